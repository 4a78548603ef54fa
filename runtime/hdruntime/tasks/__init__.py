"""The tasks: a file for each, named as the task is, with its class as ``TASK``."""
