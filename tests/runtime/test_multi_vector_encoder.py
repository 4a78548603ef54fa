"""Models of late interaction: the vectors of sentence-transformers, from each of the formats that it reads."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

import hdruntime
from hdruntime import MultiVectorEncoder
from hdruntime.bundle.manifest import Role
from hdruntime.bundle.manifest_json import json_of_manifest, manifest_from_json
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleCorruptError, InputError
from hdruntime.jobs import VectorOptions
from hdruntime.text.embeddings import EmbeddingPrecision
from hdruntime.text.encoding import Overflow
from hdruntime.text.similarity import maxsim, maxsim_of_pairs
from support.colbert_models import DOCUMENT_TOKENS, MAX_LEN, MODELS, POSITIONS, UNSEEN, WINDOW, made_colbert
from support.comparators import assert_close, named_case
from support.grids import nightly_unless
from support.job_runs import read, run

sentence_transformers = pytest.importorskip("sentence_transformers")

ATOL = 1e-5
"""Measured: 4e-6."""

TEXTS = [
    "What is read, and by whom?",
    "",
    "the (end).",
    "Museums! " * 20,
    "?!",
    "Nobody reads [MASK] twice; " * 12,
    "a",
]
"""Of uneven lengths: empty, of punctuation alone, and longer than queries and documents are cut to."""

LONG = "The Spree flows through Berlin, past museums and ministries, and nobody reads it. " * 5
"""More tokens than the checkpoint has positions, and fewer than the bundle serves."""

LONGER = LONG * 3


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a model -> a folder with its ``checkpoint`` and its ``bundle``."""

    return lambda name: made_colbert(tmp_path_factory, name)


Both = tuple[Any, MultiVectorEncoder]


