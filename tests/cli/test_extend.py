"""`hdexport extend`: every limit grows, a bundle can be built of it, and bad input leaves nothing behind."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

import hdruntime
from hdruntime.bundle.manifest import Task
from support.commands import Command, Refused
from support.comparators import assert_close
from support.full_disks import on_full_disks
from support.tiny_models import BASE, change_json, save_tiny_model

TABLE = "embeddings.position_embeddings.weight"


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to change."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copied"))


@pytest.fixture
def sentence_transformer(copied: Path) -> Path:
    """A checkpoint with the limits that sentence-transformers and tokenizers write."""
    module = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{module}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{module}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{module}.Normalize"},
    ]
    (copied / "modules.json").write_text(json.dumps(modules))
    (copied / "1_Pooling").mkdir()
    (copied / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (copied / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    for name, changes in {
        "tokenizer_config.json": {"model_max_length": BASE},
        "tokenizer.json": {
            "truncation": {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0}
        },
    }.items():
        change_json(copied / name, **changes)
    (copied / "vocab.txt").write_text("w0\nw1\n")
    (copied / "optimizer.pt").write_bytes(b"weights of a training")
    return copied


def test_every_limit_grows_and_other_files_stay(hdexport: Command, sentence_transformer: Path, tmp_path: Path) -> None:
    longer = tmp_path / "a longer one"
    done = hdexport("extend", sentence_transformer, "--max-len", 200, "-o", longer)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"{longer}: 200 positions from 64 (hierarchical, alpha 0.4)\n"
        f"Fine-tune it on long texts, then: hdexport build '{longer}'\n"
    )
    assert names_in(longer) == [
        "1_Pooling",
        "config.json",
        "model.safetensors",
        "modules.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ]
    before = json.loads((sentence_transformer / "config.json").read_text())
    record = {"base": 64, "scheme": "hierarchical", "alpha": 0.4, "attention_scale": "none", "attention": None}
    assert json.loads((longer / "config.json").read_text()) == before | {
        "max_position_embeddings": 200,
        "hdexport": record | {"tuned": False},
    }
    sentence = json.loads((longer / "sentence_bert_config.json").read_text())
    assert sentence == {"max_seq_length": 200, "do_lower_case": False}
    for name in ("modules.json", "vocab.txt", "1_Pooling/config.json"):
        assert (longer / name).read_bytes() == (sentence_transformer / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(longer)
    assert tokenizer.model_max_length == 200
    assert len(tokenizer("w1 " * 150)["input_ids"]) == 152
    assert len(tokenizer("w1 " * 900, truncation=True)["input_ids"]) == 200


def test_a_bundle_of_it_answers_as_transformers_does(hdexport: Command, tmp_path: Path) -> None:
    """Its positions are not extended a second time."""
    # RoBERTa: the table has rows in front that belong to no position.
    save_tiny_model(tmp_path / "model", "roberta", Task.FEATURE_EXTRACTION)
    assert hdexport("extend", tmp_path / "model", "--max-len", 300, "-o", tmp_path / "longer").returncode == 0
    options = ("--target", "onnx", "--no-verify", "-o", tmp_path / "bundle")
    assert hdexport("build", tmp_path / "longer", *options).returncode == 0
    ids = np.random.default_rng(0).integers(5, 100, (2, 300))
    with hdruntime.load(tmp_path / "bundle") as session:
        assert session.manifest.max_len == 300
        answer = session(input_ids=ids)["last_hidden_state"]
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(tmp_path / "longer").eval()(torch.from_numpy(ids)).last_hidden_state
    assert_close(answer, expected.numpy(), atol=1e-5)


# What is refused


REFUSED = [
    (["--max-len", "4097"], r"--max-len 4097 is above 4096.*\nUse --max-len 4096 or less, or --positions interpolate"),
    (["--max-len", "80", "--positions", "group"], r"--positions group chooses rows by the length of each text"),
]
"""Options -> what is said of them."""


def test_an_option_that_does_not_fit_is_explained(refused: Refused, checkpoint: Path, tmp_path: Path) -> None:
    for options, message in REFUSED:
        refused("extend", checkpoint, *options, "-o", tmp_path / "out", message=message)
        assert names_in(tmp_path) == [], options


def _module_outside(model: Path) -> None:
    (model / "modules.json").write_text('[{"type": "a.Transformer", "path": "/secret"}]')


def _no_table(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    del weights[TABLE]
    save_file(weights, model / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda model: change_json(model / "config.json", max_position_embeddings=80),
            r"position_embeddings\.weight has 64 rows, and config\.json says .* 80\.\n",
        ),
        (_no_table, r"holds no position table.*\nCheck that config\.json belongs to the weights"),
        (_module_outside, r"names the folder '/secret', which is not one of the checkpoint's own"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(
    refused: Refused, copied: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(copied)
    refused("extend", copied, "--max-len", 200, "-o", tmp_path / "longer", message=message)
    assert names_in(tmp_path) == ["copied"]


def test_an_output_that_exists_needs_force(
    hdexport: Command, refused: Refused, copied: Path, checkpoint: Path, tmp_path: Path
) -> None:
    arguments = ("extend", checkpoint, "--max-len", 200, "-o", copied)
    refused(*arguments, message=r"copied exists\.\nReplace it with --force")
    assert hdexport(*arguments, "--force").returncode == 0
    assert json.loads((copied / "config.json").read_text())["max_position_embeddings"] == 200
    assert names_in(tmp_path) == ["copied"]


def test_force_never_deletes_what_does_not_belong_to_a_checkpoint(
    refused: Refused, checkpoint: Path, copied: Path, bundle: Path, tmp_path: Path
) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("mine")
    (copied / "optimizer.pt").write_text("mine")
    built = shutil.copytree(bundle, tmp_path / "bundle")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    arguments = ("extend", checkpoint, "--max-len", 200, "--force", "-o")
    refused(*arguments, thesis, message=r"is not a Hugging Face checkpoint, so --force does not.*\nRemove it yourself")
    refused(*arguments, copied, message=r"\(optimizer\.pt\); --force would delete them\.\nMove them away")
    refused(*arguments, built, message=r"\(model\.onnx, .*\); --force would delete them\.\nMove them away")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_checkpoint_is_not_replaced_by_itself(refused: Refused, copied: Path) -> None:
    refused("extend", copied, "--max-len", 200, "--force", "-o", copied, message="is the checkpoint itself")
    assert json.loads((copied / "config.json").read_text())["max_position_embeddings"] == BASE


def test_a_full_disk_is_reported_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """On file systems too small for the weights, in a mount namespace of our own."""
    done = on_full_disks(["extend", checkpoint, "--max-len", 4000], tmp_path)
    assert done.stdout == "rc: 1 []\n" * 2
    said = r"error: The disk is full: .*\nFree some space there, or choose another place[^\n]*\n"
    assert re.fullmatch(said * 2, done.stderr), done.stderr
