"""Bundles that are pushed to the hub by the real client: every file, a card, and nothing that was there is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdexport.cli
import hdruntime
from hdexport.bench.results.files import write_result
from hdexport.publish.push import model_card
from hdruntime.bundle.manifest import FileRecord
from hdruntime.bundle.reader import open_bundle
from hdruntime.hub import HubName
from support.hub_server import HubServer, served_hub
from support.sample_results import sample_result
from support.tiny_bundle import make_bundle

NAME = "someone/tiny-bundle"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that takes commits."""
    with served_hub(tmp_path, monkeypatch) as server:
        server.uploads = tmp_path / "uploads"
        server.uploads.mkdir()
        yield server


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle", task="sentence-similarity", cpu_graph=True, external_data=True)


def main(*arguments: object) -> int:
    return hdexport.cli.main([*map(str, arguments)])


def test_a_pushed_bundle_loads_by_its_name(hub: HubServer, bundle: Path, capsys: Any) -> None:
    assert main("push", bundle, NAME, "--private") == 0
    said = capsys.readouterr().out
    commit = hub.commits[NAME]["main"]
    assert hub.made[0]["visibility"] == "private"
    assert f"/{NAME}/commit/{commit}" in said
    assert f'hdruntime.load("{NAME}@{commit[:12]}")' in said
    there = hub.directories[commit]
    for file in open_bundle(bundle).manifest.files:
        assert (there / file).read_bytes() == (bundle / file).read_bytes()
    with hdruntime.load(NAME, "onnxruntime") as pushed, hdruntime.load(bundle, "onnxruntime") as own:
        assert np.array_equal(pushed.embed(["long documents"]), own.embed(["long documents"]))


def test_nothing_of_a_repository_is_replaced_without_force(
    hub: HubServer, bundle: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "before").mkdir()
    for name, content in {"README.md": "Mine.", "notes.txt": "Mine, too."}.items():
        (tmp_path / "before" / name).write_text(content)
    first = hub.push(NAME, tmp_path / "before")
    assert main("push", bundle, NAME) == 1
    assert f"{NAME} on the Hugging Face Hub holds README.md, notes.txt.\nChoose" in capsys.readouterr().err
    assert hub.commits[NAME]["main"] == first
    assert main("push", bundle, NAME, "--force") == 0
    there = hub.directories[hub.commits[NAME]["main"]]
    assert (there / "README.md").read_text().startswith("---\nlibrary_name: hdexport\n")
    assert (there / "notes.txt").read_text() == "Mine, too."


def test_a_branch_is_made_and_pushed_to(hub: HubServer, bundle: Path) -> None:
    assert main("push", bundle, f"{NAME}@v2") == 0
    of_branch, of_main = (hub.directories[hub.commits[NAME][branch]] for branch in ("v2", "main"))
    assert (of_branch / "manifest.json").is_file()
    assert [file.name for file in of_main.iterdir()] == [".gitattributes"]


def test_what_cannot_be_pushed_is_said(hub: HubServer, bundle: Path, tmp_path: Path, capsys: Any) -> None:
    hub.uploads = None
    assert main("push", bundle, NAME) == 1
    assert f"could not be pushed to {NAME}: " in (said := capsys.readouterr().err)
    assert "hf auth login" in said
    assert main("push", bundle, "tiny") == 1
    assert "'tiny' is no name on the Hugging Face Hub" in capsys.readouterr().err
    (bundle / "tokenizer.json").write_text("{}")
    assert main("push", bundle, NAME) == 1
    assert "tokenizer.json of the bundle" in capsys.readouterr().err, "a damaged bundle is not pushed"
    assert main("push", tmp_path, NAME) == 1
    assert "There is no bundle at" in capsys.readouterr().err


def test_the_card_says_what_the_bundle_is_and_what_was_measured(hub: HubServer, bundle: Path, tmp_path: Path) -> None:
    result = sample_result()
    write_result(tmp_path / "bench.json", result)
    assert main("push", bundle, NAME, "--bench", tmp_path) == 0
    card = (hub.directories[hub.commits[NAME]["main"]] / "README.md").read_text()
    assert f'model = SentenceEncoder("{NAME}")\nmodel.encode(texts)' in card
    assert f"hdexport run {NAME} texts.jsonl" in card
    assert "| accepts | 1 to 16 tokens |" in card
    assert "| verification | none; run: hdexport verify BUNDLE |" in card
    measured = next(case for case in result.cases if case.latency is not None)
    assert f"| {measured.series} | {measured.batch} x {measured.tokens} | " in card
    assert result.command in card
    assert "SentenceTransformer(" not in card, "the bundle has no files of the library"


def test_a_card_has_no_path_and_no_identifier_of_the_machine_that_measured(
    hub: HubServer, bundle: Path, tmp_path: Path
) -> None:
    """Also of a file that an older version wrote, or a person."""
    machine = {"cpu": "AMD EPYC (serial: 1653824161550)"}
    command = "hdexport bench /home/me/bundles/tiny -o /data/out"
    write_result(tmp_path / "bench.json", dataclasses.replace(sample_result(), command=command, environment=machine))
    assert main("push", bundle, NAME, "--bench", tmp_path) == 0
    card = (hub.directories[hub.commits[NAME]["main"]] / "README.md").read_text()
    assert "`hdexport bench tiny -o out`, " in card
    assert "AMD EPYC (serial: (left out)" in card


def test_a_card_names_the_checkpoint_and_the_library_where_there_are_some(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    of_library = dataclasses.replace(
        manifest,
        made_by={"source": "organisation/model@0123abc"},
        files={**manifest.files, "modules.json": FileRecord(sha256="", size_bytes=1)},
    )
    card = model_card(of_library, HubName(name=NAME), summary=[("a|b", "c\nd <e>")])
    front = card.split("---\n")[1]
    assert "base_model: organisation/model\n" in front
    assert "- sentence-transformers\n" in front
    assert "pipeline_tag: sentence-similarity\n" in front
    assert f'SentenceTransformer("{NAME}", backend="onnx")' in card
    assert "| a\\|b | c d &lt;e> |" in card
    plain = model_card(dataclasses.replace(manifest, task="fill-mask"), HubName(name=NAME), summary=[])
    assert f'session = hdruntime.load("{NAME}")' in plain
