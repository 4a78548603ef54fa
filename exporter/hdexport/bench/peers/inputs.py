"""The texts of a benchmark: Python's own help where a bundle has a tokenizer, random ids where it has none."""

from __future__ import annotations

__all__ = ["Texts"]

import functools
import logging
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.manifest import Fill, Role, TokenizerInfo
from hdruntime.bundle.reader import Bundle, read_config
from hdruntime.inference.inputs import checked_inputs
from hdruntime.text.tokenization import Overflow, TextTokenizer

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]

_QUESTION = "Which names are bound here?"
"""Of the pairs that a bundle for question answering is given; the help is the context."""

_RANDOM_IDS = 65_537
"""A prime number, so that no two rows of a batch begin at the same place."""

_RANDOM_QUESTION = 4
"""Ids before the separator, where a bundle marks questions as global and has no tokenizer."""

_ALWAYS_SPECIAL = range(4)
"""Ids that are special tokens in most vocabularies, whatever ``config.json`` says of them."""


@dataclass(frozen=True)
class _Frame:
    """A text's ids: what it is between, and what it is cut from; the content is read in circles.

    Attributes:
        before: [n], special tokens, and of a pair the whole first text.
        content: [m], at least one id.
        after: [k], special tokens.
    """

    before: IntArray
    content: IntArray
    after: IntArray


class Texts:
    """Batches of texts of any length for a bundle, the same ones at every call and in every process.

    Every text has the special tokens that the tokenizer puts around it, and there is no padding. Where the tokenizer
    does not know most of the words, as one for another language may not, ids between those special tokens are random.

    Args:
        bundle: what the texts are for.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def batch(self, batch: int, tokens: int) -> dict[str, npt.NDArray[Any]]:
        """Every input of the bundle's manifest: name -> [batch, tokens].

        Args:
            batch: texts; each begins at another place.
            tokens: of each text, special tokens included.

        Raises:
            InputError: the bundle does not take so many tokens.
            BundleCorruptError: its tokenizer cannot be read.
        """
        rows = [self._text(row, tokens) for row in range(batch)]
        # What is left out the runtime fills in: masks of ones, token types of zeros, its default of global tokens.
        manifest = self._bundle.manifest
        return checked_inputs({manifest.ids: np.stack(rows)}, manifest)

    def _text(self, row: int, tokens: int) -> IntArray:
        frame = self._frame
        length = tokens - len(frame.before) - len(frame.after)
        if length <= 0:
            # The end is kept: of a pair's first text, all global in question answering, nothing may be left open.
            return np.concatenate([frame.before, frame.after])[-tokens:]
        places = (row * (length + 1) + np.arange(length)) % len(frame.content)
        return np.concatenate([frame.before, frame.content[places], frame.after])

    @functools.cached_property
    def _frame(self) -> _Frame:
        info = self._bundle.manifest.tokenizer
        if info is None:
            return _Frame(self._random_question(), self._random_ids(), np.empty(0, np.int64))
        frame = self._tokenized(info)
        if not len(frame.content) or np.mean(frame.content == info.unk_token_id) > 0.5:
            logger.info("the tokenizer of %s does not know English; texts are random", self._bundle.path)
            return _Frame(frame.before, self._random_ids(), frame.after)
        return frame

    def _tokenized(self, info: TokenizerInfo) -> _Frame:
        manifest = self._bundle.manifest
        tokenizer = TextTokenizer(self._bundle.file(info.file), max_len=manifest.max_len)
        text = "\n".join(topics[name] for name in sorted(topics))
        is_pair = manifest.task == "question-answering"
        encoded = tokenizer.encode(
            [_QUESTION if is_pair else text], [text] if is_pair else None, overflow=Overflow.SPLIT
        )[0]
        ids = np.array(encoded.input_ids, np.int64)
        own = np.array([-1 if number is None else number for number in encoded.sequence_ids])
        inside = np.flatnonzero(own == int(is_pair))
        first, last = (inside[0], inside[-1]) if len(inside) else (len(ids), len(ids))
        before = ids[:first]
        marks = manifest.input_of(Role.MARKS)
        if is_pair and marks is not None and marks.bound is not None:
            question = np.flatnonzero(own[:first] == 0)
            too_many = max(0, int(question[-1] + 1 - marks.bound)) if len(question) else 0
            before = np.delete(before, question[len(question) - too_many :])
        return _Frame(before, ids[inside], ids[last + 1 :])

    def _random_ids(self) -> IntArray:
        manifest = self._bundle.manifest
        ordinary = np.setdiff1d(np.arange(manifest.vocab_size), np.array(sorted(self._special_ids()), np.int64))
        generator = np.random.default_rng(0)
        return ordinary[generator.integers(0, len(ordinary), _RANDOM_IDS)]

    def _random_question(self) -> IntArray:
        marks = self._bundle.manifest.input_of(Role.MARKS)
        if marks is None or marks.default.fill is not Fill.UNTIL_TOKEN or marks.default.token_id is None:
            return np.empty(0, np.int64)
        question = self._random_ids()[-min(_RANDOM_QUESTION, marks.bound or _RANDOM_QUESTION) :]
        return np.append(question, marks.default.token_id)

    def _special_ids(self) -> set[int]:
        manifest = self._bundle.manifest
        config = read_config(self._bundle)
        special = {value for key, value in config.items() if key.endswith("_token_id") and isinstance(value, int)}
        if manifest.tokenizer is not None:
            info = manifest.tokenizer
            named = (info.pad_token_id, info.unk_token_id, info.mask_token_id)
            special |= {number for number in named if number is not None}
        return special | set(_ALWAYS_SPECIAL)
