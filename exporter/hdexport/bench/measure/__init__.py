"""One measurement: a process, a case, a call, and what the machine could do at best."""
