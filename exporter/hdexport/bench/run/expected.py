"""PyTorch's outputs of a case in float32, written row by row: memory does not grow with the batch."""

from __future__ import annotations

__all__ = ["write_rows"]

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from hdruntime.arrays import FloatArray


def write_rows(path: Path, rows: Iterable[Mapping[str, FloatArray]], *, batch: int) -> None:
    """Write a folder of ``.npy`` files, one a name: float32 [batch, ...] arrays. It appears whole or not at all.

    Args:
        rows: outputs of one text each, name -> array without the batch axis; `batch` of them.

    Raises:
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        folder = Path(scratch) / "rows"
        folder.mkdir()
        for number, row in enumerate(rows):
            for name, values in row.items():
                # Mapped again for each row: mapped pages count as memory of the process.
                new = {"mode": "w+", "dtype": np.float32, "shape": (batch, *values.shape)}
                array = np.lib.format.open_memmap(folder / f"{name}.npy", **({"mode": "r+"} if number else new))
                array[number] = values
        folder.rename(path)
