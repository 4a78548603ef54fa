"""The plan of a benchmark: bundles and baselines, lengths and batches, and series that cannot run here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hdexport.bench.baselines import BASELINES
from hdexport.bench.baselines.baseline import Baseline, MeasuredModel
from hdexport.bench.results.result import Series
from hdexport.checkpoint import path_of_source
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdruntime.backends.bundle_runner import has_graph
from hdruntime.backends.choice import unavailable_reason
from hdruntime.backends.entry import BackendEntry, ThisMachine
from hdruntime.backends.precision import BUILD_OPTIONS, Precision
from hdruntime.backends.registry import backend_named, backend_names, backends, this_machine
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import InputError, Setting
from hdruntime.process_limits import chosen_threads

_FIRST = 512

_STEPS_BELOW_FIRST = 3
"""A model of at most `_FIRST` tokens is measured from an eighth of its max_len."""

_MOST_DIGITS, _MOST_LENGTHS = 12, 1000
"""Maximum digits of a number in `lengths`, and maximum lengths of one range."""

_MAX_SHOWN = 60
"""Maximum characters of an invalid value in a message."""

_LENGTHS_HINT = "Give numbers, such as 128,512,4096, or a range, such as 512:8192:x2 or 512:2048:+512."

_RANGE = re.compile(r"(\d+):(\d+):(x|\+)(\d+)")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a benchmark.

    Attributes:
        bundles: directories of bundles.
        lengths: sequence lengths in tokens; None for 512, doubled up to the largest max_len of the bundles.
        batches: sequences per call.
        baselines: baselines that run the models of the bundles.
        backends: names of `Backend`; None for each backend that a bundle has a graph or an engine for.
        precisions: names of `Precision` of bundles on a CPU; None for ``auto`` and, for bundles with such a graph,
            ``int8``.
        rounds: processes per case, one per round.
        threads: CPU threads; None for `hdruntime.process_limits.chosen_threads`.
        device: device of the baselines, ``cpu`` or ``cuda``; None for the GPU if there is one.
        time_limit_s: time limit of one process in seconds.
        model: checkpoint of the bundles; None for the source that each bundle names.
        command: command line, for the record.
    """

    bundles: tuple[Path, ...]
    lengths: tuple[int, ...] | None = None
    batches: tuple[int, ...] = (1,)
    baselines: tuple[Baseline, ...] = tuple(BASELINES.values())
    backends: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    rounds: int = 3
    threads: int | None = None
    device: str | None = None
    time_limit_s: float = 600.0
    model: str | None = None
    trust: Trust = UNTRUSTED
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class PlannedSeries:
    """A series, and what runs it.

    Attributes:
        series: entry of the series in the result.
        bundle: bundle that is run, or the bundle of the model that a baseline runs.
        model: model in PyTorch.
        device: ``cpu`` or ``cuda``.
        baseline: baseline that runs the model; None for a backend that runs the bundle.
        precision: requested precision of a bundle on a CPU.
    """

    series: Series
    bundle: Bundle
    model: MeasuredModel
    device: str
    baseline: Baseline | None = None
    precision: Precision = Precision.AUTO

    @property
    def is_available(self) -> bool:
        """Whether the series can run here."""
        return self.series.unavailable is None


