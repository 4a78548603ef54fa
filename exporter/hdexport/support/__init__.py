"""Parts that any other may need: files, memory, progress. They know nothing of models."""
