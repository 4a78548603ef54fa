"""Tasks: what a bundle's outputs make of texts of any length, one module per kind of answer."""
