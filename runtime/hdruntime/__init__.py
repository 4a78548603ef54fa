"""The runtime of hdexport: load a bundle, run it.

::

    import hdruntime

    with hdruntime.load("my-bundle") as session:
        vectors = session.embed(["a long document", "another"])  # float32 [texts, dimensions]

Everything is imported when first used, so that ``import hdruntime`` costs next to nothing. The import switches off the
telemetry of ONNX Runtime, unless the environment variable ``ORT_DISABLE_TELEMETRY`` is set already.
"""

from __future__ import annotations

__all__ = [
    "Answer",
    "Backend",
    "BackendError",
    "BackendUnavailableError",
    "Bundle",
    "BundleCorruptError",
    "BundleError",
    "BundleNotFoundError",
    "BundleVersionError",
    "CrossEncoder",
    "DamagedJobError",
    "DocumentStream",
    "Encoding",
    "EngineError",
    "Entity",
    "ExportError",
    "GpuOptions",
    "HdexportError",
    "HybridEmbedding",
    "InputChangedError",
    "InputError",
    "Manifest",
    "MissingDependencyError",
    "ModelError",
    "MultiVectorEncoder",
    "NonFiniteOutputError",
    "OutOfMemoryError",
    "OutputExistsError",
    "Precision",
    "Segment",
    "SentenceEncoder",
    "Session",
    "Setting",
    "SparseEncoder",
    "SparseVector",
    "TextChunks",
    "VerificationError",
    "__version__",
    "load",
    "open_bundle",
]

import importlib
import os
from typing import TYPE_CHECKING

from hdruntime.errors import (
    BackendError,
    BackendUnavailableError,
    BundleCorruptError,
    BundleError,
    BundleNotFoundError,
    BundleVersionError,
    DamagedJobError,
    EngineError,
    ExportError,
    HdexportError,
    InputChangedError,
    InputError,
    MissingDependencyError,
    ModelError,
    NonFiniteOutputError,
    OutOfMemoryError,
    OutputExistsError,
    Setting,
    VerificationError,
)

if TYPE_CHECKING:
    __version__: str

    from hdruntime.backends.precision import Precision
    from hdruntime.bundle.manifest import Backend, Manifest
    from hdruntime.bundle.reader import Bundle, open_bundle
    from hdruntime.cross_encoder import CrossEncoder
    from hdruntime.gpu.options import GpuOptions
    from hdruntime.inference.streaming import DocumentStream, Segment
    from hdruntime.multi_vector_encoder import MultiVectorEncoder
    from hdruntime.sentence_encoder import SentenceEncoder
    from hdruntime.session import Session, load
    from hdruntime.sparse_encoder import SparseEncoder
    from hdruntime.tasks.hybrid_similarity import HybridEmbedding
    from hdruntime.tasks.sparse_similarity import SparseVector
    from hdruntime.text.answers import Answer
    from hdruntime.text.chunking import TextChunks
    from hdruntime.text.encoding import Encoding
    from hdruntime.text.entities import Entity

# ONNX Runtime 1.29 and newer keeps a queue of events in the home directory, names of models and texts of errors among
# them, and sends it to its makers. It reads this variable once, when it starts, and child processes inherit it; its
# function disable_telemetry_events() is too late. A user's own setting of 0 stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_MODULE_OF_NAME = {
    "Answer": "hdruntime.text.answers",
    "Backend": "hdruntime.bundle.manifest",
    "Bundle": "hdruntime.bundle.reader",
    "CrossEncoder": "hdruntime.cross_encoder",
    "DocumentStream": "hdruntime.inference.streaming",
    "Encoding": "hdruntime.text.encoding",
    "Entity": "hdruntime.text.entities",
    "GpuOptions": "hdruntime.gpu.options",
    "Manifest": "hdruntime.bundle.manifest",
    "MultiVectorEncoder": "hdruntime.multi_vector_encoder",
    "Precision": "hdruntime.backends.precision",
    "Segment": "hdruntime.inference.streaming",
    "SentenceEncoder": "hdruntime.sentence_encoder",
    "Session": "hdruntime.session",
    "SparseEncoder": "hdruntime.sparse_encoder",
    "HybridEmbedding": "hdruntime.tasks.hybrid_similarity",
    "SparseVector": "hdruntime.tasks.sparse_similarity",
    "TextChunks": "hdruntime.text.chunking",
    "load": "hdruntime.session",
    "open_bundle": "hdruntime.bundle.reader",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("hdexport")
    elif name in _MODULE_OF_NAME:
        value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
