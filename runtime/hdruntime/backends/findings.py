"""Lines of ``hdexport doctor``: what is here, what is missing, what is broken."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class FindingStatus(StrEnum):
    """The finding: ``INFO`` is a fact, ``MISSING`` a limit of this machine, ``BROKEN`` a fault."""

    OK = "ok"
    INFO = "info"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One part of the machine.

    Attributes:
        part: the part of the machine.
        status: the finding.
        detail: version, name or reason.
        fix: the command that repairs it; None where nothing is to be done.
    """

    part: str
    status: FindingStatus
    detail: str
    fix: str | None = None


class Probed(NamedTuple):
    """What the process said that imported a library, or the last line of why it did not."""

    version: str = ""
    facts: dict[str, Any] = {}  # noqa: RUF012 never changed
    error: str | None = None


IMPORT = """
import importlib, json, sys
print(json.dumps({"version": importlib.import_module(sys.argv[1]).__version__}))
"""
"""A probe that imports the package and prints its version."""
