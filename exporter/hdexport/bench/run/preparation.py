"""Everything that cases need, made by processes before they run: inputs, PyTorch's answers, peers'
artefacts, ceilings."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hdexport.bench.measure.ceilings import measured_ceilings
from hdexport.bench.measure.processes import ProcessOutcome, run_function
from hdexport.bench.measure.roofline import Work, works_of
from hdexport.bench.peers import PEERS
from hdexport.bench.peers.peer import MeasuredModel, Prepared, Texts
from hdexport.bench.results.result import CaseResult, Ceilings, Status
from hdexport.bench.run.plan import Plan, PlannedSeries
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError
from hdruntime.whole_files import whole_file

if TYPE_CHECKING:
    from hdexport.verify.pytorch_reference import Reference


class Watcher:
    """Silent; the base of classes that show something."""

    def step(self, title: str) -> None:
        """A step of the preparation begins."""

    def note(self, text: str) -> None:
        """A note of the result."""

    def planned(self, cases: Sequence[tuple[str, int, int]], rounds: int) -> None:
        """The rounds begin; each case is the name of its series, batch and tokens."""

    def begin(self, series: str, batch: int, tokens: int, number: int) -> None:
        """Round `number`, from 1, of a case begins."""

    def finish(self, case: CaseResult) -> None:
        """A round of a case ended; `case` is its result so far."""


_TIME_LIMIT_S = 3600.0
"""Time limit of one step: exports of large models take minutes."""


class Preparation:
    """The files and figures that were made for a plan, in an empty folder."""

    def __init__(self, plan: Plan, folder: Path, watcher: Watcher) -> None:
        self._plan, self._folder, self._watcher = plan, folder, watcher
        available = [planned for planned in plan.series if planned.is_available]
        self._subjects = list(dict.fromkeys(planned.subject for planned in available))
        self._max_len = {subject: _max_len(subject, plan) for subject in self._subjects}
        self._peers = [planned for planned in available if planned.series.is_peer]
        self._devices = list(dict.fromkeys(map(_device_and_dtype, available)))
        self._artefacts: dict[str, tuple[ProcessOutcome, Prepared | None]] = {}
        self._work: dict[MeasuredModel, dict[tuple[int, int], Work]] = {}
        self._ceilings: dict[tuple[str, str], Ceilings] = {}
        self._notes: list[str] = []

    def run(self) -> None:
        """Makes everything; if not even inputs could be made, this is a BackendError."""
        for subject in self._subjects:
            self._folder_of(subject).mkdir()
            self._make_inputs(subject)
        self.measure_ceilings()
        for subject in self._subjects:
            self._count_work(subject)
            if subject.checkpoint is not None:
                self._make_expected(subject)
        for planned in self._peers:
            self._make_artefact(planned)

    def measure_ceilings(self) -> None:
        """Measures this machine's rates; of several measurements the best counts, because others may disturb one."""
        for device, dtype in self._devices:
            self._measure_ceilings(device, dtype)

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be made, and what readers lose by that."""
        return tuple(self._notes)

    @property
    def ceilings(self) -> tuple[Ceilings, ...]:
        return tuple(self._ceilings.values())

    def ceilings_of(self, planned: PlannedSeries) -> Ceilings | None:
        """Ceilings of a series' device and type; None where they could not be measured."""
        return self._ceilings.get(_device_and_dtype(planned))

    def work_of(self, planned: PlannedSeries, batch: int, tokens: int) -> Work | None:
        """The work of a case; None where it could not be counted."""
        return self._work.get(planned.subject, {}).get((batch, tokens))

    def inputs(self, planned: PlannedSeries, batch: int, tokens: int) -> Path:
        """A case's inputs; for a batch that is not in the plan, the first text of one that is, repeated."""
        folder = self._folder_of(planned.subject)
        path = inputs_path(folder, batch, tokens)
        if not path.exists():
            with np.load(inputs_path(folder, self._plan.batches[0], tokens)) as file:
                repeated: dict[str, Any] = {name: np.repeat(file[name][:1], batch, axis=0) for name in file.files}
            np.savez(path, **repeated)
        return path

    def expected(self, planned: PlannedSeries, batch: int, tokens: int) -> Path | None:
        """PyTorch's answers to these inputs; None if there are none."""
        path = expected_path(self._folder_of(planned.subject), batch, tokens)
        return path if path.exists() else None

    def made(self, planned: PlannedSeries) -> Prepared | None:
        """A peer's artefact; None for other series, and if its preparation failed."""
        return self._artefacts.get(planned.series.name, (None, None))[1]

    def failure(self, planned: PlannedSeries) -> str | None:
        """Why a peer has nothing to run; None where it has."""
        outcome, _ = self._artefacts.get(planned.series.name, (None, None))
        if outcome is None or outcome.status is Status.OK:
            return None
        return f"It could not be prepared ({outcome.status.value}): {outcome.reason}"

    def _folder_of(self, subject: MeasuredModel) -> Path:
        return self._folder / f"model-{self._subjects.index(subject)}"

    def _shapes(self, subject: MeasuredModel) -> list[tuple[int, int]]:
        lengths = [tokens for tokens in self._plan.lengths if tokens <= self._max_len[subject]]
        return [(batch, tokens) for tokens in lengths for batch in self._plan.batches]

    def _make_inputs(self, subject: MeasuredModel) -> None:
        self._watcher.step("Making the inputs")
        call = partial(write_inputs, subject, self._folder_of(subject), self._shapes(subject))
        outcome, _ = run_function(call, time_limit_s=_TIME_LIMIT_S)
        if outcome.status is not Status.OK:
            raise BackendError(
                f"The inputs for {subject.bundle} could not be made: {outcome.reason}\n"
                f"Look at the bundle: hdexport inspect {shlex.quote(str(subject.bundle))}"
            )

    def _make_expected(self, subject: MeasuredModel) -> None:
        failures: dict[str, list[str]] = {}
        left, folder = self._shapes(subject), self._folder_of(subject)
        while left:
            # All in one process, because PyTorch takes seconds to start; after a failure the next process continues.
            shapes = ", ".join(f"{batch} x {tokens}" for batch, tokens in left)
            self._watcher.step(f"PyTorch's answers in float32, {shapes}")
            call = partial(write_expected, subject, folder, left)
            outcome, _ = run_function(call, time_limit_s=len(left) * _TIME_LIMIT_S)
            left = [shape for shape in left if not expected_path(folder, *shape).exists()]
            if left:
                reason, (batch, tokens) = f"{outcome.status.value}: {outcome.reason}", left.pop(0)
                failures.setdefault(reason, []).append(f"{batch} x {tokens}")
        for reason, failed in failures.items():
            self._notes.append(f"{', '.join(failed)} tokens were not compared with PyTorch, which failed: {reason}")

    def _make_artefact(self, planned: PlannedSeries) -> None:
        self._watcher.step(f"Preparing {planned.series.name}")
        prepare = PEERS[planned.series.runner].prepare
        call = partial(prepare, planned.subject, self._folder_of(planned.subject), device=planned.device)
        self._artefacts[planned.series.name] = run_function(call, time_limit_s=_TIME_LIMIT_S)

    def _count_work(self, subject: MeasuredModel) -> None:
        self._watcher.step("Counting operations")
        call = partial(works_of, subject.bundle, self._shapes(subject))
        outcome, work = run_function(call, time_limit_s=_TIME_LIMIT_S)
        if work is None:
            self._notes.append(f"No roofline: the operations could not be counted: {outcome.reason}")
        else:
            self._work[subject] = work

    def _measure_ceilings(self, device: str, dtype: str) -> None:
        self._watcher.step(f"Measuring the limits of this machine ({device}, {dtype})")
        call = partial(measured_ceilings, device, dtype, self._plan.threads)
        outcome, now = run_function(call, time_limit_s=_TIME_LIMIT_S)
        if now is None:
            reason = f"the limits of {device} in {dtype} could not be measured: {outcome.reason}"
            self._notes.append(f"No roofline: {reason}")
            return
        before = self._ceilings.get((device, dtype), now)
        self._ceilings[device, dtype] = dataclasses.replace(
            now,
            matmul_flops_per_s=max(before.matmul_flops_per_s, now.matmul_flops_per_s),
            copy_bytes_per_s=max(before.copy_bytes_per_s, now.copy_bytes_per_s),
        )


