"""Importing the runtime is cheap, and what it exports exists."""

from __future__ import annotations

import subprocess
import sys

import hdruntime
import hdruntime.errors
from support.comparators import named_case


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


def test_every_exported_name_exists() -> None:
    for name in hdruntime.__all__:
        with named_case(name):
            assert getattr(hdruntime, name) is not None
            assert name in dir(hdruntime)


def test_every_error_is_exported() -> None:
    assert set(hdruntime.errors.__all__) <= set(hdruntime.__all__)
