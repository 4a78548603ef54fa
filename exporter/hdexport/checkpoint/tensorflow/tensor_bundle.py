"""TensorFlow's checkpoints of version 2: ``NAME.index`` and ``NAME.data-00000-of-00001``, read without TensorFlow.

The index is a sorted table of records that say where a tensor lies in the data files, which hold bare numbers. The
checksums of the index and of all tensors that are read are compared.

Source: TensorFlow's ``core/protobuf/tensor_bundle.proto`` and ``core/util/tensor_bundle``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hdexport.checkpoint.tensorflow.formats import DamagedError, fields_of, masked_crc32c, read_table
from hdexport.support.json_files import shown
from hdruntime.errors import ModelError

_HEADER_KEY = b""
_SLICE_KEYS = b"\0"
"""Begin of the keys of parts of a variable, which are no names."""

_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""The name of a string that only checkpoints of objects have; their tensors are named by attributes, not variables."""

_BFLOAT16 = 14
_TYPES = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 10: "|b1", _BFLOAT16: "<u2", 19: "<f2"}
"""Number of a type in ``core/framework/types.proto`` -> NumPy's name of how it is stored."""

_NAMES = {4: "uint8", 5: "int16", 6: "int8", 7: "string", 8: "complex64", 17: "uint16", 20: "resource", 21: "variant"}
"""Types that are not read, for messages."""


class StoredTensor(NamedTuple):
    """The place of a tensor in a file.

    Attributes:
        type_number: TensorFlow's number of the tensor's type.
        shard: index of the data file.
        offset, size: position and number of the tensor's bytes there.
        checksum: masked checksum of these bytes.
        slices: number of parts that it is stored in under other names; 0 where it is whole.
    """

    type_number: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: int

    @property
    def is_floating(self) -> bool:
        """Whether the tensor may be a weight."""
        return self.type_number == _BFLOAT16 or _TYPES.get(self.type_number, "").startswith("<f")


