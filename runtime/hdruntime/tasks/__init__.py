"""Tasks: what each reads, its answer to a text, and the columns of the answer; one module per kind of answer."""
