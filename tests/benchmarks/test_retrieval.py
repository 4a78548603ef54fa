"""The benchmark of quality: tiny runs of its script, continued, and what is read from their results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import corpora, retrieval, tables
from benchmarks.quality.results import Line, read_lines
from hdexport.extend import ExtendOptions, extend
from hdruntime.bundle.manifest import Scheme
from support.needs import needs_openvino

ROOT = Path(retrieval.__file__).parents[2]


def line(
    reading: str, ranks: dict[str, list[list[int]]], precision: str = "float32", **facts: object
) -> dict[str, object]:
    shared = {"corpus": "debian", "digest": "0", "model": "m", "max_len": 4096, "runner": "r"} | facts
    about = {"documents": 2, "tokens": {"median": 700, "longest": 900}, "date": "2026-11-22T00:00:00"}
    variant = retrieval.Variant(reading, precision=precision)
    return {"facts": shared, "variant": variant.name, "build": asdict(variant), "ranks": ranks, **about}


RANKS = {"name": [[1], [2]], "first": [[0], [2]], "later": [[1, 2], [0, 4]]}


def test_mrr_and_differences_are_read_from_ranks() -> None:
    one = Line.of(line("truncated", RANKS))
    other = Line.of(line("whole", RANKS | {"later": [[1, 1], [1, 4]]}))
    assert [one.mrr(kind).value for kind in RANKS] == pytest.approx([3 / 4, 1 / 4, (1 + 1 / 2 + 1 / 4) / 4])
    assert other.difference(one, "later").value == pytest.approx((0 + 1 / 2 + 1 + 0) / 4)
    assert (one.mrr("first").low, one.mrr("first").high) == (0, 0.5)
    with pytest.raises(ValueError, match="truncated were measured on different queries"):
        other.difference(Line.of(line("truncated", RANKS, digest="1")), "later")


def test_of_a_variant_that_was_measured_twice_the_last_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert read_lines(file) == []
    again = line("truncated", RANKS | {"name": [[1], [1]]})
    file.write_text(
        "".join(json.dumps(each) + "\n" for each in (line("truncated", RANKS), line("whole", RANKS), again))
    )
    assert [(each.variant, each.mrr("name").value) for each in read_lines(file)] == [("truncated", 1), ("whole", 0.75)]


def test_tables_are_written_between_the_markers_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    results.write_text("".join(json.dumps(line(name, RANKS)) + "\n" for name in ("truncated", "whole")))
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["tables.py", str(results), "--write", str(page)])
    assert tables.main() == 0
    text = page.read_text()
    assert text.startswith(f"before\n{tables.BEGIN}\n")
    assert text.endswith(f"{tables.END}\nafter\n")
    assert "old" not in text
    assert "| | name (2) | first (2) | later (4) |" in text
    assert "| whole | 0.750 (+0.000 to +0.000) |" in text


@pytest.mark.nightly
def test_the_pages_have_the_tables_of_the_results() -> None:
    results = read_lines(ROOT / tables.RESULTS)
    for page, precisions in ((tables.PAGE, False), (tables.PRECISIONS_PAGE, True)):
        _, _, rest = (ROOT / page).read_text(encoding="utf-8").partition(tables.BEGIN)
        shown, _, _ = rest.partition(tables.END)
        lines = [each for each in results if each.is_of_precisions == precisions]
        assert shown.strip() == tables.markdown(lines).strip() != "", page


def test_a_precision_is_compared_with_the_same_variant_in_float32() -> None:
    better, worse = RANKS | {"later": [[1, 1], [1, 1]]}, RANKS | {"later": [[2, 2], [2, 2]]}
    lines = [Line.of(line(*each)) for each in (("truncated", RANKS), ("split", better), ("split", worse, "int8"))]
    rows = tables.markdown(lines).splitlines()
    assert [row.split("|")[1].strip() for row in rows[-3:]] == ["truncated", "split", "split, int8"]
    assert rows[-1].endswith("| 0.500 (-0.500 to -0.500) |")


def test_variants_have_names_of_their_own() -> None:
    every = retrieval.variants(argparse.Namespace(window=8, tuned=[Path("a/one"), Path("two")], runner="onnxruntime"))
    names = [variant.name for variant in every]
    assert len(set(names)) == len(names)
    assert {"hierarchical 0.05, log-n", "tile, window:8", "tuned: one", "interpolate:static"} <= set(names)
    precisions = [each.name for each in retrieval.variants(argparse.Namespace(runner="openvino"))]
    assert {"truncated", "truncated, bfloat16", "hierarchical 0.05, log-n, int8"} <= set(precisions)
    assert len(set(precisions)) == len(precisions)


@pytest.fixture
def run(
    tiny_sentence_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Run the script on six texts of made-up words with variants by name; returns what it printed."""
    generator = np.random.default_rng(0)

    def sentence() -> str:
        return f"The {' '.join(f'w{number}' for number in generator.integers(0, 100, 12))}."

    texts = {f"text {number}": " ".join(sentence() for _ in range(8)) for number in range(6)}
    extend(ExtendOptions(model=tiny_sentence_model, output=tmp_path / "longer", max_len=90, scheme=Scheme.TILE))
    monkeypatch.setattr(retrieval, "CHUNK", 16)
    monkeypatch.setitem(corpora.CORPORA, "python", lambda *_, **__: corpora.Corpus(texts, {"words": "1"}))

    def main(variants: str, runner: str = "onnxruntime", more: str = "") -> str:
        options = f"--model {tiny_sentence_model} --corpus python --max-len 90 --window 8 --sentences 2"
        options += f" {more} --runner {runner} --tuned {tmp_path / 'longer'}"
        output = f"-o {tmp_path / 'results.jsonl'} --variants"
        monkeypatch.setattr(sys, "argv", ["retrieval.py", *options.split(), *output.split(), *variants.split(";")])
        assert retrieval.main() == 0
        return capsys.readouterr().out

    return main


