"""A toy: every query attends to the tokens at distances that are multiples of k, by standard operators."""
