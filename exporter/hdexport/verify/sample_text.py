"""Real text to run a model on: Python's own documentation, in the bundle's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hdruntime.arrays import IntArray
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.text.tokenization import Overflow, TextTokenizer

ENGLISH = "English text"
RANDOM_IDS = "random ids"

_CHARACTERS_PER_TOKEN = 32
"""Enough for any tokenizer: technical English has four or five per token, and runs of dashes more."""

_SPECIAL_IDS = 4
"""The first ids of most vocabularies are padding, separators and the like, which are rare in a text."""


def sample_ids(bundle: Bundle, lengths: Sequence[int]) -> tuple[list[IntArray], str]:
    """One text of each length; shorter ones are beginnings of the longest.

    Args:
        bundle: whose tokenizer and vocabulary are used.
        lengths: in tokens, special tokens included.

    Returns:
        Ids, [tokens] each, and their kind: `ENGLISH`; or `RANDOM_IDS`, where the bundle has no tokenizer, this
        Python comes without its documentation, or most of its words are not in the vocabulary.
    """
    text = "\n".join(english_texts())
    if bundle.manifest.tokenizer is not None and text:
        tokenizer = TextTokenizer.of(bundle, max_len=max(lengths))
        start = text[: max(lengths) * _CHARACTERS_PER_TOKEN]
        (encoding,) = tokenizer.encode([start], overflow=Overflow.TRUNCATE)
        ids = np.array(encoding.input_ids, np.int64)
        if np.count_nonzero(ids == bundle.manifest.tokenizer.unk_token_id) <= len(ids) / 2:
            # Each ends as the whole does, with the separator that models know texts to end with.
            return [np.concatenate([ids[: length - 1], ids[-1:]]) for length in lengths], ENGLISH
    return random_ids(bundle.manifest, lengths), RANDOM_IDS


def random_ids(manifest: Manifest, lengths: Sequence[int]) -> list[IntArray]:
    """Texts of ids drawn from the vocabulary of a bundle's manifest, [tokens] each; the same ones at every call."""
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
