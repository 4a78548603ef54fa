"""`hdexport build` refuses a checkpoint that cannot be right in one message, before it traces anything."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import hdexport.cli
from hdexport.checkpoint import find_checkpoint
from hdruntime.bundle.manifest import Task
from hdruntime.errors import HdexportError
from support.tiny_models import change_json, save_sentence_modules, save_tiny_model

WIDTH = 32
Change = Callable[[Path], object]


@pytest.fixture(scope="session")
def sentence_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a pooling and a dense layer. Not to be changed: copy it."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny-sentences"
    save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION)
    save_sentence_modules(path, "Dense", pooling={"pooling_mode_mean_tokens": True})
    save_dense(path, WIDTH, 8)
    return path


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Build a changed copy of a checkpoint, in this process: what it was refused with."""

    def trace(*_: object, **__: object) -> None:
        pytest.fail("the checkpoint was taken")

    def build(checkpoint: Path, change: Change) -> str:
        copy = Path(shutil.copytree(checkpoint, tmp_path / "model"))
        change(copy)
        output = tmp_path / "bundle"
        capsys.readouterr()
        assert hdexport.cli.main(["build", str(copy), "-o", str(output), "--target", "onnx"]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        assert "Traceback" not in printed.err
        assert "--debug" not in printed.err
        assert not output.exists()
        shutil.rmtree(copy)
        return printed.err

    monkeypatch.setattr("hdexport.graph.tracing.trace", trace)
    return build


def config(**changes: object) -> Change:
    return merged("config.json", **changes)


def merged(file: str, **changes: object) -> Change:
    return lambda directory: change_json(directory / file, **changes)


def added(file: str, member: str) -> Change:
    """JSON that Python's own writer would not write, as one more member of an object."""
    return lambda directory: (directory / file).write_text(
        (directory / file).read_text().rstrip().removesuffix("}") + f', "more": {member}}}'
    )


def content(file: str, text: str) -> Change:
    return lambda directory: (directory / file).write_text(text)


def link_to_itself(name: str) -> Change:
    def change(directory: Path) -> None:
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(path.name)

    return change


def module(index: int, **changes: object) -> Change:
    def change(directory: Path) -> None:
        modules = json.loads((directory / "modules.json").read_text())
        modules[index] |= changes
        (directory / "modules.json").write_text(json.dumps(modules))

    return change


def missing_shard(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    index = {"weight_map": {"embeddings.word_embeddings.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def without_token_types(directory: Path) -> None:
    change_json(directory / "config.json", type_vocab_size=0)
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["embeddings.token_type_embeddings.weight"] = torch.zeros(0, WIDTH)
    save_file(weights, file, metadata={"format": "pt"})


def save_dense(directory: Path, width: int, outputs: int, **weights: torch.Tensor) -> None:
    folder = directory / "2_Dense"
    (folder / "config.json").write_text(json.dumps({"in_features": width, "out_features": outputs}))
    tensors = {"weight": torch.ones(outputs, width), "bias": torch.ones(outputs)} | weights
    save_file({f"linear.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 10_000

OF_A_MODEL: dict[str, tuple[Change, str]] = {
    "a missing shard": (missing_shard, "lacks model-00001-of-00002.safetensors"),
    "architectures are numbers": (
        config(architectures=[5]),
        "architectures [5], which is not a list of names.\nSet",
    ),
    "deep": (content("config.json", DEEP), "config.json cannot be read: its values are nested too deeply.\nDownload"),
    "digits": (added("config.json", DIGITS), "config.json cannot be read: it holds a number of thousands of digits"),
    "half a character": (added("config.json", r'"\ud800"'), "which is not valid Unicode.\nDownload the model again"),
    "NaN": (config(layer_norm_eps=float("nan")), "has 'layer_norm_eps' nan, which is not finite.\nSet it"),
    "NaN in a list": (config(anything=[{"a": float("nan")}]), "has 'a' nan, which is not finite"),
    "a negative epsilon": (config(layer_norm_eps=-1.0), "layer_norm_eps -1.0, which is below zero.\nSet it"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads 0; it must be a whole number, 1 or more.\nSet it"),
    "heads that do not fit": (config(num_attention_heads=5), "No bert can be made of "),
    "heads of a wrong type": (
        config(num_attention_heads="four"),
        "does not describe a bert: Validation error for field",
    ),
    "no token types": (without_token_types, "has type_vocab_size 0, but the model adds the vector of a type"),
    "an unknown activation": (config(hidden_act="none such"), "No bert can be made of "),
    "layers": (config(num_hidden_layers=10**9), "has num_hidden_layers 1000000000; the maximum is 1024"),
    "positions": (config(max_position_embeddings=10**12), "max_position_embeddings 1000000000000; at most 16777216"),
    "a linked config": (link_to_itself("config.json"), "config.json is a broken link.\nDownload"),
    "linked weights": (link_to_itself("model.safetensors"), "model.safetensors is a broken link"),
    "a deep tokenizer": (content("tokenizer.json", DEEP), "The tokenizer of "),
}

OF_SENTENCES: dict[str, tuple[Change, str]] = {
    "poolings that are lists": (merged("1_Pooling/config.json", pooling_mode=[["mean"]]), "the pooling mode ['mean']"),
    "a linked pooling": (link_to_itself("1_Pooling"), "1_Pooling is a broken link"),
    "linked settings of it": (link_to_itself("1_Pooling/config.json"), "a link in the path leads back to itself"),
    "NUL": (module(2, path="2\0Dense"), "names the folder '2\\x00Dense', which is not one of the checkpoint's own"),
    "a folder elsewhere": (module(2, path="../other"), "names the folder '../other', which is not one of the"),
    "no outputs": (lambda path: save_dense(path, WIDTH, 0), "weight is [0, 32], and the layer has [0, 32]"),
    "a width of terabytes": (merged("2_Dense/config.json", in_features=10**12), "1000000000000], and the layer has"),
    "another width": (lambda path: save_dense(path, 31, 8), "cannot be multiplied (2x32 and 31x8)"),
    "integers": (
        lambda path: save_dense(path, WIDTH, 8, weight=torch.ones(8, WIDTH, dtype=torch.int8)),
        "has weights that are integers, NaN or infinite: linear.weight",
    ),
    "weights that are NaN": (
        lambda path: save_dense(path, WIDTH, 8, bias=torch.full((8,), float("nan"))),
        "has weights that are integers, NaN or infinite: linear.bias",
    ),
}  # fmt: skip


def test_a_model_that_cannot_be_right_is_refused(checkpoint: Path, refusal: Callable[..., str]) -> None:
    for name, (change, message) in OF_A_MODEL.items():
        assert message in refusal(checkpoint, change), name


def test_sentence_modules_that_cannot_be_right_are_refused(
    sentence_checkpoint: Path, refusal: Callable[..., str]
) -> None:
    for name, (change, message) in OF_SENTENCES.items():
        assert message in refusal(sentence_checkpoint, change), name


def test_a_link_to_itself_is_not_a_model(refusal: Callable[..., str], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert hdexport.cli.main(["build", str(tmp_path / "loop"), "-o", str(tmp_path / "bundle")]) == 1
    assert "a link in the path leads back to itself" in capsys.readouterr().err


def test_a_fault_of_the_machine_is_not_called_a_damaged_download(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes")

    monkeypatch.setattr("transformers.BertModel.from_pretrained", fail)
    assert hdexport.cli.main(["build", str(checkpoint), "-o", str(tmp_path / "bundle"), "--target", "onnx"]) == 1
    printed = capsys.readouterr().err
    assert "can't allocate memory" in printed
    assert "ownload" not in printed


def test_where_no_temporary_directory_can_be_written_tmpdir_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
    monkeypatch.setattr("hdexport.cli.build.run", lambda options: tempfile.mkdtemp())
    assert hdexport.cli.main(["build", "anything", "-o", str(tmp_path / "bundle")]) == 1
    said = capsys.readouterr().err
    assert "No usable temporary directory found in" in said
    assert "TMPDIR=DIRECTORY hdexport" in said


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.sampled_from([0, 1, -1, 2, 3, 10**9, 10**12])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny BERT to be spoilt, and what its config.json says at first."""
    path = tmp_path_factory.mktemp("fuzzed") / "model"
    save_tiny_model(path, "bert", Task.TEXT_CLASSIFICATION)
    return path, json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("examples", [30, pytest.param(500, marks=pytest.mark.nightly)])
def test_whatever_a_config_says_it_is_taken_or_refused(fuzzed: tuple[Path, dict[str, Any]], examples: int) -> None:
    path, original = fuzzed
    keys = st.sampled_from([*sorted(original), "num_labels", "is_decoder", "quantization_config", "auto_map", "dtype"])

    @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(changes=st.dictionaries(keys, VALUES, min_size=1, max_size=2))
    def check(changes: dict[str, Any]) -> None:
        (path / "config.json").write_text(json.dumps(original | changes))
        message = None
        try:
            checkpoint = find_checkpoint(path)
            task = checkpoint.task()
            assert checkpoint.base_positions > 0
            checkpoint.load(task)
        except HdexportError as error:
            message = str(error)
        assert message is None or ("\n" in message and len(message) < 2000)

    check()
