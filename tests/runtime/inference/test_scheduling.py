"""Batches fit in memory, bad rows do not affect others, and every row is returned once."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hdruntime
from fakes.recording_runner import BROKEN_ID, NAN_ID, RecordingRunner, answer
from hdexport.support.bundle_writer import seal
from hdruntime.backends.onnxruntime import cpu
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError, InputError, NonFiniteOutputError, OutOfMemoryError
from hdruntime.inference import scheduling
from hdruntime.inference.batching import MemoryLimits
from hdruntime.inference.scheduling import BatchResult, PaddingCount, Scheduler, non_finite_rows
from hdruntime.session import Session
from hdruntime.text.encoding import Encoding
from support.comparators import assert_close, named_case

OUTPUT = "last_hidden_state"
Ids = Sequence[Sequence[int]]


def texts(*lengths: int) -> Ids:
    """Ids of texts of these lengths, nearly all different."""
    return [[(row * 5 + token * token) % 9 for token in range(length)] for row, length in enumerate(lengths)]


def scheduler(runner: RecordingRunner) -> Scheduler:
    return Scheduler(
        runner,
        mask="attention_mask",
        padding_limit=lambda tokens: sys.maxsize,
        non_finite_error=lambda name, rows: NonFiniteOutputError(f"{name} {list(rows)}"),
    )


def padded(rows: list[list[int]]) -> np.ndarray:
    most = max(map(len, rows))
    return np.array([[*row, *[0] * (most - len(row))] for row in rows], np.int64)


def run(over: Scheduler | RecordingRunner, ids: Ids, batch_tokens: int | None = None) -> Iterator[BatchResult]:
    def inputs_of(rows: list[int]) -> dict[str, np.ndarray]:
        return {
            "input_ids": padded([ids[row] for row in rows]),
            "attention_mask": padded([[1] * len(ids[row]) for row in rows]),
        }

    over = over if isinstance(over, Scheduler) else scheduler(over)
    return over.run([len(row) for row in ids], inputs_of, outputs=[OUTPUT], batch_tokens=batch_tokens)


def assert_answered(ids: Ids, results: Iterable[BatchResult], *, failed: Iterable[int] = ()) -> None:
    """Every row is in one result: rows of `failed` with an error, all others with their own answer."""
    failed = set(failed)
    seen: list[int] = []
    for result in results:
        assert set(result.errors) <= set(result.rows), "an error of a row of another batch"
        seen += result.rows
        for index, row in enumerate(result.rows):
            assert (row in failed) == (row in result.errors), f"row {row}: {result.errors.get(row)}"
            if row not in failed:
                expected = answer(np.array(ids[row]))
                assert result.attention_mask[index].sum() == len(expected)
                np.testing.assert_array_equal(result.outputs[OUTPUT][index, : len(expected)], expected)
    assert sorted(seen) == list(range(len(ids)))


def test_the_check_of_answers_refuses_wrong_ones() -> None:
    ids = texts(3, 3, 5)
    results = list(run(RecordingRunner(), ids, batch_tokens=6))
    assert_answered(ids, results)
    *others, last = results
    swapped = dataclasses.replace(last, rows=last.rows[::-1])
    false = dataclasses.replace(last, errors={last.rows[0]: BackendError("no")})
    for wrong in (others, [*results, last], [*others, swapped], [*others, false]):
        with pytest.raises(AssertionError):
            assert_answered(ids, wrong)


# Every row once


@given(
    lengths=st.lists(st.integers(1, 16), max_size=30),
    broken=st.sets(st.integers(0, 29), max_size=3),
    nan=st.sets(st.integers(0, 29), max_size=3),
    memory=st.integers(16, 200),
    batch_tokens=st.integers(1, 200),
    max_rows=st.integers(1, 9),
    max_in_flight=st.integers(1, 3),
    fails_late=st.booleans(),
)
def test_every_row_is_answered_once_whatever_fails(
    lengths: list[int],
    broken: set[int],
    nan: set[int],
    memory: int,
    batch_tokens: int,
    max_rows: int,
    max_in_flight: int,
    fails_late: bool,
) -> None:
    ids = texts(*lengths)
    failed = {row for row in broken | nan if row < len(ids)}
    for row in failed:
        ids[row][-1] = BROKEN_ID if row in broken else NAN_ID  # type: ignore[index]
    runner = RecordingRunner(
        memory=memory, fails_late=fails_late, max_in_flight=max_in_flight, max_rows=lambda tokens: max_rows
    )
    assert_answered(ids, run(runner, ids, batch_tokens), failed=failed)
    assert not runner.in_flight
    assert all(rows <= max_rows for rows, _ in runner.shapes)
    assert all(rows == 1 or rows * tokens <= batch_tokens for rows, tokens in runner.shapes)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_requested_number_of_batches_is_in_flight(max_in_flight: int) -> None:
    runner = RecordingRunner(max_in_flight=max_in_flight)
    results = run(runner, texts(*[8] * 20), batch_tokens=16)
    next(results)
    assert len(runner.in_flight) == max_in_flight - 1, "the others run while the caller has the first result"
    list(results)
    assert runner.most_seen == max_in_flight
    assert runner.order == list(range(10)), "results are requested in the order of starts"


def test_started_batches_are_finished_if_the_caller_stops_early() -> None:
    runner = RecordingRunner(max_in_flight=2)
    results = run(runner, texts(*[8] * 20), batch_tokens=16)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert runner.order == [0, 1]


def test_the_longest_rows_run_first_in_batches_within_the_backends_limit() -> None:
    runner = RecordingRunner(max_rows=lambda tokens: 1 if tokens > 8 else 3)
    ids = texts(3, 12, 5, 16, 5, 3, 3, 8)
    assert_answered(ids, run(runner, ids))
    assert runner.shapes == [(1, 16), (1, 12), (3, 8), (3, 3)]


# Memory


@pytest.mark.parametrize("fails_late", [False, True])
def test_a_batch_without_memory_is_halved_and_the_limit_remembered(
    fails_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runner = RecordingRunner(memory=70, fails_late=fails_late)
    over = scheduler(runner)
    ids = texts(*[16] * 20)
    with caplog.at_level(logging.WARNING):
        assert_answered(ids, run(over, ids, batch_tokens=320))
    assert runner.shapes[:3] == [(20, 16), (10, 16), (5, 16)]
    assert runner.shapes[3:] == [(2, 16)] * 10
    assert [record.getMessage() for record in caplog.records] == [
        "Out of memory with a batch of 20 x 16 tokens: continuing with at most 160 tokens per batch of such rows. "
        "Set the limit from the start: batch_tokens=160."
    ]
    assert_answered(ids, run(over, ids, batch_tokens=320))
    assert runner.failures == 3, "the second time none fails"


LIMITS = [
    ([], 100, sys.maxsize),
    ([(8, 128)], 128, 4),
    ([(8, 128)], 64, sys.maxsize),
    ([(8, 128)], 129, sys.maxsize),
    ([(8, 128), (4, 100)], 100, 2),
    ([(2, 70), (8, 128)], 70, 1),
    ([(1, 9)], 9, 1),
]


def test_a_limit_holds_between_powers_of_two() -> None:
    for failures, tokens, rows in LIMITS:
        with named_case(failures, tokens, rows):
            limits = MemoryLimits()
            for failure in failures:
                limits.halve(*failure)
            assert limits.max_rows(tokens) == rows


def test_a_row_that_does_not_fit_alone_has_its_error_and_the_others_their_answers() -> None:
    runner = RecordingRunner(memory=10, fails_late=True)
    ids = texts(4, 12, 4, 16, 9)
    results = list(run(runner, ids))
    assert_answered(ids, results, failed=[1, 3])
    errors = {row: error for result in results for row, error in result.errors.items()}
    assert all(isinstance(error, OutOfMemoryError) for error in errors.values())


def test_a_row_that_fits_only_without_company_is_answered() -> None:
    runner = RecordingRunner(memory=20, fails_late=True, max_in_flight=2)
    ids = texts(16, 15, 14, 13)
    assert_answered(ids, run(runner, ids, batch_tokens=16))
    assert runner.failures > 0, "two at a time were tried"


def test_if_no_batch_ever_fits_the_error_is_raised() -> None:
    runner = RecordingRunner(memory=0)
    with pytest.raises(OutOfMemoryError):
        list(run(runner, texts(4, 12)))


def test_a_row_whose_length_did_fit_gets_no_error_for_lack_of_memory() -> None:
    runner = RecordingRunner(memory=16)
    over = scheduler(runner)
    list(run(over, texts(10)))
    runner.memory = 5
    results = run(over, texts(12, 10, 4))
    assert set(next(results).errors) == {0}, "no row of 12 tokens ever ran: it may be too long"
    with pytest.raises(OutOfMemoryError):
        next(results)


_REAL_LACK_OF_MEMORY = """
import json, logging, resource, sys
import numpy as np
import hdruntime