def inputs_path(folder: Path, batch: int, tokens: int) -> Path:
    """The file of a batch's inputs: an ``.npz`` of int64 [batch, tokens] arrays."""
    return folder / f"inputs-{batch}x{tokens}.npz"


def expected_path(folder: Path, batch: int, tokens: int) -> Path:
    """The folder of PyTorch's outputs for that batch: float32 arrays, one ``.npy`` file each."""
    return folder / f"expected-{batch}x{tokens}"


def write_inputs(subject: MeasuredModel, folder: Path, shapes: Sequence[tuple[int, int]]) -> None:
    """Writes the inputs of every (batch, tokens)."""
    texts = Texts(open_bundle(subject.bundle, check_files=False))
    for batch, tokens in shapes:
        with whole_file(inputs_path(folder, batch, tokens)) as file:
            # NumPy's type stub takes the names of arrays for options.
            np.savez(file, **texts.batch(batch, tokens))  # type: ignore[arg-type]


def write_expected(subject: MeasuredModel, folder: Path, shapes: Sequence[tuple[int, int]]) -> None:
    """Writes PyTorch's outputs for those inputs, one shape after the other."""
    from hdexport.checkpoint import find_checkpoint
    from hdexport.verify.pytorch_reference import reference_of

    assert subject.checkpoint is not None
    bundle = open_bundle(subject.bundle, check_files=False)
    checkpoint = find_checkpoint(subject.checkpoint, trust=subject.trust)
    reference = reference_of(bundle, checkpoint)
    for batch, tokens in shapes:
        with np.load(inputs_path(folder, batch, tokens)) as file:
            inputs = {name: file[name] for name in file.files}
        write_rows(expected_path(folder, batch, tokens), _answers(reference, inputs, batch), batch=batch)


