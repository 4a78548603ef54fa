"""The tokens of queries and documents, of models of late interaction: how many there are, and which have vectors."""

from __future__ import annotations

import dataclasses
from enum import Enum

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.sentence_settings import MultiVectorSettings, SentenceSettings
from hdruntime.errors import InputError
from hdruntime.text.tokenization import Encoding

OUTPUT = "token_embeddings"
"""Name of the output that holds the vectors."""


class Side(str, Enum):
    """The kind of a text, by the names of sentence-transformers' ``task``, and of the prompts."""

    QUERY = "query"
    DOCUMENT = "document"


class TextSide:
    """How the texts of one side become tokens with vectors, as in sentence-transformers' ``MultiVectorEncoder``.

    Args:
        settings: of the model.
        side: None for texts that are neither queries nor documents; they are skipped in as documents.

    Attributes:
        own_length: tokens that the model cuts such texts to, special tokens and prompt included.
    """

    def __init__(self, settings: SentenceSettings, side: Side | None) -> None:
        own = settings.multi_vector
        assert own is not None, "multi_vector_of checks it"
        self.expansion = own.expansion if side is Side.QUERY else None
        self.own_length = _own_length(settings, own, side)
        named = Side.DOCUMENT if side is None else side
        self._skipped = np.array(own.skipped_ids if named.value in own.skipped_in else (), np.int64)

    def expanded(self, encoding: Encoding) -> Encoding:
        """A text's tokens with the tokens that are added to a short query."""
        expansion = self.expansion
        missing = 0 if expansion is None else expansion.length - len(encoding)
        if expansion is None or missing <= 0:
            return encoding
        return dataclasses.replace(
            encoding,
            input_ids=[*encoding.input_ids, *[expansion.token_id] * missing],
            token_type_ids=[*encoding.token_type_ids, *[0] * missing],
            offsets=[*encoding.offsets, *[(0, 0)] * missing],
            sequence_ids=[*encoding.sequence_ids, *[None] * missing],
            unattended_tokens=0 if expansion.attend else missing,
        )

    def has_vector(self, encoding: Encoding) -> npt.NDArray[np.bool_]:
        """[tokens]: which tokens of an expanded text have vectors."""
        return ~np.isin(np.asarray(encoding.input_ids, np.int64), self._skipped)


def multi_vector_of(manifest: Manifest) -> SentenceSettings:
    """The settings of a bundle that gives a vector for each token.

    Raises:
        InputError: the bundle's task is another.
    """
    settings = manifest.sentence
    if manifest.task != "token-similarity" or settings is None or settings.multi_vector is None:
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
