"""`hdexport families` names every type that has a family, and what any other gets."""

from __future__ import annotations

from hdexport.families import SUPPORTED_MODEL_TYPES
from support.commands import run_here


def test_each_family_is_named_and_what_any_other_type_gets() -> None:
    done = run_here("families")
    assert done.returncode == 0, done.stderr
    named = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    assert " ".join(named).replace(",", "").split() == list(SUPPORTED_MODEL_TYPES)
    assert "Any other model type of transformers" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
