"""Convert an operator's attributes to TensorRT's plugin fields, which an engine stores, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hdplugins.attention.plugin_spec import FieldType

# 32 bits, as TensorRT's ONNX parser hands attributes over.
_STORED = {
    FieldType.INT: ("INT32", np.int32),
    FieldType.INTS: ("INT32", np.int32),
    FieldType.FLOAT: ("FLOAT32", np.float32),
}

_READ = {
    FieldType.INT: ("INT32", "INT64"),
    FieldType.INTS: ("INT32", "INT64"),
    FieldType.FLOAT: ("FLOAT32", "FLOAT64"),
}
"""Types that a field may arrive in, by TensorRT's names."""


class FieldCollection:
    """Attributes as a field collection, which TensorRT reads.

    TensorRT's objects point into each other's memory and own none of it: keep this object as long as TensorRT may read.
    """

    def __init__(self, trt: Any, types: Mapping[str, FieldType], attributes: Mapping[str, Any] | None = None) -> None:
        """Make the fields of these types.

        Values are whole numbers of 32 bits; without any, the fields tell TensorRT's parser which attributes to pass.
        """
        values = {name: () if attributes is None else attributes[name] for name in types}
        self._arrays = {name: np.atleast_1d(np.array(values[name], _STORED[kind][1])) for name, kind in types.items()}
        self._fields = [
            trt.PluginField(name, array, getattr(trt.PluginFieldType, _STORED[types[name]][0]))
            for name, array in self._arrays.items()
        ]
        self.collection = trt.PluginFieldCollection(self._fields)


def attributes_from_fields(
    trt: Any, types: Mapping[str, FieldType], fields: Iterable[Any], *, optional: Mapping[str, FieldType]
) -> dict[str, Any]:
    """Return all attributes of an operator, and the optional ones that are present.

    Raises:
        ValueError: a field that TensorRT passes to a creator is missing, unknown, duplicate, or of another type.
    """
    received = list(fields)
    names = [field.name for field in received]
    if sorted(name for name in names if name not in optional) != sorted(types) or len(names) > len(set(names)):
        raise ValueError(
            f"the fields {', '.join(names) or 'none'} were given; they must be {', '.join(types)}, each exactly once."
        )
    by_name = dict(zip(names, received, strict=True))
    return {
        name: _value(trt, name, kind, by_name[name]) for name, kind in {**types, **optional}.items() if name in by_name
    }


def _value(trt: Any, name: str, kind: FieldType, field: Any) -> Any:
    if field.type.name not in _READ[kind] or field.size < 1 or (field.size > 1 and kind is not FieldType.INTS):
        raise ValueError(
            f"the field {name} holds {field.size} x {field.type.name}; it is one value of type {kind.value}."
        )
    values = field.data.tolist()
    return tuple(values) if kind is FieldType.INTS else values[0]
