"""How the command line writes the parameters of an error: as flags."""

from __future__ import annotations

import shlex
from enum import Enum

from hdruntime.errors import Setting

_FLAGS = {
    "architectures": "--sm",
    "learning_rate": "--lr",
    "max_shapes": "--maxShapes",
    "min_shapes": "--minShapes",
    "opt_shapes": "--optShapes",
    "output": "-o",
    "precisions": "--precision",
    "rope_factor": "--rope",
    "scheme": "--positions",
    "target": "--for",
    "targets": "--target",
}
"""Flags that are not named as their parameter is."""

_PRECISIONS = {"float16": "--fp16", "bfloat16": "--bf16"}
"""Precision of a build -> its flag."""


def flag(setting: Setting) -> str:
    """A setting as a shell takes it: ``--overflow truncate``, ``--normalize``, ``--no-normalize``."""
    value = setting.value.value if isinstance(setting.value, Enum) else setting.value
    if setting.name == "precision" and setting.command == "build":
        return _PRECISIONS.get(str(value), "--fp16")
    name = _FLAGS.get(setting.name) or f"--{setting.name.replace('_', '-')}"
    if value is ... or value is True:
        return name
    if value is None or value is False:
        return f"--no-{name.removeprefix('--')}"
    return f"{name} {shlex.quote(_text(setting.name, value))}"


def _text(name: str, value: object) -> str:
    if name == "rope_factor":
        return f"ntk:{value:g}"
    if isinstance(value, tuple):
        return ",".join(str(each).removeprefix("sm") for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
