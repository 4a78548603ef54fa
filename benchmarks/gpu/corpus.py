"""The steps that embed whole corpora: `python -m benchmarks.corpus`, and the whole job beside a script of ten lines."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.corpus.bench import CorpusBench, CorpusSeries, texts_of
from benchmarks.corpus.gpu_watch import GpuWatch
from benchmarks.gpu.job import Job, SkippedError, StepFailedError
from benchmarks.texts import HELP
from hdexport.bench.measure.processes import run_process
from hdexport.bench.results.result import RunStatus
from hdexport.bench.run.plan import BenchOptions
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import InputError

_SHAPES = {"bert-base": (768, 12, 3072), "minilm": (384, 6, 1536)}
"""Name -> hidden size, layers, intermediate size; heads are 12. A corpus is embedded by the first, a job runs the
second, beside which what a machine does besides computing weighs most."""

_TINY = (48, 1, 96)
_HEADS = 12
_MAX_LEN = 8192
_REHEARSED_LEN = 512
_VOCABULARY = 30_522
_GAIN = 2.0
"""As of the models in `benchmarks.gpu.models`: texts that differ have vectors that differ."""

_JOB_TEXTS = 100_000
_REHEARSED_TEXTS = 48
_REHEARSED_BATCHES = (32,)
_PROCESS_SECONDS = 60.0
"""Of one run of a corpus; of a step, its budget ends it."""

_LEAST_COSINE = 0.99
"""Of a vector of the job and that of the script: both are of half precision."""

_TEN_LINES = Path(__file__).with_name("ten_lines.py")

_TIMED = """
import json, subprocess, sys, time
began = time.monotonic()
done = subprocess.run([sys.executable, *sys.argv[1:]], stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
said = {"began": began, "ended": time.monotonic()}
if done.returncode:
    said |= {"status": "failed", "reason": f"exit code {done.returncode}: {done.stderr[-300:]}"}
print(json.dumps(said))
"""
"""A command from its start to its end; `run_process` watches its memory, and ends it."""


def build_model(job: Job, model: str) -> None:
    """A bundle and its checkpoint, before anything is timed."""
    _bundle(job, model)
    job.write(case="bundle", model=model)


def make_job(job: Job) -> None:
    """Build the model and write the texts of `run_job`, before anything is timed."""
    build_model(job, "minilm")
    _job_texts(job)


def embed_corpus(
    job: Job,
    corpus: str,
    *,
    rounds: int = 1,
    compiles: bool = False,
    has_baselines: bool = True,
    batch_sizes: Sequence[int] | None = None,
) -> None:
    """A sample's texts by the bundle and by sentence-transformers at its default and best batch sizes, in turns.

    Each run is a row at once, for the step may be ended; the last rows have errors as well, and what did not run.
    """
    bundle = job.bundle or _bundle(job, "bert-base")
    options = BenchOptions(
        bundles=(bundle,),
        model=None if job.bundle else str(_checkpoint_beside(bundle)),
        rounds=1 if job.times_nothing else rounds,
        device=job.device,
        time_limit_s=_PROCESS_SECONDS,
    )
    with tempfile.TemporaryDirectory() as folder:
        source, sizes = corpus, batch_sizes
        if job.times_nothing:
            few = texts_of(corpus)[:_REHEARSED_TEXTS]
            file = Path(folder) / "few.jsonl"
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in few), encoding="utf-8")
            source, sizes = str(file), _REHEARSED_BATCHES
        try:
            bench = CorpusBench(
                options,
                source,
                batch_sizes=sizes,
                compiles=compiles,
                has_baselines=has_baselines,
                on_run=lambda series: _write_series(job, corpus, bench, series),
            )
        except InputError as error:
            raise SkippedError(str(error).replace("\n", " ")) from None
        result = bench.result()
    for series in result.series:
        _write_series(job, corpus, bench, series)
    if not any(series.seconds for series in result.series if not series.is_baseline):
        raise StepFailedError("no bundle embedded the corpus")


def run_job(job: Job) -> None:
    """A file of texts from Parquet to Parquet: `hdexport run`, then the ten lines, from start to end of the process."""
    import pyarrow.parquet as pq

    bundle, source = _bundle(job, "minilm"), _job_texts(job)
    backend = Backend.ONNXRUNTIME if job.rehearsal else Backend.ONNXRUNTIME_CUDA
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("ours.parquet", "theirs.parquet")]
        ours = ["-m", "hdexport", "run", str(bundle), str(source), "-o", str(outputs[0])]
        ours += ["--backend", backend, "--overflow", "truncate"]
        _time_command(job, "hdexport run", source, ours)
        # Not where it lies: Python finds the modules beside a script first, and transformers has optional ones.
        script = shutil.copy(_TEN_LINES, folder)
        theirs = [str(script), str(_checkpoint_beside(bundle)), str(source), str(outputs[1])]
        _time_command(job, "ten lines of sentence-transformers", source, theirs)
        _check_equal(job, [pq.read_table(output) for output in outputs])


def _time_command(job: Job, what: str, source: Path, command: Sequence[str]) -> None:
    import pyarrow.parquet as pq

    with GpuWatch() as watch:
        # The step ends it.
        ended = run_process(["-c", _TIMED, *command], time_limit_s=3600)
    found: dict[str, Any] = {"case": "corpus job", "what": what, "texts": pq.read_metadata(source).num_rows}
    if ended.status is not RunStatus.OK or ended.output is None:
        job.write(**found, status=ended.status.value, reason=ended.reason)
        raise StepFailedError(f"{what}: {ended.reason}")
    began, end = ended.output["began"], ended.output["ended"]
    if not job.rehearsal:
        found |= {"gpu_busy_share": watch.busy_share(began, end), "gpu_peak_bytes": watch.peak_bytes}
    job.write(**found, status="ok", seconds=end - began, peak_bytes=ended.peak_rss_bytes)


def _check_equal(job: Job, tables: Sequence[Any]) -> None:
    import numpy as np

    ours, theirs = (np.stack(table["embedding"].to_numpy()).astype(np.float32) for table in tables)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosine = float(((ours * theirs).sum(1) / lengths).min())
    is_equal = tables[0]["id"].to_pylist() == tables[1]["id"].to_pylist() and cosine >= _LEAST_COSINE
    job.write(case="corpus answers", passed=is_equal, min_cosine=cosine)
    if not is_equal:
        raise StepFailedError(f"the job's rows are not the script's: cosine {cosine:.4f}")


def _write_series(job: Job, corpus: str, bench: CorpusBench, series: CorpusSeries) -> None:
    about = {"case": "corpus", "corpus": corpus, "texts": bench.texts, "title": series.title}
    job.write(**about, **asdict(series))


def _checkpoint_beside(bundle: Path) -> Path:
    return bundle.with_name(f"{bundle.name}-checkpoint")


def _bundle(job: Job, model: str) -> Path:
    """Built once; its checkpoint stays beside it, for sentence-transformers."""
    from hdexport.build import BuildOptions, build

    bundle = job.folder / f"corpus-{model}{'-rehearsed' if job.rehearsal else ''}"
    if not bundle.exists():
        with tempfile.TemporaryDirectory(dir=job.folder) as own:
            checkpoint = Path(own) / bundle.name
            _save_checkpoint(checkpoint, _TINY if job.rehearsal else _SHAPES[model], job)
            max_len = _REHEARSED_LEN if job.rehearsal else _MAX_LEN
            options = BuildOptions(
                model=checkpoint, output=Path(own) / "bundle", max_len=max_len, precision="float16", verify=None
            )
            build(options)
            # Another step may have been faster.
            with contextlib.suppress(OSError):
                os.rename(checkpoint, _checkpoint_beside(bundle))
            with contextlib.suppress(OSError):
                os.rename(Path(own) / "bundle", bundle)
    return bundle


def _save_checkpoint(folder: Path, shape: tuple[int, int, int], job: Job) -> None:
    """A model of sentence-transformers with random weights, and a vocabulary of Python's help."""
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from tokenizers import BertWordPieceTokenizer

    max_len = _REHEARSED_LEN if job.rehearsal else _MAX_LEN
    pieces = BertWordPieceTokenizer()
    pieces.train_from_iterator(HELP.splitlines(), vocab_size=_VOCABULARY, show_progress=False)
    hidden, layers, intermediate = shape
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=pieces.get_vocab_size(),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        intermediate_size=intermediate,
        max_position_embeddings=max_len,
        initializer_range=_GAIN / hidden**0.5,
    )
    with tempfile.TemporaryDirectory() as own:
        transformers.BertModel(config, add_pooling_layer=False).save_pretrained(own)
        tokenizer = transformers.BertTokenizerFast(tokenizer_object=pieces._tokenizer, model_max_length=max_len)
        tokenizer.save_pretrained(own)
        base = Transformer(own, max_seq_length=max_len)
        SentenceTransformer(modules=[base, Pooling(hidden), Normalize()], device="cpu").save_pretrained(str(folder))


def _job_texts(job: Job) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    few = job.times_nothing
    file = job.folder / f"corpus-texts{'-few' if few else ''}.parquet"
    if not file.exists():
        samples = 1 if few else -(-_JOB_TEXTS // len(texts_of("mixed")))
        texts = texts_of("mixed", samples=samples)[: _REHEARSED_TEXTS if few else _JOB_TEXTS]
        with tempfile.TemporaryDirectory(dir=job.folder) as own:
            written = Path(own) / file.name
            pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), written)
            shutil.move(written, file)
    return file
