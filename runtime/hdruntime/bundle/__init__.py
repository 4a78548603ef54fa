"""Bundles: what a manifest says, and how directories with one are read and written."""
