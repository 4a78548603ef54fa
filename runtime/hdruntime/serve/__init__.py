"""A bundle behind HTTP: the interfaces of OpenAI, Cohere, Jina and text-embeddings-inference. See docs/serve.md."""

from __future__ import annotations

__all__ = ["ServeOptions", "application", "serve"]

from typing import TYPE_CHECKING, Any

from hdruntime.serve.options import ServeOptions

if TYPE_CHECKING:
    from hdruntime.serve.asgi import application
    from hdruntime.serve.server import serve


def __getattr__(name: str) -> Any:
    # Imported when used: the help of the command needs the options alone.
    if name == "application":
        from hdruntime.serve.asgi import application

        return application
    if name == "serve":
        from hdruntime.serve.server import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
