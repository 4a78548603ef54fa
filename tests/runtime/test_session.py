"""A session gives the model's answers, keeps order, and refuses invalid inputs."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError, BundleCorruptError, InputError, NonFiniteOutputError
from hdruntime.session import Session
from support.comparators import named_case

Model = Callable[..., np.ndarray]
BundleMaker = Callable[..., Path]
MAX_LEN = 16
NAN = 9
TEXTS = [
    "long documents are read whole .",
    "",
    "long",
    "read documents",
    "whole",
    "are are are are are are are",
]


@pytest.fixture
def session(bundle_path: Path) -> Iterator[Session]:
    with hdruntime.load(bundle_path) as session:
        yield session


def random_ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, NAN, shape)


# One batch


def test_the_answer_is_the_models(session: Session, model: Model) -> None:
    for tokens, batch in itertools.product([1, 2, 15, MAX_LEN], [1, 3]):
        with named_case(tokens, batch):
            ids = random_ids(batch, tokens)
            (output,) = session(input_ids=ids).values()
            assert output.dtype == np.float32
            np.testing.assert_allclose(output, model(ids), atol=1e-6)


def test_any_integers_are_accepted_and_masks_of_booleans_or_floats(session: Session, model: Model) -> None:
    for dtype in ["int8", "uint32", "int64", "uint64", ">i4", "list"]:
        with named_case(dtype):
            ids = random_ids(2, 5)
            given: Any = ids.tolist() if dtype == "list" else ids.astype(dtype)
            np.testing.assert_allclose(session(input_ids=given)["last_hidden_state"], model(ids), atol=1e-6)
    mask = np.array([[1, 1, 0]])
    of_integers, *others = (
        session(input_ids=[[4, 5, 6]], attention_mask=mask.astype(dtype))["last_hidden_state"]
        for dtype in (int, bool, np.float32)
    )
    for other in others:
        np.testing.assert_array_equal(other, of_integers)


def test_token_types_default_to_zeros(new_bundle: BundleMaker) -> None:
    session = hdruntime.load(new_bundle(token_types=True))
    default = session(input_ids=[[4, 5]])["last_hidden_state"]
    zeros = session(input_ids=[[4, 5]], token_type_ids=[[0, 0]])["last_hidden_state"]
    ones = session(input_ids=[[4, 5]], token_type_ids=[[0, 1]])["last_hidden_state"]
    np.testing.assert_array_equal(default, zeros)
    assert np.abs(ones - zeros).max() > 1


PADDED = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]], dtype=np.int64)


def test_rows_padded_on_the_right_run_without_padding(new_bundle: BundleMaker, model: Model) -> None:
    """The bundle's graph for the CPU ignores its mask: any padding that reached it would change the means."""
    session = hdruntime.load(new_bundle(cpu_graph=True))
    ids = random_ids(*PADDED.shape)
    output = session(input_ids=ids, attention_mask=PADDED)["last_hidden_state"]
    expected = model(ids, PADDED) * PADDED[:, :, np.newaxis]
    np.testing.assert_allclose(output, expected, atol=1e-6)


