"""Changed graphs of a bundle in ONNX Runtime, on one unpadded text at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdruntime.arrays import IntArray
from hdruntime.backends.onnxruntime.sessions import session_options
from hdruntime.bundle.manifest import Role
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.state_start import state_at_start

if TYPE_CHECKING:
    import onnx_ir


def single_text_runner(bundle: Bundle, graph: onnx_ir.Model) -> Callable[..., dict[str, npt.NDArray[Any]]]:
    """A function from names of outputs, a text's ids, [tokens], and inputs of this graph's own, to the outputs' values.

    Its `padding` is the number of tokens of padding that come before the text, and are in outputs as well.

    Args:
        bundle: in whose files the weights are.
        graph: a changed graph.
    """
    import onnx_ir as ir
    import onnxruntime

    options = session_options(None, spinning=False)
    # The order of the nodes: the nodes that read a value come right after it, and the value is freed then.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # Int8 products by their definition, and not by this processor's kernels: a bundle runs on others, too.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    content = ir.to_proto(graph).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(
        outputs: Sequence[str],
        text: IntArray,
        more: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        padding: int = 0,
    ) -> dict[str, npt.NDArray[Any]]:
        tokenizer = bundle.manifest.tokenizer
        pad = tokenizer.pad_token_id if tokenizer is not None else 0
        places = np.arange(padding + len(text))[np.newaxis]
        ids = np.concatenate([np.full(padding, pad, np.int64), text])[np.newaxis]
        # The first token stands for tokens that a caller may mark; a single text has tokens of one type.
        first, real = (places == padding).astype(np.int64), (places >= padding).astype(np.int64)
        known = {Role.IDS: ids, Role.MASK: real, Role.MARKS: first, Role.POOLED: real, Role.ATTENDED: real}
        feeds = {
            spec.name: state_at_start(spec, rows=1, memory=bundle.manifest.least_memory)
            if spec.role is Role.MEMORY
            else known.get(spec.role, np.zeros_like(first))
            for spec in bundle.manifest.inputs
        }
        return dict(zip(outputs, session.run(outputs, {**feeds, **(more or {})}), strict=True))

    return run
