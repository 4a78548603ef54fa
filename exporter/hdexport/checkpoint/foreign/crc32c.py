"""CRC-32C, by which TensorFlow guards its files: hundreds of megabytes per second without a compiled package.

A checksum is linear over GF(2) in the data. So the data is cut into lanes, which NumPy advances together, four bytes
per step, and the lanes' checksums are joined by the linear map of "as many zero bytes as a lane has".
"""

from __future__ import annotations

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, its bits reversed."""

_MASK_DELTA = 0xA282EAD8
"""Constant that LevelDB adds to a rotated checksum, so that checksums of data that holds checksums stay meaningful."""

_FEW_BYTES = 4096
"""Fewer are quicker one by one."""


def crc32c(data: bytes | memoryview) -> int:
    """The checksum of bytes, from 0 to 2^32 - 1."""
    content = np.frombuffer(data, np.uint8)
    state, done = 0xFFFFFFFF, 0
    if len(content) >= _FEW_BYTES:
        lanes = 1 << (len(content).bit_length() // 2)
        words = len(content) // (4 * lanes)
        done = 4 * lanes * words
        state = _of_lanes(content[:done].view("<u4").reshape(lanes, words), state)
    table = _byte_table()
    for byte in content[done:].tolist():
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


def masked_crc32c(data: bytes | memoryview) -> int:
    """The checksum as LevelDB's tables and TensorFlow's checkpoints store it."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _of_lanes(words: np.ndarray, start: int) -> int:
    """The state after all words: [lanes, words per lane], a power of two of lanes."""
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