with hdruntime.load(sys.argv[1], threads=1) as session:
    texts = ["long documents are read whole ."] * 40 + ["whole"] * 3
    expected = session.embed(texts, batch_tokens=8)
    pages = int(open("/proc/self/statm").read().split()[0])
    most_bytes = pages * resource.getpagesize() + 100 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    logging.basicConfig(level="WARNING")
    embedded = session.embed(texts, batch_tokens=320)
    ids = session.tokenize(texts[:1])[0].input_ids
    one_batch = session(input_ids=[ids] * 40)["last_hidden_state"].mean(axis=1)
    print(json.dumps([np.array_equal(expected, embedded), float(np.abs(one_batch - expected[:40]).max())]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the memory of a process")
def test_onnx_runtime_continues_with_smaller_batches_when_memory_is_short(new_bundle: Callable[..., Path]) -> None:
    path = new_bundle()
    waste_memory(path)
    command = [sys.executable, "-c", textwrap.dedent(_REAL_LACK_OF_MEMORY), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    is_equal, difference = json.loads(done.stdout)
    assert is_equal
    assert difference < 1e-6
    assert done.stderr.count("Out of memory with a batch of 40 x 8 tokens: continuing with at most 160") == 1, (
        done.stderr
    )


def waste_memory(path: Path) -> None:
    """Make the bundle's model need 1 MiB for every token."""
    import onnx
    from onnx import helper, numpy_helper

    manifest = open_bundle(path).manifest
    model = onnx.load(path / "model.onnx")
    last = model.graph.node[-1]
    last.output[0] = "answer"
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 1, 2**18]), "much"))
    model.graph.node.extend(
        [
            helper.make_node("Expand", ["mask_float", "much"], ["large"]),
            helper.make_node("ReduceMin", ["large", "axis_last"], ["ones"]),
            helper.make_node("Mul", ["answer", "ones"], [OUTPUT]),
        ]
    )
    onnx.save(model, path / "model.onnx")
    seal(path, manifest)


