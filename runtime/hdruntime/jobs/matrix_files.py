"""The vectors of a batch job as NumPy's files."""

from __future__ import annotations

__all__ = ["NpyResults", "NpzResults"]

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hdruntime.jobs.arrow_results import ArrowResults

Array = npt.NDArray[Any]
Batches = Callable[[], Iterator[pa.RecordBatch]]


class NpyResults(ArrowResults):
    """One array: the vectors, NaN in failed rows."""

    def _write(self, batches: Batches, file: BinaryIO, metadata: Mapping[str, str]) -> None:
        rows = sum(len(batch) for batch in batches())
        _write_array(file, (rows, self._vectors.list_size), self._dtype, map(self._matrix, batches()))

    @property
    def _vectors(self) -> pa.DataType:
        return self._schema.field("embedding").type

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self._vectors.value_type.to_pandas_dtype())

    def _matrix(self, batch: pa.RecordBatch) -> Array:
        column = batch.column("embedding")
        # 0 where there is no NaN: a job of integers leaves out failed rows.
        missing = np.nan if self._dtype.kind == "f" else 0
        matrix = np.full((len(batch), self._vectors.list_size), missing, self._dtype)
        values = column.flatten().to_numpy(zero_copy_only=False)
        matrix[column.is_valid().to_numpy(zero_copy_only=False)] = values.reshape(-1, self._vectors.list_size)
        return matrix


class NpzResults(NpyResults):
    """Arrays ``embedding``, ``id``, ``tokens`` (0 in rows that were not tokenised), ``failed``, and ``metadata``, JSON.

    Ids are int64, or strings where one is, or where one is missing: "".
    """

    def _write(self, batches: Batches, file: BinaryIO, metadata: Mapping[str, str]) -> None:
        schema = self._closed_schema(batches())
        rows, missing, longest = 0, 0, 1
        for batch in batches():
            ids = self._closed(batch, schema).column("id")
            rows, missing = rows + len(ids), missing + ids.null_count
            longest = max(longest, *(len(str(value)) for value in ids.to_pylist()), 1)
        whole = pa.types.is_integer(schema.field("id").type) and not missing
        dtype = np.dtype(np.int64 if whole else f"U{longest}")

        def ids_of(batch: pa.RecordBatch) -> Array:
            values = self._closed(batch, schema).column("id").to_pylist()
            return np.array(values if whole else ["" if value is None else str(value) for value in values], dtype)

        def tokens(batch: pa.RecordBatch) -> Array:
            return batch.column("tokens").fill_null(0).to_numpy(zero_copy_only=False).astype(np.int32)

        def failed(batch: pa.RecordBatch) -> Array:
            return batch.column("error").is_valid().to_numpy(zero_copy_only=False)

        arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any], Callable[[pa.RecordBatch], Array]]] = {
            "embedding": ((rows, self._vectors.list_size), self._dtype, self._matrix),
            "id": ((rows,), dtype, ids_of),
            "tokens": ((rows,), np.dtype(np.int32), tokens),
            "failed": ((rows,), np.dtype(bool), failed),
        }
        with zipfile.ZipFile(file, "w") as archive:
            # ZipInfo has a fixed date: the same job writes the same bytes.
            for name, (shape, kind, part) in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    _write_array(member, shape, kind, map(part, batches()))
            with archive.open(zipfile.ZipInfo("metadata.npy"), "w") as member:
                np.lib.format.write_array(member, np.array(json.dumps(metadata)))


def _write_array(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any], parts: Iterable[Array]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for part in parts:
        file.write(np.ascontiguousarray(part).tobytes())
