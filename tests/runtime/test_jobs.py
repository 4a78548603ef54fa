"""Batch jobs on real files and real ONNX Runtime sessions."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet
import pytest
from onnx import TensorProto, helper, numpy_helper

import hdruntime
from hdruntime import windows
from hdruntime.bundle import TensorSpec, open_bundle, seal
from hdruntime.errors import BackendError, InputError, OutputExistsError
from hdruntime.jobs import JobOptions, JobProgress, plan_job, run_job
from hdruntime.rows import Columns
from hdruntime.tokenization import Overflow

BundleMaker = Callable[..., Path]
WORDS = ("long", "documents", "are", "read", "whole", ".")
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "long", "documents", "are", "read", "whole", "nan", ".")
"""Of the tiny bundles, in the order of the ids."""

MAX_WORDS = 14
"""The tiny bundles accept 16 tokens, of which two are special."""


def run(bundle: Path, inputs: Path, output: Path, **options: object) -> JobProgress:
    opened = open_bundle(bundle)
    job = plan_job(opened, [inputs], output, options=JobOptions(**options))  # type: ignore[arg-type]
    with hdruntime.load(opened) as session:
        return run_job(job, session)


def write_rows(path: Path, texts: list[object]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read(path: Path) -> list[dict[str, object]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, object]] = pa.parquet.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text().splitlines()]


def random_texts(count: int) -> list[str]:
    chosen = random.Random(count)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(0, MAX_WORDS))) for _ in range(count)]


def embeddings(bundle: Path, texts: list[str]) -> np.ndarray:
    """One text at a time, so that nothing of batching is in the expected values."""
    with hdruntime.load(bundle) as session:
        return np.concatenate([session.embed([text]) for text in texts])


def gather_bundle(
    bundle: Path,
    task: str,
    tables: dict[str, np.ndarray],
    *,
    labels: tuple[str, ...] = (),
    config: dict[str, object] | None = None,
    mask_token_id: int | None = None,
) -> Path:
    """Turn a tiny bundle into one whose outputs are rows of tables, looked up by token id.

    A table of shape [ids] gives an output [batch, tokens], one of [ids, n] gives [batch, tokens, n]; for
    text-classification the output is the row of the second token, the text's first.
    """
    of_second_token = task == "text-classification"
    nodes = []
    outputs = []
    constants = [numpy_helper.from_array(np.array(1), "second")]
    for name, table in tables.items():
        shape = ["batch", *table.shape[1:]] if of_second_token else ["batch", "tokens", *table.shape[1:]]
        looked_up = f"{name}_of_tokens" if of_second_token else name
        constants.append(numpy_helper.from_array(table.astype(np.float32), f"{name}_table"))
        nodes.append(helper.make_node("Gather", [f"{name}_table", "input_ids"], [looked_up]))
        if of_second_token:
            nodes.append(helper.make_node("Gather", [looked_up, "second"], [name], axis=1))
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"])
        for name in ("input_ids", "attention_mask")
    ]
    graph = helper.make_graph(nodes, "gather", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    manifest = open_bundle(bundle).manifest
    assert manifest.tokenizer is not None
    onnx.save(model, bundle / "model.onnx")
    (bundle / "config.json").write_text(json.dumps(config or {}))
    specs = [
        TensorSpec(
            name=output.name,
            dtype="float32",
            shape=tuple(size.dim_param or size.dim_value for size in output.type.tensor_type.shape.dim),
        )
        for output in outputs
    ]
    changed = dataclasses.replace(
        manifest,
        task=task,
        outputs=tuple(specs),
        labels=labels,
        tokenizer=dataclasses.replace(manifest.tokenizer, mask_token_id=mask_token_id),
    )
    seal(bundle, changed)
    return bundle


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize("window_rows", [1, 64, 4096])
@pytest.mark.parametrize("max_batch_tokens", [1, 40, 16384, None])
def test_every_row_gets_its_own_embedding_in_order(
    bundle_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    window_rows: int,
    max_batch_tokens: int | None,
) -> None:
    monkeypatch.setattr(windows, "_WINDOW_ROWS", window_rows)
    texts = random_texts(200)
    inputs = write_rows(tmp_path / "in.jsonl", list(texts))
    done = run(bundle_path, inputs, tmp_path / f"out{ending}", max_batch_tokens=max_batch_tokens)
    rows = read(tmp_path / f"out{ending}")
    assert [row["id"] for row in rows] == list(range(200))
    assert [row["error"] for row in rows] == [None] * 200
    assert [row["tokens"] for row in rows] == [len(text.split()) + 2 for text in texts]
    np.testing.assert_allclose(
        np.array([row["embedding"] for row in rows], np.float32), embeddings(bundle_path, texts), atol=1e-6
    )
    assert (done.rows, done.failed_rows) == (200, 0)
    assert done.tokens == sum(len(text.split()) + 2 for text in texts)


BAD_ROWS: dict[str, tuple[object, str]] = {
    "null": (None, "Column 'text' is null"),
    "a number": (7, "Column 'text' holds int"),
    "too long": ("long " * 15, "has 17 tokens; this bundle accepts 1 to 16"),
    "not finite": ("read nan", "NaN"),
}


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_has_its_error_and_its_neighbours_their_values(
    bundle_path: Path, tmp_path: Path, name: str, ending: str
) -> None:
    bad, error = BAD_ROWS[name]
    # Of the bad row's length too, so that it shares a batch with good ones.
    inputs = write_rows(tmp_path / "in.jsonl", ["read whole", bad, "", "long documents"])
    done = run(bundle_path, inputs, tmp_path / f"out{ending}")
    rows = read(tmp_path / f"out{ending}")
    assert error in str(rows[1]["error"])
    assert rows[1]["embedding"] is None
    good = [rows[0], rows[2], rows[3]]
    assert [row["error"] for row in good] == [None] * 3
    np.testing.assert_allclose(
        np.array([row["embedding"] for row in good]),
        embeddings(bundle_path, ["read whole", "", "long documents"]),
        atol=1e-6,
    )
    assert (done.rows, done.failed_rows, done.tokens) == (4, 1, 4 + 2 + 4)
    assert done.first_error is not None
    assert done.first_error.startswith("row 1: ")


def test_a_job_of_nothing_but_bad_rows_is_done(bundle_path: Path, tmp_path: Path) -> None:
    inputs = write_rows(tmp_path / "in.jsonl", ["nan", None, "nan nan"])
    assert run(bundle_path, inputs, tmp_path / "out.jsonl").failed_rows == 3
    assert all(row["error"] for row in read(tmp_path / "out.jsonl"))


def test_a_text_that_is_too_long_is_cut_when_asked(bundle_path: Path, tmp_path: Path) -> None:
    inputs = write_rows(tmp_path / "in.jsonl", ["long " * 15, "long " * MAX_WORDS])
    run(bundle_path, inputs, tmp_path / "out.jsonl", overflow=Overflow.TRUNCATE)
    cut, whole = read(tmp_path / "out.jsonl")
    assert cut["tokens"] == 16
    assert cut["embedding"] == whole["embedding"]


def test_jsonl_embeddings_read_back_as_the_same_float32(new_bundle: BundleMaker, tmp_path: Path) -> None:
    bundle = new_bundle(task="sentence-similarity")
    inputs = write_rows(tmp_path / "in.jsonl", ["long documents"])
    run(bundle, inputs, tmp_path / "out.jsonl")
    (row,) = read(tmp_path / "out.jsonl")
    assert np.array(row["embedding"], np.float32).tobytes() == embeddings(bundle, ["long documents"]).tobytes()


def test_parquet_embeddings_are_fixed_size_lists_of_float32(bundle_path: Path, tmp_path: Path) -> None:
    run(bundle_path, write_rows(tmp_path / "in.jsonl", ["long"]), tmp_path / "out.parquet")
    schema = pa.parquet.read_schema(tmp_path / "out.parquet")
    assert schema.names == ["id", "embedding", "tokens", "error"]
    assert schema.field("embedding").type == pa.list_(pa.float32(), 4)
    assert schema.field("id").type == pa.int64()


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_ids_are_passed_through(bundle_path: Path, tmp_path: Path, ending: str) -> None:
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"key": "b", "text": "long"}\n{"key": 12345678901234567890123, "text": "read"}\n{"text": "."}')
    run(bundle_path, inputs, tmp_path / f"out{ending}", columns=Columns(id="key"))
    ids = [row["id"] for row in read(tmp_path / f"out{ending}")]
    # One Parquet column cannot hold strings and integers.
    large: object = 12345678901234567890123
    assert ids == ["b", str(large) if ending == ".parquet" else large, None]


def test_integer_ids_of_parquet_stay_integers(bundle_path: Path, tmp_path: Path) -> None:
    table = pa.table({"key": pa.array([7, 5], pa.int32()), "text": ["long", "read"]})
    pa.parquet.write_table(table, tmp_path / "in.parquet")
    run(bundle_path, tmp_path / "in.parquet", tmp_path / "out.parquet", columns=Columns(id="key"))
    assert pa.parquet.read_table(tmp_path / "out.parquet").column("id").to_pylist() == [7, 5]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_class_has_its_label_and_every_score(new_bundle: BundleMaker, tmp_path: Path, ending: str) -> None:
    logits = np.zeros((len(VOCABULARY), 2))
    logits[VOCABULARY.index("long")] = [0, np.log(3)]
    bundle = gather_bundle(new_bundle(), "text-classification", {"logits": logits}, labels=("no", "yes"))
    run(bundle, write_rows(tmp_path / "in.jsonl", ["long", None]), tmp_path / f"out{ending}")
    row, failed = read(tmp_path / f"out{ending}")
    assert list(row) == ["id", "label", "score", "scores", "tokens", "error"]
    assert row["label"] == "yes"
    assert row["score"] == pytest.approx(0.75, rel=1e-6)
    assert row["scores"] == pytest.approx({"no": 0.25, "yes": 0.75}, rel=1e-6)
    assert (failed["label"], failed["scores"]) == (None, None)


@pytest.mark.parametrize(
    ("config", "classes", "scores"),
    [
        ({}, 2, [0.25, 0.75]),
        ({"problem_type": "multi_label_classification"}, 2, [0.5, 0.75]),
        ({"problem_type": "regression"}, 2, [0.0, np.log(3)]),
        ({}, 1, [0.5]),
    ],
)
def test_scores_follow_the_problem_type_of_the_checkpoint(
    new_bundle: BundleMaker, tmp_path: Path, config: dict[str, object], classes: int, scores: list[float]
) -> None:
    logits = np.tile([0, np.log(3)], (len(VOCABULARY), 1))[:, :classes]
    bundle = gather_bundle(new_bundle(), "text-classification", {"logits": logits}, config=config)
    run(bundle, write_rows(tmp_path / "in.jsonl", ["long"]), tmp_path / "out.jsonl")
    (row,) = read(tmp_path / "out.jsonl")
    # Classes without a name have the one that transformers gives them.
    expected = {f"LABEL_{index}": score for index, score in enumerate(scores)}
    assert row["scores"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_entities_are_listed_with_their_characters(new_bundle: BundleMaker, tmp_path: Path, ending: str) -> None:
    logits = np.tile([9.0, 0.0], (len(VOCABULARY), 1))
    logits[VOCABULARY.index("documents")] = [0, np.log(3)]
    bundle = gather_bundle(new_bundle(), "token-classification", {"logits": logits}, labels=("O", "THING"))
    run(bundle, write_rows(tmp_path / "in.jsonl", ["Long Documents", "", None]), tmp_path / f"out{ending}")
    one, none, failed = read(tmp_path / f"out{ending}")
    (entity,) = one["entities"]  # type: ignore[misc]
    assert {**entity, "score": pytest.approx(entity["score"])} == {
        "start": 5,
        "end": 14,
        "text": "Documents",
        "label": "THING",
        "score": 0.75,
    }
    assert none["entities"] == []
    assert failed["entities"] is None


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_questions_are_answered_from_their_context(new_bundle: BundleMaker, tmp_path: Path, ending: str) -> None:
    start, end = np.zeros(len(VOCABULARY)), np.zeros(len(VOCABULARY))
    start[VOCABULARY.index("documents")] = end[VOCABULARY.index("read")] = 9
    bundle = gather_bundle(new_bundle(), "question-answering", {"start_logits": start, "end_logits": end})
    rows = [
        {"q": "documents read long?", "c": "Long documents are read whole."},
        {"q": "long", "c": ""},
        {"q": " ", "c": "documents"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = Columns(text="q", text_pair="c")
    run(bundle, tmp_path / "in.jsonl", tmp_path / f"out{ending}", columns=columns)
    found, empty, asked_nothing = read(tmp_path / f"out{ending}")
    assert (found["answer"], found["start"], found["end"]) == ("documents are read", 5, 23)
    assert (empty["answer"], empty["score"], empty["error"]) == ("", 0, None)
    assert asked_nothing["error"] == "The question has no tokens."


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_masks_are_filled(new_bundle: BundleMaker, tmp_path: Path, ending: str) -> None:
    mask = VOCABULARY.index("whole")
    logits = np.zeros((len(VOCABULARY), len(VOCABULARY)))
    logits[mask, VOCABULARY.index("read")] = 9
    bundle = gather_bundle(new_bundle(), "fill-mask", {"logits": logits}, mask_token_id=mask)
    run(bundle, write_rows(tmp_path / "in.jsonl", ["long whole whole", "long"]), tmp_path / f"out{ending}")
    two, none = read(tmp_path / f"out{ending}")
    masks: list[list[dict[str, object]]] = two["masks"]  # type: ignore[assignment]
    assert [len(mask) for mask in masks] == [5, 5]
    assert [mask[0]["token"] for mask in masks] == ["read", "read"]
    assert "The text has no mask to fill.\nWrite whole where a word is wanted." in str(none["error"])


@pytest.mark.parametrize(("rows_that_fit", "batches"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_batches_are_smaller_where_outputs_would_fill_the_memory(
    new_bundle: BundleMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows_that_fit: int,
    batches: int,
) -> None:
    # A token has 100 outputs of 4 bytes, a row 3 tokens.
    monkeypatch.setattr(windows, "_OUTPUT_BYTES", 400 * 3 * rows_that_fit)
    wide = {"logits": np.zeros((len(VOCABULARY), 100))}
    opened = open_bundle(gather_bundle(new_bundle(), "token-classification", wide))
    job = plan_job(opened, [write_rows(tmp_path / "in.jsonl", ["long"] * 4)], tmp_path / "out.jsonl")
    seen = []
    with hdruntime.load(opened) as session:
        run_job(job, session, on_progress=lambda progress: seen.append(progress.rows))
    assert len(set(seen) - {0}) == batches


@pytest.mark.parametrize(("asked", "used"), [(None, 24), (7, 7)])
def test_batches_are_of_what_suits_the_backend_unless_asked_for(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, used: int
) -> None:
    from hdruntime.backends.onnxruntime import OnnxRuntimeRunner

    monkeypatch.setattr(OnnxRuntimeRunner, "batch_tokens", 24)
    sizes = []
    infer = hdruntime.Session.infer

    def spy(session: hdruntime.Session, encodings: list, *, batch_tokens: int | None = None, **options: Any) -> Any:
        sizes.append(batch_tokens)
        return infer(session, encodings, batch_tokens=batch_tokens, **options)

    monkeypatch.setattr(hdruntime.Session, "infer", spy)
    rows = write_rows(tmp_path / "in.jsonl", ["long"] * 5)
    run(bundle_path, rows, tmp_path / "out.jsonl", max_batch_tokens=asked)
    assert set(sizes) == {used}


def test_a_row_that_the_backend_fails_on_is_only_that_rows_error(new_bundle: BundleMaker, tmp_path: Path) -> None:
    # The last word has an id that the manifest allows and the graph's table does not have.
    table = np.zeros((len(VOCABULARY) - 1, 4))
    bundle = gather_bundle(new_bundle(), "feature-extraction", {"last_hidden_state": table})
    run(bundle, write_rows(tmp_path / "in.jsonl", ["long", ".", "read"]), tmp_path / "out.jsonl")
    errors = [row["error"] for row in read(tmp_path / "out.jsonl")]
    assert [error is None for error in errors] == [True, False, True]
    assert "ONNX Runtime failed" in str(errors[1])


def test_a_last_window_of_rows_that_the_backend_fails_on_does_not_stop_the_job(
    new_bundle: BundleMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "_CHUNK_ROWS", 1)
    monkeypatch.setattr(windows, "_WINDOW_ROWS", 1)
    table = np.zeros((len(VOCABULARY) - 1, 4))
    bundle = gather_bundle(new_bundle(), "feature-extraction", {"last_hidden_state": table})
    assert run(bundle, write_rows(tmp_path / "in.jsonl", ["long", "."]), tmp_path / "out.jsonl").failed_rows == 1


def test_a_session_that_never_worked_stops_the_job(new_bundle: BundleMaker, tmp_path: Path) -> None:
    table = np.zeros((2, 4))
    bundle = gather_bundle(new_bundle(), "feature-extraction", {"last_hidden_state": table})
    with pytest.raises(BackendError, match="ONNX Runtime failed"):
        run(bundle, write_rows(tmp_path / "in.jsonl", ["long", "read"]), tmp_path / "out.jsonl")
    assert left_in(tmp_path) == ["bundle", "in.jsonl"]


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_session_that_breaks_stops_the_job_and_keeps_the_old_output(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "_CHUNK_ROWS", 1)
    monkeypatch.setattr(windows, "_WINDOW_ROWS", 1)
    opened = open_bundle(bundle_path)
    inputs = write_rows(tmp_path / "in.jsonl", ["long", "read"])
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    job = plan_job(opened, [inputs], output, options=JobOptions(force=True))
    session = hdruntime.load(opened)

    def close_after_a_row(progress: JobProgress) -> None:
        if progress.rows:
            session.close()

    with pytest.raises(BackendError, match="session is closed"):
        run_job(job, session, on_progress=close_after_a_row)
    assert output.read_text() == "old"
    assert left_in(tmp_path) == ["bundle", "in.jsonl", "out.jsonl"]


def test_an_interrupted_job_leaves_nothing(bundle_path: Path, tmp_path: Path) -> None:
    opened = open_bundle(bundle_path)
    inputs = write_rows(tmp_path / "in.jsonl", ["long"])
    job = plan_job(opened, [inputs], tmp_path / "out.parquet")

    def interrupt(progress: JobProgress) -> None:
        raise KeyboardInterrupt

    with hdruntime.load(opened) as session, pytest.raises(KeyboardInterrupt):
        run_job(job, session, on_progress=interrupt)
    assert left_in(tmp_path) == ["bundle", "in.jsonl"]


def test_an_output_that_exists_is_refused_before_any_work(bundle_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    with pytest.raises(OutputExistsError, match=r"out.jsonl exists.\nReplace it with --force, or choose"):
        plan_job(open_bundle(bundle_path), [tmp_path / "missing.jsonl"], output)
    run(bundle_path, write_rows(tmp_path / "in.jsonl", ["long"]), output, force=True)
    assert len(read(output)) == 1


def test_an_output_that_appears_meanwhile_is_not_replaced(bundle_path: Path, tmp_path: Path) -> None:
    opened = open_bundle(bundle_path)
    output = tmp_path / "out.jsonl"
    job = plan_job(opened, [write_rows(tmp_path / "in.jsonl", ["long"])], output)
    with hdruntime.load(opened) as session, pytest.raises(OutputExistsError):
        run_job(job, session, on_progress=lambda progress: output.write_text("theirs") and None)
    assert output.read_text() == "theirs"


def test_a_linked_output_keeps_its_link(bundle_path: Path, tmp_path: Path) -> None:
    (tmp_path / "target.jsonl").write_text("old")
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "target.jsonl")
    run(bundle_path, write_rows(tmp_path / "in.jsonl", ["long"]), tmp_path / "out.jsonl", force=True)
    assert (tmp_path / "out.jsonl").is_symlink()
    assert len(read(tmp_path / "target.jsonl")) == 1


@pytest.mark.parametrize("name", ["out.csv", "out", "out.txt"])
def test_an_output_of_unknown_kind_is_refused_with_the_known_ones(bundle_path: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"Outputs end in .jsonl or .parquet\."):
        plan_job(open_bundle(bundle_path), [tmp_path], tmp_path / name)


def test_an_output_in_no_directory_or_on_one_is_refused(bundle_path: Path, tmp_path: Path) -> None:
    bundle = open_bundle(bundle_path)
    with pytest.raises(InputError, match=r"There is no directory .*missing for the output.\nMake it: mkdir -p"):
        plan_job(bundle, [tmp_path], tmp_path / "missing" / "out.jsonl")
    (tmp_path / "out.jsonl").mkdir()
    with pytest.raises(OutputExistsError, match=r"out.jsonl is a directory"):
        plan_job(bundle, [tmp_path], tmp_path / "out.jsonl", options=JobOptions(force=True))


def test_a_job_does_not_overwrite_its_input(bundle_path: Path, tmp_path: Path) -> None:
    inputs = write_rows(tmp_path / "rows.jsonl", ["long"])
    with pytest.raises(InputError, match=r"rows.jsonl is an input as well as the output"):
        plan_job(open_bundle(bundle_path), [inputs], inputs, options=JobOptions(force=True))


def test_options_that_do_not_fit_the_task_are_refused(new_bundle: BundleMaker, tmp_path: Path) -> None:
    logits = np.zeros((len(VOCABULARY), 2))
    inputs = write_rows(tmp_path / "in.jsonl", ["long"])

    def plan(bundle: Path, **options: object) -> None:
        plan_job(open_bundle(bundle), [inputs], tmp_path / "o.jsonl", options=JobOptions(**options))  # type: ignore[arg-type]

    tables = {"start_logits": logits[:, 0], "end_logits": logits[:, 0]}
    with pytest.raises(InputError, match=r"--text-column question --text-pair-column context"):
        plan(gather_bundle(new_bundle("qa"), "question-answering", tables))
    with pytest.raises(InputError, match=r"reads one text.\nLeave out --text-pair-column"):
        plan(
            gather_bundle(new_bundle("ner"), "token-classification", {"logits": logits}),
            columns=Columns(text_pair="b"),
        )
    with pytest.raises(InputError, match=r"has no mask token"):
        plan(gather_bundle(new_bundle("mlm"), "fill-mask", {"logits": logits}))
    with pytest.raises(InputError, match=r"The bundle's task is 'summarization'; jobs are run for feature-extraction,"):
        plan(gather_bundle(new_bundle("other"), "summarization", {"logits": logits}))
    with pytest.raises(InputError, match=r"has no tokenizer, so it cannot read text"):
        plan(new_bundle("silent", tokenizer=False))
    with pytest.raises(InputError, match=r"--max-batch-tokens 0 is too small.\nUse 1 or more"):
        plan(new_bundle("any"), max_batch_tokens=0)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_full_disk_is_said_and_leaves_nothing(bundle_path: Path, tmp_path: Path, ending: str) -> None:
    # A limit on the size of files fails a write as a full disk does, without filling one.
    inputs = write_rows(tmp_path / "in.jsonl", list(random_texts(3000)))
    code = """
