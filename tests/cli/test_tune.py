"""`hdexport tune`: what it says, what it keeps when it is interrupted, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hdexport.tune.state import kept_steps
from support.waiting import wait_until

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]


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
        r"Texts: 10; \d+ pieces are longer than 64 tokens, \d+ are not\.\n"
        r"Not needed for feature-extraction, and left out: pooler \(2 weights\)\.\n"
        r"\S*tuned: 150 positions from 64, \d+ values trained\n"
        r"\d+ texts in 2 steps, \d+\.\d minutes; loss [\d.]+ to [\d.]+\n"
        r"Next: hdexport build \S*tuned\n",
        done.stdout,
    ), done.stdout
    record = json.loads((tmp_path / "tuned" / "tuning.json").read_text())
    assert (record["steps"], len(record["losses"]), record["texts"]["number"]) == (2, 2, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts", "tuned"]


def test_an_interrupted_run_says_what_is_kept(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    arguments = ["tune", checkpoint, "--texts", texts, "--max-len", "150", "--minutes", "5", "-o", tmp_path / "tuned"]
    program = (
        "import sys, hdexport.tune.state as s; s._SAVE_SECONDS = 0; from hdexport.cli import main; sys.exit(main())"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: (kept_steps(tmp_path / "tuned") or 0) >= 1 or child.poll() is not None, seconds=240)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()  # where the signal did not end it
    assert child.returncode == 130
    assert re.search(r"^interrupted: \d+ steps are kept; the same command continues after them\n\Z", said, re.M), said
    assert not (tmp_path / "tuned").exists()


REFUSED = [
    (["--max-len", "64"], r"--max-len 64 adds no position to the checkpoint's 64"),
    (
        ["--max-len", "150", "--column", "body"],
        r"has no column 'body'; its columns are text\.\nName one of them with --column",
    ),
    (["--max-len", "150", "--loss", "mlm"], r"has no weights for .*, which the task fill-mask needs"),
    (["--max-len", "150", "--device", "gpu"], r"argument --device: invalid choice"),
    (["--max-len", "150", "--lr", "0"], r"--lr 0 is not a number above 0"),
]
"""Options -> what is said of them."""


def test_an_option_that_does_not_fit_is_explained(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("text\n" + "\n".join(" ".join(f"w{number}" for number in range(100)) for _ in range(9)) + "\n")
    for options, message in REFUSED:
        refused("tune", checkpoint, "--texts", rows, *options, "-o", tmp_path / "out", message=message)
        assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"], options
