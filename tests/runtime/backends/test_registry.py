"""Every backend has a folder, an extra and imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from hdexport.graph.targets.registry import targets
from hdruntime.backends.registry import backend_names, backends
from hdruntime.bundle.manifest import Backend

ROOT = Path(__file__).parents[3]


def test_every_backend_of_the_format_has_a_home() -> None:
    assert {entry.name for entry in backends()} == set(Backend)
    assert sorted(backend_names()) == sorted(Backend)
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
