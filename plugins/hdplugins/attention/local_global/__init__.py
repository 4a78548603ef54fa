"""Local attention with biases and sides: the operator, and a face in each module."""
