"""Streams: a document in segments equals the model by hand, and interleaved documents equal each alone."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.backends.onnxruntime.cuda import OnnxRuntimeCudaRunner
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.sentence_settings import SentenceSettings
from hdruntime.errors import BackendError, InputError, NonFiniteOutputError
from hdruntime.inference.streaming import Segment
from hdruntime.session import Session
from support.comparators import assert_close, named_case
from support.recurrent_bundle import (
    REMEMBERED,
    make_recurrent_bundle,
    make_streaming_bundle,
    recurrent_states,
    streamed_states,
)
from support.tiny_bundle import NAN_ID

HIDDEN = "last_hidden_state"
MAX_LEN = 16
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_streaming_bundle(tmp_path_factory.mktemp("streaming") / "bundle")


# The extra `gpu` has an ONNX Runtime that is new enough for the latter.
@pytest.fixture(params=["onnxruntime", pytest.param("onnxruntime_cuda", marks=pytest.mark.pinned)])
def session(request: pytest.FixtureRequest, path: Path) -> Iterator[Session]:
    """On the CPU; the second with the code for a GPU."""
    if request.param == "onnxruntime_cuda":
        request.getfixturevalue("cuda_on_cpu")
    bundle = open_bundle(path)
    runner = OnnxRuntimeRunner if request.param == "onnxruntime" else OnnxRuntimeCudaRunner
    with Session(bundle, runner(bundle)) as opened:
        yield opened


on_one_backend = pytest.mark.parametrize("session", ["onnxruntime"], indirect=True)
"""For what no backend decides."""


def document(tokens: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(1000 * seed + tokens).integers(0, NAN_ID, tokens).tolist()
    return ids


def joined(segments: list[Segment], name: str = HIDDEN) -> np.ndarray:
    """A document's output, [tokens, ...], after a check that its segments are consecutive and end once."""
    assert [segment.tokens.start for segment in segments] == [0, *(segment.tokens.stop for segment in segments[:-1])]
    assert [segment.is_last for segment in segments] == [False] * (len(segments) - 1) + [True]
    for segment in segments:
        assert segment.error is None
        assert len(segment.outputs[name]) == segment.tokens.stop - segment.tokens.start
    return np.concatenate([segment.outputs[name] for segment in segments])


def by_document(segments: Iterator[Segment]) -> dict[int, list[Segment]]:
    found: dict[int, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.document, []).append(segment)
    return found


# One document


def test_a_document_in_segments_equals_the_model_by_hand(session: Session) -> None:
    for segment, tokens in itertools.product(
        [1, REMEMBERED - 1, REMEMBERED, REMEMBERED + 1, MAX_LEN, None], [1, 5, 6, 7, 16, 17, 60]
    ):
        with named_case(segment, tokens):
            ids = document(tokens)
            with session.stream(ids, segment=segment) as stream:
                segments = list(stream)
            assert [list(each.outputs) for each in segments] == [[HIDDEN]] * len(segments)
            assert_close(joined(segments), streamed_states(ids, segment or MAX_LEN), atol=1e-5)


@on_one_backend
def test_a_stream_that_forgets_would_be_noticed(session: Session) -> None:
    ids = document(30)
    alone = [session(input_ids=[ids[start : start + 10]])[HIDDEN][0] for start in range(0, 30, 10)]
    with pytest.raises(AssertionError):
        assert_close(np.concatenate(alone), streamed_states(ids, 10), atol=1e-5)


def test_what_is_not_there_yet_is_attended_to_where_the_model_does(tmp_path: Path) -> None:
    with hdruntime.load(make_streaming_bundle(tmp_path / "bundle", attended=True), "onnxruntime") as session:
        ids = document(30)
        assert_close(joined(list(session.stream(ids, segment=4))), streamed_states(ids, 4, attended=True), atol=1e-5)


