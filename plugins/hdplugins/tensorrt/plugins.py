"""TensorRT plugins of our operators, for ``tensorrt`` and ``tensorrt_rtx``: registration and kernels.

Each flavour is a module that the caller passes; none is imported here. What an operator adds to a plugin is its face
`plugin` (see `hdplugins.attention.plugin_spec`); all else is the same for every operator (see
`hdplugins.tensorrt.plugin_class`).
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
from hdplugins.tensorrt.plugin_class import PLUGIN_NAMESPACE, Plugin, plugin_class, reported
from hdplugins.tensorrt.plugin_fields import FieldCollection, attributes_from_fields

_registry_lock = threading.RLock()


def plugin_operators() -> tuple[Operator, ...]:
    """The operators that have a plugin."""
    with_kernels = [operator for operator in OPERATORS.values() if operator.has_implementation(PLUGIN)]
    return tuple(operator for operator in with_kernels if plugin_spec_of(operator).IS_PLUGIN)


@contextlib.contextmanager
def plugins_with_kernels(trt: ModuleType, kernels: Path | None) -> Iterator[None]:
    """Register our plugins; those that TensorRT creates in the block launch the kernels of that folder, or None.

    Keep it open while a graph is parsed or an engine is deserialised: an engine stores the attributes of its plugins,
    and not where its bundle lies. Plugins keep the folder that they were created with; without one they are built into
    an engine and not run. Other threads wait. A RuntimeError says that something else is registered under the name of
    one of our plugins.
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
    """An operator's creator in the registry of a flavour's module; another module of its name has a separate registry.

    It is kept, for the registry has a bare pointer.
    """
    members = {"trt": trt, "operator": operator, "spec": plugin_spec_of(operator)}
    creator = type(f"{operator.name}Creator", (_Creator, trt.IPluginCreatorV3One), members)()
    if not trt.get_plugin_registry().register_creator(creator, PLUGIN_NAMESPACE):
        name = f"{PLUGIN_NAMESPACE}::{operator.name}"
        raise RuntimeError(f"Another plugin {name}, version {operator.version}, is registered in this process.")
    return creator


class _Creator:
    """Creates an operator's plugins; its other base, TensorRT's interface, is each flavour's own."""

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
    def create_plugin(self, name: str, fields: Any, phase: Any) -> Plugin:
        attributes = attributes_from_fields(self.trt, self.spec.FIELDS, fields, optional=self.spec.optional_fields)
        return plugin_class(cast(ModuleType, self.trt), self.operator)(attributes, self.kernels)
