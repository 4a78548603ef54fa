"""A toy task: where the token with the largest number is in a text, and that number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from hdruntime.bundle.manifest import Manifest
from hdruntime.tasks.task import Call, Outputs, Pairs, Route, RowTensor, Text, TextsBody, TextTask, Values
from hdruntime.text.tokenization import Encoding


class Loudest(NamedTuple):
    """Characters ``start`` to ``end`` of the text, end exclusive, and the largest number of that token."""

    start: int
    end: int
    loudness: float


class LoudestToken(TextTask):
    """The token of a text whose states have the largest number."""

    name = "loudest-token"
    output_axes: ClassVar = {"last_hidden_state": ("batch", "tokens", "hidden_size")}
    needs_text = True

    @classmethod
    def problems(cls, manifest: Manifest) -> Iterator[str]:
        """A number for each token is asked for, of more than one."""
        if manifest.hidden_size < 2:
            yield f"hidden_size is {manifest.hidden_size}, among which none is the largest"

    @classmethod
    def described(cls, manifest: Manifest) -> Iterator[tuple[str, str]]:
        """A line of `hdexport inspect`."""
        yield "loudest", f"of {manifest.hidden_size} numbers for each token"

    def fields(self) -> tuple[pa.Field, ...]:
        """The columns of a job."""
        return tuple(pa.schema({"start": pa.int32(), "end": pa.int32(), "loudness": pa.float32()}))

    def values(self, answer: Loudest) -> Values:
        """A value for each column."""
        return answer._asdict()

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> Loudest:
        """The token is one of the text's, and no special one."""
        own = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence == 0]
        loudness = outputs["last_hidden_state"][own].max(axis=1)
        best = int(np.argmax(loudness))
        return Loudest(*encoding.offsets[own[best]], float(loudness[best]))

    def row_tensor(self) -> RowTensor:
        """Triton's: start, end and loudness as floats."""
        return RowTensor("loudest", 3, Pairs.REFUSED)

    def routes(self) -> Sequence[Route]:
        """``POST /loudest``."""
        return (Route("/loudest", TextsBody, self._loudest),)

    async def _loudest(self, call: Call, body: TextsBody) -> object:
        found = await call.answered(body, body.texts())
        return [answer._asdict() for answer in found.answers]
