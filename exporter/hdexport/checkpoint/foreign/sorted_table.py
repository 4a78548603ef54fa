"""LevelDB's format of a sorted table, in which TensorFlow writes the index of a checkpoint.

Blocks of entries, whose keys share prefixes with the keys before; a block that lists the blocks; and a footer of 48
bytes that says where the list is. Each block has a checksum, which is compared.

Source: the file ``doc/table_format.md`` of LevelDB, and TensorFlow's ``core/lib/io/format.h``.
"""

from __future__ import annotations

from collections.abc import Iterator

from hdexport.checkpoint.foreign.crc32c import masked_crc32c
from hdexport.checkpoint.foreign.wire_format import DamagedError, read_varint

_FOOTER_BYTES = 48
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_UNCOMPRESSED, _SNAPPY = 0, 1
_TRAILER_BYTES = 5
"""After each block: how it is compressed, one byte, and its checksum, four."""


def read_table(data: bytes) -> dict[bytes, bytes]:
    """Key -> value, in the order of the keys.

    Args:
        data: the whole file.

    Raises:
        DamagedError: the table is cut off, changed, something else, or compressed.
    """
    if len(data) < _FOOTER_BYTES or data[-len(_MAGIC) :] != _MAGIC:
        raise DamagedError(
            f"its {len(data)} bytes do not end in the magic number of such a table: it is cut off, or something else"
        )
    # The first handle is of the block that describes filters, which TensorFlow leaves empty.
    footer = data[-_FOOTER_BYTES : -len(_MAGIC)]
    _, _, end = _handle(footer, 0)
    offset, size, _ = _handle(footer, end)
    table: dict[bytes, bytes] = {}
    for _, handle in _entries(_block(data, offset, size)):
        offset, size, _ = _handle(handle, 0)
        table.update(_entries(_block(data, offset, size)))
    return table


def _handle(data: bytes, begin: int) -> tuple[int, int, int]:
    """Where a block is and its size, and where these two numbers end."""
    offset, middle = read_varint(data, begin)
    size, end = read_varint(data, middle)
    return offset, size, end


def _block(data: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    if end + _TRAILER_BYTES > len(data) - _FOOTER_BYTES:
        raise DamagedError(f"it names a block of {size} bytes at {offset}, and has {len(data)} bytes: it is cut off")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER_BYTES], "little")
    if masked_crc32c(data[offset : end + 1]) != stored:
        raise DamagedError(f"the checksum of its block at {offset} is wrong: the file was changed")
    if data[end] != _UNCOMPRESSED:
        name = "with Snappy" if data[end] == _SNAPPY else f"by the unknown method {data[end]}"
        raise DamagedError(f"its block at {offset} is compressed {name}, and TensorFlow compresses no index")
    return data[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a block; the list of entries with whole keys behind them is for searching, and not needed."""
    if len(block) < 4:
        raise DamagedError("a block has no entries")
    end = len(block) - 4 * (int.from_bytes(block[-4:], "little") + 1)
    if end < 0:
        raise DamagedError("a block is shorter than it says")
    key, offset = b"", 0
    while offset < end:
        shared, offset = read_varint(block, offset)
        added, offset = read_varint(block, offset)
        size, offset = read_varint(block, offset)
        if shared > len(key) or offset + added + size > end:
            raise DamagedError("an entry is longer than its block")
        key = key[:shared] + block[offset : offset + added]
        yield key, block[offset + added : offset + added + size]
        offset += added + size
