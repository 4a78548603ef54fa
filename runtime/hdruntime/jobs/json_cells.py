"""Values of results as JSON."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from hdruntime.arrays import AnyArray
from hdruntime.jobs.input_files import Cell
from hdruntime.packing import grouped

_NUMBERS = 2**18
"""Numbers of vectors that become JSON together, also of a text with more: a few MB of text."""


def json_from_value(value: object) -> str:
    """A value as JSON, on one line; null for NaN and infinity, which JSON lacks."""
    if value is None:
        return "null"
    if type(value) is int:
        return str(value)
    if isinstance(value, Cell):
        value = value.in_python()
    try:
        return _ENCODE(value)
    except ValueError:
        finite = json.loads(json.dumps(value, default=_json_default), parse_constant=lambda name: None)
        return json.dumps(finite, ensure_ascii=False)


def json_from_cells(cells: list[Any]) -> Iterable[str]:
    """The values of a column as JSON; of NumPy arrays all numbers together, which is faster than one by one."""
    if np.ndarray not in set(map(type, cells)):
        return map(json_from_value, cells)
    arrays = [cell for cell in cells if cell is not None]
    vectors = _json_from_vectors([vector for cell in arrays for vector in (cell if cell.ndim > 1 else (cell,))])
    return [
        "null"
        if cell is None
        else f"[{', '.join(itertools.islice(vectors, len(cell)))}]"
        if cell.ndim > 1
        else next(vectors)
        for cell in cells
    ]


def values_from_json(column: pa.AnyArray) -> list[Any]:
    texts = ["null" if text is None else text for text in column.to_pylist()]
    return json.loads(f"[{', '.join(texts)}]")


def text_of_value(value: object) -> str:
    """A value as text: a JSON string without its quotes, anything else as JSON."""
    encoded = json_from_value(value)
    return str(json.loads(encoded)) if encoded.startswith('"') else encoded


def _json_from_vectors(vectors: Sequence[AnyArray]) -> Iterator[str]:
    """Vectors as JSON: numbers with the fewest digits that identify a float32, and null for NaN and infinity."""
    from pyarrow import compute  # which takes long to load, and which other outputs go without

    for some in grouped([len(vector) for vector in vectors], max_items=len(vectors), max_total=_NUMBERS):
        values = np.concatenate(vectors[some])
        if values.dtype == np.float16:
            # Of these Arrow writes all digits.
            values = values.astype(np.float32)
        texts = pa.array(values, mask=~np.isfinite(values)).cast(pa.string()).fill_null("null")
        ends = np.cumsum([0, *map(len, vectors[some])])
        joined = compute.binary_join(pa.ListArray.from_arrays(pa.array(ends, pa.int32()), texts), ", ")
        yield from map("[{}]".format, joined.to_pylist())


def _json_default(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_json_default).encode
"""As `json.dumps`, which makes an encoder for every value."""
