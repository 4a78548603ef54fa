"""Extended positions, learnt from long texts without labels."""
