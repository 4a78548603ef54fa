"""Embeds a corpus by bundles and by other libraries, with a process per run, round by round."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.corpus import embed_script, encode_script
from benchmarks.corpus.baselines import CorpusBaseline, corpus_baselines
from benchmarks.corpus.gpu_watch import GpuWatch
from hdexport.bench.measure.calls import environment
from hdexport.bench.measure.processes import ProcessOutcome, run_process
from hdexport.bench.results.result import RunStatus
from hdexport.bench.run.plan import BenchOptions, Plan, PlannedSeries, plan
from hdexport.support.redaction import redact
from hdexport.support.texts import read_texts
from hdruntime.bundle.checked_json import json_from_dataclass
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.staging import DirectoryKind
from hdruntime.errors import ExportError, InputError
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.of_bundle import class_of
from hdruntime.text.encoding import Overflow
from hdruntime.text.tokenization import TextTokenizer
from hdruntime.whole_files import write_whole

CORPUS_FILE = "corpus.json"

CORPUS_DIRECTORY = DirectoryKind(
    name="benchmark of a corpus",
    marker=CORPUS_FILE,
    is_one=lambda directory: (directory / CORPUS_FILE).is_file(),
    other_files=lambda directory: sorted(path.name for path in directory.iterdir() if path.name != CORPUS_FILE),
)
"""Output of `python -m benchmarks.corpus`."""

_SEARCHED_SHARE = 4
"""The best batch size is searched with one text in so many, of all lengths."""

_LEAST_SEARCHED_TEXTS = 64

_DEVICES = {"cpu": "the CPU", "cuda": "a GPU"}

_BATCH_SIZES = {"cpu": (1, 4, 16, 32, 64), "cuda": (16, 32, 64, 128, 256, 512)}
"""The batch sizes tried for a baseline, by device; the fastest is kept."""

_SAMPLES_ON_GPU = 10
"""A sample has so many times as many texts on a GPU, which computes as many in a tenth of a second."""

_LEAST_SECONDS = {"cpu": 0.0, "cuda": 3.0}
"""That are timed at least, by calling again: NVML's share is of up to a second."""

_WARM_UP_TEXTS = 8

_WARM_UP_SHARE = 16
"""On a GPU one text in so many is embedded before, for each batch size: every shape of a batch is new once."""


