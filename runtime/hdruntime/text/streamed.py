"""Outputs of a streamed document, accumulated segment by segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hdruntime.arrays import FloatArray, WideArray
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.errors import InputError, Message, Setting
from hdruntime.text.checks import SPLIT
from hdruntime.text.embeddings import normalized
from hdruntime.text.encoding import Encoding
from hdruntime.text.pooling import SENTENCE_EMBEDDING, PoolingMode, embedding_output

_POOLINGS = (PoolingMode.MEAN, PoolingMode.MAX, PoolingMode.LAST_TOKEN)
"""Pooling modes that can be computed segment by segment."""

_EMBED_CHUNKS: Message = (
    "Embed documents in chunks (",
    SPLIT,
    "), or build the bundle with ",
    Setting("task", "feature-extraction", command="build"),
    ".",
)

Outputs = Mapping[str, FloatArray]


class StreamedOutputs:
    """The outputs of a bundle's streamed documents, made of the outputs of their segments.

    The embedding of a document is pooled over all tokens, as for one long text: by mean, maximum or last token, and
    normalized if the bundle normalizes. Other outputs with a tokens axis are concatenated. Outputs without one, such as
    the logits of a text, come from the last segment, which depends on all segments before it.

    Args:
        manifest: manifest of the bundle.
        outputs: names of the outputs; ``sentence_embedding`` or the output that is pooled into it for an embedding.
        pools: whether a document has one embedding; rejects pooling modes that need all tokens at once.

    Attributes:
        needed: names of the outputs that each segment must have.
    """

    def __init__(self, manifest: Manifest, outputs: Sequence[str], *, pools: bool) -> None:
        self._with_tokens = {spec.name for spec in manifest.outputs if spec.has_tokens_axis}
        self._pools = pools
        self._pooling, self._normalizes = PoolingMode.MEAN.value, False
        self._pools_prompt = manifest.input_of(Role.POOLED) is None
        self.needed = list(outputs)
        if self._pools:
            self.needed = [self._tokens_to_pool(manifest)]

    def begin(self, encoding: Encoding) -> _Vector | _Joined:
        """Begin a document; `encoding` has all of its tokens."""
        if not self._pools:
            return _Joined(self._with_tokens)
        skipped = 0 if self._pools_prompt else encoding.prompt_tokens
        return _Vector(self.needed[0], self._pooling, skipped, normalizes=self._normalizes)

    def _tokens_to_pool(self, manifest: Manifest) -> str:
        pooled, settings = embedding_output(manifest), manifest.sentence
        if pooled.has_tokens_axis:
            return pooled.name
        if settings is None:
            raise _streaming_error("the bundle does not state how it pools tokens", hint="Build the bundle again.")
        self._pooling, self._normalizes = " and ".join(settings.pooling), settings.normalize
        if self._pooling not in _POOLINGS:
            first = "sees the first segment only" if self._pooling == PoolingMode.CLS else "needs all tokens at once"
            raise _streaming_error(f"the model's pooling mode is {self._pooling}, which {first}")
        if settings.dense:
            raise _streaming_error("the model has a Dense layer or LayerNorm after pooling")
        return "last_hidden_state"


class _Joined:
    """Outputs of tokens, concatenated, and other outputs of the last segment."""

    def __init__(self, with_tokens: set[str]) -> None:
        self._with_tokens = with_tokens
        self._parts: dict[str, list[FloatArray]] = {}

    def add(self, start: int, outputs: Outputs) -> None:
        """Add a segment's outputs, without batch axis; its first token is token `start` of the document."""
        for name, values in outputs.items():
            kept = self._parts.get(name, []) if name in self._with_tokens else []
            self._parts[name] = [*kept, values]

    def finished(self) -> dict[str, FloatArray]:
        """Name -> the document's output."""
        return {
            name: np.concatenate(parts) if name in self._with_tokens else parts[-1]
            for name, parts in self._parts.items()
        }


class _Vector:
    """An embedding of all tokens, as running sums."""

    def __init__(self, name: str, pooling: str, skipped: int, *, normalizes: bool) -> None:
        self._name, self._pooling, self._skipped, self._normalizes = name, pooling, skipped, normalizes
        self._pooled: WideArray | None = None
        self._tokens = 0

    def add(self, start: int, outputs: Outputs) -> None:
        """Add a segment; see `_Joined.add`."""
        states = outputs[self._name].astype(np.float64)
        if self._pooled is None:
            self._pooled = np.zeros(states.shape[1:])
        states = states[max(0, self._skipped - start) :]
        if not len(states):
            return
        if self._pooling == PoolingMode.MEAN:
            self._pooled = self._pooled + states.sum(axis=0)
        elif self._pooling == PoolingMode.MAX:
            largest = states.max(axis=0)
            self._pooled = np.maximum(self._pooled, largest) if self._tokens else largest
        else:
            self._pooled = states[-1]
        self._tokens += len(states)

    def finished(self) -> dict[str, FloatArray]:
        """The vector, float32 [dimensions], as the output ``sentence_embedding``."""
        assert self._pooled is not None, "a document has segments"
        vector = self._pooled / max(1, self._tokens) if self._pooling == PoolingMode.MEAN else self._pooled
        return {SENTENCE_EMBEDDING: (normalized(vector) if self._normalizes else vector).astype(np.float32)}


def _streaming_error(reason: str, hint: Message = _EMBED_CHUNKS) -> InputError:
    return InputError(f"A streamed document has no embedding: {reason}.", hint=hint)