import resource, sys
from pathlib import Path
import hdruntime
from hdruntime.jobs import plan_job, run_job
bundle = hdruntime.open_bundle(Path(sys.argv[1]))
job = plan_job(bundle, [Path(sys.argv[2])], Path(sys.argv[3]))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    run_job(job, hdruntime.load(bundle))
except hdruntime.HdexportError as error:
    print(error)
"""
    output = tmp_path / f"out{ending}"
    command = [sys.executable, "-c", code, str(bundle_path), str(inputs), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"{output} could not be written: File too large.\nFree some space"), done.stderr
    assert left_in(tmp_path) == ["bundle", "in.jsonl"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
def test_memory_does_not_grow_with_the_rows(bundle_path: Path, tmp_path: Path) -> None:
    few = write_rows(tmp_path / "few.jsonl", ["long " * MAX_WORDS] * 5000)
    many = write_rows(tmp_path / "many.jsonl", ["long " * MAX_WORDS] * 20_000)
    # Not getrusage: its ru_maxrss counts the process that started this one, too.
    code = """
import re, sys
from pathlib import Path
import hdruntime
from hdruntime.jobs import plan_job, run_job
bundle = hdruntime.open_bundle(Path(sys.argv[1]))
session = hdruntime.load(bundle)
for name in sys.argv[2:]:
    run_job(plan_job(bundle, [Path(name)], Path(name).with_suffix(".parquet")), session)
    print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
    command = [sys.executable, "-c", code, str(bundle_path), str(few), str(many)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    after_few_kib, after_many_kib = map(int, done.stdout.split())
    # Measured: 11 MiB, the allocators' play; 51 MiB if all rows were read before any is written.
    assert after_many_kib - after_few_kib < 24 * 1024
