"""The plan of a benchmark: the ways to run each model, at which lengths and batches, and ways that cannot run here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hdexport.bench.peers import PEERS
from hdexport.bench.peers.peer import MeasuredModel
from hdexport.bench.results.result import Series
from hdexport.checkpoint import path_of_source
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdruntime.backends.bundle_runner import has_graph
from hdruntime.backends.choice import why_unavailable
from hdruntime.backends.entry import BackendEntry, ThisMachine
from hdruntime.backends.precision import OPTION_OF_GRAPHS, Precision
from hdruntime.backends.registry import backend_named, backend_names, backends, this_machine
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import InputError
from hdruntime.process_limits import chosen_threads

_FIRST = 512

_STEPS_BELOW_FIRST = 3
"""A model of at most `_FIRST` tokens is measured from an eighth of its longest text."""

_MOST_DIGITS, _MOST_LENGTHS = 12, 1000
"""Of a number of ``--lengths``, and lengths of one range."""

_LENGTHS = "Give numbers like --lengths 128,512,4096, or a range like --lengths 512:8192:x2 or 512:2048:+512."

_RANGE = re.compile(r"(\d+):(\d+):(x|\+)(\d+)")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What a user asks to measure.

    Attributes:
        lengths: tokens of a text; None for 512, doubled up to the longest that a bundle takes.
        batches: texts of a call.
        peers: names of `PEERS`; None for all.
        backends: names of `Backend`; None for each that a bundle has a graph or an engine for.
        precisions: names of `Precision` that bundles compute in on a CPU; None for ``auto`` and, of bundles that have
            such a graph, ``int8``.
        rounds: processes per case, one per round.
        threads: CPU threads; None for `hdruntime.process_limits.chosen_threads`.
        device: ``cpu`` or ``cuda``, where peers run; None for the GPU if there is one.
        time_limit_s: of one process.
        memory_budget_bytes: also look for the largest batch that fits it; None does not.
        model: the checkpoint of the bundles; None for the source that each bundle names.
        command: the command line, for the record.
    """

    bundles: tuple[Path, ...]
    lengths: tuple[int, ...] | None = None
    batches: tuple[int, ...] = (1,)
    peers: tuple[str, ...] | None = None
    backends: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    rounds: int = 3
    threads: int | None = None
    device: str | None = None
    time_limit_s: float = 600.0
    memory_budget_bytes: int | None = None
    model: str | None = None
    trust: Trust = UNTRUSTED
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class PlannedSeries:
    """A series, and what runs it.

    Attributes:
        series: its entry in the result.
        bundle: the bundle that is run, or whose model a peer runs.
        subject: the model in PyTorch.
        device: ``cpu`` or ``cuda``.
        precision: the precision that a bundle is asked to compute in on a CPU.
    """

    series: Series
    bundle: Bundle
    subject: MeasuredModel
    device: str
    precision: Precision = Precision.AUTO

    @property
    def is_available(self) -> bool:
        """Whether the series can run here."""
        return self.series.unavailable is None


