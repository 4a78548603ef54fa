"""A bundle's graphs on this machine's CPU, to be compared with PyTorch."""

from __future__ import annotations

__all__ = ["Run", "runner", "sampled_runner"]

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import hdruntime
from hdexport.attention.kind import Decisions
from hdexport.graph.bundle_graph import read_graph
from hdexport.graph.vocabulary_head import sampled_graph
from hdruntime.backends.onnxruntime import OnnxRuntimeRunner
from hdruntime.backends.onnxruntime_sessions import open_session, session_options
from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import PORTABLE_LOWERING

if TYPE_CHECKING:
    import onnx_ir

_PROVIDER = "CPUExecutionProvider"

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

Run = Callable[[Mapping[str, IntArray]], dict[str, FloatArray]]
"""Inputs by name, [batch, tokens] each -> outputs by name. Token types that are not given are 0."""


@contextlib.contextmanager
def runner(bundle: Bundle, graph: GraphFile, decisions: Decisions | None = None) -> Iterator[Run]:
    """Run one graph whole: the lowered one as users do, through the runtime; the portable one as it is.

    A graph whose decisions are asked for gives them as further outputs, and runs as it is.

    Its threads do not spin while they wait: that would keep the cores from PyTorch's, which runs between two cases.
    """
    if decisions is not None:
        model = read_graph(bundle, graph)
        decisions.watch(model)
        yield _changed_run(bundle, model)
        return
    if graph.lowering == PORTABLE_LOWERING:
        yield _plain_run(
            open_session(bundle, graph, session_options(None, spinning=False), providers=[(_PROVIDER, {})])
        )
        return
    # As `hdruntime.load` opens it, without the spinning.
    with hdruntime.Session(bundle, OnnxRuntimeRunner(bundle, spinning=False)) as session:
        yield lambda feeds: session(**feeds)


@contextlib.contextmanager
def sampled_runner(bundle: Bundle, graph: GraphFile, decisions: Decisions | None = None) -> Iterator[Run | None]:
    """Run one graph with logits at a few tokens, which it takes as the input `SAMPLED_TOKENS`, [samples].

    It is the same graph except for the tokens that its last projection is given, and runs as it is: padding is not cut
    off as the runtime does. None where that projection is not found.
    """
    model = read_graph(bundle, graph)
    logits = bundle.manifest.outputs[0].name
    if decisions is not None:
        decisions.watch(model)
    yield _changed_run(bundle, model) if sampled_graph(model, logits, bundle.manifest.vocab_size) else None


def _changed_run(bundle: Bundle, model: onnx_ir.Model) -> Run:
    """Runs a graph whose weights are in the bundle's files."""
    import onnx_ir as ir
    import onnxruntime

    options = session_options(None, spinning=False)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    content = ir.to_proto(model).SerializeToString()
    return _plain_run(onnxruntime.InferenceSession(content, options, providers=[_PROVIDER]))


def _plain_run(session: Any) -> Run:
    inputs = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]

    def run(feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
        types = {name: np.zeros_like(feeds["input_ids"]) for name in inputs if name == "token_type_ids"}
        return dict(zip(outputs, session.run(outputs, types | dict(feeds)), strict=True))

    return run
