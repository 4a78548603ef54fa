"""The attention operators, one folder each, and the code that their implementations share."""
