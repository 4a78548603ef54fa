"""A bundle behind HTTP: the interfaces of OpenAI, Cohere, Jina and text-embeddings-inference. See docs/serve.md."""

from __future__ import annotations

__all__ = ["ServeOptions", "application", "serve"]

from hdruntime.serve.application import application
from hdruntime.serve.options import ServeOptions
from hdruntime.serve.server import serve
