"""Bundles: the content of a manifest, and how directories with one are read and written."""
