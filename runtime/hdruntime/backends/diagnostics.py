"""Results of ``hdexport doctor``: what is installed, what is missing and what is broken."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class DiagnosticStatus(StrEnum):
    """``INFO`` is a fact, ``MISSING`` a limit of this machine, ``BROKEN`` a fault."""

    OK = "ok"
    INFO = "info"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class DiagnosticResult:
    """The diagnosis of one component of the machine.

    Attributes:
        component: name of the component.
        status: status of the component.
        detail: version, name or reason.
        fix: command that repairs the component; None where there is nothing to repair.
    """

    component: str
    status: DiagnosticStatus
    detail: str
    fix: str | None = None


class ProbeResult(NamedTuple):
    """The output of a process that imported a package.

    Attributes:
        version: version of the package.
        details: what else the probe printed.
        error: last line of the error if the package could not be imported.
    """

    version: str = ""
    details: dict[str, Any] = {}  # noqa: RUF012 never changed
    error: str | None = None


IMPORT = """
import importlib, json, sys
print(json.dumps({"version": importlib.import_module(sys.argv[1]).__version__}))
"""
"""A probe that imports the package and prints the package's version."""