@dataclass(frozen=True, kw_only=True)
class CorpusSeries:
    """One way to embed the corpus.

    Attributes:
        name: of the bundle with its backend and precision, or of the baseline.
        batch_size: texts per batch; None for a bundle, whose batches are of tokens.
        is_default: whether the batch size is the library's own; otherwise it is the best one that was found.
        remark: how its computation differs from the bundle's.
        unavailable: why it did not run; None if it did.
        seconds: of each round.
        tokens: of the texts with special tokens, cut where the bundle ends.
        computed_tokens: the same with padding.
        peak_bytes: peak resident memory of its process and all that the process started.
        gpu_busy_share: of each round, the share of the timed seconds in which the GPU computed, 0 to 1; empty on a CPU,
            and where NVML does not say it.
        gpu_peak_bytes: by how much the GPU's used memory rose at most; None on a CPU, and without NVML.
        max_abs_error: largest difference of a number of its vectors from sentence-transformers' on the same device, in
            float32 on a CPU and in the bundle's type on a GPU; None if that did not run.
    """

    name: str
    is_baseline: bool
    batch_size: int | None = None
    is_default: bool = True
    remark: str | None = None
    unavailable: str | None = None
    seconds: tuple[float, ...] = ()
    tokens: int = 0
    computed_tokens: int = 0
    peak_bytes: int = 0
    gpu_busy_share: tuple[float, ...] = ()
    gpu_peak_bytes: int | None = None
    max_abs_error: float | None = None

    @property
    def title(self) -> str:
        """The name, with a baseline's batch size."""
        return self.name if self.batch_size is None else f"{self.name}, batch {self.batch_size}"

    @property
    def padding(self) -> float:
        """Padding as a share of the computed tokens, 0 to 1."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class CorpusResult:
    """A benchmark of one corpus.

    Attributes:
        date: of the start, ISO 8601.
        corpus: name of the sample, or the file.
        texts: number of texts.
        lengths: tokens of the shortest, the median and the longest text, cut where the bundle ends.
        rounds: processes per series.
        device: ``cpu`` or ``cuda``, where all series computed.
    """

    schema_version: int = 1
    date: str
    command: str
    environment: dict[str, str]
    corpus: str
    texts: int
    lengths: tuple[int, int, int]
    rounds: int
    series: tuple[CorpusSeries, ...]
    device: str = "cpu"


def write_corpus_result(folder: Path, result: CorpusResult) -> None:
    """Writes `CORPUS_FILE` into a folder, whole or not at all, without paths and identifiers of this machine."""
    write_whole(folder / CORPUS_FILE, json_from_dataclass(redact(result)))


SAMPLES: dict[str, tuple[str, int, Callable[[random.Random], int]]] = {
    "short": ("texts of 4 to 20 words", 3000, lambda draw: draw.randint(4, 20)),
    # With the tokens that a word has here, 68 tokens on average: as many as a passage of MS MARCO.
    "passages": ("texts of 25 to 45 words", 1500, lambda draw: draw.randint(25, 45)),
    "mixed": (
        "texts of 8 to 1,200 words, log-normal",
        200,
        lambda draw: min(1200, max(8, round(draw.lognormvariate(4.8, 1.1)))),
    ),
    # A word of this text has 1.9 tokens of BERT's vocabulary: 1,000 to 8,000 tokens.
    "long": ("texts of 530 to 4,200 words", 16, lambda draw: draw.randint(530, 4200)),
}
"""Name -> description, number of texts on a CPU, and the words of one."""


class CorpusBench:
    """One run of a corpus: a name of `SAMPLES`, or a file or folder of texts.

    `options` give the bundles, their backends and precisions, rounds, threads, the time limit and the checkpoint, and
    not lengths, batches and baselines. All series run on one device: `options.device`, or else the GPU if a bundle runs
    there. Of `batch_sizes`, the best for each baseline is searched; a baseline's default always runs too. With
    `compiles`, torch.compile is a separate baseline on a GPU. `on_run` gets a series after each of its runs.
    """

    def __init__(
        self,
        options: BenchOptions,
        corpus: str,
        *,
        batch_sizes: Sequence[int] | None = None,
        has_baselines: bool = True,
        compiles: bool = True,
        on_step: Callable[[str], None] = lambda line: None,
        on_run: Callable[[CorpusSeries], None] = lambda series: None,
    ) -> None:
        self._options, self._corpus, self._say, self._on_run = options, corpus, on_step, on_run
        self._date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._plan, self._device = _checked_plan(options)
        self._has_baselines, self._compiles = has_baselines, compiles
        self._batch_sizes = batch_sizes or _BATCH_SIZES[self._device]
        on_gpu = self._device == "cuda"
        self._texts = texts_of(corpus, samples=_SAMPLES_ON_GPU if on_gpu else 1)
        self._warm_up_texts = max(_WARM_UP_TEXTS, len(self._texts) // _WARM_UP_SHARE) if on_gpu else _WARM_UP_TEXTS

    @property
    def texts(self) -> int:
        """Number of texts."""
        return len(self._texts)

    def result(self) -> CorpusResult:
        """Measures every series."""
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            texts = scratch / "texts.json"
            texts.write_text(json.dumps(self._texts), encoding="utf-8")
            runs = [*self._bundle_runs(texts), *self._baseline_runs(scratch, texts)]
            series = self._measured(runs, scratch)
        return CorpusResult(
            date=self._date,
            command=self._options.command,
            environment=environment(self._plan.threads),
            corpus=self._corpus,
            texts=self.texts,
            lengths=_lengths_of(self._texts, self._plan.series[0].bundle),
            rounds=self._options.rounds,
            series=tuple(series),
            device=self._device,
        )

    def _measured(
        self, runs: Sequence[tuple[CorpusSeries, Callable[[Path], ProcessOutcome] | None]], scratch: Path
    ) -> list[CorpusSeries]:
        found = [series for series, _ in runs]
        vectors: dict[int, Path] = {}
        for number in range(1, self._options.rounds + 1):
            for place, (series, run) in enumerate(runs):
                if run is None or found[place].unavailable is not None:
                    continue
                self._say(f"{series.title}, round {number} of {self._options.rounds}")
                output = scratch / f"{place}.npy"
                watch = GpuWatch() if self._device == "cuda" else None
                with watch or contextlib.nullcontext():
                    ended = run(output)
                if ended.output is None or ended.status is not RunStatus.OK:
                    found[place] = dataclasses.replace(found[place], unavailable=_reason(ended))
                    continue
                vectors[place] = output
                found[place] = dataclasses.replace(
                    found[place],
                    seconds=(*found[place].seconds, ended.output["seconds"]),
                    tokens=ended.output["tokens"],
                    computed_tokens=ended.output["computed_tokens"],
                    peak_bytes=max(found[place].peak_bytes, ended.peak_rss_bytes),
                    **({} if watch is None else _gpu_figures(found[place], watch, ended.output)),
                )
                self._on_run(found[place])
        first = next((series.name for series in found if series.is_baseline), None)
        reference = next((place for place in vectors if found[place].name == first and found[place].is_default), None)
        if reference is None:
            return found
        expected = np.load(vectors[reference])
        return [
            dataclasses.replace(series, max_abs_error=largest_difference(np.load(vectors[place]), expected))
            if place in vectors and place != reference
            else series
            for place, series in enumerate(found)
        ]

    def _bundle_runs(self, texts: Path) -> Iterator[tuple[CorpusSeries, Callable[[Path], ProcessOutcome] | None]]:
        for planned in self._plan.series:
            unavailable = planned.series.unavailable
            if unavailable is None and planned.device != self._device:
                unavailable = f"it runs on {_DEVICES[planned.device]}: measure it with --device {planned.device}"
            series = CorpusSeries(name=planned.series.name, is_baseline=False, unavailable=unavailable)
            yield series, functools.partial(self._run_bundle, planned, texts)

    def _run_bundle(self, planned: PlannedSeries, texts: Path, output: Path) -> ProcessOutcome:
        request = {
            "bundle": str(planned.bundle.path),
            "backend": planned.series.runner,
            "precision": planned.precision.value,
            "threads": self._plan.threads,
            "texts": str(texts),
            "warm_up_texts": self._warm_up_texts,
            "least_seconds": _LEAST_SECONDS[self._device],
            "output": str(output),
        }
        return self._run(embed_script, request, output.with_suffix(".json"))

    def _run(
        self,
        script: ModuleType,
        request: Mapping[str, object],
        file: Path,
        *,
        python: str | None = None,
        parts: int = 1,
    ) -> ProcessOutcome:
        """Runs a script in a process, with a request that is written to the file."""
        file.write_text(json.dumps(request), encoding="utf-8")
        limit_s = self._options.time_limit_s * parts
        return run_process([str(script.__file__), str(file)], python=python, time_limit_s=limit_s)

    def _baseline_runs(
        self, scratch: Path, texts: Path
    ) -> Iterator[tuple[CorpusSeries, Callable[[Path], ProcessOutcome] | None]]:
        if not self._has_baselines:
            return
        first = self._plan.series[0]
        sample = scratch / "sample.json"
        step = max(1, min(_SEARCHED_SHARE, len(self._texts) // _LEAST_SEARCHED_TEXTS))
        sample.write_text(json.dumps(sorted(self._texts, key=len)[::step]), encoding="utf-8")
        best: dict[tuple[str, str], tuple[int, ...]] = {}
        for baseline in corpus_baselines(first.bundle.manifest, device=self._device, compiles=self._compiles):
            series = CorpusSeries(
                name=baseline.name, is_baseline=True, remark=baseline.remark, unavailable=baseline.unavailable
            )
            if baseline.unavailable is None and first.model.checkpoint is None:
                missing = "the bundle's checkpoint is not here; name it with --model"
                series = dataclasses.replace(series, unavailable=missing)
            if series.unavailable is not None:
                yield series, None
                continue
            try:
                model = baseline.folder(first.model, scratch)
            except ExportError as error:
                yield dataclasses.replace(series, unavailable=str(error)), None
                continue
            encode = functools.partial(self._encode, baseline, model, first)
            key, sizes = (baseline.backend, baseline.dtype), self._batch_sizes
            if baseline.is_compiled:
                # A search would compile for each size; the best one is that without the compiler.
                if key not in best:
                    yield dataclasses.replace(series, unavailable="it did not run without torch.compile"), None
                    continue
                sizes = best[key]
            if len(sizes) > 1:
                self._say(f"{baseline.name}: the best batch size")
                searched = encode(sample, scratch / "searched.npy", sizes)
                if searched.output is None or searched.status is not RunStatus.OK:
                    yield dataclasses.replace(series, unavailable=_reason(searched)), None
                    continue
                seconds = searched.output["seconds_by_size"]
                sizes = (int(min(seconds, key=seconds.__getitem__)),)
            best[key] = tuple(sizes)
            for size in dict.fromkeys((baseline.batch_size, *sizes)):
                tuned = dataclasses.replace(series, batch_size=size, is_default=size == baseline.batch_size)
                yield tuned, functools.partial(encode, texts, sizes=(size,))

    def _encode(
        self,
        baseline: CorpusBaseline,
        model: Path,
        planned: PlannedSeries,
        texts: Path,
        output: Path,
        sizes: Sequence[int],
    ) -> ProcessOutcome:
        request = {
            "model": str(model),
            "texts": str(texts),
            "backend": baseline.backend,
            "device": baseline.device,
            "dtype": baseline.dtype,
            "compiled": baseline.is_compiled,
            "threads": self._plan.threads,
            "max_length": planned.bundle.manifest.max_len,
            "batch_sizes": list(sizes),
            "warm_up_texts": self._warm_up_texts,
            "least_seconds": _LEAST_SECONDS[self._device] if len(sizes) == 1 else 0.0,
            "output": str(output),
            "scaled_for": str(planned.bundle.path) if baseline.python is None else None,
        }
        file = output.with_suffix(".json")
        return self._run(encode_script, request, file, python=baseline.python, parts=len(sizes))


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest absolute difference; infinite where shapes differ or a number is not finite."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max(initial=0.0))


def texts_of(corpus: str, *, samples: int = 1) -> list[str]:
    """The texts of a sample, the same ones each time, so many times as many, or of a file or folder."""
    if corpus not in SAMPLES:
        return [text.text for text in read_texts(Path(corpus), parameter="corpus")]
    draw, words = random.Random(0), " ".join(topics.values()).split()
    _, count, words_of_text = SAMPLES[corpus]
    lengths = [words_of_text(draw) for _ in range(count * samples)]
    starts = [draw.randrange(len(words) - length) for length in lengths]
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def _reason(ended: ProcessOutcome) -> str:
    return ended.reason or ended.status.value


def _gpu_figures(series: CorpusSeries, watch: GpuWatch, output: Mapping[str, float]) -> dict[str, Any]:
    """The fields about the GPU, with those of this round."""
    share, peaks = watch.busy_share(output["began"], output["ended"]), (series.gpu_peak_bytes, watch.peak_bytes)
    return {
        "gpu_busy_share": series.gpu_busy_share if share is None else (*series.gpu_busy_share, share),
        "gpu_peak_bytes": max((peak for peak in peaks if peak is not None), default=None),
    }


def _checked_plan(options: BenchOptions) -> tuple[Plan, str]:
    """The plan, and the device of all series."""
    found = plan(dataclasses.replace(options, baselines=()))
    for planned in found.series:
        manifest = planned.bundle.manifest
        if not issubclass(class_of(manifest.task), Embedding) or manifest.tokenizer is None:
            lacks = "" if manifest.tokenizer else " without a tokenizer"
            raise InputError(
                f"A corpus is embedded, and {planned.bundle.path} is a bundle of {manifest.task}{lacks}.\n"
                "Measure it across lengths: hdexport bench BUNDLE"
            )
    if len({planned.model.checkpoint for planned in found.series}) > 1:
        raise InputError("A run compares bundles of one checkpoint.\nMeasure the others in a run of their own.")
    ours = found.series
    runnable = {planned.device for planned in ours if planned.is_available}
    device = options.device or ("cuda" if "cuda" in runnable else "cpu")
    if device not in runnable:
        where = _DEVICES[device]
        reasons = [
            f"{each.series.name}: {each.series.unavailable or f'it runs on {_DEVICES[each.device]}'}" for each in ours
        ]
        raise InputError(
            f"All series run on one device, and none of these runs on {where} here:\n"
            + "\n".join(reasons)
            + "\nLeave out --device and --backends to measure what runs here."
        )
    return found, device


def _lengths_of(texts: Sequence[str], bundle: Bundle) -> tuple[int, int, int]:
    tokenizer = TextTokenizer.of(bundle, max_len=bundle.manifest.max_len)
    lengths = sorted(map(len, tokenizer.encode(texts, overflow=Overflow.TRUNCATE)))
    return lengths[0], lengths[len(lengths) // 2], lengths[-1]
