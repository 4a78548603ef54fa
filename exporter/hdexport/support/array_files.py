"""Files of NumPy arrays that users hand in: read without running code in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hdruntime.errors import InputError


def load_arrays(path: Path) -> Any:
    """The array of a ``.npy`` file, or the archive of a ``.npz`` file; for use within `reading`. It is mapped, so that
    a damaged header cannot ask for memory that the file does not fill."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


@contextlib.contextmanager
def reading(path: Path, remedy: str, *, option: str = "") -> Iterator[None]:
    """Translates NumPy's errors; `option` names the file in messages, with a space behind it."""
    try:
        yield
    except Exception as error:
        # For a damaged file NumPy raises errors of zip archives, of Python's tokenizer and a dozen others; for a file
        # that is not NumPy's own, the error says how to run code in it.
        reason = (
            "it is not a file of NumPy arrays, or it holds Python objects" if "allow_pickle" in str(error) else error
        )
        raise InputError(f"{option}{path} cannot be read: {reason}\nWrite it with {remedy}.") from error
