"""Sparse vectors: those of sentence-transformers' SparseEncoder, from models that the library saved.

An encoder, a session and a job give the same vectors, on every backend and at every length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow.parquet
import pytest

import hdruntime
from hdruntime import SparseEncoder
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError
from hdruntime.jobs import plan_job
from hdruntime.jobs.options import JobOptions
from hdruntime.tasks.sparse_similarity import SparseVector, sparse_vector, stacked
from hdruntime.text.encoding import Overflow
from support.commands import run_here
from support.comparators import assert_close, named_case
from support.job_runs import read, run
from support.splade_models import MAX_LEN, MODELS, VOCAB_SIZE, made_splade

sentence_transformers = pytest.importorskip("sentence_transformers")

ATOL = 1e-5
"""Of a value of one token, and times the square root of a sum of such, whose errors are independent. Measured against
float64 on an Intel Xeon, in ONNX Runtime and OpenVINO: 3.1e-6 of single values, where sentence-transformers' own
float32 is off by 3.5e-6, and 4e-6 times the root of sums."""

BLOCK = 256
"""Tokens that the graph pools at once."""

TEXTS = ["What is read, and by whom?", "", "Museums! " * 40, "a", "Nobody reads [MASK] twice; " * 5]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a model -> a folder with its ``checkpoint`` and its ``bundle``."""

    return lambda name: made_splade(tmp_path_factory, name)


@pytest.fixture
def bundle(saved: Callable[[str], Path]) -> Path:
    return saved("max") / "bundle"


@pytest.fixture(scope="module")
def encoder(saved: Callable[[str], Path]) -> Iterator[SparseEncoder]:
    """Of the model "max"; a test does not change its settings."""
    with SparseEncoder(saved("max") / "bundle", backend="onnxruntime") as encoder:
        yield encoder


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """[texts, dimensions]; a token adds a value of about 1 to a sum."""
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, atol=ATOL * max(1.0, float(other.max())) ** 0.5)


def test_the_comparison_finds_a_weight_that_is_left_out_or_counted_twice() -> None:
    sums = np.full((2, 3), 600.0)
    for error in (-1.0, 1.0, 3e-4):
        with pytest.raises(AssertionError):
            assert_same(sums + np.array([[0.0, 0, 0], [0, error, 0]]), sums)


def dense(vectors: Any) -> np.ndarray:
    return stacked(vectors) if isinstance(vectors, list) else vectors.dense()


@pytest.mark.parametrize(("name", "backend"), [("max", "onnxruntime"), ("max", "openvino"), ("sum", "onnxruntime")])
def test_vectors_are_those_of_sentence_transformers(saved: Callable[[str], Path], name: str, backend: str) -> None:
    """In float64: two results in float32 differ by the rounding of both."""
    theirs = sentence_transformers.SparseEncoder(str(saved(name) / "checkpoint"), device="cpu").double()
    with SparseEncoder(saved(name) / "bundle", backend=backend, precision="float32") as ours:
        assert (ours.prompts, ours.similarity_fn_name) == (theirs.prompts, theirs.similarity_fn_name)
        assert (ours.max_active_dims, ours.max_seq_length) == (theirs.max_active_dims, theirs.max_seq_length)
        for method in ("encode", "encode_query", "encode_document"):
            expected = getattr(theirs, method)(TEXTS).to_dense().numpy()
            assert_same(dense(getattr(ours, method)(TEXTS)), expected)
        assert 0 < (expected > 0).mean() < 0.9
        for options in ({"prompt": "read "}, {"prompt_name": "query"}, {"max_active_dims": 5}):
            expected = theirs.encode(TEXTS, **options).to_dense().numpy()
            assert_same(dense(ours.encode(TEXTS, **options)), expected)
        alone = ours.encode(TEXTS[0])
        assert_same(alone.dense()[None], theirs.encode(TEXTS[:1]).to_dense().numpy())
        assert np.all(np.diff(alone.indices) > 0)


