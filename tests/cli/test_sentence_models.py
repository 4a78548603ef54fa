"""Commands on a model with prompts and a length of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdexport.bench.baselines.baseline import MeasuredModel, checkpoint_folder
from hdruntime.bundle.manifest import Backend, Role, Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import ModelError
from support.commands import Command
from support.made_once import made_once
from support.needs import needs_rtx
from support.tiny_models import save_sentence_modules, save_tiny_model


@pytest.fixture(scope="module")
def prompted(hdexport: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundle of a model with prompts, and what its build said."""

    def make(directory: Path) -> None:
        checkpoint = directory / "checkpoint"
        save_tiny_model(checkpoint, "bert", Task.FEATURE_EXTRACTION)
        save_sentence_modules(checkpoint, "Normalize", pooling={"pooling_mode": "mean", "include_prompt": False})
        config = {"prompts": {"query": "w7 ", "passage": "w8 "}, "default_prompt_name": "query", "truncate_dim": 7}
        (checkpoint / "config_sentence_transformers.json").write_text(json.dumps(config))
        (checkpoint / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
        done = hdexport("build", checkpoint, "-o", directory / "bundle", "--max-len", 100, "--no-verify")
        assert done.returncode == 0, done.stderr
        (directory / "said").write_text(done.stdout)

    return made_once(tmp_path_factory, "prompted bundle", make)


def test_build_and_inspect_say_both_lengths_and_the_prompts(hdexport: Command, prompted: Path) -> None:
    said = (prompted / "said").read_text()
    assert "1 to 100 tokens" in said
    assert (
        "Text length: 100 tokens, from --max-len; --max-seq-length model lowers it to 24, the checkpoint's limit\n"
    ) in said
    shown = hdexport("inspect", prompted / "bundle").stdout
    for row in (
        r"accepts 1 to 100 tokens",
        r"text length 100 tokens, from --max-len of the build the checkpoint's limit is 24 tokens",
        r"vectors mean, normalized, 7 dimensions kept; similarity cosine",
        r"prompt query 'w7 ' (default)",
        r"prompt passage 'w8 '",
        r"prompt tokens are not pooled",
    ):
        assert row in " ".join(shown.split())
    settings = json.loads(hdexport("inspect", prompted / "bundle", "--json").stdout)["manifest"]["sentence"]
    assert (settings["max_seq_length"], settings["include_prompt"]) == (24, False)


def test_the_length_that_was_asked_for_is_the_encoders_and_the_first_truncated_text_is_said(
    prompted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [" ".join(["w7"] * 30 + [word] * 5) for word in ("w8", "w9")]
    with hdruntime.SentenceEncoder(prompted / "bundle") as encoder:
        assert encoder.max_seq_length == 100
        one, other = encoder.encode(texts)
        assert not np.allclose(one, other)
        assert caplog.messages == []
        encoder.max_seq_length = "model"
        assert encoder.max_seq_length == 24
        one, other = encoder.encode(texts)
        np.testing.assert_array_equal(one, other)
        encoder.encode(texts)
    (said,) = caplog.messages
    assert said.startswith("Texts of more than 24 tokens are truncated to that many; the bundle runs up to 100.\n")
    assert "SentenceEncoder's argument max_seq_length" in said


@needs_rtx
def test_an_engine_is_built_that_takes_the_mask_of_the_pooled_tokens(prompted: Path) -> None:
    bundle = open_bundle(prompted / "bundle")
    mask = bundle.manifest.input_of(Role.POOLED)
    assert mask is not None
    assert mask.name == "pooling_mask"
    (engine,) = bundle.manifest.engines
    assert engine.variant == Backend.TENSORRT_RTX.value
    names = [spec.name for spec in (*bundle.manifest.inputs, *bundle.manifest.outputs)]
    # TensorRT names the tensors of an engine in its file; reading them otherwise takes a GPU.
    content = bundle.file(engine.file).read_bytes()
    assert [name for name in names if name.encode() in content] == names


def test_a_job_takes_prompts_by_name_and_as_text(hdexport: Command, prompted: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("w10 w11\nw12\n")

    def run(output: str, *options: object) -> Any:
        done = hdexport("run", prompted / "bundle", tmp_path / "in.txt", "-o", tmp_path / f"{output}.jsonl", *options)
        return done if done.returncode else (tmp_path / f"{output}.jsonl").read_text()

    by_default, by_name = run("default"), run("query", "--prompt-name", "query")
    passage, none = run("passage", "--prompt-name", "passage"), run("none", "--prompt", "")
    assert by_default == by_name == run("text", "--prompt", "w7 ")
    assert passage == run("same", "--prompt", "w8 ")
    assert len({by_default, passage, none}) == 3
    unknown = run("unknown", "--prompt-name", "title")
    assert unknown.returncode == 1
    assert "--prompt-name is 'title'; it must be one of 'query', 'document', 'passage'." in unknown.stderr
    # A job that was done with another prompt is another job.
    assert run("default", "--prompt-name", "passage").returncode == 1


POOLING_OF_ITS_OWN = """
import torch

class Attentive(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(32, 1, bias=False)
        torch.nn.init.constant_(self.score.weight, 0.5)

    def forward(self, features):
        scores = self.score(features["token_embeddings"]).squeeze(-1)
        weights = torch.softmax(scores.masked_fill(features["attention_mask"] == 0, -1e9), dim=-1).unsqueeze(-1)
        return {**features, "sentence_embedding": (features["token_embeddings"] * weights).sum(dim=1)}

    @classmethod
    def load(cls, path, subfolder="", **options):
        return cls()
"""


def test_code_of_a_checkpoint_runs_where_it_is_trusted_and_not_otherwise(hdexport: Command, tmp_path: Path) -> None:
    """Built, verified from text beside the library, extended, and built again."""
    checkpoint = tmp_path / "checkpoint"
    save_tiny_model(checkpoint, "bert", Task.FEATURE_EXTRACTION)
    save_sentence_modules(checkpoint, "Normalize", pooling={})
    (checkpoint / "attentive.py").write_text(POOLING_OF_ITS_OWN)
    chain = json.loads((checkpoint / "modules.json").read_text())
    chain[1]["type"] = "attentive.Attentive"
    (checkpoint / "modules.json").write_text(json.dumps(chain))
    build = ("build", checkpoint, "-o", tmp_path / "bundle", "--max-len", 64, "--target", "onnx", "--no-verify")
    refused = hdexport(*build)
    assert refused.returncode == 1
    assert "'attentive.Attentive', which is not sentence-transformers' own" in refused.stderr
    assert not (tmp_path / "bundle").exists()
    assert hdexport(*build, "--trust-remote-code").returncode == 0
    assert "attentive.Attentive" in hdexport("inspect", tmp_path / "bundle").stdout
    verify = ("verify", tmp_path / "bundle", "--longest", 64)
    assert "--trust-remote-code" in hdexport(*verify).stderr
    verified = hdexport(*verify, "--trust-remote-code")
    assert verified.returncode == 0, verified.stderr
    assert re.search(r"^text: SentenceTransformer +float32 +PASS ", verified.stdout, re.MULTILINE)
    with pytest.raises(ModelError, match="trust_remote_code=True"):
        checkpoint_folder(MeasuredModel(bundle=tmp_path / "bundle", checkpoint=str(checkpoint)), tmp_path)
    longer = tmp_path / "longer"
    assert hdexport("extend", checkpoint, "--max-len", 100, "-o", longer).returncode == 0
    options = ("--target", "onnx", "--no-verify", "--trust-remote-code")
    again = hdexport("build", longer, "-o", tmp_path / "again", *options)
    assert again.returncode == 0, again.stderr
