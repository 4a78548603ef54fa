"""The APIs that the server speaks: a module for each, found by its place here, with an ``INTERFACE``."""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.serve.interface import Interface
from hdruntime.tasks.of_bundle import class_of
from hdruntime.tasks.task import TaskOptions, TextTask


def interfaces() -> list[type[Interface]]:
    """The interfaces of the modules in this folder, in the order of the modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [cast(type[Interface], importlib.import_module(f"{__name__}.{name}").INTERFACE) for name in names]


def served_task(bundle: Bundle) -> TextTask:
    """The task of a bundle as a server runs it; a bundle without a tokenizer is rejected."""
    if bundle.manifest.tokenizer is None:
        raise InputError(f"The bundle {bundle.path} has no tokenizer.", hint="Serve a bundle that reads texts.")
    return class_of(bundle.manifest.task).of_job(bundle, TaskOptions())
