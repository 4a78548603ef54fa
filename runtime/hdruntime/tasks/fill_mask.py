"""Tokens for the masks of texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.tasks.task import Outputs, TaskOptions, Text, TextTask, Values
from hdruntime.text.encoding import Encoding
from hdruntime.text.logits import shortest, softmax
from hdruntime.text.tokenizer_file import read_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

CHOICES = 5
"""Tokens suggested for each mask, as in Hugging Face's fill-mask pipeline."""


class Filling(NamedTuple):
    """A candidate token for a mask."""

    token: str
    token_id: int
    score: float


class MaskFillings(TextTask):
    """The best tokens for each mask of a text; a bundle whose tokenizer has no mask is rejected."""

    name = Task.FILL_MASK
    reads_offsets = False
    # Logits for the whole vocabulary at every token of a long text would fill the memory.
    splits = streams = False

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle.manifest)
        info = bundle.manifest.tokenizer
        if info is None or info.mask_token_id is None:
            raise InputError(
                f"The tokenizer of {bundle.path} has no mask token, so there is nothing to fill.",
                hint="Use a bundle of a checkpoint whose tokenizer has one.",
            )
        self._mask_token_id, self._tokenizer = info.mask_token_id, read_tokenizer(bundle.file(info.file))

    @classmethod
    def of_job(cls, bundle: Bundle, options: TaskOptions) -> MaskFillings:
        return cls(bundle)

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        filling = pa.struct([("token", pa.string()), ("token_id", pa.int32()), ("score", pa.float32())])
        return (pa.field("masks", pa.list_(pa.list_(filling))),)

    def values(self, answer: list[list[Filling]]) -> Values:
        return {"masks": [[filling._asdict() for filling in mask] for mask in answer]}

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> list[list[Filling]]:
        token_id = self._mask_token_id
        return fillings(outputs["logits"], mask_token_id=token_id, spelling=self._spelling, encoding=encoding)

    def filled(self, text: str, number: int, token: str) -> str:
        """A text with a token in place of the mask of a number, from 0."""
        mask = self._spelling(self._mask_token_id).strip()
        parts = text.split(mask)
        return mask.join(parts[: number + 1]) + token.strip() + mask.join(parts[number + 1 :])

    def _spelling(self, token_id: int) -> str:
        # "Paris" instead of the vocabulary's "\u0120Paris".
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


TASK = MaskFillings


def fillings(
    logits: FloatArray, *, mask_token_id: int, spelling: Callable[[int], str], encoding: Encoding
) -> list[list[Filling]]:
    """The best tokens for every mask of a text, best first; a text without a mask is rejected.

    `logits` are float32 [tokens, vocab_size], and `spelling` says how the token of an id is written.
    """
    masks = np.flatnonzero(encoding.ids == mask_token_id)
    if not len(masks):
        raise InputError("The text has no mask to fill.", hint=f"Write {spelling(mask_token_id)} in place of a word.")
    return [_best_tokens(softmax(logits[mask]), spelling) for mask in masks]


def _best_tokens(scores: FloatArray, spelling: Callable[[int], str]) -> list[Filling]:
    # A stable sort of the negated scores: of equally probable tokens the one with the smaller id comes first.
    best = np.argsort(-scores, kind="stable")[:CHOICES]
    return [Filling(spelling(int(token)), int(token), shortest(scores[token])) for token in best]
