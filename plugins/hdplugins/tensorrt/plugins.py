"""Register TensorRT plugins of hdexport's operators, for ``tensorrt`` and ``tensorrt_rtx``.

The caller passes the module of a TensorRT variant; this package imports none. An operator's `PluginSpec` (see
`hdplugins.attention.plugin_spec`) holds all that differs between operators; `TensorRTPlugin` (see
`hdplugins.tensorrt.plugin_class`) is common to them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from hdplugins import OPERATORS
from hdplugins.attention.operator import Operator
from hdplugins.attention.plugin_spec import PLUGIN, PluginSpec, plugin_spec_of
from hdplugins.tensorrt.plugin_class import PLUGIN_NAMESPACE, TensorRTPlugin, plugin_class, reported
from hdplugins.tensorrt.plugin_fields import FieldCollection, attributes_from_fields

_registry_lock = threading.RLock()


def plugin_operators() -> tuple[Operator, ...]:
    with_kernels = [operator for operator in OPERATORS.values() if operator.has_implementation(PLUGIN)]
    return tuple(operator for operator in with_kernels if plugin_spec_of(operator).IS_PLUGIN)


@contextlib.contextmanager
def plugins_with_kernels(trt: ModuleType, kernels: Path | None) -> Iterator[None]:
    """Register hdexport's plugins; plugins that TensorRT creates inside the block launch the kernels in `kernels`.

    Keep the block open while a graph is parsed or an engine is deserialised: an engine stores the attributes of its
    plugins, but not the path of its bundle. A plugin keeps its folder of kernels; a plugin without a folder can be
    built into an engine, but not run. Other threads wait.

    Raises:
        RuntimeError: another plugin is registered under the name of an operator.
    """
    with _registry_lock:
        creators = [_registered_creator(trt, operator) for operator in plugin_operators()]
        before = [creator.kernels for creator in creators]
        for creator in creators:
            # The working directory may change before the shapes are known.
            creator.kernels = None if kernels is None else kernels.absolute()
        try:
            yield
        finally:
            for creator, folder in zip(creators, before, strict=True):
                creator.kernels = folder


@functools.cache
def _registered_creator(trt: ModuleType, operator: Operator) -> Any:
    """Register an operator's creator in a TensorRT variant, once per module: each module has a separate registry.

    The cache keeps the creator alive, because the registry holds a bare pointer.
    """
    members = {"trt": trt, "operator": operator, "spec": plugin_spec_of(operator)}
    creator = type(f"{operator.name}Creator", (_Creator, trt.IPluginCreatorV3One), members)()
    if not trt.get_plugin_registry().register_creator(creator, PLUGIN_NAMESPACE):
        name = f"{PLUGIN_NAMESPACE}::{operator.name}"
        raise RuntimeError(f"Another plugin {name}, version {operator.version}, is registered in this process.")
    return creator


class _Creator:
    """Creates an operator's plugins. The other base is the interface of a TensorRT variant."""

    trt: Any
    operator: Operator
    spec: PluginSpec

    def __init__(self) -> None:
        self.trt.IPluginCreatorV3One.__init__(self)
        self.name, self.plugin_version = self.operator.name, str(self.operator.version)
        self.plugin_namespace = PLUGIN_NAMESPACE
        self._declared = FieldCollection(self.trt, {**self.spec.FIELDS, **self.spec.optional_fields})
        self.field_names = self._declared.collection
        self.kernels: Path | None = None

    @reported
    def create_plugin(self, name: str, fields: Any, phase: Any) -> TensorRTPlugin:
        attributes = attributes_from_fields(self.trt, self.spec.FIELDS, fields, optional=self.spec.optional_fields)
        return plugin_class(cast(ModuleType, self.trt), self.operator)(attributes, self.kernels)
