"""Tasks: a bundle's answers to texts of any length, one module per kind of answer."""
