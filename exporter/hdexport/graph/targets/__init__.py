"""One graph for each backend, made of the portable one."""
