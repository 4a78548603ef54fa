"""Kinds of attention: what the exporter knows of each, and how a model comes to call our operators."""