@on_one_backend
def test_a_text_is_tokenized_as_a_whole(session: Session) -> None:
    text = "long documents are read whole . " * 9
    (encoding,) = session.tokenize([text], overflow="recur")
    ids = encoding.input_ids
    assert (ids[0], ids[-1], ids.count(CLS), ids.count(SEP)) == (CLS, SEP, 1, 1)
    expected = streamed_states(ids, 7)
    for given_document in (text, encoding, ids, np.array(ids)):
        assert_close(joined(list(session.stream(given_document, segment=7))), expected, atol=1e-5)  # type: ignore[arg-type]


def test_requested_memories_are_copies_of_their_time(session: Session) -> None:
    ids = document(40)
    segments = list(session.stream(ids, segment=8, outputs=[HIDDEN, "new_mems.mask", "new_mems.0"]))
    assert [each.outputs["new_mems.mask"].sum() for each in segments] == [REMEMBERED] * 5
    lasts = [each.outputs["new_mems.0"] for each in segments]
    assert not any(np.array_equal(one, other) for one, other in itertools.pairwise(lasts))


def test_memories_of_a_fixed_size_are_carried(tmp_path: Path) -> None:
    ids, memory, expected, segment = document(30), None, [], 4
    for start in range(0, 30, segment):
        answer = recurrent_states(np.array([ids[start : start + segment]]), None, memory)
        memory = answer.memory
        expected.append(answer.states[0])
    with hdruntime.load(make_recurrent_bundle(tmp_path / "bundle"), "onnxruntime") as session:
        assert_close(joined(list(session.stream(ids, segment=segment))), np.concatenate(expected), atol=1e-5)


# Interleaved documents


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    rows=st.integers(1, 5),
    segment=st.integers(1, MAX_LEN),
)
def test_interleaved_documents_equal_each_alone(session: Session, lengths: list[int], rows: int, segment: int) -> None:
    documents = [document(tokens, seed) for seed, tokens in enumerate(lengths)]
    found = by_document(session.stream_all(iter(documents), segment=segment, rows=rows))
    assert sorted(found) == list(range(len(documents)))
    for number, segments in found.items():
        assert_close(joined(segments), streamed_states(documents[number], segment), atol=1e-5)


@on_one_backend
def test_a_row_does_not_wait_for_the_others_and_a_document_is_taken_when_there_is_a_row_for_it(
    session: Session,
) -> None:
    taken = []

    def documents() -> Iterator[list[int]]:
        for tokens in (40, 4, 4, 4, 4):
            taken.append(tokens)
            yield document(tokens)

    stream = session.stream_all(documents(), segment=8, rows=2)
    assert taken == []
    first = next(stream)
    assert taken == [40, 4]
    order = [(each.document, each.tokens.start) for each in (first, *stream)]
    assert order == [(0, 0), (1, 0), (0, 8), (2, 0), (0, 16), (3, 0), (0, 24), (4, 0), (0, 32)]


def test_a_bad_document_ends_with_its_error_and_the_others_go_on(session: Session) -> None:
    documents = [document(20, seed) for seed in range(4)]
    documents[1][11] = NAN_ID
    found = by_document(session.stream_all(documents, segment=5, rows=2))
    bad = found.pop(1)
    assert [each.tokens.start for each in bad] == [0, 5, 10]
    assert isinstance(bad[-1].error, NonFiniteOutputError)
    assert bad[-1].is_last
    for number, segments in found.items():
        assert_close(joined(segments), streamed_states(documents[number], 5), atol=1e-5)


def test_tokens_are_counted_and_rows_without_a_document_are_not_computed(path: Path) -> None:
    with hdruntime.load(path, "onnxruntime") as session:
        for _ in session.stream_all([document(21), document(5)], segment=10, rows=8):
            pass
        assert (session.padding.tokens, session.padding.padded_tokens) == (26, 0)


# Embeddings


TEXTS = ["long documents are read whole . " * 5, "read", "", "documents are long . " * 3]


def pooled(states: np.ndarray, pooling: str) -> np.ndarray:
    return {"mean": states.mean(0), "max": states.max(0), "lasttoken": states[-1]}[pooling]


