"""Importing the runtime is cheap, and what it exports exists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hdruntime
import hdruntime.errors
from hdruntime.bundle.manifest import Task
from support.comparators import named_case
from support.tiny_bundle import make_bundle


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_runtime_imports_nothing_that_takes_long() -> None:
    """Such packages are imported where they are used."""
    slow = {"onnxruntime", "polygraphy", "pyarrow", "ray", "rich", "tensorrt", "tokenizers", "torch", "transformers"}
    code = """
import sys
import hdruntime, hdruntime.session
hdruntime.load, hdruntime.open_bundle
print(*{name.partition(".")[0] for name in sys.modules})
"""
    assert not slow & set(run(code).split())


def test_reading_a_manifest_loads_nothing_that_runs_it(tmp_path: Path) -> None:
    """No array, tokenizer or task's class is needed to look at a bundle, of whatever task."""
    code = f"""
import sys
import hdruntime
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.task_formats import format_of
hdruntime.open_bundle({str(make_bundle(tmp_path / "bundle"))!r})
print(*{{task for task in Task if format_of(task)}}, *sys.modules)
"""
    loaded = set(run(code).split())
    assert {*Task} <= loaded
    assert not {"numpy", "tokenizers", "hdruntime.tasks"} & loaded


def test_every_exported_name_exists() -> None:
    for name in hdruntime.__all__:
        with named_case(name):
            assert getattr(hdruntime, name) is not None
            assert name in dir(hdruntime)


def test_every_error_is_exported() -> None:
    assert set(hdruntime.errors.__all__) <= set(hdruntime.__all__)
