"""Local attention with biases by distance, and with sides: LongT5's."""