def test_other_masks_run_as_given_and_padding_holds_zeros(session: Session, model: Model) -> None:
    mask = np.array([[0, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    ids = random_ids(*mask.shape)
    output = session(input_ids=ids, attention_mask=mask)["last_hidden_state"]
    np.testing.assert_allclose(output, model(ids, mask) * mask[:, :, np.newaxis], atol=1e-6)


def test_outputs_without_a_tokens_axis_come_back_in_order(new_bundle: BundleMaker) -> None:
    session = hdruntime.load(new_bundle(task="text-classification", cpu_graph=True))
    ids = random_ids(*PADDED.shape)
    together = session(input_ids=ids, attention_mask=PADDED)["logits"]
    for row, length in enumerate(PADDED.sum(1)):
        alone = session(input_ids=ids[row : row + 1, :length])["logits"]
        np.testing.assert_allclose(together[row], alone[0], atol=1e-6)


# Invalid inputs

TOO_LONG = (
    r"^Input has 17 tokens; this bundle accepts 1 to 16\.\nTruncate it, or build the bundle again with max_len=17\.$"
)
IDS = {"input_ids": [[1, 2]]}


INVALID_INPUTS = [
    ({}, "input_ids is missing"),
    ({"input_ids": [1, 2]}, r"input_ids has shape \[2\]; it must be \[batch, tokens\].\n.*\[ids\]"),
    ({"input_ids": [[1, 2], [3]]}, r"cannot be read as an array .*\nPad shorter rows"),
    ({"input_ids": np.zeros((0, 4), int)}, "the batch is empty"),
    ({"input_ids": [[]]}, "Input has 0 tokens; this bundle accepts 1 to 16"),
    ({"input_ids": [[1.0]]}, "input_ids is of type float64; it must be integers"),
    ({"input_ids": [["a"]]}, "input_ids is of type <U1"),
    ({"input_ids": [[2**63]]}, "input_ids holds 9223372036854775808, which is more than int64"),
    ({"input_ids": [[2**64]]}, "integers of at most 64 bits"),
    ({"input_ids": [[1, 2], [3, 11]]}, r"input_ids\[1, 1\] is 11; the vocabulary has 11 ids, 0 to 10"),
    ({"input_ids": [[1, -1]]}, r"input_ids\[0, 1\] is -1; the vocabulary has 11 ids"),
    ({"input_ids": [[4] * 17]}, TOO_LONG),
    ({**IDS, "attention_mask": [[1]]}, r"attention_mask has shape \[1, 1\], but input_ids \[1, 2\]"),
    ({**IDS, "attention_mask": [[1, 2]]}, r"attention_mask\[0, 1\] is 2; it must be 1 for"),
    ({**IDS, "attention_mask": [[1.0, 0.5]]}, "attention_mask is of type float64"),
    ({**IDS, "token_type_ids": [[0, 0]]}, "Unknown input 'token_type_ids'; this bundle accepts input_ids, att"),
]


def test_invalid_inputs_are_refused(session: Session) -> None:
    for inputs, message in INVALID_INPUTS:
        with named_case(message), pytest.raises(InputError, match=message):
            session(**inputs)


def test_errors_of_onnx_runtime_become_ours(new_bundle: BundleMaker) -> None:
    path = new_bundle(token_types=True)
    manifest = open_bundle(path).manifest
    *others, types = manifest.inputs
    # As in bundles that were built before this bound was kept.
    seal(path, dataclasses.replace(manifest, inputs=(*others, dataclasses.replace(types, bound=None))))
    session = hdruntime.load(path)
    with pytest.raises(BackendError, match=r"ONNX Runtime failed on a batch of 1 x 1 tokens: .*Gather"):
        session(input_ids=[[1]], token_type_ids=[[2]])


# NaN


def test_nan_in_an_answer_is_reported_with_its_rows(session: Session) -> None:
    with pytest.raises(NonFiniteOutputError, match="last_hidden_state holds NaN or infinity in rows 1, 3"):
        session(input_ids=[[4, 5], [4, NAN], [4, 4], [NAN, 4]])


def test_nan_in_the_padding_is_no_error(session: Session) -> None:
    for mask in ([[1, 1, 0]], [[0, 1, 1]]):
        ids = np.where(np.array(mask) == 1, 4, NAN)
        assert np.isfinite(session(input_ids=ids, attention_mask=mask)["last_hidden_state"]).all()


def test_nan_in_infer_and_embed_names_the_callers_rows(session: Session) -> None:
    texts = ["long", "long documents are", "nan", "read whole nan"]
    with pytest.raises(NonFiniteOutputError, match=r"rows (2|3)\."):
        session.infer(session.tokenize(texts))
    with pytest.raises(NonFiniteOutputError, match=r"^texts\[2\]: The output last_hidden_state holds NaN"):
        session.embed(texts)


@pytest.mark.parametrize(("dtype", "advice"), [("float16", "bf16=True"), ("float32", "hdexport verify")])
def test_the_advice_on_nan_depends_on_the_dtype(new_bundle: BundleMaker, dtype: str, advice: str) -> None:
    with pytest.raises(NonFiniteOutputError, match=advice):
        hdruntime.load(new_bundle(dtype=dtype))(input_ids=[[NAN]])


# Texts


@pytest.mark.parametrize("task", ["feature-extraction", "sentence-similarity"])
def test_embeddings_keep_order_and_do_not_depend_on_batches(new_bundle: BundleMaker, task: str) -> None:
    session = hdruntime.load(new_bundle(task=task, cpu_graph=True))
    for batch_tokens in [1, 16, None]:
        with named_case(batch_tokens):
            embeddings = session.embed(TEXTS, batch_tokens=batch_tokens)
            assert embeddings.shape == (len(TEXTS), 4)
            assert embeddings.dtype == np.float32
            for text, embedding in zip(TEXTS, embeddings, strict=True):
                np.testing.assert_allclose(session.embed([text])[0], embedding, atol=1e-6)
            assert len(np.unique(embeddings.round(3), axis=0)) == len(TEXTS)


def test_the_graphs_own_sentence_embedding_is_preferred(new_bundle: BundleMaker) -> None:
    session = hdruntime.load(new_bundle(task="sentence-similarity"))
    (encoding,) = session.tokenize(["long documents"])
    expected = session(input_ids=[encoding.input_ids])["sentence_embedding"]
    np.testing.assert_array_equal(session.embed(["long documents"]), expected)


def test_a_text_that_is_too_long_is_refused_or_truncated(session: Session) -> None:
    text = "long " * 15
    with pytest.raises(InputError, match=r"texts\[1\]: The text has 17 tokens.*\n.*max_len=17"):
        session.embed(["long", text])
    np.testing.assert_array_equal(session.embed([text], overflow="truncate"), session.embed(["long " * 14]))


def test_a_task_without_embeddings_is_an_error(new_bundle: BundleMaker) -> None:
    session = hdruntime.load(new_bundle(task="text-classification"))
    with pytest.raises(InputError, match=r"task is text-classification, .*\n.*task='feature-extraction'"):
        session.embed(["long"])


def test_a_bundle_without_a_tokenizer_is_an_error_for_texts(new_bundle: BundleMaker) -> None:
    session = hdruntime.load(new_bundle(tokenizer=False))
    assert session(input_ids=[[4]])
    with pytest.raises(InputError, match="has no tokenizer"):
        session.embed(["long"])


def test_infer_trims_each_result_to_its_text(new_bundle: BundleMaker, model: Model) -> None:
    session = hdruntime.load(new_bundle(task="sentence-similarity"))
    encodings = session.tokenize(TEXTS)
    results = session.infer(encodings, batch_tokens=12)
    for encoding, result in zip(encodings, results, strict=True):
        expected = model(np.array([encoding.input_ids]))[0]
        np.testing.assert_allclose(result["last_hidden_state"], expected, atol=1e-6)
        assert result["sentence_embedding"].shape == (4,)


def test_infer_returns_the_requested_outputs(new_bundle: BundleMaker) -> None:
    session = hdruntime.load(new_bundle(task="sentence-similarity"))
    (result,) = session.infer(session.tokenize(["long"]), outputs=["sentence_embedding"])
    assert set(result) == {"sentence_embedding"}
    assert session.infer(session.tokenize(["long", ""]), outputs=[]) == [{}, {}]
    with pytest.raises(InputError, match=r"no output 'logits'; its outputs are last_hidden_state"):
        session.infer(session.tokenize(["long"]), outputs=["logits"])


# Backends and life


def test_impossible_threads_are_refused(bundle_path: Path) -> None:
    for threads in (0, 1025):
        with pytest.raises(InputError, match=rf"threads is {threads}; it must be 1 to 1024"):
            hdruntime.load(bundle_path, threads=threads)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[onnxruntime.InferenceSession]]:
    """The sessions of ONNX Runtime that were made, in order."""
    sessions: list[weakref.ref[onnxruntime.InferenceSession]] = []
    real = onnxruntime.InferenceSession

    def recorded(*arguments: Any, **options: Any) -> onnxruntime.InferenceSession:
        session = real(*arguments, **options)
        sessions.append(weakref.ref(session))
        return session

    monkeypatch.setattr(onnxruntime, "InferenceSession", recorded)
    return sessions


def test_a_graph_that_onnx_runtime_cannot_read_is_an_error(bundle_path: Path) -> None:
    manifest = open_bundle(bundle_path).manifest
    (bundle_path / "model.onnx").write_bytes(b"no protobuf")
    seal(bundle_path, manifest)
    with pytest.raises(BackendError, match=r"cannot load .*model.onnx: .*\n.*pip install -U onnxruntime"):
        hdruntime.load(bundle_path)


def test_a_graph_whose_weights_lie_outside_of_the_bundle_is_not_loaded(bundle_path: Path) -> None:
    import onnx

    manifest = open_bundle(bundle_path).manifest
    model = onnx.load(bundle_path / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../model.onnx.data"
    (bundle_path / "model.onnx").write_bytes(model.SerializeToString())
    (bundle_path / "model.onnx.data").rename(bundle_path.parent / "model.onnx.data")
    seal(bundle_path, manifest)
    with pytest.raises(BackendError, match=r"escapes (both )?model directory"):
        hdruntime.load(bundle_path)


def test_a_manifest_of_other_outputs_than_the_graphs_is_refused(new_bundle: BundleMaker) -> None:
    path, other = new_bundle("one"), new_bundle("other", task="text-classification")
    seal(path, open_bundle(other).manifest)
    with pytest.raises(BundleCorruptError, match=r"outputs of model.onnx are last_hidden_state(.|\n)* lists logits"):
        hdruntime.load(path)


def test_threads_share_a_session(new_bundle: BundleMaker) -> None:
    """Simultaneous runs share tokenisers, batches and counts."""
    session = hdruntime.load(new_bundle(cpu_graph=True))
    expected = session.embed(TEXTS)
    long_text = " ".join(TEXTS)
    of_long_text = session.embed([long_text], overflow="split", stride=3)
    hidden = [result["last_hidden_state"] for result in session.infer(session.tokenize(TEXTS))]
    before = session.padding

    def embed(first: int) -> None:
        texts = TEXTS[first:] + TEXTS[:first]
        np.testing.assert_allclose(session.embed(texts), np.roll(expected, -first, axis=0), atol=1e-6)

    def split(stride: int) -> None:
        same = session.embed([long_text], overflow="split", stride=3)
        np.testing.assert_array_equal(same, of_long_text)
        session.split([long_text], stride=stride)

    def call(row: int) -> None:
        (encoding,) = session.tokenize([TEXTS[row]], overflow="truncate")
        (output,) = session(input_ids=[encoding.input_ids])["last_hidden_state"]
        np.testing.assert_allclose(output, hidden[row], atol=1e-6)

    calls = [(embed, split, call)[task % 3] for task in range(180)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda function, task: function(task % len(TEXTS)), calls, range(len(calls))))
    tokens = sum(map(len, hidden))
    of_split = sum(len(chunk) for chunk in session.split([long_text], stride=3)[0].chunks)
    called = sum(len(hidden[task % len(TEXTS)]) for task in range(180) if task % 3 == 2)
    assert session.padding.tokens - before.tokens == 60 * (tokens + of_split) + called


def test_closing_a_session_raises_in_other_threads(new_bundle: BundleMaker) -> None:
    """Every call gives the right answer or says that the session is closed."""
    path = new_bundle(cpu_graph=True)
    with hdruntime.load(path) as session:
        expected = session.embed(TEXTS)

    def use(session: Session) -> bool:
        try:
            while True:
                np.testing.assert_allclose(session.embed(TEXTS), expected, atol=1e-6)
        except BackendError as error:
            return "session is closed" in str(error)

    for _ in range(5):
        session = hdruntime.load(path)
        with ThreadPoolExecutor(4) as pool:
            users = [pool.submit(use, session) for _ in range(4)]
            while session.padding.tokens < 500:
                time.sleep(0.001)
            session.close()
            assert all(user.result(timeout=30) for user in users)


def test_closing_frees_the_backend(bundle_path: Path, made: list[weakref.ref]) -> None:
    bundle = open_bundle(bundle_path)
    runner = OnnxRuntimeRunner(bundle)
    session = Session(bundle, runner)
    session.embed(["long"])
    (backend,) = made
    assert backend() is not None
    session.close()
    gc.collect()
    assert backend() is None
    with pytest.raises(BackendError, match="session is closed"):
        runner.start({name: np.ones((1, 1), np.int64) for name in ("input_ids", "attention_mask")}, [])()


def test_a_closed_session_is_an_error_of_every_call(bundle_path: Path) -> None:
    with hdruntime.load(bundle_path) as session:
        session.embed(["long"])
        assert session.batch_tokens == 1024
    session.close()
    for call in (lambda: session(input_ids=[[4]]), lambda: session.embed(["long"]), lambda: session.batch_tokens):
        with pytest.raises(BackendError, match="session is closed"):
            call()


def test_a_backend_on_the_cpu_refuses_arrays_on_a_gpu(session: Session) -> None:
    with pytest.raises(
        BackendError,
        match=r"onnxruntime does not accept arrays on a GPU.*\n.*or load the bundle with a backend of",
    ):
        session.run_on_device(input_ids=object())
