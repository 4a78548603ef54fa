"""The texts of a benchmark: Python's own help if the bundle's tokenizer knows it, else random ids."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdexport.verify.single_texts import ENGLISH, sample_ids
from hdruntime.bundle.manifest import Role
from hdruntime.bundle.reader import Bundle
from hdruntime.inference.inputs import checked_inputs

_STREAM_TOKENS = 16_381
"""Tokens that texts are cut from; a prime number, so that no two rows of a batch begin at the same place."""

_QUESTION_TOKENS = 8
"""Tokens before the separator, if a bundle marks the tokens of questions."""


class Texts:
    """Batches of texts of any length for a bundle, the same ones in every process. There is no padding, and every
    English text begins and ends with the tokenizer's special tokens."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def batch(self, batch: int, tokens: int) -> dict[str, npt.NDArray[Any]]:
        """Every input of the bundle's manifest, name -> [batch, tokens]; `tokens` includes special tokens."""
        return self._inputs(np.stack([self._text(row, tokens) for row in range(batch)]))

    def alone(self, lengths: Sequence[int]) -> list[dict[str, npt.NDArray[Any]]]:
        """Different texts, each by itself: every input of the manifest, name -> [1, tokens], per text."""
        return [self._inputs(self._text(row, tokens)[np.newaxis]) for row, tokens in enumerate(lengths)]

    def _inputs(self, rows: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        tokens = rows.shape[1]
        # The runtime fills in the other inputs: masks of ones, token types of zeros, its default of global tokens.
        manifest = self._bundle.manifest
        marks = manifest.input_of(Role.MARKS)
        if marks is not None and marks.default.token_id is not None:
            rows[:, min(_QUESTION_TOKENS, marks.bound or _QUESTION_TOKENS, tokens - 1)] = marks.default.token_id
        # Peers run texts alone.
        return checked_inputs({manifest.ids: rows}, manifest, memory=manifest.least_memory)

    def _text(self, row: int, tokens: int) -> npt.NDArray[np.int64]:
        before, content, after = self._frame
        length = max(0, tokens - len(before) - len(after))
        places = (row * (length + 1) + np.arange(length)) % len(content)
        return np.concatenate([before, content[places], after])[-tokens:]

    @functools.cached_property
    def _frame(self) -> tuple[npt.NDArray[np.int64], ...]:
        """The ids at the beginning of every text, the ids that its middle is cut from, and those at its end."""
        (ids,), kind = sample_ids(self._bundle, [_STREAM_TOKENS])
        return (ids[:1], ids[1:-1], ids[-1:]) if kind == ENGLISH else (ids[:0], ids, ids[:0])
