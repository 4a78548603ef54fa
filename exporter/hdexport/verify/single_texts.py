"""Single texts to run graphs on, in the bundle's tokens, and a runner of changed graphs on one unpadded
text at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hdruntime.arrays import AnyArray, IntArray
from hdruntime.backends.onnxruntime.sessions import session_options
from hdruntime.bundle.graph_interface import state_at_start
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.bundle.reader import Bundle
from hdruntime.text.encoding import Overflow
from hdruntime.text.tokenization import TextTokenizer

if TYPE_CHECKING:
    import onnx_ir

ENGLISH = "English text"
RANDOM_IDS = "random ids"

_CHARACTERS_PER_TOKEN = 32
"""Enough for any tokenizer: technical English has four or five per token, and runs of dashes more."""

_SPECIAL_IDS = 4
"""The first ids of most vocabularies are padding, separators and the like, which are rare in a text."""


def sample_ids(bundle: Bundle, lengths: Sequence[int]) -> tuple[list[IntArray], str]:
    """One text of each length, [tokens] with special tokens, where shorter ones are beginnings of the longest; and
    their kind. It is `ENGLISH`, Python's own documentation; or `RANDOM_IDS`, where the bundle has no tokenizer, this
    Python comes without its documentation, or most of its words are not in the vocabulary."""
    text = "\n".join(english_texts())
    if bundle.manifest.tokenizer is not None and text:
        tokenizer = TextTokenizer.of(bundle, max_len=max(lengths))
        start = text[: max(lengths) * _CHARACTERS_PER_TOKEN]
        (encoding,) = tokenizer.encode([start], overflow=Overflow.TRUNCATE)
        ids = np.array(encoding.input_ids, np.int64)
        if np.count_nonzero(ids == bundle.manifest.tokenizer.unk_token_id) <= len(ids) / 2:
            # Each ends as the whole text does, with the separator.
            return [np.concatenate([ids[: length - 1], ids[-1:]]) for length in lengths], ENGLISH
    return random_ids(bundle.manifest, lengths), RANDOM_IDS


def random_ids(manifest: Manifest, lengths: Sequence[int]) -> list[IntArray]:
    """Texts of ids drawn from the vocabulary, [tokens] each; the same ones at every call."""
    generator = np.random.default_rng(0)
    first = min(_SPECIAL_IDS, manifest.vocab_size - 1)
    return [generator.integers(first, manifest.vocab_size, length) for length in lengths]


def english_texts() -> list[str]:
    """The topics of Python's help; none where a distribution of Python leaves them out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return list(topics.values())


def single_text_runner(bundle: Bundle, graph: onnx_ir.Model) -> Callable[..., dict[str, AnyArray]]:
    """A function from names of outputs, a text's ids, [tokens], and inputs of this graph's own, to the outputs' values.
    The graph's weights are in the bundle's files. `padding` is the number of tokens of padding before the text, which
    are in outputs as well."""
    import onnx_ir as ir
    import onnxruntime

    options = session_options(None, spinning=False)
    # In this order, the nodes that read a value come right after it, and the value is freed then.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # Computes int8 products by their definition: a bundle also runs on processors with other kernels.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    content = ir.to_proto(graph).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def run(
        outputs: Sequence[str],
        text: IntArray,
        more: Mapping[str, AnyArray] | None = None,
        *,
        padding: int = 0,
    ) -> dict[str, AnyArray]:
        tokenizer = bundle.manifest.tokenizer
        pad = tokenizer.pad_token_id if tokenizer is not None else 0
        places = np.arange(padding + len(text))[np.newaxis]
        ids = np.concatenate([np.full(padding, pad, np.int64), text])[np.newaxis]
        # The first token stands for tokens that a caller may mark; a single text has tokens of one type.
        first, real = (places == padding).astype(np.int64), (places >= padding).astype(np.int64)
        known = {
            Role.IDS: ids,
            Role.MASK: real,
            Role.GLOBAL_ATTENTION_MASK: first,
            Role.POOLED: real,
            Role.ATTENDED: real,
        }
        feeds = {
            spec.name: state_at_start(spec, rows=1, memory=bundle.manifest.min_memory)
            if spec.role is Role.RECURRENT_STATE
            else known.get(spec.role, np.zeros_like(first))
            for spec in bundle.manifest.inputs
        }
        return dict(zip(outputs, session.run(outputs, {**feeds, **(more or {})}), strict=True))

    return run
