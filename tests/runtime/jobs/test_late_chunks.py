"""Late chunking in a job: a row per chunk, in every format, whatever stops it; and what contradicts it."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import hdruntime
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError
from hdruntime.jobs import JobOptions, VectorOptions, plan_job, writers
from hdruntime.jobs.options import RowOptions
from hdruntime.jobs.results import KeptResults
from hdruntime.jobs.rows import Columns
from hdruntime.ray.mapper import BundleMapper
from hdruntime.tasks import text_inference
from hdruntime.text.chunking import TextChunks
from hdruntime.text.embeddings import EmbeddingPrecision, normalized
from hdruntime.text.encoding import Overflow
from hdruntime.text.splitting import SplitPooling
from support.comparators import named_case
from support.job_runs import VOCABULARY, content_of, gather_bundle, random_texts, read, run, stop_at, write_rows

BundleMaker = Callable[..., Path]

TEXTS = [
    "Long documents are read. Whole",
    "read",
    "long documents are read whole . " * 9,
    "  ",
    "nan . read",
    "Read. Are.",
]
KEYS = ["a", "b", "long", "blank", "bad", "c"]
SPANS: list[Any] = [[[0, 4], [18, 30], [0, 30]], [[0, 4]], [[100, 164]], [], [[6, 10]], [[0, 99]]]
ERRORS = {
    "blank": "The text has no chunk: it has no token, or an empty list of chunks.\nLeave it out.",
    "bad": "The output last_hidden_state holds NaN or infinity.",
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = zip(KEYS, TEXTS, SPANS, strict=True)
    path.write_text("".join(json.dumps({"id": k, "text": t, "spans": s, "lang": "en"}) + "\n" for k, t, s in lines))
    return path


def expected(bundle: Path, chunks: Any, *, keys: list[str], **options: object) -> dict[str, TextChunks]:
    """What a session gives for the good texts."""
    texts = [TEXTS[KEYS.index(key)] for key in keys]
    with hdruntime.load(bundle) as session:
        return dict(zip(keys, session.embed_chunks(texts, chunks=chunks, **options), strict=True))  # type: ignore[call-overload]


def assert_rows(found: list[dict[str, Any]], wanted: dict[str, TextChunks]) -> None:
    rows = [
        (key, chunk, start, end, tokens)
        for key, chunks in wanted.items()
        for chunk, (start, end, tokens) in enumerate(zip(chunks.starts, chunks.ends, chunks.tokens, strict=True))
    ]
    names = ("id", "chunk", "start", "end", "tokens")
    assert [tuple(row[name] for name in names) for row in found] == rows
    vectors = np.concatenate([chunks.vectors for chunks in wanted.values()])
    np.testing.assert_allclose(np.array([row["embedding"] for row in found], np.float32), vectors, atol=1e-6)


@pytest.mark.parametrize(
    ("ending", "rule", "options"),
    [
        (".jsonl", "sentences", {}),
        (".parquet", "tokens:3", {"overlap": 0}),
        (".parquet", "tokens:20", {"overlap": 9, "prompt": "are "}),
    ],
)
def test_every_chunk_is_a_row_with_its_document(
    bundle_path: Path, rows: Path, tmp_path: Path, ending: str, rule: str, options: dict[str, Any]
) -> None:
    output = tmp_path / f"out{ending}"
    done = run(bundle_path, rows, output, late_chunking=rule, columns=Columns(keep=("lang",)), **options)
    found = read(output)
    assert list(found[0]) == ["id", "lang", "chunk", "start", "end", "embedding", "tokens", "error"]
    failed = {row["id"]: row for row in found if row["error"] is not None}
    assert {key: row["error"][: len(ERRORS[key])] for key, row in failed.items()} == ERRORS
    for row in failed.values():
        assert [row[name] for name in ("chunk", "start", "end", "embedding", "tokens")] == [None] * 5
    assert {row["lang"] for row in found} == {"en"}
    keys = ["a", "b", "long", "c"]
    assert_rows([row for row in found if row["error"] is None], expected(bundle_path, rule, keys=keys, **options))
    assert [key for number, key in enumerate(row["id"] for row in found) if key != found[number - 1]["id"]] == KEYS
    assert (done.rows, done.failed_rows, done.errors) == (6, 2, {"input": 1, "not_finite": 1})
    if ending == ".parquet":
        schema = pa.parquet.read_schema(output)
        kinds = {name: schema.field(name).type for name in ("chunk", "start", "end", "tokens", "embedding")}
        assert kinds == dict.fromkeys(["chunk", "start", "end", "tokens"], pa.int32()) | {
            "embedding": pa.list_(pa.field("element", pa.float32()))
        }
        assert schema.metadata[b"hdexport.late_chunking"] == rule.encode()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "parquet of fixed pairs"])
def test_chunks_of_a_column(bundle_path: Path, rows: Path, tmp_path: Path, kind: str) -> None:
    if kind != "jsonl":
        pairs = pa.list_(pa.list_(pa.int32(), 2)) if kind.endswith("pairs") else pa.large_list(pa.list_(pa.int64()))
        table = pa.table({"id": KEYS, "text": TEXTS, "spans": pa.array(SPANS, pairs)})
        rows = tmp_path / "in.parquet"
        pa.parquet.write_table(table, rows)
    done = run(bundle_path, rows, tmp_path / "out.jsonl", late_chunking="spans")
    found = read(tmp_path / "out.jsonl")
    errors = {row["id"]: row["error"] for row in found if row["error"]}
    assert errors == {
        "blank": ERRORS["blank"],
        "bad": errors["bad"],
        "c": "Chunk 0 is [0, 99]; the text has 10 characters.\n"
        "Give 0 <= start < end <= 10, the end exclusive; characters are counted, not bytes.",
    }
    assert errors["bad"].startswith(ERRORS["bad"])
    keys = ["a", "b", "long"]
    assert_rows([row for row in found if not row["error"]], expected(bundle_path, SPANS[:3], keys=keys))
    assert (done.failed_rows, done.errors) == (3, {"input": 2, "not_finite": 1})


BAD_CHUNKS = [
    ("null", "column", "Column 'spans' is null; a list of [start, end] is required."),
    ('"0-4"', "column", "Column 'spans' holds str; a list of [start, end] is required."),
    ('[{"start": 0, "end": 4}]', "input", "Chunk 0 is {'start': 0, 'end': 4}; it must be a pair"),
]


def test_bad_chunks_are_their_rows_error(bundle_path: Path, tmp_path: Path) -> None:
    spans = ["[[0, 4]]", *(each for each, _, _ in BAD_CHUNKS), "[[5, 14]]"]
    lines = [f'{{"text": "long documents", "spans": {each}}}' for each in spans]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, '{"text": "read"}']))
    done = run(bundle_path, tmp_path / "in.jsonl", tmp_path / "out.jsonl", late_chunking="spans")
    good, *bad, after, missing = read(tmp_path / "out.jsonl")
    for row, (_, _, error) in zip(bad, BAD_CHUNKS, strict=True):
        assert row["error"].startswith(error)
    assert missing["error"] == "The row has no column 'spans'; it has 'text'."
    assert [good["error"], after["error"], good["embedding"] is None] == [None, None, False]
    assert done.errors == Counter(kind for _, kind, _ in BAD_CHUNKS) + Counter(["column"])


def test_chunks_are_made_smaller_and_failed_rows_left_out(bundle_path: Path, rows: Path, tmp_path: Path) -> None:
    options = VectorOptions(truncate_dim=3, normalize=True, output_dtype=EmbeddingPrecision.FLOAT16)
    run(bundle_path, rows, tmp_path / "out.npz", late_chunking="sentences", vectors=options, skip_failed=True)
    wanted = expected(bundle_path, "sentences", keys=["a", "b", "long", "c"])
    arrays = np.load(tmp_path / "out.npz")
    assert set(arrays) == {"chunk", "start", "end", "embedding", "id", "tokens", "failed", "metadata"}
    assert arrays["id"].tolist() == [key for key, chunks in wanted.items() for _ in range(len(chunks))]
    for name, values in (("start", "starts"), ("end", "ends"), ("tokens", "tokens")):
        assert arrays[name].tolist() == np.concatenate([getattr(each, values) for each in wanted.values()]).tolist()
    assert arrays["chunk"].tolist() == [chunk for chunks in wanted.values() for chunk in range(len(chunks))]
    vectors = normalized(np.concatenate([each.vectors for each in wanted.values()])[:, :3])
    assert arrays["embedding"].dtype == np.float16
    np.testing.assert_allclose(arrays["embedding"], vectors, atol=1e-3)


def test_a_chunk_that_float16_cannot_hold_fails_and_its_document_counts_once(
    new_bundle: BundleMaker, tmp_path: Path
) -> None:
    table = np.ones((len(VOCABULARY), 4))
    table[VOCABULARY.index("long")] = 1e6
    bundle = gather_bundle(new_bundle(), "feature-extraction", {"last_hidden_state": table})
    inputs = write_rows(tmp_path / "in.jsonl", ["read long read long read", "read", "long"])
    vectors = VectorOptions(output_dtype=EmbeddingPrecision.FLOAT16)
    done = run(bundle, inputs, tmp_path / "out.jsonl", vectors=vectors, late_chunking="tokens:1")
    found = read(tmp_path / "out.jsonl")
    assert [row["embedding"] is None for row in found] == [False, True, False, True, False, False, True]
    assert [row["chunk"] for row in found] == [0, 1, 2, 3, 4, 0, 0]
    assert (done.rows, done.failed_rows, done.errors) == (3, 2, {"input": 2})


@pytest.mark.parametrize("ending", [".jsonl", ".npz"])
def test_a_stopped_job_continues_and_writes_the_same_bytes(
    bundle_path: Path, tmp_path: Path, small_shards: None, ending: str
) -> None:
    texts = [*random_texts(12), "nan", " ", "long documents are read . " * 20, *random_texts(12)]
    inputs = write_rows(tmp_path / "in.jsonl", texts)
    options = {"late_chunking": "tokens:4", "vectors": VectorOptions(output_dtype=EmbeddingPrecision.INT8)}
    options |= {"skip_failed": True}
    run(bundle_path, inputs, tmp_path / f"whole{ending}", **options)
    output = tmp_path / f"out{ending}"
    for rows in (10, 20):
        with pytest.raises(KeyboardInterrupt):
            run(bundle_path, inputs, output, on_progress=stop_at(rows), **options)
    for other, what in (
        ({"late_chunking": "tokens:5"}, "late_chunking was tokens:4, and is tokens:5"),
        ({"overlap": 1}, "overlap was None, and is 1"),
        ({"late_chunking": None}, "late_chunking was tokens:4, and is None"),
    ):
        with pytest.raises(InputError, match=rf"an unfinished job with 20 rows .*: {what}\.\n"):
            run(bundle_path, inputs, output, **options | other)
    done = run(bundle_path, inputs, output, **options)
    assert (done.rows, done.resumed_rows) == (27, 20)
    assert output.read_bytes() == (tmp_path / f"whole{ending}").read_bytes()


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", "", ".npz"])
def test_chunks_that_repeat_a_long_kept_column_are_written_in_pieces(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    kept = () if ending == ".npz" else ("page",)
    page = {"html": "x" * 1000}
    texts = ["read whole . " * 5, "read", "long documents are read . " * 4]
    names = ["x" * 1000 + key for key in "abc"] if ending == ".npz" else ["a", "b", "c"]
    lines = [json.dumps({"id": name, "text": text, "page": page}) for name, text in zip(names, texts, strict=True)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = {"late_chunking": "tokens:1", "columns": Columns(keep=kept)}
    run(bundle_path, tmp_path / "in.jsonl", tmp_path / f"whole{ending}", **options)

    monkeypatch.setattr(writers, "_BLOCK_BYTES", 3000)
    sizes: list[int] = []
    append = KeptResults.append

    def interrupted_once(folder: KeptResults, data: bytes) -> None:
        append(folder, data)
        sizes.append(len(data))
        if len(sizes) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(KeptResults, "append", interrupted_once)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            run(bundle_path, tmp_path / "in.jsonl", tmp_path / f"out{ending}", **options)
    # 36 chunks, three of them in a piece.
    assert len(sizes) > 12
    assert max(sizes) < 6000
    whole, out = tmp_path / f"whole{ending}", tmp_path / f"out{ending}"
    if ending in (".parquet", ""):
        # Row groups may differ.
        assert pa.parquet.read_table(out).equals(pa.parquet.read_table(whole))
    else:
        assert content_of(out) == content_of(whole)


@pytest.mark.parametrize(("shard_rows", "batch_tokens"), [(1, None), (4096, 1)])
def test_shards_and_batches_do_not_change_chunks(
    bundle_path: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shard_rows: int,
    batch_tokens: int | None,
) -> None:
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", shard_rows)
    run(
        bundle_path, rows, tmp_path / "out.jsonl", late_chunking="tokens:5", skip_failed=True, batch_tokens=batch_tokens
    )
    assert_rows(read(tmp_path / "out.jsonl"), expected(bundle_path, "tokens:5", keys=["a", "b", "long", "c"]))


def refused(bundle: Path, rows: Path, output: str = "out.jsonl", **options: Any) -> str:
    given = {"late_chunking": "sentences"} | options
    with pytest.raises(InputError) as raised:
        plan_job(open_bundle(bundle), [rows], rows.with_name(output), options=JobOptions(**given))
    assert not list(rows.parent.glob("out*"))
    return str(raised.value)


CONTRADICTIONS = [
    (
        {"overflow": Overflow.SPLIT},
        "overflow='split' and late_chunking contradict each other: late chunking reads lo",
    ),
    ({"late_chunking": None, "overlap": 3}, "overlap is for late chunking.\nAdd late_chunking='tokens:256', or"),
    ({"overlap": -1}, "overlap is -1; it must be 0 or more."),
    ({"overlap": 16}, "overlap=16 leaves no new token for a macro chunk, which has 16 tokens.\nUse fewer, or"),
    ({"columns": Columns(text_pair="id")}, "late_chunking reads one text per row.\nLeave out text_pair"),
    ({"columns": Columns(input_ids="spans")}, "late_chunking needs texts, not ids: a chunk has characters.\nLea"),
    ({"late_chunking": ""}, "late_chunking is empty.\nGive tokens:256, sentences, or the name of a column."),
]


def test_what_contradicts_late_chunking_is_refused(bundle_path: Path, rows: Path, new_bundle: BundleMaker) -> None:
    for options, message in CONTRADICTIONS:
        with named_case(message):
            assert refused(bundle_path, rows, **options).startswith(message)
    assert f"{rows} has no column 'sentence'; its columns are id, text" in refused(
        bundle_path, rows, late_chunking="sentence"
    )
    npy = refused(bundle_path, rows, "out.npy")
    assert npy.startswith("A .npy file holds vectors alone, and with late_chunking nothing would tell which text each")
    table = rows.with_name("in.parquet")
    pa.parquet.write_table(pa.table({"text": ["a"], "spans": ["0-1"], "end": [1]}), table)
    assert f"Column 'spans' of {table} holds string, not lists of [" in refused(
        bundle_path, table, late_chunking="spans"
    )
    assert "names of result columns: end." in refused(bundle_path, table, columns=Columns(keep=("end",)))
    unknown = new_bundle("unknown", task="sentence-similarity")
    assert "does not state how it pools tokens" in refused(unknown, rows)


def test_options_of_split_texts_stay_those_of_split_texts() -> None:
    with pytest.raises(InputError, match=r"stride is for texts that are split"):
        JobOptions(late_chunking="sentences", stride=3, split_pooling=SplitPooling.MEAN).check()
    with pytest.raises(
        InputError, match=r"^BundleMapper adds columns to rows, and late chunking makes several rows of one"
    ):
        BundleMapper("none", options=RowOptions(late_chunking="sentences"))
