"""No compiler of kernels starts: every kernel has to be in a cache."""

from __future__ import annotations

from typing import Any

import pytest

from hdplugins.kernels import aot


def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a kernel that is not in the cache is an error."""

    def refuse(log: int) -> Any:
        raise AssertionError("a compiler was started")

    monkeypatch.setattr(aot, "_start_compiler", refuse)
