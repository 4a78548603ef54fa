"""NEZHA: a BERT whose attention has terms of the clipped distance instead of a table of positions."""