class TensorBundle:
    """A checkpoint by its file ``NAME.index``: `tensors` has the names and places of its tensors at once, `read` gives
    their numbers on demand."""

    def __init__(self, index: Path) -> None:
        self._index = index
        try:
            table = read_table(index.read_bytes())
            header = fields_of(table.get(_HEADER_KEY, b""))
            if _HEADER_KEY not in table:
                raise DamagedError("it has no header")
            if _number(header, 2):
                raise DamagedError("its numbers are big-endian; little-endian ones are read")
            names = {
                key: key.decode("utf-8") for key in table if key != _HEADER_KEY and not key.startswith(_SLICE_KEYS)
            }
            self.tensors = {name: _stored(table[key]) for key, name in names.items()}
        except OSError as error:
            raise ModelError(f"{index} cannot be read: {error.strerror}.", hint="Copy the checkpoint again.") from error
        except ValueError as error:
            reason = str(error) if isinstance(error, DamagedError) else "a name in it is not UTF-8"
            raise ModelError(
                f"{index} cannot be read as the index of a TensorFlow checkpoint: {reason}.",
                hint="Copy or download the checkpoint again.",
            ) from error
        if _OBJECT_GRAPH in self.tensors:
            raise ModelError(
                f"{index} is a checkpoint of objects, as Keras writes it for a name without .h5: its tensors have no "
                "names of variables.",
                hint="Save the weights again, as HDF5: model.save_weights('model.h5')",
            )
        self._shards = self._checked_shards(_number(header, 1))

    def read(self, name: str) -> np.ndarray:
        """A tensor's numbers; numbers of bfloat16 as float32, which holds them exactly."""
        tensor = self.tensors[name]
        if tensor.slices:
            raise ModelError(
                f"{self._index} stores {shown(name)} in {tensor.slices} slices: it was a partitioned variable, and "
                "whole ones are read.",
                hint="Save the checkpoint again without a partitioner.",
            )
        dtype = _TYPES.get(tensor.type_number)
        if dtype is None:
            kind = _NAMES.get(tensor.type_number, f"the type of number {tensor.type_number}")
            raise ModelError(
                f"{self._index} stores {shown(name)} as {kind}; float32, float16, bfloat16 and float64 are read.",
                hint="Save the checkpoint again in one of these.",
            )
        count = int(np.prod(tensor.shape, dtype=np.int64))
        if tensor.size != count * np.dtype(dtype).itemsize:
            raise ModelError(
                f"{self._index} gives {shown(name)} {tensor.size} bytes, which is not what its shape "
                f"{list(tensor.shape)} has.",
                hint="Copy or download the checkpoint again.",
            )
        if not count:
            return np.empty(tensor.shape, np.float32 if tensor.type_number == _BFLOAT16 else dtype)
        try:
            content = np.memmap(self._shards[tensor.shard], np.uint8, "r", tensor.offset, (tensor.size,))
        except OSError as error:
            raise ModelError(
                f"{self._shards[tensor.shard]} cannot be read: {error.strerror}.", hint="Copy the checkpoint again."
            ) from error
        if masked_crc32c(content.data) != tensor.checksum:
            raise ModelError(
                f"The checksum of {shown(name)} in {self._shards[tensor.shard]} is wrong: the file was changed after "
                "it was written.",
                hint="Copy or download the checkpoint again.",
            )
        values = content.view(dtype).reshape(tensor.shape)
        return (values.astype("<u4") << 16).view("<f4") if tensor.type_number == _BFLOAT16 else values

    def _checked_shards(self, count: int) -> Sequence[Path]:
        stem = self._index.name.removesuffix(".index")
        if not 1 <= count <= 99999:
            raise ModelError(
                f"{self._index} says that there are {count} data files.", hint="Copy or download the checkpoint again."
            )
        shards = [self._index.with_name(f"{stem}.data-{shard:05}-of-{count:05}") for shard in range(count)]
        needed = dict.fromkeys(range(count), 0)
        for name, tensor in self.tensors.items():
            if tensor.slices:
                continue
            if tensor.shard not in needed:
                raise ModelError(
                    f"{self._index} has {shown(name)} in data file {tensor.shard}, of {count}.",
                    hint="Copy or download the checkpoint again.",
                )
            needed[tensor.shard] = max(needed[tensor.shard], tensor.offset + tensor.size)
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ModelError(
                f"{self._index.parent} lacks {', '.join(missing[:3])}, of the {count} data files that "
                f"{self._index.name} names.",
                hint="Copy the missing files beside it, under these names.",
            )
        for number, shard in enumerate(shards):
            size = shard.stat().st_size
            if size < needed[number]:
                raise ModelError(
                    f"{shard} has {size} bytes, and {self._index.name} says at least {needed[number]}: it is cut off.",
                    hint="Copy or download the checkpoint again.",
                )
        return shards


def _stored(record: bytes) -> StoredTensor:
    fields = fields_of(record)
    shape = fields_of(_bytes(fields, 2))
    sizes = [_number(fields_of(axis), 1) for axis in shape.get(2, ()) if isinstance(axis, bytes)]
    if any(size >= 1 << 62 for size in sizes):
        raise DamagedError("a shape in it is not known")
    return StoredTensor(
        type_number=_number(fields, 1),
        shape=tuple(sizes),
        shard=_number(fields, 3),
        offset=_number(fields, 4),
        size=_number(fields, 5),
        checksum=_number(fields, 6),
        slices=len(fields.get(7, ())),
    )


def _number(fields: dict[int, list[int | bytes]], number: int) -> int:
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise DamagedError(f"a record in it has text in field {number}, which is a number")
    return value


def _bytes(fields: dict[int, list[int | bytes]], number: int) -> bytes:
    value = fields.get(number, [b""])[-1]
    if not isinstance(value, bytes):
        raise DamagedError(f"a record in it has a number in field {number}, which is a message")
    return value
