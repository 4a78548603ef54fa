"""Bundles on the Hugging Face Hub: their model card, and how they get there."""

from __future__ import annotations

__all__ = ["PushOptions", "Pushed", "push"]

from hdexport.publish.push import Pushed, PushOptions, push
