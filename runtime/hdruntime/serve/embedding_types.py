"""Embeddings in the types that clients ask for: numbers or base64, of float32, int8, uint8 or bits."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from hdruntime.arrays import AnyArray, FloatingArray
from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError, Setting
from hdruntime.text.embeddings import EmbeddingPrecision, quantized
from hdruntime.text.ranges import Ranges, read_ranges

Made = TypeVar("Made")

OutputDtype = Literal["float", "int8", "uint8", "binary", "ubinary"]
"""Voyage's types of an embedding's values."""

EncodingFormat = Literal["float", "base64", "int8", "uint8", "binary", "ubinary", "base64_int8", "base64_binary"]
"""OpenAI's, Jina's and Perplexity's formats; OpenAI's and Jina's types are numbers in JSON."""

_PRECISIONS: Mapping[OutputDtype, EmbeddingPrecision] = {
    "float": EmbeddingPrecision.FLOAT32,
    "int8": EmbeddingPrecision.INT8,
    "uint8": EmbeddingPrecision.UINT8,
    "binary": EmbeddingPrecision.BINARY,
    "ubinary": EmbeddingPrecision.UBINARY,
}

_ENCODED: Mapping[str, EmbeddingPrecision] = {
    "base64": EmbeddingPrecision.FLOAT32,
    "base64_int8": EmbeddingPrecision.INT8,
    "base64_binary": EmbeddingPrecision.UBINARY,
}
"""Format -> the type whose bytes are in base64."""


FLOAT_VALUE_BYTES = 22
"""Bytes of a float32 in JSON: values of normalized embeddings have 20 to 21 with their commas."""

BASE64_VALUE_BYTES = 4 * 4 / 3
"""Bytes of a float32 in base64."""

_MANY_VALUES = 2**18
"""Values of embeddings whose JSON is made in another thread than the event loop's: fewer take 25 ms (Intel
Xeon, 2026-11-29)."""


class EmbeddingTypes:
    """The types of the embeddings that a request asks for, as its keys say.

    Args:
        formats: Jina may ask for several.
        output_dtype: Voyage's key, with which the only formats are ``float``, for numbers, and ``base64``.

    Raises:
        InputError: both keys name a type.
    """

    def __init__(
        self, formats: EncodingFormat | Sequence[EncodingFormat], output_dtype: OutputDtype | None = None
    ) -> None:
        names = [formats] if isinstance(formats, str) else list(dict.fromkeys(formats))
        self._is_one = isinstance(formats, str)
        self._types = {name: (_precision(name), name in _ENCODED) for name in names}
        if not names:
            raise InputError("encoding_format has no format.", hint="Leave it out for numbers.")
        if output_dtype is not None:
            if not set(names) <= {"float", "base64"}:
                raise InputError(
                    f"encoding_format names the type {names[0]}, and output_dtype the type {output_dtype}.",
                    hint="Give output_dtype with no encoding_format, or with base64.",
                )
            self._types = {
                name: (_PRECISIONS[output_dtype], is_encoded) for name, (_, is_encoded) in self._types.items()
            }

    @property
    def is_float(self) -> bool:
        """Whether all formats are of float32."""
        return all(precision is EmbeddingPrecision.FLOAT32 for precision, _ in self._types.values())

    @property
    def value_bytes(self) -> float:
        """Bytes of a value in all formats together, and at least those of the float32 that it is made of."""
        written = 0.0
        for precision, is_encoded in self._types.values():
            if precision is EmbeddingPrecision.FLOAT32:
                written += BASE64_VALUE_BYTES if is_encoded else FLOAT_VALUE_BYTES
            else:
                # "-128," of 8 bits, or of one dimension.
                written += 5 if precision.needs_ranges else 5 / 8
        return max(written, 4)

    async def rows(self, embeddings: FloatingArray, ranges: Ranges | None, *, is_rescaled: bool = False) -> list[Any]:
        """The embeddings, float32 [rows, dimensions], as a response has them: a value for each row, or where several
        formats were asked for, an object with a value for each. See `typed_embeddings` for the arguments."""
        values = await made_beside_the_loop(
            lambda: self._values(embeddings, ranges, is_rescaled=is_rescaled), [embeddings]
        )
        return values[0] if self._is_one else [self._object(row) for row in zip(*values, strict=True)]

    async def lists(self, embeddings: Sequence[FloatingArray], ranges: Ranges | None) -> list[Any]:
        """The embeddings of several texts, each float32 [embeddings of the text, dimensions], as `rows` has them: a
        list of values for each text, or an object with a list for each format."""
        parts = await made_beside_the_loop(lambda: [self._values(each, ranges) for each in embeddings], embeddings)
        return [part[0] if self._is_one else self._object(part) for part in parts]

    def check_ranges_are_not_needed(self, key: str) -> None:
        """Reject int8 and uint8, since the server's ranges are not of the embeddings of a key."""
        for precision, _ in self._types.values():
            if precision.needs_ranges:
                raise InputError(
                    f"{key} gives no {precision.value} embeddings: the server's ranges are of other embeddings.",
                    hint="Ask for float, base64, binary or ubinary.",
                )

    def _values(
        self, embeddings: FloatingArray, ranges: Ranges | None, *, is_rescaled: bool = False
    ) -> list[list[Any]]:
        """[formats], each a value for each row."""
        return [
            json_rows(typed_embeddings(embeddings, precision, ranges, is_rescaled=is_rescaled), is_base64=is_encoded)
            for precision, is_encoded in self._types.values()
        ]

    def _object(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._types, values, strict=True))


