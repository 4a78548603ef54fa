"""The programs of benchmarks/reliability run, bounded, and find nothing wrong; a fault that is put in is found."""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.reliability import damage, kills
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleError
from support.tiny_bundle import make_bundle


@pytest.fixture
def bundle_path(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle", external_data=True)


PROGRAMS = {
    "damage": ["--cases", "30"],
    "threads": ["--texts", "300", "--seconds", "20"],
    "kills": ["--jobs", "3", "--rows", "400"],
    "fuzz": ["--requests", "300"],
    "overload": ["--seconds", "3"],
    "clients": ["--seconds", "2"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_finds_nothing_wrong(program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "row.jsonl"
    monkeypatch.setattr(sys, "argv", [program, *PROGRAMS[program], "--output", str(output)])
    assert importlib.import_module(f"benchmarks.reliability.{program}").main() == 0, output.read_text()
    assert f"benchmarks.reliability.{program}" in output.read_text()


@pytest.mark.parametrize("seed", range(12))
def test_every_damage_is_refused(bundle_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    what = damage._damage_manifest(bundle_path, rng) if seed % 3 == 0 else damage._damage_file(bundle_path, rng)
    if not what.startswith(("value", "key")):
        with pytest.raises(BundleError):
            open_bundle(bundle_path)


def test_an_error_of_another_class_and_other_embeddings_are_found(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tmp_path / "expected.npy"
    np.save(expected, np.zeros(4))
    monkeypatch.setattr(damage, "_embedding", lambda bundle: np.ones(4))
    assert damage._in_a_process(lambda: damage._compare(bundle_path, expected)) == "other embeddings"
    monkeypatch.setattr(damage, "_embedding", lambda bundle: 1 / 0)
    assert damage._in_a_process(lambda: damage._compare(bundle_path, expected)) == "foreign error"
    assert damage._in_a_process(lambda: os.kill(os.getpid(), signal.SIGKILL)) == "crash (-9)"


@pytest.mark.parametrize("seed", range(8))
def test_a_kept_file_is_damaged_and_the_lock_is_not(tmp_path: Path, seed: int) -> None:
    folder, output = tmp_path / ".out.jsonl.job", tmp_path / "out.jsonl"
    assert kills.damage_kept_file(output, random.Random(seed)) == ""
    folder.mkdir()
    for name in ("lock", "results", "manifest.json", "partial"):
        (folder / name).write_bytes(b"" if name == "partial" else b"kept" * 2000)
    before = _content(folder)
    assert kills.damage_kept_file(output, random.Random(seed)).endswith(("of results", "of manifest.json"))
    changed = {name for name in before if _content(folder).get(name) != before[name]}
    assert len(changed) == 1
    assert changed <= {"results", "manifest.json"}


def _content(folder: Path) -> dict[str, bytes | str]:
    return {path.name: path.read_bytes() if path.is_file() else "no file" for path in folder.iterdir()}


def test_a_refusal_names_the_folder_and_the_next_step(tmp_path: Path) -> None:
    folder, output = tmp_path / ".out.jsonl.job", tmp_path / "out.jsonl"
    right = f"error: The unfinished job in {folder} is damaged: results has changed.\nStart over with --restart.\n"
    assert kills.unfit_refusal(right, output) == ""
    assert kills.unfit_refusal(f"Traceback (most recent call last):\n{right}", output) == "a traceback"
    assert kills.unfit_refusal(right.replace(str(folder), "it"), output) == "no folder is named"
    assert kills.unfit_refusal(f"{right}3 rows are kept: the same command continues.\n", output) == "no next step"
