"""Every backend is found at home, light, with an extra; mistakes of another package stay its own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from hdexport.graph.targets.registry import targets
from hdruntime.backends import registry
from hdruntime.backends.registry import backend_names, backends
from hdruntime.bundle.manifest import Backend

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test registers is not there for the next one."""
    yield
    backends.cache_clear()


def test_every_backend_of_the_format_has_a_home() -> None:
    assert {entry.name for entry in backends()} >= set(Backend)
    assert backend_names()[: len(Backend)] == tuple(Backend)
    with_targets = {target.backend for target in targets()}
    assert {entry.name for entry in backends() if entry.target in [target.name for target in targets()]} >= with_targets


def test_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for entry in backends():
        if entry.extra is not None:
            assert any(entry.package.replace("_", "-") in requirement for requirement in extras[entry.extra])
            assert entry.install == f"pip install 'hdexport[{entry.extra}]'"


def test_no_library_is_imported_to_list_backends() -> None:
    code = """
import sys
from hdruntime.backends.registry import backends
from hdexport.graph.targets.registry import targets
backends(), targets()
heavy = {"numpy", "onnx", "onnxruntime", "openvino", "tensorrt", "tensorrt_lean", "tensorrt_rtx", "torch"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_a_backend_whose_code_fails_is_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    point = EntryPoint(name="broken", value="no_such_package:Backend", group="hdexport.backends")
    monkeypatch.setattr(registry, "registered_backends", lambda: {"broken": point})
    backends.cache_clear()
    assert {entry.name for entry in backends()} == set(Backend)
    assert "The backend broken (no_such_package:Backend) cannot be loaded and is ignored: ModuleNotFound" in caplog.text