class Plan(NamedTuple):
    """Plan of a benchmark.

    Attributes:
        series: series in the order of the tables, including series that cannot run here.
        lengths: sequence lengths in tokens, ascending.
        batches: sequences per call.
        threads: CPU threads of every process.
        notes: notes for the reader.
    """

    series: tuple[PlannedSeries, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    threads: int
    notes: tuple[str, ...]


def plan(options: BenchOptions, *, machine: ThisMachine | None = None) -> Plan:
    """Plan a benchmark from the bundles' manifests and this machine. Raises InputError if no series can run here."""
    machine = machine or this_machine()
    backend_choice = _valid(options.backends, list(backend_names()), "backends", "backend")
    chosen = [entry for name in backend_choice if (entry := backend_named(name)) is not None]
    precisions = _valid(options.precisions, [precision.value for precision in Precision], "precisions", "precision")
    bundles = [open_bundle(path) for path in options.bundles]
    lengths = options.lengths or default_lengths(max(bundle.manifest.max_len for bundle in bundles))
    _check_lengths(lengths, bundles)
    device = options.device or ("cpu" if machine.gpu is None else "cuda")
    groups = _groups(bundles, options.model)
    models = [_model(group, options) for group in groups]
    series = []
    for group, model in zip(groups, models, strict=True):
        for bundle in group:
            native = _native_backends(bundle, machine)
            for entry in native if options.backends is None else chosen:
                wanted = _native_precisions(bundle, entry) if options.precisions is None else map(Precision, precisions)
                series += _backend_series(bundle, model, entry, wanted, machine, bundles)
    for group, model in zip(groups, models, strict=True):
        series += _baseline_series(_longest(group), model, options.baselines, device, is_only=len(groups) == 1)
    if not any(planned.is_available for planned in series):
        reasons = [f"{planned.series.name}: {planned.series.unavailable}" for planned in series]
        raise InputError("\n".join(["None of these series can run here:", *reasons, "See: hdexport doctor"]))
    return Plan(
        series=tuple(series),
        lengths=lengths,
        batches=options.batches,
        threads=chosen_threads(options.threads)[0],
        notes=tuple(_notes(groups, models)),
    )


def parse_lengths(text: str) -> tuple[int, ...]:
    """Distinct lengths in tokens, ascending, from numbers and ranges that are separated by commas.

    ``512:8192:x2`` doubles from 512 to 8192, ``512:2048:+512`` adds; both ends are included.
    """
    lengths: set[int] = set()
    # Longer numbers are no lengths, and Python reads no number of thousands of digits.
    if any(len(digits) > _MOST_DIGITS for digits in re.findall(r"\d+", text)):
        raise InputError(
            Setting("lengths", text[:_MAX_SHOWN]),
            f" has a number of more than {_MOST_DIGITS} digits; no bundle takes so many tokens.",
            hint=_LENGTHS_HINT,
        )
    for part in text.split(","):
        lengths.update(_lengths_of(part.strip(), text))
    return tuple(sorted(lengths))


def default_lengths(max_len: int) -> tuple[int, ...]:
    """512, doubled up to `max_len`, which is included; for a shorter model an eighth, a quarter and a half of it."""
    first = _FIRST if max_len > _FIRST else max(1, max_len >> _STEPS_BELOW_FIRST)
    return _multiplied(first, max_len, 2)


def _valid(names: Sequence[str] | None, valid: list[str], parameter: str, noun: str) -> list[str]:
    for name in names or ():
        if name not in valid:
            raise InputError(
                Setting(parameter),
                f": {name!r:.60} is not a {noun}; valid: {', '.join(valid)}.",
                hint=("Name some of them, with commas, or leave ", Setting(parameter), " out."),
            )
    return valid if names is None else [name for name in valid if name in names]


def _check_lengths(lengths: Sequence[int], bundles: Sequence[Bundle]) -> None:
    longest = max(bundle.manifest.max_len for bundle in bundles)
    if lengths[-1] > longest:
        raise InputError(
            Setting("lengths"),
            f" contains {lengths[-1]}; the bundles accept 1 to {longest} tokens.",
            hint=("Leave it out, or build a bundle with ", Setting("max_len", lengths[-1], command="build"), "."),
        )


def _groups(bundles: Iterable[Bundle], model: str | None) -> list[list[Bundle]]:
    """Group bundles that share one model in PyTorch: one checkpoint with equal positions and attention."""
    groups: dict[object, list[Bundle]] = {}
    for bundle in bundles:
        manifest = bundle.manifest
        positions = manifest.positions
        source = manifest.made_by.get("source")
        checkpoint = model or (source, path_of_source(source, bundle.path))
        key = (
            checkpoint, manifest.task, json.dumps(manifest.attention, sort_keys=True),
            *(record for name, record in sorted(manifest.files.items()) if name.endswith(".npy")),  # of an attention
            positions.scheme, positions.alpha, positions.base, positions.attention_scale,
            positions.rope_factor,
        )  # fmt: skip
        groups.setdefault(key, []).append(bundle)
    return list(groups.values())


def _longest(group: Sequence[Bundle]) -> Bundle:
    return max(group, key=lambda bundle: bundle.manifest.max_len)


def _model(group: Sequence[Bundle], options: BenchOptions) -> MeasuredModel:
    bundle = _longest(group)
    path = path_of_source(bundle.manifest.made_by.get("source"), bundle.path)
    return MeasuredModel(
        bundle=bundle.path,
        checkpoint=options.model or (None if path is None else str(path)),
        trust=options.trust,
    )


def _native_backends(bundle: Bundle, machine: ThisMachine) -> list[BackendEntry]:
    """Backends that a bundle was built for; ratios refer to the first backend."""
    lowerings = {graph.lowering for graph in bundle.manifest.graphs}
    # Reverse order of `auto`: every bundle has a graph for its last choice.
    entries = sorted(backends(), key=lambda entry: (entry.needs_gpu, -entry.rank))
    of_graphs = [
        entry
        for entry in entries
        if lowerings.intersection(entry.lowerings) and (machine.gpu is not None or not entry.needs_gpu)
    ]
    variants: list[str] = [engine.variant for engine in bundle.manifest.engines]
    of_engines = [entry for entry in entries if entry.variant in variants and entry.is_advised]
    of_engines.sort(key=lambda entry: variants.index(str(entry.variant)))
    return [*of_graphs, *of_engines]


def _native_precisions(bundle: Bundle, entry: BackendEntry) -> list[Precision]:
    """Precisions that a bundle has graphs for; a session uses a graph such as int8 only if it is named."""
    named = [each for each in BUILD_OPTIONS if each in entry.precisions]
    return [Precision.AUTO, *(each for each in named if has_graph(bundle, entry.lowerings[0], precision=each))]


def _backend_series(
    bundle: Bundle,
    model: MeasuredModel,
    entry: BackendEntry,
    precisions: Iterable[Precision],
    machine: ThisMachine,
    bundles: Sequence[Bundle],
) -> list[PlannedSeries]:
    """Series of a bundle in a backend, one per precision; on a GPU the graph or the engine decides the precision."""
    names = [other.path.name for other in bundles]
    name = bundle.path.name if names.count(bundle.path.name) == 1 else str(bundle.path)
    reasons = {
        precision: unavailable_reason(bundle, entry.name, precision=precision, machine=machine)
        for precision in ([Precision.AUTO] if entry.needs_gpu else precisions)
    }
    return [
        PlannedSeries(
            series=Series(
                name=f"{name} ({entry.name}{'' if precision is Precision.AUTO else f', {precision.value}'})",
                runner=entry.name,
                bundle=str(bundle.path),
                model=bundle.manifest.name,
                is_baseline=False,
                unavailable=None if reason is None else str(reason),
            ),
            bundle=bundle,
            model=model,
            device="cuda" if entry.needs_gpu else "cpu",
            precision=precision,
        )
        for precision, reason in reasons.items()
    ]


def _baseline_series(
    bundle: Bundle, model: MeasuredModel, baselines: Sequence[Baseline], device: str, *, is_only: bool
) -> list[PlannedSeries]:
    series = []
    for baseline in baselines:
        unavailable = baseline.unavailable(bundle.manifest)
        if model.checkpoint is None:
            unavailable = f"{_missing_checkpoint(bundle)} Name the checkpoint."
        series.append(
            PlannedSeries(
                series=Series(
                    name=baseline.name if is_only else f"{baseline.name}: {bundle.path.name}",
                    runner=baseline.name,
                    bundle=str(bundle.path),
                    model=bundle.manifest.name,
                    is_baseline=True,
                    remark=baseline.remark(bundle.manifest),
                    unavailable=unavailable,
                ),
                bundle=bundle,
                model=model,
                device=device,
                baseline=baseline,
            )
        )
    return series


def _missing_checkpoint(bundle: Bundle) -> str:
    source = bundle.manifest.made_by.get("source", "an unknown checkpoint")
    return f"{bundle.path} was built from {source}, which was not found."


def _notes(groups: Sequence[Sequence[Bundle]], models: Sequence[MeasuredModel]) -> list[str]:
    return [
        f"{_missing_checkpoint(_longest(group))} Nothing was compared with PyTorch. Name the checkpoint."
        for group, model in zip(groups, models, strict=True)
        if model.checkpoint is None
    ]


def _lengths_of(part: str, text: str) -> tuple[int, ...]:
    if part.isdecimal() and int(part) > 0:
        return (int(part),)
    match = _RANGE.fullmatch(part)
    if match:
        first, last, step = int(match[1]), int(match[2]), int(match[4])
        if 0 < first <= last and step > (match[3] == "x"):
            if match[3] == "+" and (last - first) // step > _MOST_LENGTHS:
                raise InputError(
                    Setting("lengths", text[:_MAX_SHOWN]),
                    f": {part!r:.60} is more than {_MOST_LENGTHS} lengths.",
                    hint=f"Give a larger step. {_LENGTHS_HINT}",
                )
            return _multiplied(first, last, step) if match[3] == "x" else (*range(first, last, step), last)
    raise InputError(
        Setting("lengths", text[:_MAX_SHOWN]), f": {part!r:.60} is not a length in tokens.", hint=_LENGTHS_HINT
    )


def _multiplied(first: int, last: int, factor: int) -> tuple[int, ...]:
    lengths = []
    while first < last:
        lengths.append(first)
        first *= factor
    return (*lengths, last)
