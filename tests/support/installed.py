"""Packages that a test installs for its own time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import functools


@contextlib.contextmanager
def package_installed(folder: Path, *registries: functools._lru_cache_wrapper[Any]) -> Iterator[None]:
    """A folder's package is there, as it is for every process that starts from here; `registries` look for packages
    anew, when it comes and when it goes."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", path)
        try:
            for registry in registries:
                registry.cache_clear()
            yield
        finally:
            for registry in registries:
                registry.cache_clear()
