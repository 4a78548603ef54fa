"""Kinds of attention: the exporter's knowledge of each, and how a model comes to call our operators."""
