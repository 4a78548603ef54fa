"""Bundles of TensorFlow's and bert4keras' checkpoints, built by the command line, answer as bert4keras does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import hdruntime
from support.commands import Command, Refused
from support.comparators import assert_close
from support.grids import nightly_unless
from support.tensor_bundles import BERT4KERAS, copied_checkpoint

SCORED = 9
OF_KERAS = ("hierarchical", "keras3", "roformer")
LENGTHS = {"hierarchical": 50, "nezha": 90, "roformer": 40}
"""Tokens of bert4keras' rows; the others have 20."""


def needs_h5py(name: str) -> None:
    if name in OF_KERAS:
        pytest.importorskip("h5py", reason="h5py, which reads Keras' files, is not installed")


@pytest.mark.parametrize(
    "name",
    [
        nightly_unless(name in ("bert", "hierarchical"), name)
        for name in ("albert", "bert", "electra", "hierarchical", "keras3", "nezha", "roformer")
    ],
)
def test_a_bundle_answers_as_bert4keras_does(hdexport: Command, tmp_path: Path, name: str) -> None:
    needs_h5py(name)
    expected = np.load(BERT4KERAS / name / "expected.npz")
    task = "fill-mask" if "scores" in expected else "feature-extraction"
    done = hdexport(
        "build", BERT4KERAS / name, "--max-len", LENGTHS.get(name, 24), "--target", "onnx", "--no-verify",
        "-o", tmp_path / "bundle",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Read " in done.stdout
    overridden = (
        "Positions: hierarchical, as hierarchical_position of the configuration (alpha 0.4) says." in done.stdout
    )
    assert overridden == (name == "hierarchical")
    ids, real = expected["ids"], expected["ids"] != 0
    with hdruntime.load(tmp_path / "bundle") as session:
        assert session.manifest.task == task
        assert session.manifest.positions.attention_scale == "none"
        assert session.manifest.tokenizer is not None
        (answer,) = session(
            input_ids=ids, attention_mask=real.astype(np.int64), token_type_ids=expected["segments"]
        ).values()
    right = expected["scores"] if task == "fill-mask" else expected["states"]
    assert_close((answer[..., ::SCORED] if task == "fill-mask" else answer)[real], right[real], atol=1e-5)


def test_an_extended_checkpoint_is_a_hugging_face_directory(hdexport: Command, tmp_path: Path) -> None:
    needs_h5py("hierarchical")
    expected = np.load(BERT4KERAS / "hierarchical" / "expected.npz")
    done = hdexport("extend", BERT4KERAS / "hierarchical", "--max-len", 50, "-o", tmp_path / "extended")
    assert done.returncode == 0, done.stderr
    assert "50 positions from 24 (hierarchical, alpha 0.4)" in done.stdout
    names = sorted(path.name for path in (tmp_path / "extended").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"]
    model = transformers.AutoModel.from_pretrained(tmp_path / "extended").eval()
    ids = torch.from_numpy(expected["ids"])
    with torch.no_grad():
        states = model(ids, (ids != 0).long(), torch.from_numpy(expected["segments"])).last_hidden_state
    assert_close(states[ids != 0].numpy(), expected["states"][expected["ids"] != 0], atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "extended")
    assert tokenizer.model_max_length == 50
    # The table is long enough now; what is built of it must not be decomposed a second time.
    config = json.loads((tmp_path / "extended" / "config.json").read_text())
    assert config["hdexport"]["alpha"] == 0.4


def test_an_alpha_of_the_command_overrules_the_configurations(hdexport: Command, tmp_path: Path) -> None:
    needs_h5py("hierarchical")
    extend = ("extend", BERT4KERAS / "hierarchical", "--max-len", 50, "--alpha", 0.2, "-o", tmp_path / "extended")
    done = hdexport(*extend)
    assert "--alpha 0.2 overrules hierarchical_position of the configuration (alpha 0.4)" in done.stdout
    assert "(hierarchical, alpha 0.2)" in done.stdout


def test_a_damaged_checkpoint_leaves_nothing(refused: Refused, tmp_path: Path) -> None:
    directory = copied_checkpoint("bert", tmp_path)
    data = directory / "bert_model.ckpt.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-4])
    before = sorted(tmp_path.rglob("*"))
    for command in ("build", "extend"):
        refused(command, directory, "--max-len", 48, "-o", tmp_path / "output", message="it is cut off")
        assert sorted(tmp_path.rglob("*")) == before


def test_the_current_directory_may_hold_such_a_checkpoint(refused: Refused, tmp_path: Path) -> None:
    directory = copied_checkpoint("bert", tmp_path)
    (directory / "bert_config.json").write_text("{}")
    refused("build", "-o", tmp_path / "output", cwd=directory, message="bert_config.json has no vocab_size")
