"""A Hugging Face checkpoint: found on disk or on the hub, checked, and loaded without running code from it."""

from hdexport.checkpoint.checkpoint import Checkpoint, default_model, find_checkpoint
from hdexport.checkpoint.source import SAMPLE_MODEL, is_hub_source, path_of_source

__all__ = ["SAMPLE_MODEL", "Checkpoint", "default_model", "find_checkpoint", "is_hub_source", "path_of_source"]