@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_right_around_the_blocks_that_are_pooled(saved: Callable[[str], Path], name: str) -> None:
    """Padding on either side and of whole blocks changes nothing, and its tokens count for nothing."""
    bundle = saved(name) / "bundle"
    with (
        hdruntime.load(bundle, "onnxruntime", precision="float32") as onnxruntime,
        hdruntime.load(bundle, "openvino", precision="float32") as openvino,
        Portable(bundle) as portable,
    ):
        generator = np.random.default_rng(0)
        for tokens in (1, 2, BLOCK // 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, MAX_LEN):
            ids = generator.integers(200, VOCAB_SIZE, (3, tokens))
            mask = np.ones_like(ids)
            mask[0, (tokens + 1) // 2 :] = 0
            mask[1, : tokens // 3] = 0
            expected = portable(ids, mask)
            padded = np.where(mask == 0, 7, ids)
            for session in (onnxruntime, openvino):
                assert_same(session(input_ids=ids, attention_mask=mask)["sparse_embedding"], expected)
                assert_same(session(input_ids=padded, attention_mask=mask)["sparse_embedding"], expected)
                assert_same(session(input_ids=ids[2:])["sparse_embedding"], expected[2:])


class Portable:
    """The portable graph in ONNX Runtime, which pools all tokens at once."""

    def __init__(self, bundle: Path) -> None:
        import onnxruntime

        self._session = onnxruntime.InferenceSession(bundle / "model.onnx", providers=["CPUExecutionProvider"])

    def __enter__(self) -> Portable:
        return self

    def __exit__(self, *error: object) -> None:
        del self._session

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
        return found


@pytest.mark.parametrize("name", MODELS)
def test_no_graph_but_the_portable_one_holds_logits_of_all_tokens(saved: Callable[[str], Path], name: str) -> None:
    bundle = saved(name) / "bundle"
    opened = open_bundle(bundle)
    wide = {}
    for graph in opened.manifest.graphs:
        found = onnx.load(bundle / graph.file, load_external_data=False).graph
        weights = {each.name for each in found.initializer if opened.manifest.vocab_size in each.dims}
        weights |= {node.output[0] for node in found.node if node.op_type == "Transpose" and node.input[0] in weights}
        wide[graph.lowering] = [
            node.name for node in found.node if node.op_type == "MatMul" and node.input[1] in weights
        ]
    assert wide.pop("portable")
    assert set(wide) >= {"onnxruntime_cpu", "onnxruntime_cuda", "openvino"}
    assert not any(wide.values())


def test_similarity_sparsity_words_and_tensors_are_those_of_sentence_transformers(
    saved: Callable[[str], Path],
) -> None:
    theirs = sentence_transformers.SparseEncoder(str(saved("max") / "checkpoint"), device="cpu")
    expected = theirs.encode(TEXTS)
    with SparseEncoder(saved("max") / "bundle", backend="onnxruntime") as ours:
        found = ours.encode(TEXTS)
        for function in ("dot", "cosine", "euclidean", "manhattan"):
            ours.similarity_fn_name = theirs.similarity_fn_name = function
            wanted = theirs.similarity(expected.to_dense(), expected.to_dense()[:2]).numpy()
            np.testing.assert_allclose(ours.similarity(found, found[:2]), wanted, rtol=1e-4, atol=1e-4)
            pairs = theirs.similarity_pairwise(expected.to_dense()[1:3], expected.to_dense()[:2]).numpy()
            np.testing.assert_allclose(ours.similarity_pairwise(found[1:3], found[:2]), pairs, rtol=1e-4, atol=1e-4)
        assert ours.similarity(found[0], found).shape == (1, len(TEXTS))
        assert ours.sparsity(found) == pytest.approx(theirs.sparsity(expected))
        words, wanted = ours.decode(found, top_k=6), theirs.decode(expected, top_k=6)
        assert [[word for word, _ in of_text] for of_text in words] == [[word for word, _ in each] for each in wanted]
        np.testing.assert_allclose(
            [[w for _, w in each] for each in words], [[w for _, w in each] for each in wanted], atol=ATOL
        )
        assert len(ours.decode(found[0])) == len(found[0])

        for inputs in (TEXTS, TEXTS[0]):
            expected, found = theirs.encode(inputs), ours.encode(inputs, convert_to_tensor=True)
            assert (found.is_sparse, found.shape, found.dtype) == (True, expected.shape, expected.dtype)
            assert_close(found.to_dense().numpy(), expected.to_dense().numpy(), atol=ATOL)
        whole = ours.encode(TEXTS, convert_to_tensor=True, convert_to_sparse_tensor=False)
        assert not whole.is_sparse
        sparse = ours.encode(TEXTS, convert_to_tensor=True)
        for given in (sparse, list(sparse)):
            assert_close(ours.similarity(given, given).numpy(), ours.similarity(whole, whole).numpy(), atol=0)
        assert ours.similarity(whole, whole[:2]).shape == (len(TEXTS), 2)
        assert ours.encode([]) == []


WHAT_DOES_NOT_FIT = [
    (lambda encoder: encoder.encode(["a", 5]), r"inputs\[1\] is 5, of type int"),
    (lambda encoder: encoder.encode("a", max_active_dims=0), "max_active_dims is 0; it must be 1 or more"),
    (lambda encoder: encoder.decode([1]), "embeddings is of type list; it must be a SparseVector"),
    (lambda encoder: encoder.decode(encoder.encode("a"), top_k=0), "top_k is 0"),
    (lambda encoder: encoder.sparsity("a"), "embeddings is of type str"),
]


def test_what_does_not_fit_is_refused(encoder: SparseEncoder) -> None:
    for call, message in WHAT_DOES_NOT_FIT:
        with named_case(message), pytest.raises(InputError, match=message):
            call(encoder)


def test_vectors_of_two_models_are_not_compared() -> None:
    one, other = (SparseVector(np.array([1], np.int32), np.ones(1, np.float32), size) for size in (3, 4))
    with pytest.raises(InputError, match="3 and 4 dimensions, so they are of several models"):
        stacked([one, other])


def test_the_largest_weights_are_kept_and_of_equal_ones_those_of_smaller_ids() -> None:
    weights = np.array([0, 2, 1, 0, 2, 3, 1], np.float32)
    assert sparse_vector(weights).indices.tolist() == [1, 2, 4, 5, 6]
    for limit, kept in ((1, [5]), (2, [1, 5]), (4, [1, 2, 4, 5]), (9, [1, 2, 4, 5, 6])):
        found = sparse_vector(weights, max_active_dims=limit)
        assert found.indices.tolist() == kept
        assert_close(found.values, weights[kept], atol=0)
    assert len(sparse_vector(np.zeros(3, np.float32))) == 0


LONG = "The Spree flows through Berlin, past museums and ministries, and nobody reads it. " * 60


def test_a_split_text_has_the_sums_of_its_chunks_where_the_model_adds(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = saved("sum") / "bundle"
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": LONG}) + "\n")
    run(bundle, tmp_path / "in.jsonl", tmp_path / "out.jsonl", overflow=Overflow.SPLIT)
    (row,) = read(tmp_path / "out.jsonl")
    with hdruntime.load(bundle, "onnxruntime") as session:
        (split,) = session.split([LONG])
        assert len(split.chunks) > 1
        of_pieces = np.stack([row["sparse_embedding"] for row in session.infer(split.chunks)])
        (found,) = session.embed_sparse([LONG], overflow="split", max_active_dims=VOCAB_SIZE)
        (kept,) = session.embed_sparse([LONG], overflow="split")
    assert_same(found.dense()[None], of_pieces.sum(axis=0, keepdims=True))
    # The model's own number.
    assert len(kept) == 100 < len(found)
    found = sparse_vector(found.dense(), max_active_dims=100)
    assert row["indices"] == found.indices.tolist()
    assert_same(np.array([row["values"]]), found.values[None])


def test_a_split_text_has_the_largest_weights_of_its_chunks(bundle: Path) -> None:
    with hdruntime.load(bundle, "onnxruntime") as session:
        (split,) = session.split([LONG], stride=16)
        assert len(split.chunks) > 1
        of_pieces = np.stack([row["sparse_embedding"] for row in session.infer(split.chunks)])
        (found,) = session.embed_sparse([LONG], overflow="split", stride=16)
        assert_close(found.dense(), of_pieces.max(axis=0), atol=ATOL)
        assert not np.allclose(found.dense(), of_pieces.mean(axis=0), atol=0.01)
        assert session.embed_sparse([]) == []
        with SparseEncoder(bundle, backend="onnxruntime") as encoder:
            assert_same(encoder.encode([LONG], overflow="split", stride=16)[0].dense()[None], found.dense()[None])
            with pytest.raises(InputError, match="tokens; max_seq_length is 64"):
                encoder.encode([LONG], overflow="error")
        with pytest.raises(InputError, match="This bundle has no recurrent states"):
            session.embed_sparse(["a"], overflow="recur")


def test_other_bundles_give_no_sparse_vectors(new_bundle: Callable[..., Path]) -> None:
    other = new_bundle(task="sentence-similarity")
    with pytest.raises(InputError, match="task is sentence-similarity, which has no sparse vectors"):
        SparseEncoder(other)
    with (
        hdruntime.load(other, "onnxruntime") as session,
        pytest.raises(InputError, match="embed_sparse is for sparse-similarity"),
    ):
        session.embed_sparse(["a"])
    with pytest.raises(InputError, match="max_active_dims is for sparse-similarity, and the bundle's task is sent"):
        plan_job(open_bundle(other), [__file__], "out.jsonl", options=JobOptions(max_active_dims=5))


def test_a_job_writes_indices_and_values(bundle: Path, tmp_path: Path) -> None:
    inputs, output = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    texts = [*TEXTS[:2], LONG]
    inputs.write_text("".join(json.dumps({"id": f"t{index}", "text": text}) + "\n" for index, text in enumerate(texts)))
    options = ["--overflow", "split", "--max-active-dims", "9", "--prompt-name", "query", "--backend", "onnxruntime"]
    assert run_here("run", bundle, inputs, "-o", output, *options).returncode == 0
    with hdruntime.load(bundle, "onnxruntime") as session:
        expected = session.embed_sparse(texts, overflow="split", max_active_dims=9, prompt_name="query")
    rows = read(output)
    assert [row["id"] for row in rows] == ["t0", "t1", "t2"]
    for row, vector in zip(rows, expected, strict=True):
        assert row["error"] is None
        assert list(row["indices"]) == vector.indices.tolist()
        assert_close(np.array(row["values"], np.float32), vector.values, atol=1e-6)
    kinds = [str(pyarrow.parquet.read_schema(output).field(name).type) for name in ("indices", "values")]
    assert kinds == ["list<element: int32>", "list<element: float>"]


def test_the_number_of_weights_is_an_option_of_the_job(bundle: Path, tmp_path: Path) -> None:
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"text": "a"}\n')
    run(bundle, inputs, tmp_path / "out.jsonl", max_active_dims=5)
    assert len(read(tmp_path / "out.jsonl")[0]["indices"]) == 5
    with pytest.raises(InputError, match="max_active_dims is 0; it must be 1 or more"):
        JobOptions(max_active_dims=0).check()
    with pytest.raises(InputError, match=r"recurrent states|segment"):
        plan_job(open_bundle(bundle), [inputs], tmp_path / "o.jsonl", options=JobOptions(overflow=Overflow.RECUR))
