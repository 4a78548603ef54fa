"""Where a bundle goes: to the Hugging Face Hub, with its model card, or into a repository of models of Triton."""

from __future__ import annotations

__all__ = ["PushOptions", "Pushed", "push"]

from hdexport.publish.push import Pushed, PushOptions, push
