"""BGE-M3's three kinds of embeddings from one run: those of FlagEmbedding's formulas in PyTorch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime import HybridEmbedding, SentenceEncoder
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.manifest_json import json_of_manifest, manifest_from_json
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleCorruptError, InputError
from hdruntime.jobs import VectorOptions
from hdruntime.session import Session
from hdruntime.tasks.hybrid_similarity import EmbeddingKind
from hdruntime.text.embeddings import EmbeddingPrecision, quantized
from hdruntime.text.encoding import Overflow
from support.bge_m3_models import TOKEN_WIDTH, WIDTH, expected, made_bge_m3
from support.job_runs import read, run, write_rows
from support.tiny_models import BASE

TEXTS = ["w7 w8 w9 w8", "", "w9 unknown w11 w12 w13", "w5 " * 100, "w20 w21 w22 w23 w24 w25"]
ATOL = 1e-6


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_bge_m3(tmp_path_factory)


@pytest.fixture(scope="module")
def session(saved: Path) -> Iterator[Session]:
    with hdruntime.load(saved / "bundle", "onnxruntime", threads=1) as session:
        yield session


def sparse_of(embedding: HybridEmbedding) -> dict[int, float]:
    assert embedding.sparse is not None
    return dict(zip(embedding.sparse.indices.tolist(), embedding.sparse.values.tolist(), strict=True))


def assert_close(found: Any, wanted: Any, *, atol: float = ATOL) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def test_embeddings_are_those_of_the_three_heads(saved: Path, session: Session) -> None:
    wanted = expected(saved / "checkpoint", TEXTS)
    found = session.embed_hybrid(TEXTS, overflow="truncate")
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours.dense, theirs.dense)
        assert sparse_of(ours) == pytest.approx(theirs.sparse, abs=ATOL)
        assert ours.sparse is not None
        assert ours.sparse.indices.tolist() == sorted(theirs.sparse)
        assert_close(ours.colbert, theirs.colbert, atol=2 * ATOL)
    assert 0 < len(sparse_of(found[0])) < 3, "a word without a weight above 0 is left out"
    assert sparse_of(found[1]) == {}
    (unknown,) = session.embed_hybrid(["unknown"])
    assert sparse_of(unknown) == {}, "an unknown word has no weight"
    # The comparison sees another text, and another word's weight.
    assert np.abs(np.asarray(found[0].dense) - wanted[2].dense).max() > 0.01
    assert sparse_of(found[0]) != pytest.approx(wanted[2].sparse, abs=ATOL)


@pytest.mark.parametrize(
    "kinds", [each for size in (1, 2) for each in itertools.combinations(EmbeddingKind, size)], ids=" ".join
)
def test_a_kind_that_was_not_asked_for_is_not_there(session: Session, kinds: Sequence[EmbeddingKind]) -> None:
    (whole,), (found,) = session.embed_hybrid(TEXTS[:1]), session.embed_hybrid(TEXTS[:1], returns=kinds)
    for kind in EmbeddingKind:
        assert (getattr(found, kind) is None) == (kind not in kinds)
    if found.dense is not None:
        assert_close(found.dense, whole.dense)
    if found.sparse is not None:
        assert sparse_of(found) == sparse_of(whole)
    if found.colbert is not None:
        assert_close(found.colbert, whole.colbert)


FLAG_EMBEDDING = """
import json, sys
from FlagEmbedding import BGEM3FlagModel

