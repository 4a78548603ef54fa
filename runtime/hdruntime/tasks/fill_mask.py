"""Tokens for the masks of texts, by bundles of fill-mask."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.tasks.task import Outputs, Text, TextTask, Values
from hdruntime.text.logits import Filling, fillings
from hdruntime.text.tokenization import Encoding, read_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa


class MaskFillings(TextTask):
    """The best tokens for each mask of a text.

    Args:
        bundle: the bundle.

    Raises:
        InputError: the bundle has no tokenizer, or the tokenizer no mask.
    """

    outputs = ("logits",)
    # Logits for the whole vocabulary at every token of a long text would fill the memory.
    splits = streams = False

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle.manifest)
        info = bundle.manifest.tokenizer
        if info is None or info.mask_token_id is None:
            raise InputError(f"The tokenizer of {bundle.path} has no mask token, so there is nothing to fill.")
        self._mask_token_id, self._tokenizer = info.mask_token_id, read_tokenizer(bundle.file(info.file))

    def fields(self) -> tuple[pa.Field, ...]:
        import pyarrow as pa

        filling = pa.struct([("token", pa.string()), ("token_id", pa.int32()), ("score", pa.float32())])
        return (pa.field("masks", pa.list_(pa.list_(filling))),)

    def values(self, answer: list[list[Filling]]) -> Values:
        return {"masks": [[dataclasses.asdict(filling) for filling in mask] for mask in answer]}

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> list[list[Filling]]:
        token_id = self._mask_token_id
        return fillings(outputs["logits"], mask_token_id=token_id, spelling=self._spelling, encoding=encoding)

    def _spelling(self, token_id: int) -> str:
        # "Paris" instead of the vocabulary's "\u0120Paris".
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))
