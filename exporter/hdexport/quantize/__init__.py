"""Graphs whose products with weights are int8: calibration on texts, rounding of weights, and the graph pass."""
