"""Bundles behind HTTP: the interfaces of OpenAI, Cohere, Jina and text-embeddings-inference. See docs/serve.md."""

from __future__ import annotations

__all__ = ["BundleToServe", "LoadedModel", "ServeOptions", "application", "application_of_models", "serve"]

import importlib
from typing import TYPE_CHECKING, Any

from hdruntime.serve.options import ServeOptions

if TYPE_CHECKING:
    from hdruntime.serve.asgi import application, application_of_models
    from hdruntime.serve.running_model import LoadedModel
    from hdruntime.serve.server import BundleToServe, serve

_MODULES = {
    "application": "asgi",
    "application_of_models": "asgi",
    "LoadedModel": "running_model",
    "BundleToServe": "server",
    "serve": "server",
}


def __getattr__(name: str) -> Any:
    # Imported when used: the help of the command needs the options alone.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
