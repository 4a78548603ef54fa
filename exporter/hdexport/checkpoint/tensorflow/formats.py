"""Formats of TensorFlow's files, read without it: Protocol Buffers, CRC-32C, and LevelDB's sorted tables."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

_VARINT, _FIXED_64, _LENGTH_DELIMITED, _FIXED_32 = 0, 1, 2, 5
_WIDTH_OF_FIXED = {_FIXED_64: 8, _FIXED_32: 4}
_MOST_VARINT_BYTES = 10

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, its bits reversed."""

_MASK_DELTA = 0xA282EAD8
"""Constant that LevelDB adds to a rotated checksum, so that checksums of data that holds checksums stay meaningful."""

_FEW_BYTES = 4096
"""Fewer are quicker one by one."""

_FOOTER_BYTES = 48

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")

_UNCOMPRESSED, _SNAPPY = 0, 1

_TRAILER_BYTES = 5
"""After each block: how it is compressed, one byte, and its checksum, four."""


class DamagedError(ValueError):
    """Bytes do not follow their format; the message is half a sentence that says how."""


def fields_of(message: bytes) -> dict[int, list[int | bytes]]:
    """Field number -> values in their order: numbers of varint and fixed fields, bytes of the others."""
    fields: dict[int, list[int | bytes]] = {}
    offset = 0
    while offset < len(message):
        key, offset = _read_varint(message, offset)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == _VARINT:
            value, offset = _read_varint(message, offset)
        elif kind in (_LENGTH_DELIMITED, *_WIDTH_OF_FIXED):
            size, offset = (
                _read_varint(message, offset) if kind == _LENGTH_DELIMITED else (_WIDTH_OF_FIXED[kind], offset)
            )
            part = message[offset : offset + size]
            if len(part) < size:
                raise DamagedError("a record in it is cut off")
            value, offset = (part if kind == _LENGTH_DELIMITED else int.from_bytes(part, "little")), offset + size
        else:
            raise DamagedError(f"a record in it has a field of the unknown kind {kind}")
        fields.setdefault(number, []).append(value)
    return fields


def crc32c(data: bytes | memoryview) -> int:
    """The checksum of bytes, by which TensorFlow guards its files, at hundreds of megabytes per second.

    A checksum is linear over GF(2) in the data. So the data is split into blocks, which NumPy advances together, four
    bytes per step, and the blocks' checksums are joined by the linear map of as many zero bytes as a block has.
    """
    content = np.frombuffer(data, np.uint8)
    state, done = 0xFFFFFFFF, 0
    if len(content) >= _FEW_BYTES:
        blocks = 1 << (len(content).bit_length() // 2)
        words = len(content) // (4 * blocks)
        done = 4 * blocks * words
        state = _of_blocks(content[:done].view("<u4").reshape(blocks, words), state)
    table = _byte_table()
    for byte in content[done:].tolist():
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


def masked_crc32c(data: bytes | memoryview) -> int:
    """The checksum as LevelDB's tables and TensorFlow's checkpoints store it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def read_table(data: bytes) -> dict[bytes, bytes]:
    """Key -> value, in the order of the keys, of a whole file of LevelDB's sorted table, in which TensorFlow writes the
    index of a checkpoint.

    The file has blocks of entries, whose keys share prefixes with the keys before; a block that lists the blocks; and a
    footer of 48 bytes that says where the list is. Each block has a checksum. Source: ``doc/table_format.md`` of
    LevelDB, and TensorFlow's ``core/lib/io/format.h``.
    """
    if len(data) < _FOOTER_BYTES or data[-len(_MAGIC) :] != _MAGIC:
        raise DamagedError(
            f"its {len(data)} bytes do not end in the magic number of such a table: it is cut off, or something else"
        )
    # The first handle is that of the filters' block, which TensorFlow leaves empty.
    footer = data[-_FOOTER_BYTES : -len(_MAGIC)]
    _, _, end = _handle(footer, 0)
    offset, size, _ = _handle(footer, end)
    table: dict[bytes, bytes] = {}
    for _, handle in _entries(_block(data, offset, size)):
        offset, size, _ = _handle(handle, 0)
        table.update(_entries(_block(data, offset, size)))
    return table


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """A number of 1 to 10 bytes, and where the next one begins."""
    value = 0
    for index, byte in enumerate(data[offset : offset + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, offset + index + 1
    raise DamagedError("a number in it has no end")


def _of_blocks(words: np.ndarray, start: int) -> int:
    """The state after all words: [blocks, words per block], a power of two of blocks."""
    last, third, second, first = _word_tables()
    states = np.zeros(len(words), np.uint32)
    states[0] = start
    for column in np.ascontiguousarray(words.T):
        states ^= column
        states = first[states & 0xFF] ^ second[states >> 8 & 0xFF] ^ third[states >> 16 & 0xFF] ^ last[states >> 24]
    zeros = _power(_zero_word(), words.shape[1])
    while len(states) > 1:
        states = _mapped(zeros, states[::2]) ^ states[1::2]
        zeros = _mapped(zeros, zeros)
    return int(states[0])


@functools.cache
def _byte_table() -> list[int]:
    states = list(range(256))
    for _ in range(8):
        states = [state >> 1 ^ (_POLYNOMIAL if state & 1 else 0) for state in states]
    return states


@functools.cache
def _word_tables() -> tuple[np.ndarray, ...]:
    """The term that each byte of a word adds, the last byte's first: the same byte, followed by 0 to 3 zero bytes."""
    tables = [np.array(_byte_table(), np.uint32)]
    for _ in range(3):
        tables.append(tables[0][tables[-1] & 0xFF] ^ tables[-1] >> 8)
    return tuple(tables)


def _zero_word() -> np.ndarray:
    """The map of four zero bytes: [32], the image of each bit of a state."""
    states = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(4):
        states = _word_tables()[0][states & 0xFF] ^ states >> 8
    return states


def _mapped(columns: np.ndarray, states: np.ndarray) -> np.ndarray:
    """States, of any number, after a linear map: the sum over GF(2) of their bits' images."""
    result = np.zeros_like(states)
    for bit in range(32):
        result ^= columns[bit] * (states >> np.uint32(bit) & np.uint32(1))
    return result


def _power(columns: np.ndarray, exponent: int) -> np.ndarray:
    """A map, applied `exponent` times."""
    result = np.uint32(1) << np.arange(32, dtype=np.uint32)
    while exponent:
        if exponent & 1:
            result = _mapped(columns, result)
        columns = _mapped(columns, columns)
        exponent >>= 1
    return result


def _handle(data: bytes, begin: int) -> tuple[int, int, int]:
    """Where a block is and its size, and where these two numbers end."""
    offset, middle = _read_varint(data, begin)
    size, end = _read_varint(data, middle)
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
    """The entries of a block; the list behind them, of entries with whole keys, is for searching, and not needed."""
    if len(block) < 4:
        raise DamagedError("a block has no entries")
    end = len(block) - 4 * (int.from_bytes(block[-4:], "little") + 1)
    if end < 0:
        raise DamagedError("a block is shorter than it says")
    key, offset = b"", 0
    while offset < end:
        shared, offset = _read_varint(block, offset)
        added, offset = _read_varint(block, offset)
        size, offset = _read_varint(block, offset)
        if shared > len(key) or offset + added + size > end:
            raise DamagedError("an entry is longer than its block")
        key = key[:shared] + block[offset : offset + added]
        yield key, block[offset + added : offset + added + size]
        offset += added + size
