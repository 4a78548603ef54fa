"""Dense attention with terms of the clipped distance: T5, MPNet, NEZHA."""
