"""A corpus embedded by bundles, sentence-transformers and fastembed: texts and tokens per second, padding, memory."""
