"""Calibration ranges of int8 and uint8 embeddings, read from a file: each dimension's minimum and maximum."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hdruntime.errors import InputError, Message, Setting

RANGES_SUFFIX = ".ranges.npz"
"""Suffix that a job appends to the name of an output without metadata, for the file of its ranges."""

RANGES_KEY, BUNDLE_KEY, NORMALIZED_KEY = "hdexport.ranges", "hdexport.bundle", "hdexport.normalized"
"""Keys of an output's metadata; the last one's values are true, false and unknown."""

_FILES: Message = (
    "Accepted are a .npy file of float32 [2, dimensions], minima and maxima, and an output of hdexport run with ",
    Setting("output_dtype", "int8", command="run"),
    " or uint8.",
)


Ranges = npt.NDArray[np.float32]
"""[2, dimensions]: each dimension's minimum and maximum."""


def read_ranges(path: str | Path, *, bundle: str | None = None, normalized: str = "unknown") -> Ranges:
    """Read the ranges of a .npy file, of the file that a job wrote beside its output, or of an output.

    Args:
        path: the file; for an output of several files, their directory.
        bundle: the identity of the bundle whose vectors are quantised; None for any.
        normalized: whether these vectors have length 1: a value of `NORMALIZED_KEY`.

    Raises:
        InputError: there is no such file, it holds no ranges, or ranges of another bundle's vectors, or of vectors that
            alone are normalized, or alone are not.
    """
    file = Path(path)
    try:
        if not file.exists():
            raise InputError(f"There is no file {file} with ranges.", hint=_FILES)
        ranges, metadata = _read(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{file} cannot be read as ranges: {error}.", hint=_FILES) from error
    if ranges.ndim != 2 or len(ranges) != 2 or not ranges.size:
        raise InputError(f"The ranges of {file} have the shape {list(ranges.shape)}; it must be [2, dimensions].")
    if not (np.isfinite(ranges).all() and (ranges[0] <= ranges[1]).all()):
        raise InputError(
            f"The ranges of {file} are not finite, or a minimum is larger than its maximum.",
            hint="The first row has each dimension's minimum, the second row its maximum.",
        )
    origin = metadata.get(BUNDLE_KEY)
    if None not in (origin, bundle) and origin != bundle:
        raise InputError(
            f"The ranges of {file} are of another bundle's vectors.",
            hint="Run that bundle, or, if both bundles give the same vectors, save the ranges alone: "
            f"numpy.save('ranges.npy', hdruntime.text.ranges.read_ranges({str(file)!r}))",
        )
    if {metadata.get(NORMALIZED_KEY), normalized} == {"true", "false"}:
        these, those = ("are", "are not") if normalized == "true" else ("are not", "are")
        raise InputError(
            f"The ranges of {file} are of vectors that {those} normalized, and the vectors to quantise {these}.",
            hint=(
                "Normalize both or neither: ",
                Setting("normalize", command="run"),
                " for hdexport run, normalize_embeddings for SentenceEncoder.encode.",
            ),
        )
    return ranges


def write_ranges(file: BinaryIO, ranges: Ranges, metadata: dict[str, str]) -> None:
    """Write a .npz file with the arrays ``ranges`` and ``metadata`` (JSON); the same content has the same bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in {"ranges": ranges, "metadata": np.array(json.dumps(metadata))}.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as member:
                np.lib.format.write_array(member, array)


def _read(file: Path) -> tuple[Ranges, dict[str, str]]:
    """The ranges, and the metadata of the output; empty where the file has none."""
    if file.is_dir() or file.suffix == ".parquet":
        import pyarrow.parquet  # slow to import, and only needed here

        first = file / "part-00000.parquet" if file.is_dir() else file
        entries = pyarrow.parquet.read_schema(first).metadata or {}
        return _of_metadata({name.decode(): value.decode() for name, value in entries.items() if b"hdexport." in name})
    if file.suffix in (".npy", ".npz"):
        with file.open("rb") as stream:
            content: Any = np.load(stream, allow_pickle=False)
            if isinstance(content, np.lib.npyio.NpzFile):
                metadata = json.loads(str(content["metadata"])) if "metadata" in content else {}
                if "ranges" in content:
                    return content["ranges"].astype(np.float32), metadata
                return _of_metadata(metadata)
        if np.issubdtype(content.dtype, np.floating):
            return content.astype(np.float32), {}
    beside = file.with_name(file.name + RANGES_SUFFIX)
    if not beside.exists():
        raise ValueError(f"there is no {beside.name} beside it")
    return _read(beside)


def _of_metadata(metadata: dict[str, str]) -> tuple[Ranges, dict[str, str]]:
    if RANGES_KEY not in metadata:
        raise ValueError("its metadata has no ranges: its vectors are not int8 or uint8")
    return np.array(json.loads(metadata[RANGES_KEY]), np.float32), metadata
