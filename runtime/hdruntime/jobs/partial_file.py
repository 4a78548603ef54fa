"""Finished rows of a shard that still runs, as bytes to which more rows can be appended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from hdruntime.jobs.rows import Position

_ARRAY, _NUMBER = 1, 2
"""Codes of NumPy's arrays and numbers."""

_LENGTH_BYTES = 8

Rows = Mapping[Position, Sequence[Mapping[str, object]]]
"""End of a row -> the task's values of each of its results."""


def bytes_of_rows(rows: Rows) -> bytes:
    """The rows, with their length before them."""
    content = _encode([(end, values) for end, values in rows.items()])
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content


def rows_of_bytes(content: bytes) -> Rows:
    """All rows that were appended, with the same values."""
    return {
        Position(*end): values
        for block in _blocks(memoryview(content))
        for end, values in msgspec.msgpack.decode(block, ext_hook=_decoded)
    }


def _blocks(content: memoryview) -> Iterator[memoryview]:
    while content:
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        yield content[_LENGTH_BYTES:end]
        content = content[end:]


def _encoded(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _encode((value.dtype.str, value.shape, value.tobytes())))
    if isinstance(value, np.generic):
        return msgspec.msgpack.Ext(_NUMBER, _encode((value.dtype.str, (), value.tobytes())))
    raise TypeError(f"values of a job are no {type(value).__name__}")


def _decoded(code: int, content: memoryview) -> Any:
    dtype, shape, values = msgspec.msgpack.decode(content)
    array = np.frombuffer(values, dtype).reshape(shape)
    return array if code == _ARRAY else array[()]


_encode = msgspec.msgpack.Encoder(enc_hook=_encoded).encode
