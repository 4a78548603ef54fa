"""Calibration ranges of int8 and uint8 vectors: stored with an output, and given to another job or to an encoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hdruntime import SentenceEncoder
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError, OutputExistsError
from hdruntime.jobs import JobOptions, VectorOptions, plan_job
from hdruntime.jobs.state_folder import StateFolder
from hdruntime.text.embeddings import EmbeddingPrecision
from hdruntime.text.ranges import read_ranges
from support.comparators import named_case
from support.job_runs import left_in, random_texts, read, run, run_words, stop_at, write_rows

TEXTS = random_texts(12)
ENDINGS = (".jsonl", ".npy", ".parquet", ".npz", "")


def quantised(bundle: Path, texts: list[str], output: Path, *, dtype: str = "int8", **options: Any) -> None:
    vectors = VectorOptions(output_dtype=EmbeddingPrecision(dtype), **options)
    inputs = write_rows(output.with_name("in.txt.jsonl"), list(texts))
    run(bundle, inputs, output, vectors=vectors, skip_failed=True, force=True)


def vectors_in(output: Path) -> np.ndarray:
    if output.suffix in (".npy", ".npz"):
        found: Any = np.load(output)
        return np.asarray(found if output.suffix == ".npy" else found["embedding"])
    return np.array([row["embedding"] for row in read(output / "part-00000.parquet" if output.is_dir() else output)])


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_text_has_the_same_bytes_in_two_jobs_and_in_the_encoder_if_they_share_ranges(
    bundle_path: Path, tmp_path: Path, dtype: str
) -> None:
    from sentence_transformers.util import quantize_embeddings

    with SentenceEncoder(bundle_path) as encoder:
        floats = encoder.encode(TEXTS)
        for ending in ENDINGS:
            with named_case(ending):
                documents, queries = tmp_path / f"documents{ending}", tmp_path / "queries.jsonl"
                quantised(bundle_path, TEXTS, documents, dtype=dtype)
                expected = vectors_in(documents)
                quantised(bundle_path, TEXTS[3:5], queries, dtype=dtype, ranges=documents)
                np.testing.assert_array_equal(vectors_in(queries), expected[3:5])
                # Of a single text, which has no ranges by itself; and the ranges go on with the second output.
                quantised(bundle_path, TEXTS[7:8], tmp_path / "one.jsonl", dtype=dtype, ranges=queries)
                np.testing.assert_array_equal(vectors_in(tmp_path / "one.jsonl"), expected[7:8])
                one = encoder.encode(TEXTS[7], precision=dtype, ranges=documents)
                np.testing.assert_array_equal(one, expected[7])
                ranges = read_ranges(documents)
                np.testing.assert_array_equal(ranges, [floats.min(axis=0), floats.max(axis=0)])
                library = quantize_embeddings(floats, precision=dtype, ranges=ranges)  # type: ignore[arg-type]
                np.testing.assert_array_equal(library, expected)
                np.save(tmp_path / "ranges.npy", ranges)
                quantised(bundle_path, TEXTS[3:5], queries, dtype=dtype, ranges=tmp_path / "ranges.npy")
                np.testing.assert_array_equal(vectors_in(queries), expected[3:5])
                np.testing.assert_array_equal(encoder.encode(TEXTS, precision=dtype, ranges=ranges), expected)
                for path in tmp_path.glob("*.ranges.npz"):
                    path.unlink()


def test_ranges_lie_beside_an_output_without_metadata_and_other_tools_read_them(
    bundle_path: Path, tmp_path: Path
) -> None:
    quantised(bundle_path, TEXTS, tmp_path / "out.jsonl")
    with np.load(tmp_path / "out.jsonl.ranges.npz") as file:
        assert (file["ranges"].shape, file["ranges"].dtype) == ((2, 4), np.float32)
        assert json.loads(str(file["metadata"]))["hdexport.dtype"] == "int8"
    quantised(bundle_path, TEXTS, tmp_path / "out.parquet")
    assert "out.parquet.ranges.npz" not in left_in(tmp_path)
    quantised(bundle_path, TEXTS, tmp_path / "binary.jsonl", dtype="ubinary")
    assert "binary.jsonl.ranges.npz" not in left_in(tmp_path)


def test_ranges_of_other_dimensions_bundles_or_types_are_refused_in_words(
    bundle_path: Path, tmp_path: Path, new_bundle: Callable[..., Path]
) -> None:
    rows, other = write_rows(tmp_path / "in.jsonl", ["long"]), new_bundle("other", task="sentence-similarity")
    quantised(bundle_path, TEXTS, tmp_path / "out.jsonl")
    quantised(bundle_path, TEXTS, tmp_path / "floats.parquet", dtype="float16")
    np.save(tmp_path / "wide.npy", np.array([[0.0] * 5, [1.0] * 5], np.float32))
    np.save(tmp_path / "turned.npy", np.array([[1.0] * 4, [0.0] * 4], np.float32))
    np.save(tmp_path / "flat.npy", np.zeros(4, np.float32))
    (tmp_path / "text.npy").write_text("no array")
    for name, bundle, dtype, message in [
        (
            "out.jsonl",
            bundle_path,
            "float32",
            "ranges is for output_dtype int8 and uint8, and the",
        ),
        ("out.jsonl", other, "int8", "out.jsonl are of another bundle's vectors.\nRun that bundle, or, if both"),
        ("wide.npy", bundle_path, "int8", "wide.npy have 5 dimensions, and the vectors of this job 4.\nUse one model"),
        ("turned.npy", bundle_path, "int8", "turned.npy are not finite, or a minimum is larger than its maximum"),
        ("flat.npy", bundle_path, "int8", r"flat.npy have the shape \[4\]; it must be \[2, dimensions\]"),
        ("gone.npy", bundle_path, "int8", "There is no file .*gone.npy with ranges.\nAccepted are a .npy file of"),
        ("text.npy", bundle_path, "int8", "text.npy cannot be read as ranges: "),
        ("in.jsonl", bundle_path, "int8", "in.jsonl cannot be read as ranges: there is no in.jsonl.ranges.npz beside"),
        ("floats.parquet", bundle_path, "int8", "its metadata has no ranges: its vectors are not int8 or uint8"),
    ]:
        vectors = VectorOptions(output_dtype=EmbeddingPrecision(dtype), ranges=tmp_path / name)
        with named_case(name, dtype), pytest.raises(InputError, match=message):
            plan_job(open_bundle(bundle), [rows], tmp_path / "new.jsonl", options=JobOptions(vectors=vectors))
    with SentenceEncoder(bundle_path) as encoder:
        with pytest.raises(InputError, match="ranges are for the precisions int8 and uint8; precision is"):
            encoder.encode(TEXTS, ranges=tmp_path / "out.jsonl")
        with pytest.raises(InputError, match=r"ranges has the shape \[2, 5\]; it must be \[2, 4\]"):
            encoder.encode(TEXTS, precision="int8", ranges=tmp_path / "wide.npy")
        for wrong in (np.load(tmp_path / "turned.npy"), np.full((2, 4), np.nan, np.float32)):
            with pytest.raises(InputError, match="ranges are not finite, or a minimum is larger than its maximum"):
                encoder.encode(TEXTS, precision="int8", ranges=wrong)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".npz"])
def test_ranges_of_normalized_vectors_are_for_normalized_vectors_alone(
    bundle_path: Path, tmp_path: Path, ending: str
) -> None:
    made = {normalize: tmp_path / f"{normalize}{ending}" for normalize in (False, True)}
    for normalize, output in made.items():
        quantised(bundle_path, TEXTS, output, normalize=normalize)
    with SentenceEncoder(bundle_path) as encoder:
        for normalize, output in made.items():
            with named_case(normalize):
                quantised(bundle_path, TEXTS[3:5], tmp_path / "q.jsonl", normalize=normalize, ranges=output)
                np.testing.assert_array_equal(vectors_in(tmp_path / "q.jsonl"), vectors_in(output)[3:5])
                options = {"precision": "int8", "ranges": output}
                found = encoder.encode(TEXTS, normalize_embeddings=normalize, **options)
                np.testing.assert_array_equal(found, vectors_in(output))
                message = f"vectors that {'are' if normalize else 'are not'} normalized, and the vectors to quantise"
                with pytest.raises(InputError, match=message):
                    quantised(bundle_path, TEXTS, tmp_path / "w.jsonl", normalize=not normalize, ranges=output)
                with pytest.raises(InputError, match=message):
                    encoder.encode(TEXTS, normalize_embeddings=not normalize, **options)


def test_an_unfinished_job_continues_with_its_own_ranges_alone(
    bundle_path: Path, tmp_path: Path, small_shards: None
) -> None:
    rows, output = write_rows(tmp_path / "in.jsonl", list(random_texts(25))), tmp_path / "out.jsonl"
    for name, top in (("a", 1.0), ("b", 2.0)):
        np.save(tmp_path / f"{name}.npy", np.array([[-1.0] * 4, [top] * 4], np.float32))
    first, other = (
        VectorOptions(output_dtype=EmbeddingPrecision.INT8, ranges=tmp_path / name) for name in ("a.npy", "b.npy")
    )
    with pytest.raises(KeyboardInterrupt):
        run(bundle_path, rows, output, vectors=first, on_progress=stop_at(10))
    with pytest.raises(InputError, match=r"ranges was ranges with the checksum .*, and is ranges with the checksum"):
        run(bundle_path, rows, output, vectors=other)
    assert run(bundle_path, rows, output, vectors=first).resumed_rows == 10
    np.testing.assert_array_equal(read_ranges(output), np.load(tmp_path / "a.npy"))


def test_ranges_are_there_after_a_kill_beside_them_and_never_replaced_unasked(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, rows, output = open_bundle(bundle_path), write_rows(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"
    vectors = VectorOptions(output_dtype=EmbeddingPrecision.INT8)
    move_out = StateFolder.move_out

    def killed(folder: StateFolder, target: Path, *name: str) -> None:
        if name:
            raise KeyboardInterrupt
        move_out(folder, target, *name)

    with monkeypatch.context() as patched:
        patched.setattr(StateFolder, "move_out", killed)
        with pytest.raises(KeyboardInterrupt):
            run_words(bundle, [rows], output, vectors=vectors)
    assert "out.jsonl.ranges.npz" not in left_in(tmp_path)
    run_words(bundle, [rows], output, vectors=vectors)
    assert left_in(tmp_path) == ["bundle", "in.jsonl", "out.jsonl", "out.jsonl.ranges.npz"]
    output.unlink()
    with pytest.raises(
        OutputExistsError, match=r"out\.jsonl\.ranges\.npz, the file for the ranges, exists.\nReplace it"
    ):
        run_words(bundle, [rows], output, vectors=vectors)
    run_words(bundle, [rows], output, vectors=vectors, force=True)
