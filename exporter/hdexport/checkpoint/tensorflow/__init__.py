"""Checkpoints of Google's programs and of bert4keras: TensorFlow's format and Keras', read without either."""

from hdexport.checkpoint.tensorflow.converted import convert, google_files
from hdexport.checkpoint.tensorflow.files import has_google_config, is_tensorflow_checkpoint

__all__ = ["convert", "google_files", "has_google_config", "is_tensorflow_checkpoint"]
