"""What is changed in a graph, one file a change."""