def test_a_streamed_text_is_embedded_as_one_long_text(session: Session) -> None:
    for segment, batch_tokens in itertools.product([3, 16], [None, 1, 40]):
        with named_case(segment, batch_tokens):
            encodings = session.tokenize(TEXTS, overflow="recur")
            expected = np.stack([streamed_states(encoding.input_ids, segment).mean(0) for encoding in encodings])
            found = session.embed(TEXTS, overflow="recur", segment=segment, batch_tokens=batch_tokens)
            assert_close(found, expected, atol=1e-5)
            assert session.embed([], overflow="recur").shape == (0, 4)


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("max", False), ("lasttoken", True)])
def test_a_sentence_models_vector_is_pooled_of_all_tokens(tmp_path: Path, pooling: str, normalize: bool) -> None:
    own = SentenceSettings(kind="encoder", max_seq_length=16, pooling=(pooling,), normalize=normalize)
    bundle = make_streaming_bundle(tmp_path / "bundle", task="sentence-similarity", sentence=own)
    with hdruntime.load(bundle, "onnxruntime") as session:
        encodings = session.tokenize(TEXTS, overflow="recur")
        expected = np.stack([pooled(streamed_states(each.input_ids, 5), pooling) for each in encodings])
        if normalize:
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        assert_close(session.embed(TEXTS, overflow="recur", segment=5), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (None, "does not state how it pools"),
        ({"pooling": ("cls",)}, "pooling mode is cls, which sees the first segment only"),
        ({"pooling": ("mean",), "dense": True}, "has a Dense layer"),
    ],
)
def test_a_pooling_that_segments_do_not_determine_is_refused(
    tmp_path: Path, own: dict[str, object] | None, message: str
) -> None:
    settings_ = own and SentenceSettings(kind="encoder", max_seq_length=16, **own)  # type: ignore[arg-type]
    bundle = make_streaming_bundle(tmp_path / "bundle", task="sentence-similarity", sentence=settings_ or None)
    with (
        hdruntime.load(bundle, "onnxruntime") as session,
        pytest.raises(InputError, match=rf"A streamed document has no embedding: .*{message}"),
    ):
        session.embed(["long"], overflow="recur")


# Invalid use


INVALID_OPTIONS = [
    ({"segment": 0}, r"^segment is 0; it must be 1 to 16 for this bundle\.$"),
    ({"segment": 17}, r"segment is 17; it must be 1 to 16 .*Build the bundle again with max_len=17"),
    ({"outputs": ["logits"]}, r"The bundle has no output 'logits'; its outputs are last_hidden_state, new_mems\.0"),
]


@on_one_backend
def test_invalid_options_are_refused(session: Session) -> None:
    for options, message in INVALID_OPTIONS:
        with named_case(message):
            with pytest.raises(InputError, match=f"(?s){message}"):
                session.stream([2, 3], **options)  # type: ignore[arg-type]
            with pytest.raises(InputError, match=f"(?s){message}"):
                session.stream_all([[2, 3]], **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"documents is one string; it must be a list of documents: \[text\]"):
        session.stream_all("a text, whose characters are no documents")


INVALID_DOCUMENTS = [
    ([], r"The text has 0 tokens; this bundle accepts 1 or more"),
    ([2, 11], r"input_ids\[0, 1\] is 11; the vocabulary has 11 ids"),
    ([[2, 3], [4]], r"A document is a text, an Encoding or a list of token ids; this is a list"),
    (["a", "b"], r"A document is a text, an Encoding or a list of token ids; this is a list"),
    (7, r"A document is a text, .* this is a int"),
]


@on_one_backend
def test_an_invalid_document_is_refused(session: Session) -> None:
    for value, message in INVALID_DOCUMENTS:
        with named_case(message):
            with pytest.raises(InputError, match=f"^{message}"):
                session.stream(value)  # type: ignore[arg-type]
            with pytest.raises(InputError, match=f"^Document 1: {message}"):
                list(session.stream_all([[2, 3], value]))  # type: ignore[list-item]