path, width, length = sys.argv[1:]
model = BGEM3FlagModel(path, use_fp16=False, devices="cpu", colbert_dim=int(width))
kinds = {"return_dense": True, "return_sparse": True, "return_colbert_vecs": True}
found = model.encode(json.load(sys.stdin), max_length=int(length), **kinds)
weights = [{token: float(weight) for token, weight in each.items()} for each in found["lexical_weights"]]
print(json.dumps([found["dense_vecs"].tolist(), weights, [each.tolist() for each in found["colbert_vecs"]]]))
"""


@pytest.mark.nightly
def test_embeddings_are_flagembeddings_own(saved: Path, session: Session) -> None:
    python = Path(__file__).parents[2] / ".venv" / "readers" / "flagembedding" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python.parent.parent} is made by make test-all")
    texts = [text for text in TEXTS if text]
    done = subprocess.run(
        [python, "-c", FLAG_EMBEDDING, saved / "checkpoint", str(TOKEN_WIDTH), str(BASE)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    for ours, dense, weights, tokens in zip(session.embed_hybrid(texts, overflow="truncate"), *answers, strict=True):
        assert_close(ours.dense, dense)
        assert {str(token): weight for token, weight in sparse_of(ours).items()} == pytest.approx(weights, abs=ATOL)
        assert_close(ours.colbert, tokens, atol=2 * ATOL)


def test_a_split_text_keeps_every_token_and_its_largest_weight(session: Session) -> None:
    parts = [" ".join(f"w{number}" for number in range(first, first + 40)) for first in (5, 25)]
    (found,) = session.embed_hybrid([" ".join(parts)], overflow="split")
    assert found.colbert is not None
    assert len(found.colbert) == 81, "every word and the last special token"
    assert_close(np.linalg.norm(found.colbert, axis=1), 1)
    assert_close(found.dense, session.embed([" ".join(parts)], overflow="split")[0])
    room = session.max_len - 2
    words = " ".join(parts).split()
    chunks = session.embed_hybrid([" ".join(words[:room]), " ".join(words[room:])], returns=["sparse"])
    largest: dict[int, float] = {}
    for token, weight in itertools.chain.from_iterable(sparse_of(chunk).items() for chunk in chunks):
        largest[token] = max(weight, largest.get(token, 0.0))
    assert sparse_of(found) == pytest.approx(largest, abs=ATOL)


def test_the_dense_vector_is_the_texts_wherever_there_is_one(saved: Path, session: Session) -> None:
    dense = [each.dense for each in session.embed_hybrid(TEXTS, overflow="truncate", returns=["dense"])]
    assert_close(session.embed(TEXTS, overflow="truncate"), dense)
    with SentenceEncoder(saved / "bundle", backend="onnxruntime") as encoder:
        assert_close(encoder.encode(TEXTS), dense)
        assert encoder.get_embedding_dimension() == WIDTH
        with pytest.raises(InputError, match="do not give the states of tokens"):
            encoder.encode(TEXTS, output_value="token_embeddings")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_job_has_columns_of_the_kinds(saved: Path, session: Session, tmp_path: Path, suffix: str) -> None:
    embeddings = session.embed_hybrid(TEXTS, overflow="truncate")
    rows = write_rows(tmp_path / "rows.jsonl", TEXTS)

    def job(**options: Any) -> list[dict[str, Any]]:
        output = tmp_path / f"{len(list(tmp_path.iterdir()))}{suffix}"
        run(saved / "bundle", rows, output, overflow=Overflow.TRUNCATE, **options)
        return read(output)

    for row in (plain := job()):
        assert not {"indices", "values", "token_embeddings"} & {*row}
    assert_close([row["embedding"] for row in plain], [each.dense for each in embeddings])
    for row, wanted in zip(job(returns=("colbert", "dense", "sparse")), embeddings, strict=True):
        assert_close(row["embedding"], wanted.dense)
        assert_close(row["token_embeddings"], wanted.colbert)
        assert dict(zip(row["indices"], row["values"], strict=True)) == pytest.approx(sparse_of(wanted), abs=ATOL)
    bits = job(returns=("dense", "sparse"), vectors=VectorOptions(output_dtype=EmbeddingPrecision.UBINARY))
    assert [row["embedding"] for row in bits] == [quantized(each.dense, "ubinary").tolist() for each in embeddings]
    assert [row["indices"] for row in bits] == [[*sparse_of(each)] for each in embeddings]
    with pytest.raises(InputError, match="returns names no kind"):
        job(returns=())
    with pytest.raises(InputError, match="returns is 'dance'"):
        job(returns=("dance",))


def test_a_matrix_has_dense_embeddings_alone(saved: Path, session: Session, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", TEXTS[:2])
    for suffix in (".npy", ".npz"):
        with pytest.raises(InputError, match=rf"A {suffix} file holds dense embeddings alone"):
            run(saved / "bundle", rows, tmp_path / f"both{suffix}", returns=("dense", "sparse"))
    run(saved / "bundle", rows, tmp_path / "dense.npy", returns=("dense",))
    assert_close(np.load(tmp_path / "dense.npy"), session.embed(TEXTS[:2]))


def test_other_bundles_and_kinds_are_refused(session: Session, sample_bundle: Path, tmp_path: Path) -> None:
    with hdruntime.load(sample_bundle, "onnxruntime", threads=1) as other:
        with pytest.raises(
            InputError, match=r"embed_hybrid is for hybrid-similarity, and the bundle's task is sentence"
        ):
            other.embed_hybrid(["a"])
        with pytest.raises(InputError, match="returns is for hybrid-similarity, and the bundle's task is sentence-sim"):
            run(sample_bundle, write_rows(tmp_path / "a.jsonl", ["a"]), tmp_path / "b.jsonl", returns=("dense",))
    with pytest.raises(InputError, match="is for sparse-similarity"):
        session.embed_sparse(["a"])
    with pytest.raises(InputError, match="returns is 'tokens'"):
        session.embed_hybrid(["a"], returns=["tokens"])
    with pytest.raises(InputError, match="names no kind of embeddings"):
        session.embed_hybrid(["a"], returns=[])


def test_a_manifest_without_its_weights_or_settings_is_damaged(saved: Path) -> None:
    manifest = open_bundle(saved / "bundle").manifest
    assert manifest.task is Task.HYBRID_SIMILARITY
    assert manifest.sentence is not None
    assert manifest_from_json(json_of_manifest(manifest)) == manifest
    wide = tuple(
        dataclasses.replace(spec, shape=(*spec.shape[:-1], 2)) if spec.name == "token_weights" else spec
        for spec in manifest.outputs
    )
    for broken, said in (
        (dataclasses.replace(manifest, sentence=None), "sentence"),
        (dataclasses.replace(manifest, outputs=manifest.outputs[:2]), "no token_embeddings"),
        (dataclasses.replace(manifest, outputs=wide), "has 2 weights for each token"),
    ):
        with pytest.raises(BundleCorruptError, match=said):
            manifest_from_json(json_of_manifest(broken))
    assert manifest.outputs[2].shape[-1] == TOKEN_WIDTH
