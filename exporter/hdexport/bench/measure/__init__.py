"""One measurement: a process, a case, a call, and the best rates of the machine."""