class Plan(NamedTuple):
    """All series in the order of the tables, including those that cannot run here; lengths in tokens, rising; batches
    in texts; CPU threads of every process; notes for the reader."""

    series: tuple[PlannedSeries, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    threads: int
    notes: tuple[str, ...]


def plan(options: BenchOptions, *, machine: ThisMachine | None = None) -> Plan:
    """Looks at the bundles and at this machine, without loading anything that computes. If nothing could run, the
    InputError says why."""
    machine = machine or this_machine()
    peers = _known(options.peers, list(PEERS), "--peers", "peer")
    named = _known(options.backends, list(backend_names()), "--backends", "backend")
    chosen = [entry for name in named if (entry := backend_named(name)) is not None]
    precisions = _known(options.precisions, [precision.value for precision in Precision], "--precision", "precision")
    bundles = [open_bundle(path) for path in options.bundles]
    lengths = options.lengths or default_lengths(max(bundle.manifest.max_len for bundle in bundles))
    _check_lengths(lengths, bundles)
    device = options.device or ("cpu" if machine.gpu is None else "cuda")
    groups = _groups(bundles, options.model)
    subjects = [_subject(group, options) for group in groups]
    series = []
    for group, subject in zip(groups, subjects, strict=True):
        for bundle in group:
            own = _own_backends(bundle, machine)
            for entry in own if options.backends is None else chosen:
                wanted = _own_precisions(bundle, entry) if options.precisions is None else map(Precision, precisions)
                series += _backend_series(bundle, subject, entry, wanted, machine, bundles)
    for group, subject in zip(groups, subjects, strict=True):
        series += _peer_series(_longest(group), subject, peers, device, is_only=len(groups) == 1)
    if not any(planned.is_available for planned in series):
        reasons = [f"{planned.series.name}: {planned.series.unavailable}" for planned in series]
        raise InputError("\n".join(["None of these can run here:", *reasons, "See: hdexport doctor"]))
    return Plan(
        series=tuple(series),
        lengths=lengths,
        batches=options.batches,
        threads=chosen_threads(options.threads)[0],
        notes=tuple(_notes(groups, subjects)),
    )


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths in tokens, ascending and distinct, from numbers (``128,512``) and ranges whose ends are both measured
    (``512:8192:x2`` doubles, ``512:2048:+512`` adds), separated by commas."""
    lengths: set[int] = set()
    # Longer numbers are no lengths, and Python reads no number of thousands of digits.
    if any(len(digits) > _MOST_DIGITS for digits in re.findall(r"\d+", text)):
        raise InputError(
            f"--lengths {text:.60} has a number of more than {_MOST_DIGITS} digits; no bundle takes so many tokens.\n"
            f"{_LENGTHS}"
        )
    for part in text.split(","):
        lengths.update(_lengths_of(part.strip(), text))
    return tuple(sorted(lengths))


def default_lengths(max_len: int) -> tuple[int, ...]:
    """512, doubled up to `max_len`, which is included; for shorter models an eighth, a quarter and a half of it."""
    first = _FIRST if max_len > _FIRST else max(1, max_len >> _STEPS_BELOW_FIRST)
    return _multiplied(first, max_len, 2)


def _known(names: Sequence[str] | None, known: list[str], option: str, what: str) -> list[str]:
    for name in names or ():
        if name not in known:
            raise InputError(
                f"{option}: {name!r:.60} is not a {what}; valid are {', '.join(known)}.\n"
                f"Name some of them, with commas, or leave {option} out."
            )
    return known if names is None else [name for name in known if name in names]


def _check_lengths(lengths: Sequence[int], bundles: Sequence[Bundle]) -> None:
    longest = max(bundle.manifest.max_len for bundle in bundles)
    if lengths[-1] > longest:
        raise InputError(
            f"--lengths asks for {lengths[-1]} tokens; the bundles take 1 to {longest}.\n"
            f"Leave it out, or build a longer one with: hdexport build --max-len {lengths[-1]}"
        )


def _groups(bundles: Iterable[Bundle], model: str | None) -> list[list[Bundle]]:
    """Groups bundles that share one model in PyTorch: precisions and engines of one checkpoint, positions and
    attention."""
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


def _subject(group: Sequence[Bundle], options: BenchOptions) -> MeasuredModel:
    bundle = _longest(group)
    path = path_of_source(bundle.manifest.made_by.get("source"), bundle.path)
    return MeasuredModel(
        bundle=bundle.path,
        checkpoint=options.model or (None if path is None else str(path)),
        trust=options.trust,
    )


def _own_backends(bundle: Bundle, machine: ThisMachine) -> list[BackendEntry]:
    """Backends that a bundle was built for; the first is the one that others are compared with."""
    lowerings = {graph.lowering for graph in bundle.manifest.graphs}
    # The last choice of `auto` is the first here: every bundle has a graph for it.
    entries = sorted(backends(), key=lambda entry: (entry.needs_gpu, -entry.rank))
    of_graphs = [
        entry
        for entry in entries
        if lowerings.intersection(entry.lowerings) and (machine.gpu is not None or not entry.needs_gpu)
    ]
    flavours: list[str] = [engine.flavour for engine in bundle.manifest.engines]
    of_engines = [entry for entry in entries if entry.flavour in flavours and entry.is_advised]
    of_engines.sort(key=lambda entry: flavours.index(str(entry.flavour)))
    return [*of_graphs, *of_engines]


def _own_precisions(bundle: Bundle, entry: BackendEntry) -> list[Precision]:
    """Precisions that a bundle has graphs for; a session takes precisions with graphs of their own by name only."""
    own = [each for each in OPTION_OF_GRAPHS if each in entry.precisions]
    return [Precision.AUTO, *(each for each in own if has_graph(bundle, entry.lowerings[0], precision=each))]


def _backend_series(
    bundle: Bundle,
    subject: MeasuredModel,
    entry: BackendEntry,
    precisions: Iterable[Precision],
    machine: ThisMachine,
    bundles: Sequence[Bundle],
) -> list[PlannedSeries]:
    """A backend with a bundle; on a GPU once, because the graph or the engine decides the precision."""
    names = [other.path.name for other in bundles]
    name = bundle.path.name if names.count(bundle.path.name) == 1 else str(bundle.path)
    return [
        PlannedSeries(
            series=Series(
                name=f"{name} ({entry.name.value}{'' if precision is Precision.AUTO else f', {precision.value}'})",
                runner=entry.name.value,
                bundle=str(bundle.path),
                model=bundle.manifest.name,
                is_peer=False,
                unavailable=why_unavailable(bundle, entry.name, precision=precision, machine=machine),
            ),
            bundle=bundle,
            subject=subject,
            device="cuda" if entry.needs_gpu else "cpu",
            precision=precision,
        )
        for precision in ([Precision.AUTO] if entry.needs_gpu else precisions)
    ]


def _peer_series(
    bundle: Bundle, subject: MeasuredModel, peers: Sequence[str], device: str, *, is_only: bool
) -> list[PlannedSeries]:
    series = []
    for name in peers:
        peer = PEERS[name]
        unavailable = peer.unavailable(bundle.manifest)
        if subject.checkpoint is None:
            unavailable = f"{_missing_checkpoint(bundle)} Name it with --model."
        series.append(
            PlannedSeries(
                series=Series(
                    name=name if is_only else f"{name}: {bundle.path.name}",
                    runner=name,
                    bundle=str(bundle.path),
                    model=bundle.manifest.name,
                    is_peer=True,
                    remark=peer.remark(bundle.manifest),
                    unavailable=unavailable,
                ),
                bundle=bundle,
                subject=subject,
                device=device,
            )
        )
    return series


def _missing_checkpoint(bundle: Bundle) -> str:
    source = bundle.manifest.made_by.get("source", "a checkpoint that it does not name")
    return f"{bundle.path} was built from {source}, which is not here."


def _notes(groups: Sequence[Sequence[Bundle]], subjects: Sequence[MeasuredModel]) -> list[str]:
    return [
        f"{_missing_checkpoint(_longest(group))} So nothing was compared with PyTorch; name it with --model."
        for group, subject in zip(groups, subjects, strict=True)
        if subject.checkpoint is None
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
                    f"--lengths {text:.60}: {part!r:.60} is more than {_MOST_LENGTHS} lengths.\n"
                    f"Give a larger step. {_LENGTHS}"
                )
            return _multiplied(first, last, step) if match[3] == "x" else (*range(first, last, step), last)
    raise InputError(f"--lengths {text:.60}: {part!r:.60} is not a length in tokens.\n{_LENGTHS}")


def _multiplied(first: int, last: int, factor: int) -> tuple[int, ...]:
    lengths = []
    while first < last:
        lengths.append(first)
        first *= factor
    return (*lengths, last)