@pytest.mark.nightly
def test_the_script_runs_what_the_results_lack(run: Callable[..., str], tmp_path: Path) -> None:
    assert "python: 6 documents" in run("truncated;split;chunks*")
    variants = "truncated;split;tile*;chunks*;tuned*"
    assert "6 variants to run" in run(variants)
    lines = {each.variant: each for each in read_lines(tmp_path / "results.jsonl")}
    assert list(lines) == [
        "truncated",
        "split",
        "chunks:16, the best",
        "tile",
        "tile, log-n",
        "tile, window:8",
        "tile, log-n, late chunks:16, the best",
        "tuned: longer",
        "tuned: longer, late chunks:16, the best",
    ]
    assert lines["tuned: longer"].ranks == lines["tile"].ranks  # it was extended so, and not tuned
    assert {kind: sum(map(len, of_kind)) for kind, of_kind in lines["tile"].ranks.items()} == {
        "name": 6,
        "first": 6,
        "later": 12,
    }
    later = {name: each.mrr("later").value for name, each in lines.items()}
    assert all(0 < value <= 1 for value in later.values())
    assert len(set(later.values())) > 3
    assert "0 variants to run" in run(variants)
    run("tile", "pytorch-bfloat16")
    tiled = [each for each in read_lines(tmp_path / "results.jsonl") if each.variant == "tile"]
    there = {each.facts.runner: each.mrr("later").value for each in tiled}
    assert there["pytorch-bfloat16"] == pytest.approx(there["onnxruntime"], abs=0.1)


@pytest.mark.nightly
@needs_openvino
def test_the_script_runs_precisions(run: Callable[..., str], tmp_path: Path) -> None:
    assert "2 variants to run" in run("truncated;truncated, int8", "openvino", "--documents 5")
    exact, found = read_lines(tmp_path / "results.jsonl")
    assert (exact.about["documents"], found.precision, found.is_of_precisions) == (5, "int8", True)
    assert found.mrr("later").value == pytest.approx(exact.mrr("later").value, abs=0.1)
    assert "0 variants to run" in run("truncated;truncated, int8", "openvino", "--documents 5")
