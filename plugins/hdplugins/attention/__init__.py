"""The operators, one folder each, and what their faces share."""