def test_a_document_beyond_the_bundles_positions_is_refused(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle")
    seal(bundle, dataclasses.replace(open_bundle(bundle).manifest, document_tokens=16))
    with hdruntime.load(bundle, "onnxruntime") as session:
        assert len(list(session.stream(document(16), segment=5))) == 4
        remedy = r"Build the bundle again with max_len=17, or split .*overflow='split'"
        message = rf"has 17 tokens; this bundle has positions for 16, counted.*\n{remedy}"
        with pytest.raises(InputError, match=message):
            session.stream(document(17), segment=5)
        with pytest.raises(InputError, match=f"^Document 1: The document {message}"):
            list(session.stream_all([document(16), document(17)], segment=5))


def test_a_bundle_without_recurrent_states_is_rejected(bundle_path: Path) -> None:
    with hdruntime.load(bundle_path, "onnxruntime") as session:
        for stream in (session.stream, session.stream_all):
            with pytest.raises(InputError, match=r"has no recurrent states.*\n.*--recurrence 512.*overflow='split'"):
                stream([[2, 3]])  # type: ignore[operator]
        with pytest.raises(InputError, match="has no recurrent states"):
            session.embed(["long"], overflow="recur")
        with pytest.raises(InputError, match="segment is 8, but only overflow='recur' has segments"):
            session.embed(["long"], segment=8)


@on_one_backend
def test_a_document_whose_stream_was_closed_is_refused(session: Session) -> None:
    stream = session.stream(document(30), segment=10)
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(InputError, match=r"This stream is closed.*\nBegin again with session\.stream"):
        next(stream)


@on_one_backend
def test_a_stream_ends_at_an_error(session: Session) -> None:
    stream = session.stream([*document(10), NAN_ID, *document(20)], segment=10)
    next(stream)
    with pytest.raises(NonFiniteOutputError, match="last_hidden_state holds NaN or infinity"):
        next(stream)
    with pytest.raises(InputError, match="This stream is closed"):
        next(stream)


# Sessions


def test_streams_of_several_threads_do_not_touch_each_other(session: Session) -> None:
    documents = [document(60, seed) for seed in range(6)]
    found: dict[int, np.ndarray] = {}

    def work(number: int) -> None:
        found[number] = joined(list(session.stream(documents[number], segment=4)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, ids in enumerate(documents):
        assert_close(found[number], streamed_states(ids, 4), atol=1e-5)


def test_a_closed_session_ends_its_streams(path: Path) -> None:
    session = hdruntime.load(path, "onnxruntime")
    one, several = session.stream(document(30), segment=5), session.stream_all([document(30)] * 3, segment=5)
    next(one), next(several)
    session.close()
    with pytest.raises(BackendError, match="session is closed"):
        next(one)
    with pytest.raises(BackendError, match="session is closed"):
        list(several)
    with pytest.raises(BackendError, match="session is closed"):
        session.stream(document(30))


# Memory


PEAK = """
import resource, sys
import numpy as np
import hdruntime

ids = np.random.default_rng(0).integers(0, 9, int(sys.argv[2])).tolist()
with hdruntime.load(sys.argv[1], "onnxruntime", threads=1) as session:
    tokens = sum(len(segment.outputs["last_hidden_state"]) for segment in session.stream(ids, segment=512))
print(tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_peak_memory_does_not_grow_with_the_document(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle", max_len=512)
    peaks = []
    for tokens in (4096, 65_536):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(bundle), str(tokens)], capture_output=True, text=True, timeout=120
        )
        ran, peak = map(int, done.stdout.split())
        assert ran == tokens, done.stderr
        peaks.append(peak)
    assert peaks[1] < 1.3 * peaks[0], peaks


def test_a_stream_keeps_no_results(path: Path) -> None:
    with hdruntime.load(path, "onnxruntime") as session:
        for segment in session.stream(document(40), segment=5):
            assert segment.outputs[HIDDEN].base is None, "a view would keep the whole batch"
        del segment
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, Segment)]
