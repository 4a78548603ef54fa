"""A list of vectors per text, one for each token that has one; the tokens of queries and documents differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.sentence_settings import MultiVectorSettings, SentenceSettings
from hdruntime.bundle.task_formats import TokenSimilarityFormat
from hdruntime.errors import InputError
from hdruntime.tasks.task import Encoder, Outputs, TaskOptions, Text, TextTask, Values
from hdruntime.text.tokenization import Encoding, Overflow, TextTokenizer

if TYPE_CHECKING:
    import pyarrow as pa

_OUTPUT = "token_embeddings"


class Side(str, Enum):
    """The kind of a text, by the names of sentence-transformers' ``task``, and of the prompts."""

    QUERY = "query"
    DOCUMENT = "document"


class TextSide:
    """How the texts of one side become tokens with vectors, as in sentence-transformers' ``MultiVectorEncoder``.

    Args:
        settings: of a model with a vector for each token.
        side: None for texts that are neither queries nor documents; tokens are left out as of documents.

    Attributes:
        own_length: tokens that the model cuts such texts to, special tokens and prompt included.
        skipped_ids: tokens that have no vectors.
    """

    def __init__(self, settings: SentenceSettings, side: Side | None) -> None:
        own = settings.multi_vector
        assert own is not None, "settings_of checks it"
        self.expansion = own.expansion if side is Side.QUERY else None
        self.own_length = _own_length(settings, own, side)
        named = Side.DOCUMENT if side is None else side
        self.skipped_ids = own.skipped_ids if named.value in own.skipped_in else ()

    def expanded(self, encoding: Encoding) -> Encoding:
        """A text's tokens with the tokens that are added to a short query."""
        expansion = self.expansion
        missing = 0 if expansion is None else expansion.length - len(encoding)
        if expansion is None or missing <= 0:
            return encoding
        return Encoding.of_arrays(
            np.append(encoding.ids, np.full(missing, expansion.token_id)),
            np.append(encoding.types, np.zeros(missing, np.int64)),
            prompt_tokens=encoding.prompt_tokens,
            unattended_tokens=0 if expansion.attend else missing,
            is_cut=encoding.is_cut,
        )


class TokenVectors(TextTask, TokenSimilarityFormat):
    """The vectors of a text's tokens, float32 [vectors, dimensions].

    Args:
        manifest: of a bundle of this task; others are refused.
        side: ``query`` expands queries; None for texts that are neither queries nor documents.
        as_far_as_model: whether queries are read as far as the model reads them, and no further.

    Attributes:
        length: tokens that the model cuts such texts to.
        dimensions: of a vector.
    """

    reads_offsets = False
    encoder = Encoder(
        "MultiVectorEncoder", "MultiVectorEncoder", "documents", "document_length", "encode_document(texts)"
    )
    streams = False
    prompts = True
    default_prompt_name = Side.DOCUMENT.value
    reads_by_prompt_name = True

    def __init__(self, manifest: Manifest, side: Side | None, *, as_far_as_model: bool = False) -> None:
        super().__init__(manifest)
        self._rules = TextSide(settings_of(manifest), side)
        self.length = self._rules.own_length
        self.dimensions = next(int(spec.shape[-1]) for spec in manifest.outputs if spec.name == _OUTPUT)
        self._is_limited = as_far_as_model and side is Side.QUERY
        self._cutting: TextTokenizer | None = None
        # [vocab_size]: which tokens have vectors.
        self._has_vector = np.ones(manifest.vocab_size, bool)
        self._has_vector[[each for each in self._rules.skipped_ids if each < manifest.vocab_size]] = False
        self.splits = side is not Side.QUERY

    @classmethod
    def of_job(cls, bundle: Bundle, options: TaskOptions) -> TokenVectors:
        """Documents are read as far as the bundle serves; queries as far as the model reads them."""
        side = Side.QUERY if options.prompt_name == Side.QUERY.value else Side.DOCUMENT
        return cls(bundle.manifest, side, as_far_as_model=True)

    @classmethod
    def own_length(cls, settings: SentenceSettings) -> int:
        return TextSide(settings, Side.DOCUMENT).own_length

    @classmethod
    def described(cls, manifest: Manifest) -> Iterator[tuple[str, str]]:
        yield from super().described(manifest)
        settings = settings_of(manifest)
        own = settings.multi_vector
        assert own is not None, "settings_of checks it"
        for name, side in (("queries", Side.QUERY), ("documents", Side.DOCUMENT)):
            rules = TextSide(settings, side)
            parts = [f"cut to {rules.own_length} tokens by the model"]
            if rules.expansion is not None:
                seen = "which all tokens see" if rules.expansion.attend else "which no token sees"
                parts.append(f"expanded to {rules.expansion.length} by the token {rules.expansion.token_id}, {seen}")
            if side.value in own.skipped_in and own.skipped_ids:
                parts.append(f"no vectors for {len(own.skipped_ids)} tokens of the vocabulary")
            yield name, ", ".join(parts)

    @classmethod
    def pipeline(cls) -> str:
        return Task.FEATURE_EXTRACTION

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        return (pa.field("embedding", pa.list_(pa.list_(pa.float32(), self.dimensions))),)

    def values(self, answer: FloatArray) -> Values:
        return {"embedding": answer}

    def encode(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        *,
        overflow: Overflow,
        prompt: str,
    ) -> list[Encoding]:
        most = min(self.length, tokenizer.max_len) if self._is_limited else tokenizer.max_len
        if overflow is not Overflow.ERROR and most != tokenizer.max_len:
            # Kept: a tokenizer that cuts takes long to make.
            self._cutting = self._cutting or tokenizer.limited(most)
            tokenizer = self._cutting
        encodings = super().encode(tokenizer, texts, pairs, overflow=overflow, prompt=prompt)
        longest = max(map(len, encodings))
        if longest > most and overflow is Overflow.ERROR:
            raise InputError(
                f"The query has {longest} tokens, special tokens and prompt included; the model reads {most} of a "
                "query.\nCut it: --overflow truncate"
            )
        return [self._rules.expanded(each) for each in encodings]

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> FloatArray:
        return outputs[_OUTPUT][self._has_vector[encoding.input_ids]]


TASK = TokenVectors


def settings_of(manifest: Manifest) -> SentenceSettings:
    """The settings of a bundle that gives a vector for each token; bundles of other tasks are refused."""
    settings = manifest.sentence
    if manifest.task != TokenVectors.name or settings is None or settings.multi_vector is None:
        raise InputError(
            f"Vectors of tokens are given by bundles of token-similarity, and this bundle's task is {manifest.task}.\n"
            "Build it again from a ColBERT, PyLate or MultiVectorEncoder checkpoint with --task token-similarity."
        )
    return settings


def _own_length(settings: SentenceSettings, own: MultiVectorSettings, side: Side | None) -> int:
    if side is Side.DOCUMENT:
        return settings.max_seq_length if own.document_length is None else own.document_length
    if side is None:
        return settings.max_seq_length
    if own.expansion is not None and own.expansion.strategy == "fixed":
        return own.expansion.length
    if own.query_length is None:
        return settings.max_seq_length
    return own.query_length if own.expansion is None else max(own.query_length, own.expansion.length)