# Bad rows


NAN_TEXTS = ["long whole", "nan long", "whole", "are are", "documents nan", "read whole"]


def test_rows_with_nan_have_errors_and_do_not_affect_others(new_bundle: Callable[..., Path]) -> None:
    with hdruntime.load(new_bundle(cpu_graph=True)) as session:
        encodings = session.tokenize(NAN_TEXTS)
        good = session.infer([encodings[row] for row in (0, 2, 3, 5)])
        expected = dict(zip((0, 2, 3, 5), good, strict=True))
        results = list(session.run_batches(encodings))
    assert [result.rows for result in results] == [[0, 1, 3, 4, 5], [2]]
    for result in results:
        for index, row in enumerate(result.rows):
            if row in expected:
                np.testing.assert_allclose(result.outputs[OUTPUT][index], expected[row][OUTPUT], atol=1e-6)
    (errors, none) = (result.errors for result in results)
    assert not none
    assert list(errors) == [1, 4]
    for error in errors.values():
        assert isinstance(error, NonFiniteOutputError)
        assert "last_hidden_state holds NaN or infinity.\n" in str(error)


@pytest.mark.parametrize("together", [1, 8, 2**18])
def test_no_value_that_is_not_finite_is_overlooked(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(scheduling, "_CHECKED_VALUES", together)
    for value, place in itertools.product((np.nan, np.inf, -np.inf), np.ndindex(3, 2, 2)):
        values = np.full((3, 2, 2), np.finfo(np.float32).max, np.float32)
        assert non_finite_rows({"a": values}) == {}
        values[place] = value
        assert non_finite_rows({"b": np.zeros((3, 1), np.float32), "a": values}) == {"a": [place[0]]}


# A session over it


Opener = Callable[[RecordingRunner], Session]


@pytest.fixture
def open_session(bundle_path: Path) -> Opener:
    return lambda runner: Session(open_bundle(bundle_path), runner)


@pytest.mark.parametrize(
    "options", [{"max_rows": lambda tokens: 3}, {"memory": 30}, {"memory": 30, "fails_late": True}]
)
def test_a_call_with_too_many_rows_is_cut_into_parts(open_session: Opener, options: dict) -> None:
    runner = RecordingRunner(**options)
    ids = np.arange(35).reshape(7, 5) % 9
    mask = np.ones_like(ids)
    mask[:, 3:] = np.arange(7)[:, np.newaxis] % 2
    session = open_session(runner)
    output = session(input_ids=ids, attention_mask=mask)[OUTPUT]
    np.testing.assert_array_equal(output, answer(ids) * mask[..., np.newaxis])
    assert len(runner.shapes) > 1
    assert 1 <= session.max_rows(5) < 7


def test_nan_in_a_part_is_named_by_the_callers_rows(open_session: Opener) -> None:
    ids = np.full((7, 5), 4)
    ids[[1, 5]] = NAN_ID
    with pytest.raises(NonFiniteOutputError, match=r"in rows 1, 5\."):
        open_session(RecordingRunner(max_rows=lambda tokens: 3))(input_ids=ids)


def test_a_row_without_memory_raises_from_a_call_and_from_infer(open_session: Opener) -> None:
    runner = RecordingRunner(memory=10)
    session = open_session(runner)
    with pytest.raises(OutOfMemoryError):
        session(input_ids=[[4] * 11])
    assert runner.shapes == [(1, 11)], "there is nothing smaller to try"
    with pytest.raises(OutOfMemoryError):
        session.infer([encoding(4, 4), encoding(*[4] * 11)])


def test_an_engine_for_fewer_tokens_limits_the_session(open_session: Opener) -> None:
    session = open_session(RecordingRunner(max_len=6))
    assert session.max_len == 6
    message = "has 7 tokens; this bundle accepts 1 to 6"
    with pytest.raises(InputError, match=message):
        session(input_ids=[[4] * 7])
    with pytest.raises(InputError, match=message):
        session.infer([encoding(*[4] * 7)])
    with pytest.raises(InputError, match=message):
        session.embed(["long " * 5])
    (cut,) = session.tokenize(["long " * 5], overflow="truncate")
    assert len(cut) == 6
    assert session.embed(["long " * 50], overflow="split").shape == (1, 4)


def test_a_session_closed_meanwhile_gives_no_row_an_error(open_session: Opener) -> None:
    runner = RecordingRunner(max_in_flight=2)
    session = open_session(runner)
    results = session.run_batches([encoding(4, 4)] * 8, batch_tokens=2)
    next(results)
    session.close()
    assert runner.is_closed
    with pytest.raises(BackendError, match="session is closed"):
        list(results)
    session.close()


def test_padding_that_a_cpu_never_computes_is_not_counted(bundle_path: Path) -> None:
    with hdruntime.load(bundle_path) as session:
        session.embed(["long", "whole documents are read", ""])
        assert session.padding == PaddingCount(tokens=11, padded_tokens=0)
        session(input_ids=[[4] * 4] * 3, attention_mask=[[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]])
        assert session.padding == PaddingCount(tokens=20, padded_tokens=1)


def test_a_cpu_that_reads_weights_from_memory_shares_a_run_among_short_texts(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[4] * tokens for tokens in (9, 7, 6, 1)]
    # The weights of a test's bundle stay in any cache.
    monkeypatch.setattr(cpu, "_CACHED_BYTES", -sys.maxsize)
    with hdruntime.load(bundle_path) as session:
        alone = [session.infer([encoding(*ids)])[0] for ids in texts]
        before = session.padding.tokens
        batches = list(session.run_batches([encoding(*ids) for ids in texts]))
        assert [batch.rows for batch in batches] == [[0, 1, 2, 3]]
        assert session.padding == PaddingCount(tokens=before + 23, padded_tokens=2 + 3 + 8)
        for row, expected in enumerate(alone):
            for name, values in batches[0].outputs.items():
                has_tokens = values.shape[1:] != expected[name].shape
                assert_close(values[row, : len(texts[row])] if has_tokens else values[row], expected[name], atol=1e-6)
        # More padding takes longer than another run, and so does an attention that keeps the scores of long rows.
        limit = cpu._READING_TOKENS
        assert [session._scheduler.runner.max_padding(tokens) for tokens in (limit, 128, 129)] == [limit, limit, 0]
        monkeypatch.setattr(cpu, "_READING_TOKENS", 4)
    with hdruntime.load(bundle_path) as session:
        assert [batch.rows for batch in session.run_batches([encoding(*ids) for ids in texts])] == [[0, 1], [2], [3]]


def test_rows_of_an_answer_with_little_padding_hold_zeros_there(
    new_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_CACHED_BYTES", -sys.maxsize)
    with hdruntime.load(new_bundle()) as session:
        mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
        for name, values in session(input_ids=[[4] * 4] * 2, attention_mask=mask).items():
            if values.shape[:2] == mask.shape:
                assert not values[1, 2:].any(), name
                assert values[1, :2].any(), name


def encoding(*ids: int) -> Encoding:
    return Encoding(list(ids), [0] * len(ids), [(0, 0)] * len(ids), [0] * len(ids))