def write_rows(path: Path, rows: Iterable[Mapping[str, FloatArray]], *, batch: int) -> None:
    """Writes a folder of ``.npy`` files, float32 [batch, ...] each, that appears whole or not at all. `rows` has the
    outputs of one text each, name -> array without the batch axis; memory does not grow with the batch."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        folder = Path(scratch) / "rows"
        folder.mkdir()
        for number, row in enumerate(rows):
            for name, values in row.items():
                # Mapped again for each row: mapped pages count as memory of the process.
                new = {"mode": "w+", "dtype": np.float32, "shape": (batch, *values.shape)}
                array = np.lib.format.open_memmap(folder / f"{name}.npy", **({"mode": "r+"} if number else new))
                array[number] = values
        folder.rename(path)


def _max_len(subject: MeasuredModel, plan: Plan) -> int:
    """Longest text of the subject's bundles; the subject's own bundle takes the longest."""
    return max(planned.bundle.manifest.max_len for planned in plan.series if planned.subject == subject)


def _device_and_dtype(planned: PlannedSeries) -> tuple[str, str]:
    """On a CPU everything computes in float32, also with weights of another type."""
    return (planned.device, planned.bundle.manifest.dtype) if planned.device == "cuda" else ("cpu", "float32")


def _answers(reference: Reference, inputs: Mapping[str, IntArray], batch: int) -> Iterator[dict[str, FloatArray]]:
    # All rows have one length and no padding, so each answers alone as in the batch, whatever the attention.
    for row in range(batch):
        outputs = reference.batch({name: ids[row : row + 1] for name, ids in inputs.items()})
        yield {name: values[0] for name, values in outputs.items()}
