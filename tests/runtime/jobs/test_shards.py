"""Shards of rows: where they end, what runs together, whose fault an error is, texts in chunks, ids."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import hdruntime
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError, InputError
from hdruntime.jobs import JobOptions, plan_job, run_job, shards
from hdruntime.jobs.input_files import Cell
from hdruntime.jobs.options import RowOptions
from hdruntime.jobs.row_inference import LocalPool
from hdruntime.jobs.rows import Columns, Position, Row
from hdruntime.jobs.shards import split_into_shards
from hdruntime.tasks import text_inference
from hdruntime.tasks.of_bundle import task_of_bundle
from hdruntime.text.encoding import Overflow
from hdruntime.text.splitting import SplitPooling
from support.comparators import named_case
from support.job_runs import VOCABULARY, embeddings, gather_bundle, left_in, read, results, run, write_rows

BundleMaker = Callable[..., Path]


def spy_on_batches(session: hdruntime.Session, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shape of every batch that the session's backend is given from now on."""
    started: list[tuple[int, int]] = []
    start = OnnxRuntimeRunner.start

    def spy(runner: OnnxRuntimeRunner, inputs: dict, outputs: list) -> object:
        started.append(inputs["input_ids"].shape)
        return start(runner, inputs, outputs)

    monkeypatch.setattr(OnnxRuntimeRunner, "start", spy)
    return started


def rows_of(*texts: str) -> list[Row]:
    return [Row(id=number, text=text, end=Position(row=number + 1)) for number, text in enumerate(texts)]


SHARDS = [
    ([], []),
    ([0], [1]),
    ([10, 1], [1, 1]),
    ([3, 3, 3], [3]),
    ([3, 3, 4, 1], [3, 1]),
    ([1, 99, 1], [2, 1]),
    ([0] * 5000, [4096, 904]),
]


def test_a_shard_ends_with_the_row_that_fills_it() -> None:
    for sizes, shards_of in SHARDS:
        with named_case(sizes, shards_of):
            rows = rows_of(*("x" * size for size in sizes))
            found = list(split_into_shards(rows, characters=10))
            assert [len(shard.rows) for shard in found] == shards_of
            assert [row for shard in found for row in shard.rows] == rows
            assert [shard.end.row for shard in found] == list(itertools.accumulate(shards_of))


def test_a_shard_ends_with_the_row_whose_kept_columns_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MAX_BYTES", 100)
    for value in ("x" * 50, [0] * 50, [{"a": ["x" * 50]}], {"x" * 50: None}, Cell(pa.scalar(b"x" * 50))):
        rows = [msgspec.structs.replace(row, kept={"kept": value, "more": None}) for row in rows_of(*"abc")]
        assert [len(shard.rows) for shard in split_into_shards(rows, characters=10)] == [2, 1]


def test_shards_from_where_one_ended_are_the_same_ones() -> None:
    rows = rows_of(*("x" * (number % 7) for number in range(300)))
    every = list(split_into_shards(rows, characters=20))
    again = list(split_into_shards(rows[every[4].end.row :], characters=20))
    assert again == every[5:]


def batches_of(
    bundle: Path, rows: int, monkeypatch: pytest.MonkeyPatch, options: RowOptions | None = None
) -> list[tuple[int, int]]:
    """The shapes of the batches of so many rows of 3 tokens."""
    opened = open_bundle(bundle)
    inputs = write_rows(bundle.with_name("in.jsonl"), ["long"] * rows)
    job = plan_job(opened, [inputs], bundle.with_name("out.jsonl"))
    with hdruntime.load(opened) as session:
        started = spy_on_batches(session, monkeypatch)
        run_job(job, LocalPool(session, job.task, options=options))
    return started


