"""The steps from a checkpoint to a verified bundle."""
