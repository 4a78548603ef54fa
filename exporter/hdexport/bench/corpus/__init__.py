"""A whole corpus: how fast a bundle and sentence-transformers embed texts of mixed lengths, each as users call it."""
