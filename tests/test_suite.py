"""The suite itself: the order of its tests, and what they import."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_every_file_that_begins_early_is_there(pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    files = [scope for scope in conftest._SECONDS if scope.startswith("tests/")]
    assert len(files) > 10
    assert [file for file in files if not (TESTS.parent / file).is_file()] == []


def _imported(file: Path) -> set[tuple[str, str]]:
    """Modules of ours that a file imports from, in its functions too, and the names that it takes."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
            "hdexport",
            "hdruntime",
            "hdplugins",
        ):
            found |= {(str(node.module), alias.name) for alias in node.names}
    return found


def test_everything_that_tests_and_benchmarks_import_exists() -> None:
    """Some of them run on a GPU only."""
    root = TESTS.parent
    for folder in ("tests", "benchmarks", "examples"):
        for file in (root / folder).rglob("*.py"):
            if any(part.startswith("toy_") for part in file.parts[:-1]):
                continue  # its test puts it into the packages from which it imports itself
            for module, name in _imported(file):
                here = hasattr(importlib.import_module(module), name)
                assert here or importlib.util.find_spec(f"{module}.{name}"), f"{file}: {module} has no {name}"
