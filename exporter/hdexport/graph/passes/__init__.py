"""Changes of a graph, one file per change."""