@pytest.mark.parametrize(("rows_that_fit", "batches"), [(1, [1, 1, 1, 1]), (3, [3, 1])])
def test_batches_are_smaller_if_outputs_would_fill_the_memory(
    new_bundle: BundleMaker, monkeypatch: pytest.MonkeyPatch, rows_that_fit: int, batches: list[int]
) -> None:
    # A token has 100 outputs of 4 bytes, a row 3 tokens.
    monkeypatch.setattr(text_inference, "_OUTPUT_BYTES", 400 * 3 * rows_that_fit)
    bundle = gather_bundle(new_bundle(), "token-classification", {"logits": np.zeros((len(VOCABULARY), 100))})
    assert [rows for rows, _ in batches_of(bundle, 4, monkeypatch)] == batches


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        (RowOptions(), [(8, 3), (2, 3)]),
        (RowOptions(batch_size=4), [(4, 3), (4, 3), (2, 3)]),
        (RowOptions(batch_size=4, batch_tokens=7), [(2, 3)] * 5),
    ],
)
def test_batch_sizes_are_the_backends_default_or_an_option(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, options: RowOptions, batches: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(OnnxRuntimeRunner, "batch_tokens", 24)
    assert batches_of(bundle_path, 10, monkeypatch, options) == batches


@pytest.mark.parametrize(
    ("batch_tokens", "tokens_that_fit", "characters"),
    [
        (1, 2**23, 2**21),
        (2**15, 2**23, 2**22),
        (2**20, 2**23, 2**23),
        # A vector for each of 2**18 tokens has half of the memory for outputs; there is a least size all the same.
        (2**15, 2**19, 2**20),
        (2**15, 1, 2**17),
    ],
)
def test_shards_beside_a_gpu_follow_batches_as_far_as_answers_of_tokens_allow(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, batch_tokens: int, tokens_that_fit: int, characters: int
) -> None:
    monkeypatch.setattr(text_inference, "needs_gpu", lambda name: True)
    # A token has 4 outputs of 4 bytes.
    monkeypatch.setattr(text_inference, "_OUTPUT_BYTES", 16 * tokens_that_fit)
    opened = open_bundle(bundle_path)
    with hdruntime.load(opened) as session:
        pool = LocalPool(session, task_of_bundle(opened, RowOptions()), options=RowOptions(batch_tokens=batch_tokens))
        assert pool.shard_characters == characters


def bundle_with_ids(new_bundle: BundleMaker, ids: int) -> Path:
    """A bundle whose graph fails on ids from a number on, which the manifest allows."""
    return gather_bundle(new_bundle(), "feature-extraction", {"last_hidden_state": np.zeros((ids, 4))})


@pytest.mark.parametrize("shard_rows", [1, 4096])
def test_a_row_that_the_backend_fails_on_is_only_that_rows_error(
    new_bundle: BundleMaker, monkeypatch: pytest.MonkeyPatch, shard_rows: int
) -> None:
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", shard_rows)
    bundle = bundle_with_ids(new_bundle, len(VOCABULARY) - 1)
    # "." has the last id; with one row per shard, it is also alone in the last shard.
    for texts in (["long", ".", "read"], ["long", "."]):
        errors = [row["error"] for row in results(bundle, texts, force=True)]
        assert [error is None for error in errors] == [text != "." for text in texts]
        assert "ONNX Runtime failed" in errors[1]


def test_a_session_that_never_worked_stops_the_job(new_bundle: BundleMaker, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="ONNX Runtime failed"):
        results(bundle_with_ids(new_bundle, 2), ["long", "read"])
    assert left_in(tmp_path) == ["bundle", "in.jsonl"]


def test_padding_is_counted_where_a_backend_computes_it(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["long", "long documents are", "read"]
    rows = write_rows(tmp_path / "in.jsonl", list(texts))
    done = run(bundle_path, rows, tmp_path / "cpu.jsonl")
    assert (done.computed_tokens, done.padded_tokens, done.padding_waste) == (3 + 5 + 3, 0, 0)
    # As a GPU's backend has it.
    monkeypatch.setattr(OnnxRuntimeRunner, "max_padding", lambda runner, tokens: sys.maxsize)
    monkeypatch.setattr(OnnxRuntimeRunner, "computed_tokens", lambda runner, mask: mask.size)
    done = run(bundle_path, rows, tmp_path / "padded.jsonl")
    assert (done.computed_tokens, done.padded_tokens) == (3 + 5 + 3, 4)
    assert done.padding_waste == pytest.approx(4 / 15)


def test_a_long_text_is_run_in_chunks(bundle_path: Path, tmp_path: Path) -> None:
    texts = ["read whole", "long documents are read whole . " * 5, "", "nan " * 40]
    vectors = []
    for pooling in SplitPooling:
        output = tmp_path / f"{pooling.value}.jsonl"
        options = {"overflow": Overflow.SPLIT, "stride": 3, "split_pooling": pooling}
        done = run(bundle_path, write_rows(tmp_path / "in.jsonl", list(texts)), output, **options)
        rows = read(output)
        assert [row["tokens"] for row in rows] == [4, 32, 2, 42]
        with hdruntime.load(bundle_path) as session:
            expected = session.embed(texts[:3], overflow="split", stride=3, split_pooling=pooling)
        np.testing.assert_allclose(np.array([row["embedding"] for row in rows[:3]], np.float32), expected, atol=1e-6)
        assert "NaN" in str(rows[3]["error"])
        assert (done.failed_rows, done.errors) == (1, {"not_finite": 1})
        vectors.append(rows[1]["embedding"])
    assert vectors[0] != vectors[1]


IMPOSSIBLE = [
    (RowOptions(batch_tokens=0), "batch_tokens is 0; it must be 1 or more"),
    (RowOptions(batch_size=0), "batch_size is 0; it must be 1 or more"),
    (RowOptions(overflow=Overflow.SPLIT, stride=-1), "stride is -1; it must be 0 or more"),
    (RowOptions(stride=1), "stride is for texts that are split.\\nAdd overflow='split'"),
]


def test_options_that_no_session_can_follow_are_refused() -> None:
    for options, message in IMPOSSIBLE:
        with named_case(message), pytest.raises(InputError, match=message):
            options.check()


def run_ids(bundle: Path, tmp_path: Path, rows: list[object], **options: object) -> list[dict[str, object]]:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"ids": {row}}}\n' for row in rows))
    run(bundle, tmp_path / "in.jsonl", tmp_path / "out.jsonl", columns=Columns(input_ids="ids"), **options)
    return read(tmp_path / "out.jsonl")


