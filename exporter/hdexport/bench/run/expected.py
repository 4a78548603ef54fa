"""PyTorch's outputs of a case in float32, written and read row by row: memory does not grow with the batch."""

from __future__ import annotations

__all__ = ["read_rows", "write_rows"]

import contextlib
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def write_rows(path: Path, rows: Iterable[Mapping[str, FloatArray]], *, batch: int) -> None:
    """Write an ``.npz`` of float32 [batch, ...] arrays; it appears whole or not at all.

    Args:
        path: of the file; one that is there is replaced.
        rows: outputs of one text each, name -> array without the batch axis; `batch` of them.
        batch: texts.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
        with contextlib.ExitStack() as files:
            opened: dict[str, IO[bytes]] = {}
            for row in rows:
                for name, values in row.items():
                    if name not in opened:
                        opened[name] = files.enter_context((Path(folder) / f"{name}.npy").open("wb"))
                        _write_header(opened[name], (batch, *values.shape))
                    np.ascontiguousarray(values, np.float32).tofile(opened[name])
        partial = Path(folder) / "partial.npz"
        with zipfile.ZipFile(partial, "w") as archive:
            for name in opened:
                archive.write(Path(folder) / f"{name}.npy", f"{name}.npy")
        partial.replace(path)


def read_rows(path: Path) -> Iterator[dict[str, FloatArray]]:
    """The rows that `write_rows` was given, one after the other.

    Args:
        path: the ``.npz``; `numpy.load` reads it as well.

    Raises:
        ValueError: it is no such file.
    """
    with zipfile.ZipFile(path) as archive, contextlib.ExitStack() as files:
        opened = {name.removesuffix(".npy"): files.enter_context(archive.open(name)) for name in archive.namelist()}
        shapes = {name: _read_header(file) for name, file in opened.items()}
        for _ in range(next(iter(shapes.values()))[0]):
            yield {name: _read_row(file, shapes[name][1:]) for name, file in opened.items()}


def _write_header(file: IO[bytes], shape: tuple[int, ...]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _read_header(file: IO[bytes]) -> tuple[int, ...]:
    np.lib.format.read_magic(file)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran_order or dtype != np.float32:
        raise ValueError(f"The expected outputs are {dtype}, and not float32 row by row.")
    return tuple(shape)


def _read_row(file: IO[bytes], shape: tuple[int, ...]) -> FloatArray:
    size = int(np.prod(shape)) * np.dtype(np.float32).itemsize
    content = file.read(size)
    if len(content) != size:
        raise ValueError("The expected outputs end early.")
    return np.frombuffer(content, np.float32).reshape(shape)
