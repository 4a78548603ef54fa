"""The examples run, and do what their pages say."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import hdruntime
from hdexport.checkpoint import default_model
from hdexport.extend import ExtendOptions, extend
from hdruntime.bundle.manifest import Task
from hdruntime.tasks import text_inference
from support.bge_m3_models import expected, made_bge_m3
from support.pages import ROOT, code_blocks, page
from support.tiny_models import BASE, save_tiny_model

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for the names of their types.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test_and_is_on_the_page() -> None:
    assert EXAMPLES == ["batch_job", "bge_m3", "browser", "classify", "daft_embeddings", "fine_tune", "search"]
    for name in EXAMPLES:
        assert f'--8<-- "examples/{name}.py"' in page("docs/examples.md")


def test_search(sample_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, vectors = tmp_path / "texts.parquet", tmp_path / "vectors.parquet"
    rows = {"cat": "Cats sleep most of the day. " * 100, "file": "A context manager closes the file.", "none": None}
    pq.write_table(pa.table({"id": list(rows), "text": list(rows.values())}), texts)
    search = example("search")
    search.embed(sample_bundle, texts, vectors)
    assert "3 texts" in capsys.readouterr().out
    found = search.search(sample_bundle, vectors, "Which animal is asleep?")
    assert [name for name, _ in found] == ["cat", "file"]
    assert 1 > found[0][1] > found[1][1] > -1
    assert [name for name, _ in search.alike(vectors, "file")] == ["cat"]


def test_browser(sample_bundle: Path) -> None:
    """The page itself is opened by tests/exporter/package/test_javascript.py."""
    tokenizer = sample_bundle / "tokenizer.json"
    text = example("browser").text_of(tokenizer, 300)
    assert len(Tokenizer.from_file(str(tokenizer)).encode(text)) == 300


def test_bge_m3(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its scores are those of FlagEmbedding: dot products, and the mean of MaxSim."""
    saved, program = made_bge_m3(tmp_path_factory), example("bge_m3")
    texts = ["w7 w8 w9 w10 w11", "w9 w11 w12 w13"]
    with hdruntime.load(saved / "bundle", "onnxruntime") as session:
        found = program.scores(*session.embed_hybrid(texts))
    query, document = expected(saved / "checkpoint", texts)
    common = sum(weight * document.sparse.get(token, 0.0) for token, weight in query.sparse.items())
    assert common > 0
    best = (query.colbert @ document.colbert.T).max(axis=1)
    assert found == pytest.approx((query.dense @ document.dense, common, best.mean()), abs=1e-5)
    monkeypatch.setattr(sys, "argv", ["bge_m3", str(saved / "bundle")])
    program.main()
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_daft(sample_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Daft 0.7 needs pyarrow before 26, and is not among what the suite installs.
    pytest.importorskip("daft", reason="Daft is not installed")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    texts = ["Cats sleep most of the day.", "A context manager closes the file. " * 100, ""]
    pq.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet")
    daft_embeddings = example("daft_embeddings")
    arguments = [str(sample_bundle), str(tmp_path / "texts.parquet"), str(tmp_path / "vectors")]
    monkeypatch.setattr("sys.argv", ["daft_embeddings.py", *arguments])
    daft_embeddings.main()
    found = pq.read_table(tmp_path / "vectors")
    assert found["text"].to_pylist() == texts
    with hdruntime.SentenceEncoder(sample_bundle) as encoder:
        np.testing.assert_allclose(np.stack(found["embedding"].to_pylist()), encoder.encode(texts), atol=1e-6)
    factory = daft_embeddings.BundleProvider().get_text_embedder(str(sample_bundle), dimensions=7)
    assert factory.get_dimensions().size == len(factory.instantiate().embed_text(["a"])[0]) == 7
    with pytest.raises(ValueError, match="model='BUNDLE'"):
        daft_embeddings.BundleProvider().get_text_embedder()


def test_late_chunking(sample_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [
        block.code for block in code_blocks(page("docs/batch_jobs.md"), "python") if "embed_chunks" in block.code
    ]
    exec(block.replace('"BUNDLE"', repr(str(sample_bundle))), {})
    for line in capsys.readouterr().out.splitlines():
        assert f"# {line}" in block


def test_batch_job(sample_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_job = example("batch_job")
    monkeypatch.setattr(batch_job, "ROWS", 40)
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", 10)
    texts, vectors = tmp_path / "texts.jsonl", tmp_path / "vectors.jsonl"
    batch_job.write_rows(texts)
    with pytest.raises(KeyboardInterrupt):
        batch_job.run(sample_bundle, texts, vectors, stop_after=20)
    assert not vectors.exists()
    done = batch_job.run(sample_bundle, texts, vectors)
    assert (done.rows, done.errors) == (40, {"column": 1, "input": 1})
    assert 20 <= done.resumed_rows < 40
    rows = [json.loads(line) for line in vectors.read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in rows if row["error"]] == [3, 5]


def test_classify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    classify = example("classify")
    # Builds are verified elsewhere.
    monkeypatch.setattr(classify, "BuildOptions", functools.partial(classify.BuildOptions, verify=None))
    monkeypatch.setattr("sys.argv", ["classify.py", str(default_model()[0]), str(tmp_path / "output")])
    classify.main()
    labels = [line.split()[0] for line in capsys.readouterr().out.splitlines()[-3:]]
    assert labels == ["billing", "bug", "praise"]


def test_fine_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts, output = tmp_path / "model", tmp_path / "texts.txt", tmp_path / "output"
    save_tiny_model(model, "bert", Task.FEATURE_EXTRACTION)
    chosen = random.Random(0)
    texts.write_text("".join(" ".join(f"w{chosen.randrange(100)}" for _ in range(150)) + "\n" for _ in range(16)))
    max_len = BASE + 8
    arguments = ["fine_tune.py", model, output, "--texts", texts, "--max-len", max_len, "--steps", 2]
    monkeypatch.setattr("sys.argv", list(map(str, arguments)))
    example("fine_tune").main()
    extend(ExtendOptions(model=model, output=tmp_path / "untrained", max_len=max_len))
    (name,) = (name for name in load_file(tmp_path / "untrained" / "model.safetensors") if "position_emb" in name)
    before, after = (
        load_file(directory / "model.safetensors")[name]
        for directory in (tmp_path / "untrained", output / "checkpoint")
    )
    assert (before[BASE:] != after[BASE:]).any(axis=1).all(), "a new position was not trained"
    with hdruntime.load(output / "bundle") as session:
        assert session.embed(["w7 " * (max_len - 2)]).shape == (1, 32)
