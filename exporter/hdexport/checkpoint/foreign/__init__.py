"""Checkpoints of Google's programs and of bert4keras: TensorFlow's format and Keras', read without either."""

from hdexport.checkpoint.foreign.converted import convert, google_files
from hdexport.checkpoint.foreign.found_files import has_google_config, is_foreign

__all__ = ["convert", "google_files", "has_google_config", "is_foreign"]
