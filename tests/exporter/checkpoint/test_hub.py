"""Checkpoints on the hub: downloaded once, pinned to a commit, pickles only where they are allowed.

The client is the real one, and the hub a server on this machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hdexport.cli
from hdexport.checkpoint import find_checkpoint, is_hub_source, path_of_source
from hdexport.checkpoint.trust import Trust
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ExportError, InputError, ModelError
from support.hub_server import HubServer, served_hub
from support.tiny_models import change_json, pickle_weights, save_tiny_model

MODEL = "someone/tiny-bert"


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with its weights in safetensors."""
    path = tmp_path_factory.mktemp("pushed") / "tiny-bert"
    save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION)
    return path


@pytest.fixture(scope="module")
def pickled(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its weights in a pickle."""
    path = Path(shutil.copytree(tiny_bert, tmp_path_factory.mktemp("pushed") / "pickled"))
    pickle_weights(path)
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with served_hub(tmp_path, monkeypatch) as server:
        yield server


def test_a_model_is_downloaded_and_its_commit_is_its_source(hub: HubServer, tiny_bert: Path) -> None:
    commit = hub.push(MODEL, tiny_bert)
    checkpoint = find_checkpoint(MODEL)
    assert (checkpoint.name, checkpoint.source) == ("tiny-bert", f"{MODEL}@{commit}")
    assert checkpoint.base_positions == 64
    assert hub.downloaded().count("model.safetensors") == 1
    assert is_hub_source(checkpoint.source)


def test_a_commit_is_not_requested_again(hub: HubServer, tiny_bert: Path, tmp_path: Path) -> None:
    commit = hub.push(MODEL, tiny_bert)
    path = find_checkpoint(MODEL).path
    hub.asked.clear()
    assert path_of_source(f"{MODEL}@{commit}", tmp_path) == path
    assert find_checkpoint(f"{MODEL}@{commit}").path == path
    assert hub.asked == []


def test_a_revision_is_what_is_downloaded(hub: HubServer, tiny_bert: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(tiny_bert, tmp_path / "old"))
    change_json(old / "config.json", layer_norm_eps=1e-5)
    hub.push(MODEL, tiny_bert)
    commit = hub.push(MODEL, old, branch="v1.0")
    for found in (find_checkpoint(MODEL, revision="v1.0"), find_checkpoint(f"{MODEL}@{commit}")):
        assert found.config["layer_norm_eps"] == 1e-5
        assert found.source == f"{MODEL}@{commit}"


def test_pickles_are_downloaded_where_they_are_allowed_and_needed(
    hub: HubServer, tiny_bert: Path, pickled: Path
) -> None:
    commit = hub.push(MODEL, pickled)
    with pytest.raises(ModelError, match="holds no weights"):
        find_checkpoint(MODEL).load(Task.FEATURE_EXTRACTION)
    assert not [name for name in hub.downloaded() if name.endswith(".bin")]
    found = find_checkpoint(MODEL, trust=Trust(allow_pickle=True))
    assert found.source == f"{MODEL}@{commit}"
    assert hub.downloaded().count("pytorch_model.bin") == 1
    weights = dict(found.load(Task.FEATURE_EXTRACTION).named_parameters())
    for name, weight in load_file(tiny_bert / "model.safetensors").items():
        assert torch.equal(weights[name], weight), name


def test_a_pickle_beside_safetensors_is_never_downloaded(hub: HubServer, tiny_bert: Path, tmp_path: Path) -> None:
    both = Path(shutil.copytree(tiny_bert, tmp_path / "both"))
    (both / "pytorch_model.bin").write_bytes(b"not to be touched")
    hub.push(MODEL, both)
    find_checkpoint(MODEL, trust=Trust(allow_pickle=True)).load(Task.FEATURE_EXTRACTION)
    assert not [name for name in hub.downloaded() if name.endswith(".bin")]


def test_a_build_asks_for_the_model_once(
    hub: HubServer, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is read when the trace begins; a second question could be answered with what a branch has moved to."""

    def stop(*_: object, **__: object) -> None:
        raise ExportError("the trace begins")

    hub.push(MODEL, tiny_bert)
    monkeypatch.setattr("hdexport.graph.tracing.trace", stop)
    arguments = ["build", MODEL, "-o", str(tmp_path / "bundle"), "--max-len", "100", "--target", "onnx"]
    assert hdexport.cli.main(arguments) == 1
    assert "the trace begins" in capsys.readouterr().err
    assert len([path for path in hub.asked if "/revision/" in path]) == 1
    assert hub.downloaded() == sorted(path.name for path in tiny_bert.iterdir())


def test_a_model_that_is_not_on_the_hub_is_explained(hub: HubServer, tiny_bert: Path) -> None:
    hub.push(MODEL, tiny_bert)
    for model in ("nobody/nothing", f"{MODEL}@v9"):
        with pytest.raises(
            ModelError, match=rf"no directory '{model}', and the model could not be downloaded .*\nCheck the name"
        ):
            find_checkpoint(model)


def test_a_revision_of_a_directory_or_two_of_a_model_are_refused(hub: HubServer, tiny_bert: Path) -> None:
    with pytest.raises(InputError, match=r"revision='main' is for models on the .* Hub; '.*' is a path\.\nLeave rev"):
        find_checkpoint(tiny_bert, revision="main")
    with pytest.raises(InputError, match=r"names a revision, and so does revision='v2'\.\nLeave one of them out"):
        find_checkpoint(f"{MODEL}@v1", revision="v2")
    assert hub.asked == []


def test_a_directory_goes_before_a_model_on_the_hub(hub: HubServer, tiny_bert: Path) -> None:
    os.mkdir("someone")
    os.symlink(tiny_bert, MODEL)
    assert find_checkpoint(MODEL).source == "tiny-bert"
    assert hub.asked == []
