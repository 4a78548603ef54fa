"""Block-sparse attention: BigBird's, ETC's, or by a list of blocks."""