@pytest.fixture
def both(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Iterator[Both]:
    """The model of that name in sentence-transformers, and the bundle."""
    directory = saved(request.param)
    theirs = sentence_transformers.MultiVectorEncoder(str(directory / "checkpoint"), device="cpu")
    with MultiVectorEncoder(directory / "bundle", backend="onnxruntime") as ours:
        yield theirs, ours


@pytest.fixture
def classic(saved: Callable[[str], Path]) -> Iterator[MultiVectorEncoder]:
    with MultiVectorEncoder(saved("classic") / "bundle", backend="onnxruntime") as encoder:
        yield encoder


def assert_same_vectors(found: list[Any], expected: list[Any], *, atol: float = ATOL) -> None:
    """Every text has as many vectors, and the same ones."""
    assert [each.shape for each in found] == [each.shape for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert_close(np.asarray(one), np.asarray(other), atol=atol)


@pytest.mark.parametrize("both", [nightly_unless(name != "stanford", name) for name in MODELS], indirect=True)
def test_vectors_are_those_of_sentence_transformers(both: Both) -> None:
    theirs, ours = both
    assert (ours.prompts, ours.similarity_fn_name) == (theirs.prompts, theirs.similarity_fn_name)
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension()
    for texts in (TEXTS, TEXTS[:1], TEXTS[-3:]):
        for name in ("encode_query", "encode_document", "encode"):
            expected = getattr(theirs, name)(texts, convert_to_numpy=True)
            assert_same_vectors(getattr(ours, name)(texts), expected)
    for options in ({"prompt_name": "query"}, {"prompt": "find "}, {"prompt": ""}, {"normalize_embeddings": True}):
        for name in ("encode_query", "encode_document"):
            expected = getattr(theirs, name)(TEXTS, convert_to_numpy=True, **options)
            assert_same_vectors(getattr(ours, name)(TEXTS, batch_size=3, **options), expected)
    with pytest.raises(AssertionError):
        assert_same_vectors(ours.encode_query(TEXTS), theirs.encode_document(TEXTS, convert_to_numpy=True))


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_added_to_a_query_is_not_seen_by_it(saved: Callable[[str], Path], name: str) -> None:
    """In every graph; where it is seen, as in the bundle of another model, the vectors are others."""
    directory = saved(name)
    theirs = sentence_transformers.MultiVectorEncoder(str(directory / "checkpoint"), device="cpu")
    expected = theirs.encode_query(TEXTS, convert_to_numpy=True)
    ids = np.array([[101, 2054, 102, 103, 103]])
    for backend in ("onnxruntime", "openvino"):
        with MultiVectorEncoder(directory / "bundle", backend=backend) as ours:
            assert_same_vectors(ours.encode_query(TEXTS), expected)
        with hdruntime.load(directory / "bundle", backend=backend) as session:
            alone = session(input_ids=ids[:, :3])["token_embeddings"]
            unseen = session(input_ids=ids, attended_mask=np.array([[1, 1, 1, 0, 0]]))["token_embeddings"]
            seen = session(input_ids=ids)["token_embeddings"]
        assert_close(unseen[:, :3], alone, atol=ATOL)
        assert np.abs(seen[:, :3] - alone).max() > 0.01
        assert_close(np.linalg.norm(unseen, axis=2), np.ones((1, 5)), atol=ATOL)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_added_tokens_see_what_of_the_query_is_in_their_window(saved: Callable[[str], Path], backend: str) -> None:
    """Queries of all lengths: beyond the window, tokens see nothing, which is 0 in PyTorch's fused attention."""
    directory = saved("windowed")
    theirs = sentence_transformers.MultiVectorEncoder(str(directory / "checkpoint"), device="cpu")
    queries = ["a " * words for words in range(14)]
    expected = theirs.encode_query(queries, convert_to_numpy=True)
    with MultiVectorEncoder(directory / "bundle", backend=backend) as ours:
        assert_same_vectors(ours.encode_query(queries), expected)
        for number in (0, 3, 13):
            assert_same_vectors(ours.encode_query(queries[number : number + 1]), expected[number : number + 1])
    eager = {"attn_implementation": "eager"}
    others = sentence_transformers.MultiVectorEncoder(
        str(directory / "checkpoint"), device="cpu", model_kwargs=eager
    ).encode_query(queries[:1], convert_to_numpy=True)
    differ = np.abs(others[0] - expected[0]).max(axis=1) > 0.1
    real = 5  # [CLS], the three of "[Q] ", [SEP]
    assert differ[real + WINDOW :].all()
    assert not differ[: real + WINDOW].any()


@pytest.mark.parametrize("name", UNSEEN)
def test_every_graph_of_a_bundle_was_verified(saved: Callable[[str], Path], name: str) -> None:
    verification = open_bundle(saved(name) / "bundle").manifest.verification
    assert verification is not None
    assert verification.passed
    assert {"model.onnx", "onnxruntime_cpu.onnx", "openvino.onnx and openvino_unpadded.onnx"} == set(
        verification.graphs
    )


@pytest.mark.parametrize("name", ["classic", nightly_unless(False, "windowed")])
def test_a_verification_finds_a_query_that_sees_what_was_added(
    saved: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hdexport.checkpoint import find_checkpoint
    from hdexport.model.graph_module import GraphModule
    from hdexport.verify import verify_bundle
    from hdexport.verify.grid import Grid
    from hdexport.verify.pytorch_reference import reference_of

    directory, right = saved(name), GraphModule.forward
    reference = reference_of(open_bundle(directory / "bundle"), find_checkpoint(directory / "checkpoint"))
    monkeypatch.setattr(GraphModule, "forward", lambda self, attended_mask, **inputs: right(self, **inputs))
    found = verify_bundle(open_bundle(directory / "bundle"), reference, grid=Grid.QUICK)
    assert not found.passed


def test_attention_that_gives_unseen_tokens_nothing_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    from hdexport.attention.registry import attention_from_spec
    from hdexport.build import BuildOptions, build
    from hdruntime.errors import ModelError

    options = BuildOptions(
        model=saved("classic") / "checkpoint", output=tmp_path / "bundle", max_len=MAX_LEN, verify=None
    )
    with pytest.raises(ModelError, match=r"attend: false\), which attention 'blocks' of this bert does not compute"):
        build(dataclasses.replace(options, attention=attention_from_spec("bigbird:block=8")))
    with pytest.raises(InputError, match=r"max_len=15 is too short: .* every query to 16 tokens\.\nUse max_len=16"):
        build(dataclasses.replace(options, max_len=15))
    assert not (tmp_path / "bundle").exists()


def test_added_tokens_see_the_query_through_windows_that_replace_dense_attention(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """The build compares them with PyTorch's attention under a mask; of two heads, one has gaps."""
    from hdexport.attention.registry import attention_from_spec
    from hdexport.build import BuildOptions, build

    build(
        BuildOptions(
            model=saved("classic") / "checkpoint",
            output=tmp_path / "bundle",
            max_len=POSITIONS,
            attention=attention_from_spec("window:3,global:0,dilation:1/2"),
        )
    )
    verification = open_bundle(tmp_path / "bundle").manifest.verification
    assert verification is not None
    assert verification.passed


def test_a_manifest_that_contradicts_itself_is_refused(saved: Callable[[str], Path]) -> None:
    manifest = open_bundle(saved("classic") / "bundle").manifest
    assert manifest.sentence is not None
    inputs = tuple(spec for spec in manifest.inputs if spec.role is not Role.ATTENDED)
    wrong: dict[str, dict[str, Any]] = {
        "role attended": {"inputs": inputs},
        "sentence is None": {"sentence": None, "inputs": inputs},
        "is there for the kind encoder": {"sentence": dataclasses.replace(manifest.sentence, kind="encoder")},
    }
    for message, changes in wrong.items():
        with pytest.raises(BundleCorruptError, match=message):
            manifest_from_json(json_of_manifest(dataclasses.replace(manifest, **changes)))


def test_padding_has_no_vectors(saved: Callable[[str], Path]) -> None:
    ids = np.array([[101, 2054, 102, 7, 8], [7, 101, 2054, 102, 9], [5, 6, 7, 8, 9]])
    mask = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
    with hdruntime.load(saved("classic") / "bundle", backend="onnxruntime") as session:
        found = session(input_ids=ids, attention_mask=mask)["token_embeddings"]
    assert_close(np.linalg.norm(found, axis=2), mask, atol=ATOL)


def test_documents_are_read_as_far_as_the_bundle_serves(
    saved: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from hdexport.extend import ExtendOptions, extend

    directory = saved("classic")
    extend(ExtendOptions(model=directory / "checkpoint", output=tmp_path / "extended", max_len=MAX_LEN))
    theirs = sentence_transformers.MultiVectorEncoder(str(tmp_path / "extended"), device="cpu")
    with MultiVectorEncoder(directory / "bundle", backend="onnxruntime") as ours:
        assert (ours.document_length, ours.query_length, ours.max_seq_length) == (DOCUMENT_TOKENS, 16, POSITIONS)
        ours.encode_document(LONG)
        assert "MultiVectorEncoder's argument document_length sets another number, or 'bundle' for " in caplog.text
        ours.document_length = "bundle"
        theirs[0].document_length = ours.document_length
        found = ours.encode_document([LONG, "short", LONGER])
        assert MAX_LEN - 20 < len(found[2]) <= MAX_LEN
        assert len(found[0]) > POSITIONS
        assert_same_vectors(found, theirs.encode_document([LONG, "short", LONGER], convert_to_numpy=True))
        ours.query_length = 30
        assert len(ours.encode_query(LONG)) == 30
        with pytest.raises(
            InputError, match=r"document_length is 91; it must be 3 to 90 tokens for this bundle\.\nBuild"
        ):
            ours.document_length = 91
    with MultiVectorEncoder(directory / "bundle", document_length=50, query_length="bundle") as ours:
        assert (ours.document_length, ours.query_length) == (50, MAX_LEN)


@pytest.mark.parametrize("both", ["attending"], indirect=True)
def test_arguments_and_results_have_the_forms_of_sentence_transformers(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    theirs, ours = both
    assert ours.encode_query("w").shape == theirs.encode_query("w").shape
    assert ours.encode_document([]) == theirs.encode_document([]) == []
    tensors = ours.encode_document(TEXTS, convert_to_numpy=False)
    assert all(isinstance(each, torch.Tensor) for each in tensors)
    by_place = ours.encode_query(TEXTS, "document", None, 2, False, "token_embeddings", True, "cpu", False)
    assert_same_vectors(by_place, theirs.encode_query(TEXTS, "document", convert_to_numpy=True))
    queries, documents = theirs.encode_query(TEXTS), theirs.encode_document(TEXTS)
    found = ours.similarity(queries, documents)
    assert isinstance(found, torch.Tensor)
    assert_close(found.numpy(), theirs.similarity(queries, documents).numpy(), atol=1e-4)
    assert_close(
        np.asarray(ours.similarity_pairwise(queries, documents)),
        theirs.similarity_pairwise(queries, documents).numpy(),
        atol=1e-4,
    )
    ours.similarity_fn_name = sentence_transformers.SimilarityFunction.COSINE  # type: ignore[assignment]
    with pytest.raises(InputError, match="'cosine'; it must be 'maxsim' or 'meanmaxsim'"):
        ours.similarity(queries, documents)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    ours.similarity_fn_name = "maxsim"
    assert ours.similarity(ours.encode_query(["read", ""]), ours.encode_document(["a", "b"])).shape == (2, 2)


@pytest.mark.parametrize("mean", [False, True])
def test_maxsim_is_that_of_sentence_transformers(mean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from sentence_transformers.util.similarity import maxsim as theirs
    from sentence_transformers.util.similarity import maxsim_pairwise

    generator = np.random.default_rng(0)
    queries, documents = (
        [generator.normal(size=(tokens, 6)).astype(np.float32) for tokens in lengths]
        for lengths in ((3, 1, 0, 7, 2), (5, 0, 1, 9, 0))
    )
    tensors = [[torch.from_numpy(each) for each in texts] for texts in (queries, documents)]
    expected = theirs(*tensors, length_normalize=mean).numpy()
    assert (expected == -1e9).sum() > 0
    for most, most_of_queries in ((2**24, 2**12), (1, 1), (20, 4)):
        monkeypatch.setattr("hdruntime.text.similarity._MAX_PRODUCTS", most)
        monkeypatch.setattr("hdruntime.text.similarity._MAX_QUERY_VECTORS", most_of_queries)
        found = maxsim(queries, documents, mean=mean)
        assert found.dtype == np.float32
        assert_close(found, expected, atol=1e-5)
        assert isinstance(maxsim(tensors[0], documents), torch.Tensor)
    of_pairs = maxsim_pairwise(*tensors, length_normalize=mean).numpy()
    assert_close(maxsim_of_pairs(queries, documents, mean=mean), of_pairs, atol=1e-5)
    with pytest.raises(AssertionError):
        # The mean over the document, or the largest of all, is another score.
        assert_close(maxsim(documents, queries, mean=mean).T, expected, atol=0.1)


def test_maxsim_takes_one_text_and_padded_texts_and_refuses_other_shapes() -> None:
    import torch
    from sentence_transformers.util.similarity import maxsim as theirs

    generator = np.random.default_rng(1)
    padded = generator.normal(size=(2, 5, 6)).astype(np.float32)
    padded[0, 3:] = 0
    assert_close(maxsim(padded, padded), theirs(torch.from_numpy(padded), torch.from_numpy(padded)).numpy(), atol=1e-5)
    assert maxsim([], [padded[0]]).shape == (0, 1)
    with pytest.raises(InputError, match=r"queries\[0\] has shape \[6\]; each text's vectors must be \[tokens, dim"):
        maxsim([padded[0, 0]], padded)
    with pytest.raises(InputError, match="Vectors have 4 and 6 dimensions; MaxSim needs"):
        maxsim(padded[..., :4], padded)
    with pytest.raises(InputError, match="There are 2 queries but 1 documents"):
        maxsim_of_pairs(padded, padded[:1])


WRONG_ARGUMENTS = [
    ({"inputs": ["a", None]}, r"inputs\[1\] is None, of type NoneType"),
    ({"inputs": "a", "task": "passage"}, "task is 'passage'"),
    ({"inputs": "a", "device": "cuda"}, "MultiVectorEncoder"),
    ({"inputs": "a", "output_value": "sentence_embedding"}, "must be 'token_embeddings'"),
]


def test_wrong_arguments_are_refused(classic: MultiVectorEncoder) -> None:
    for arguments, message in WRONG_ARGUMENTS:
        with named_case(message), pytest.raises(InputError, match=message):
            classic.encode(**arguments)


def test_other_bundles_and_other_methods_are_refused(bundle_path: Path, saved: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match=r"this bundle's task is feature-extraction.\nBuild .*task='token-similar"):
        MultiVectorEncoder(bundle_path)
    bundle = saved("classic") / "bundle"
    with (
        hdruntime.load(bundle, backend="onnxruntime") as session,
        pytest.raises(InputError, match=r"task is token-similarity.*\n.*MultiVectorEncoder"),
    ):
        session.embed(["a"])


# Batch jobs.


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_job_writes_a_list_of_vectors_per_text(classic: MultiVectorEncoder, saved: Any, tmp_path: Path) -> None:
    bundle, inputs = saved("classic") / "bundle", write_texts(tmp_path / "in.jsonl", [*TEXTS, LONG])
    classic.document_length = "bundle"
    expected = classic.encode_document([*TEXTS, LONG])
    run(bundle, inputs, tmp_path / "out.parquet", max_seq_length="bundle")
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert str(table.schema.field("embedding").type) == "list<element: fixed_size_list<element: float>[12]>"
    assert table.schema.metadata[b"hdexport.normalized"] == b"true"
    found = [np.array(value, np.float32).reshape(-1, 12) for value in table["embedding"].to_pylist()]
    assert_same_vectors(found, expected, atol=1e-6)
    run(bundle, inputs, tmp_path / "out.jsonl", max_seq_length="bundle")
    rows = read(tmp_path / "out.jsonl")
    assert_same_vectors([np.array(row["embedding"]).reshape(-1, 12) for row in rows], expected, atol=1e-6)
    queries = write_texts(tmp_path / "queries.jsonl", TEXTS)
    run(bundle, queries, tmp_path / "queries.parquet", prompt_name="query", overflow=Overflow.TRUNCATE)
    asked = pyarrow.parquet.read_table(tmp_path / "queries.parquet")["embedding"].to_pylist()
    assert_same_vectors([np.array(value) for value in asked], classic.encode_query(TEXTS), atol=1e-6)


def test_a_query_that_is_too_long_fails_alone(saved: Callable[[str], Path], tmp_path: Path) -> None:
    inputs = write_texts(tmp_path / "in.jsonl", ["short", LONG])
    run(saved("classic") / "bundle", inputs, tmp_path / "out.jsonl", prompt_name="query")
    short, long = read(tmp_path / "out.jsonl")
    assert len(short["embedding"]) == 16
    assert long["embedding"] is None
    assert "tokens; max_seq_length is 16.\nTruncate it (overflow='truncate')" in long["error"]
    with pytest.raises(InputError, match=r"whose texts are not split.\nTruncate them"):
        run(saved("classic") / "bundle", inputs, tmp_path / "no.jsonl", prompt_name="query", overflow=Overflow.SPLIT)


@pytest.mark.parametrize("stride", [0, 10])
def test_pieces_of_a_split_text_are_one_list_of_vectors(
    stride: int, classic: MultiVectorEncoder, saved: Any, tmp_path: Path
) -> None:
    """Each token has its vector from one chunk, the special tokens and the prompt from the first chunk or the last."""
    inputs = write_texts(tmp_path / "in.jsonl", [LONGER, "short, too"])
    options = {"overflow": Overflow.SPLIT, "stride": stride, "max_seq_length": "bundle"}
    run(saved("classic") / "bundle", inputs, tmp_path / "out.jsonl", **options)
    found, short = (np.array(row["embedding"], np.float32) for row in read(tmp_path / "out.jsonl"))
    classic.document_length = "bundle"
    assert_close(short, classic.encode_document("short, too"), atol=1e-6)
    assert_close(classic.encode_document(LONGER, overflow="split", stride=stride), found, atol=1e-6)
    with pytest.raises(InputError, match="Queries of late interaction are not split"):
        classic.encode_query(LONGER, overflow="split", stride=stride)
    with pytest.raises(InputError, match="tokens; max_seq_length is"):
        classic.encode_query(LONGER, overflow="error")
    ids = classic.tokenizer.encode("[D] " + LONGER).ids
    left_out = set(open_bundle(saved("classic") / "bundle").manifest.sentence.multi_vector.skipped_ids)  # type: ignore[union-attr]
    assert len(found) == sum(each not in left_out for each in ids) > MAX_LEN
    assert_close(found[0], classic.encode_document(LONGER)[0], atol=1e-6)
    if not stride:
        # Up to the end of the first chunk, which is what the encoder cuts the text to but for the separator.
        cut = classic.encode_document(LONGER)[:-1]
        assert_close(found[: len(cut)], cut, atol=1e-6)


def test_vectors_of_tokens_have_the_options_of_vectors(classic: MultiVectorEncoder, saved: Any, tmp_path: Path) -> None:
    inputs, bundle = write_texts(tmp_path / "in.jsonl", TEXTS), saved("classic") / "bundle"
    options = VectorOptions(output_dtype=EmbeddingPrecision.FLOAT16, truncate_dim=5, normalize=True)
    run(bundle, inputs, tmp_path / "out.parquet", vectors=options, overflow=Overflow.TRUNCATE, max_seq_length="bundle")
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert "halffloat>[5]" in str(table.schema.field("embedding").type)
    classic.document_length = "bundle"
    expected = [each[:, :5] / np.linalg.norm(each[:, :5], axis=1)[:, None] for each in classic.encode_document(TEXTS)]
    found = [np.array(value, np.float32).reshape(-1, 5) for value in table["embedding"].to_pylist()]
    assert_same_vectors(found, expected, atol=1e-3)
    with pytest.raises(InputError, match=r"one vector per text, and .* one per token.\nWrite .parquet or .jsonl"):
        run(bundle, inputs, tmp_path / "out.npz")
