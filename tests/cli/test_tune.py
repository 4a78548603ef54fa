"""`hdexport tune`: what it says, and what it keeps when it is interrupted."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from hdexport.tune import training
from support.commands import Command


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of long texts, a few words each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(10):
        words = [f"w{number * 7 + place}" for place in range(7)]
        sentences = [" ".join([*words[place % 7 :], *words, *words[: place % 7], "\u3002"]) for place in range(12)]
        (folder / f"{number}.txt").write_text(" ".join(sentences))
    return folder


def test_a_folder_of_texts_becomes_a_checkpoint(
    hdexport: Command, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    arguments = ("tune", checkpoint, "--texts", texts, "--max-len", 150, "--steps", 2, "-o", tmp_path / "tuned")
    done = hdexport(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        r"Loss: contrast, for feature-extraction models\.\n"
        r"Start: hierarchical, alpha 0\.05, queries scaled by log n: best for embeddings without fine-tuning\.\n"
        r"Texts: 10; \d+ chunks are longer than 64 tokens, \d+ are not\.\n"
        r"Left out of the bundle, because feature-extraction does not use them: pooler \(2 weights\)\n"
        r"\S*tuned: 150 positions from 64, \d+ values trained\n"
        r"\d+ texts in 2 steps, \d+\.\d minutes; loss [\d.]+ to [\d.]+\n"
        r"Next: hdexport build \S*tuned\n",
        done.stdout,
    ), done.stdout
    record = json.loads((tmp_path / "tuned" / "tuning.json").read_text())
    assert (record["steps"], len(record["losses"]), record["texts"]["number"]) == (2, 2, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts", "tuned"]


def test_an_interrupted_run_says_what_is_kept(
    hdexport: Command, checkpoint: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = training.TuneFolder.save

    def save_and_stop(*arguments: Any) -> None:
        save(*arguments)
        raise KeyboardInterrupt(signal.SIGINT)

    monkeypatch.setattr(training, "_SAVE_SECONDS", 0)
    monkeypatch.setattr(training.TuneFolder, "save", save_and_stop)
    arguments = ("--texts", texts, "--max-len", 150, "--minutes", 5)
    done = hdexport("tune", checkpoint, *arguments, "-o", tmp_path / "tuned")
    assert done.returncode == 130
    kept = training.kept_steps(tmp_path / "tuned")
    assert done.stderr.endswith(f"interrupted: {kept} steps are kept; the same command continues after them\n")
    assert not (tmp_path / "tuned").exists()