def test_ids_give_what_their_text_gives_and_need_no_tokenizer(new_bundle: BundleMaker, tmp_path: Path) -> None:
    (expected,) = embeddings(new_bundle("with_tokenizer"), ["long documents"])
    (row,) = run_ids(new_bundle(tokenizer=False), tmp_path, [[2, 4, 5, 3]])
    np.testing.assert_allclose(np.array(row["embedding"], np.float32), expected, atol=1e-6)
    assert row["tokens"] == 4


IDS_THAT_DO_NOT_FIT = [
    (f"{[4] * 17}", "The text has 17 tokens; this bundle accepts 1 to 16."),
    ("[2, 11]", "input_ids[0, 1] is 11; the vocabulary has 11 ids, 0 to 10."),
    ("[2, 99999999999999999999999]", "input_ids"),
    ("[true]", "Column 'ids' holds bool at index 0; a list of integers is required."),
    ('"2"', "Column 'ids' holds str; a list of integers is required."),
]


def test_ids_that_do_not_fit_are_their_rows_error(new_bundle: BundleMaker, tmp_path: Path) -> None:
    before, *bad, after = run_ids(new_bundle(), tmp_path, [[2, 4, 3], *(ids for ids, _ in IDS_THAT_DO_NOT_FIT), [2, 3]])
    for row, (_, error) in zip(bad, IDS_THAT_DO_NOT_FIT, strict=True):
        assert str(row["error"]).startswith(error)
    assert (before["error"], after["error"]) == (None, None)


def test_too_many_ids_are_truncated_as_a_text_is_or_at_their_end(new_bundle: BundleMaker, tmp_path: Path) -> None:
    """The special tokens of a text stay; ids without them lose their end."""
    rows = [[2, *[4] * 20, 3], [2, *[4] * 14, 3], [2, *[4] * 20], [2, *[4] * 15]]
    text, truncated, others, start = run_ids(new_bundle(), tmp_path, rows, overflow=Overflow.TRUNCATE)
    assert text["tokens"] == others["tokens"] == 16
    assert text["embedding"] == truncated["embedding"]
    assert others["embedding"] == start["embedding"] != text["embedding"]


def test_ids_and_splitting_are_refused_for_tasks_without_them(new_bundle: BundleMaker, tmp_path: Path) -> None:
    columns = Columns(input_ids="ids")
    logits = {"logits": np.zeros((len(VOCABULARY), len(VOCABULARY)))}
    entities = gather_bundle(new_bundle("ner"), "token-classification", logits)
    masks = gather_bundle(new_bundle("mlm"), "fill-mask", logits, mask_token_id=4)
    for bundle, options, message in [
        (entities, JobOptions(columns=columns), "whose results are places in a text"),
        (new_bundle(), JobOptions(columns=columns, overflow=Overflow.SPLIT), "Rows of ids are not split"),
        (new_bundle(), JobOptions(columns=Columns(input_ids="ids", text_pair="b")), "texts or ids, not both"),
        (masks, JobOptions(overflow=Overflow.SPLIT), "is fill-mask, whose texts are not split"),
    ]:
        with pytest.raises(InputError, match=message):
            plan_job(
                open_bundle(bundle), [write_rows(tmp_path / "in.jsonl", ["x"])], tmp_path / "o.jsonl", options=options
            )
