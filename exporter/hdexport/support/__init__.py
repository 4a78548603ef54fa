"""What any part may need: files, memory, progress. It knows nothing of models."""