def ranges_of_server(path: str | None, manifest: Manifest) -> Ranges | None:
    """The calibration ranges, float32 [2, dimensions], of the server's int8 and uint8 embeddings; None without a file.

    Raises:
        InputError: see :func:`hdruntime.text.ranges.read_ranges`; the ranges of another bundle are rejected.
    """
    if path is None:
        return None
    settings = manifest.sentence
    is_normalized = "true" if settings is not None and settings.normalize else "unknown"
    return read_ranges(path, bundle=identity_of_bundle(manifest), normalized=is_normalized)


def typed_embeddings(
    embeddings: FloatingArray, precision: EmbeddingPrecision, ranges: Ranges | None, *, is_rescaled: bool = False
) -> AnyArray:
    """Embeddings in a type, bit-equal to sentence-transformers' ``quantize_embeddings`` with the server's ranges.

    Args:
        embeddings: float32 [..., dimensions].
        precision: see `EmbeddingPrecision`.
        ranges: see `ranges_of_server`. The ranges of a request's own embeddings would differ from request to request,
            so that embeddings of different requests could not be compared.
        is_rescaled: whether the request's keys have scaled the embeddings, so that the ranges are not theirs.

    Returns:
        [..., dimensions], or [..., (dimensions + 7) // 8] for bits; see :func:`hdruntime.text.embeddings.quantized`.

    Raises:
        InputError: int8 or uint8 without ranges, or with ranges of other embeddings.
    """
    if not precision.needs_ranges:
        return quantized(embeddings, precision)
    if ranges is None:
        raise InputError(
            f"{precision.value} embeddings need the minimum and maximum of each dimension, which the server lacks.",
            hint=(
                "Ask for binary or ubinary embeddings, or start the server with ",
                Setting("ranges", "FILE", command="serve"),
                ", the output of a job with ",
                Setting("output_dtype", precision.value, command="run"),
                ".",
            ),
        )
    dimensions = ranges.shape[1]
    if is_rescaled or embeddings.shape[-1] != dimensions:
        raise InputError(
            f"The server's ranges of {precision.value} are of the bundle's own embeddings of {dimensions} dimensions.",
            hint=f"Leave out `normalize`, and ask for {dimensions} dimensions.",
        )
    return quantized(embeddings, precision, ranges)


def base64_of(row: AnyArray) -> str:
    """The bytes of an array, little-endian, as base64."""
    return base64.b64encode(row.astype(row.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


async def made_beside_the_loop(make: Callable[[], Made], arrays: Iterable[AnyArray]) -> Made:
    """Return the result of `make`, which runs in another thread if the arrays have many values."""
    return await asyncio.to_thread(make) if sum(each.size for each in arrays) > _MANY_VALUES else make()


def json_rows(rows: AnyArray, *, is_base64: bool = False) -> list[Any]:
    """[rows, dimensions] for a response: the JSON of the numbers of each row, or base64 of its bytes.

    A number takes 32 bytes as an object of Python, so that few rows at a time are such objects.
    """
    if is_base64:
        return [base64_of(np.ascontiguousarray(row)) for row in rows]
    return [msgspec.Raw(msgspec.json.encode(row.tolist())) for row in rows]


def _precision(name: str) -> EmbeddingPrecision:
    return _ENCODED[name] if name in _ENCODED else _PRECISIONS[name]  # type: ignore[index]
