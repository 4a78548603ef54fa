"""Where a bundle goes: to the Hugging Face Hub, with its model card, or into a repository of models of Triton."""

from __future__ import annotations

__all__ = ["PushOptions", "Pushed", "package_for_triton", "push"]

from hdexport.publish.push import Pushed, PushOptions, push
from hdexport.publish.triton import package_for_triton
