"""How the command line writes the parameters of an error: as flags."""

from __future__ import annotations

import shlex
from enum import Enum

from hdruntime.errors import Setting

_FLAGS = {
    "output": "-o",
}
"""Flags that are not named as their parameter is."""


def flag(setting: Setting) -> str:
    """A setting as a shell takes it: ``--overflow truncate``, ``--normalize``, ``--no-normalize``."""
    name = _FLAGS.get(setting.name) or f"--{setting.name.replace('_', '-')}"
    if setting.value is None or setting.value is True:
        return name
    if setting.value is False:
        return f"--no-{name.removeprefix('--')}"
    value = setting.value.value if isinstance(setting.value, Enum) else setting.value
    return f"{name} {shlex.quote(str(value))}"
