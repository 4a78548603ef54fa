"""Checkpoints in TensorFlow's format, written without TensorFlow, right or wrong; TensorFlow's own are test data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from hdexport.checkpoint.tensorflow.formats import masked_crc32c
from hdexport.checkpoint.tensorflow.tensor_bundle import TensorBundle

BERT4KERAS = Path(__file__).parents[1] / "data" / "bert4keras"
"""Checkpoints that TensorFlow and bert4keras wrote, and bert4keras' answers."""

_NUMBERS = {"float32": 1, "float64": 2, "int64": 9, "float16": 19}
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_RESTART = 16
"""Entries after which a key is whole again."""


def varint(value: int) -> bytes:
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def sorted_table(entries: Mapping[bytes, bytes], *, entries_of_block: int = 1000, compression: int = 0) -> bytes:
    """A table as LevelDB writes it, with a byte that says how it is compressed; it is not."""
    file = b""

    def append(block: bytes) -> bytes:
        nonlocal file
        content = block + bytes([compression])
        handle = varint(len(file)) + varint(len(block))
        file += content + masked_crc32c(content).to_bytes(4, "little")
        return handle

    keys = sorted(entries)
    blocks = [keys[start : start + entries_of_block] for start in range(0, len(keys), entries_of_block)]
    handles = {block[-1]: append(_block({key: entries[key] for key in block})) for block in blocks}
    footer = append(_block({})) + append(_block(handles))
    return file + footer.ljust(40, b"\0") + _MAGIC


def _block(entries: Mapping[bytes, bytes]) -> bytes:
    content, before, restarts = b"", b"", []
    for number, (key, value) in enumerate(entries.items()):
        shared = 0
        if number % _RESTART == 0:
            restarts.append(len(content))
        else:
            while shared < min(len(key), len(before)) and key[shared] == before[shared]:
                shared += 1
        content += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    restarts = restarts or [0]
    return content + b"".join(offset.to_bytes(4, "little") for offset in (*restarts, len(restarts)))


def header(*, shards: int = 1, endianness: int = 0) -> bytes:
    return b"\x08" + varint(shards) + (b"\x10" + varint(endianness) if endianness else b"")


def _record(value: np.ndarray, offset: int, data: bytes) -> bytes:
    axes = b"".join(b"\x12" + varint(len(size)) + size for size in (b"\x08" + varint(axis) for axis in value.shape))
    return (
        (b"\x08" + varint(_NUMBERS[value.dtype.name]) + b"\x12" + varint(len(axes)) + axes)
        + (b"\x20" + varint(offset) + b"\x28" + varint(len(data)))
        + (b"\x35" + masked_crc32c(data).to_bytes(4, "little"))
    )


def write_checkpoint(prefix: Path, tensors: Mapping[str, np.ndarray], *, first: bytes | None = None) -> None:
    """Write ``prefix.index`` and its data file.

    Args:
        prefix: of the files' names.
        tensors: name -> value.
        first: the record of the whole checkpoint, where it is not the usual one.
    """
    entries, content = {b"": header() if first is None else first}, b""
    for name, value in tensors.items():
        data = np.ascontiguousarray(value).tobytes()
        entries[name.encode()] = _record(value, len(content), data)
        content += data
    prefix.with_name(f"{prefix.name}.index").write_bytes(sorted_table(entries))
    prefix.with_name(f"{prefix.name}.data-00000-of-00001").write_bytes(content)


def copied_checkpoint(name: str, directory: Path) -> Path:
    """A copy of one of the checkpoints, to be changed."""
    copy = Path(shutil.copytree(BERT4KERAS / name, directory / name))
    for file in copy.glob("*.npz"):
        file.unlink()
    return copy


def rewritten(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the variables of a checkpoint, and write it again."""
    (index,) = directory.glob("*.index")
    bundle = TensorBundle(index)
    tensors = {name: np.array(bundle.read(name)) for name in bundle.tensors}
    change(tensors)
    for file in directory.glob(f"{index.stem}.*"):
        file.unlink()
    write_checkpoint(index.with_suffix(""), tensors)
