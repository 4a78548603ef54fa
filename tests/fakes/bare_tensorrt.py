"""What our plugins and the runtime take from a TensorRT's module, without a TensorRT: base classes and enumerations.

For a GPU that no TensorRT at hand supports. The names and the members are those of TensorRT-RTX's bindings, which
`test_simulated_tensorrt.py` compares where these are installed; nothing here builds or runs an engine.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any


class DataType(enum.Enum):
    FLOAT = 0
    HALF = 1
    INT32 = 3
    BOOL = 4
    BF16 = 7
    INT64 = 8


class TensorFormat(enum.Enum):
    LINEAR = 0


class TensorIOMode(enum.Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class EngineStat(enum.Enum):
    TOTAL_WEIGHTS_SIZE = 0
    STRIPPED_WEIGHTS_SIZE = 1


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class PluginFieldType(enum.Enum):
    FLOAT32 = 1
    FLOAT64 = 2
    INT32 = 5
    INT64 = 9


class TensorRTPhase(enum.Enum):
    BUILD = 0
    RUNTIME = 1


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4


class IPluginV3:
    pass


class IPluginV3OneCore:
    pass


class IPluginV3OneBuild:
    pass


class IPluginV3OneRuntime:
    pass


class IPluginCreatorV3One:
    pass


class PluginField:
    def __init__(self, name: str, data: Any, type: PluginFieldType) -> None:  # noqa: A002
        self.name, self.data, self.type, self.size = name, data, type, len(data)


class PluginFieldCollection(list):
    def __init__(self, fields: Sequence[PluginField]) -> None:
        super().__init__(fields)


class PluginTensorDesc:
    dims: tuple[int, ...]
    format: TensorFormat
    type: DataType


def Dims(sizes: Sequence[int]) -> tuple[int, ...]:  # noqa: N802
    return tuple(sizes)


class _Registry:
    def __init__(self) -> None:
        self._creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, plugin_namespace: str) -> bool:
        key = (creator.name, creator.plugin_version, plugin_namespace)
        return self._creators.setdefault(key, creator) is creator

    def get_creator(self, name: str, version: str, plugin_namespace: str) -> Any:
        return self._creators.get((name, version, plugin_namespace))


_registry = _Registry()


def get_plugin_registry() -> _Registry:
    return _registry
