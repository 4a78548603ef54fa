"""TensorFlow's checkpoints are read to the last bit, and damaged ones are refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hdexport.checkpoint.tensorflow.formats import crc32c, read_table
from hdexport.checkpoint.tensorflow.tensor_bundle import TensorBundle
from hdruntime.errors import ModelError
from support.tensor_bundles import BERT4KERAS, header, sorted_table

VALUES = np.linspace(-3, 3, 12).reshape(3, 4)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The index of a checkpoint of all types, to be changed; its data file lies beside it."""
    for file in (BERT4KERAS / "types").iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path / "types.index"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("empty", np.zeros((0, 4), np.float32)),
        ("float16", VALUES.astype(np.float16)),
        ("float32", VALUES.astype(np.float32)),
        ("int64", np.arange(5)),
        ("scalar", np.array(2.5, np.float32)),
        ("wide", np.arange(2000, dtype=np.float32)),
    ],
)
def test_what_tensorflow_wrote_is_read_to_the_last_bit(index: Path, name: str, expected: np.ndarray) -> None:
    value = TensorBundle(index).read(name)
    assert value.dtype == expected.dtype
    np.testing.assert_array_equal(value, expected)


def test_bfloat16_becomes_float32_which_holds_it_exactly(index: Path) -> None:
    value = TensorBundle(index).read("bfloat16")
    assert value.dtype == np.float32
    assert (value.view(np.uint32) & 0xFFFF == 0).all()
    np.testing.assert_allclose(value, VALUES, rtol=2**-8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("string", r"stores 'string' as string; float32.*\nSave the checkpoint again in one of these"),
        ("sliced", r"stores 'sliced' in 2 slices: it was a partitioned variable.*\nSave .* without a partitioner"),
    ],
)
def test_what_is_not_read_is_named(index: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TensorBundle(index).read(name)


def test_an_index_that_is_cut_anywhere_is_refused(index: Path) -> None:
    whole = index.read_bytes()
    for size in range(0, len(whole), 5):
        index.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"types.index cannot be read as .*cut off.*\nCopy or download"):
            TensorBundle(index)


def test_a_changed_byte_of_the_index_is_noticed_or_changes_nothing(index: Path) -> None:
    whole, tensors = bytearray(index.read_bytes()), TensorBundle(index).tensors
    noticed = 0
    for position in range(len(whole)):
        changed = whole.copy()
        changed[position] ^= 0x41
        index.write_bytes(changed)
        try:
            assert TensorBundle(index).tensors == tensors, position
        except ModelError:
            noticed += 1
    # A block without entries, of 13 bytes, and what fills up a footer of 48 are not read.
    assert noticed >= len(whole) - 13 - 40


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    for file in (BERT4KERAS / "albert").glob("model.*"):
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "model.ckpt-best.data-00001-of-00002").unlink()
    with pytest.raises(ModelError, match=r"lacks model.ckpt-best.data-00001-of-00002, of the 2 data files .*\nCopy"):
        TensorBundle(tmp_path / "model.ckpt-best.index")


def test_a_data_file_that_is_cut_off_is_refused_before_anything_is_read(index: Path) -> None:
    data = index.with_name("types.data-00000-of-00001")
    # At its end are the slices, which are not read.
    data.write_bytes(data.read_bytes()[:-33])
    with pytest.raises(ModelError, match=r"has \d+ bytes, and types.index says at least \d+: it is cut off"):
        TensorBundle(index)


def test_changed_numbers_are_noticed_by_their_checksum(index: Path) -> None:
    data = index.with_name("types.data-00000-of-00001")
    whole = data.read_bytes()
    bundle = TensorBundle(index)
    for name in ("float64", "wide"):
        tensor = bundle.tensors[name]
        for offset in (tensor.offset, tensor.offset + tensor.size - 1):
            changed = bytearray(whole)
            changed[offset] ^= 1
            data.write_bytes(changed)
            with pytest.raises(ModelError, match=rf"checksum of '{name}' in .*data-00000-of-00001 is wrong"):
                TensorBundle(index).read(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n" * 3, "do not end in the magic number"),
        (sorted_table({b"": header()}, compression=1), "compressed with Snappy, and TensorFlow compresses no index"),
        (sorted_table({b"": header(endianness=1)}), "its numbers are big-endian"),
        (sorted_table({b"": header(), b"name": b"\x08"}), "a number in it has no end"),
        (sorted_table({b"": header(), b"_CHECKPOINTABLE_OBJECT_GRAPH": b""}), "a checkpoint of objects, as Keras"),
    ],
)
def test_an_index_of_something_else_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.index").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        TensorBundle(tmp_path / "model.index")


@pytest.mark.parametrize("entries_of_block", [1, 15, 16, 17])
def test_tables_of_any_number_of_blocks_are_read(entries_of_block: int) -> None:
    entries = {f"layer_{number}/kernel".encode(): bytes([number % 256]) * (number % 5) for number in range(300)}
    assert read_table(sorted_table(entries, entries_of_block=entries_of_block)) == entries


@pytest.mark.parametrize("size", [0, 1, 9, 4095, 4096, 4097, 16385, 70001])
def test_checksums_of_lanes_are_those_of_single_bytes(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    assert crc32c(data) == state ^ 0xFFFFFFFF
