"""Files that cases need, made by processes before the cases run: inputs, PyTorch's outputs, artefacts of baselines."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from hdexport.bench.baselines.baseline import MeasuredModel, Prepared, Texts
from hdexport.bench.measure.processes import ProcessOutcome, run_function
from hdexport.bench.results.result import CaseResult, RunStatus
from hdexport.bench.run.plan import Plan, PlannedSeries
from hdexport.checkpoint import find_checkpoint
from hdexport.verify.pytorch_reference import Reference, reference_of
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError
from hdruntime.whole_files import whole_file


class Watcher:
    """Observer of a benchmark that shows nothing; base class of observers that show progress."""

    def step(self, title: str) -> None:
        """A step of the preparation starts."""

    def note(self, text: str) -> None:
        """The result has a new note."""

    def planned(self, cases: Sequence[tuple[str, int, int]], rounds: int) -> None:
        """The rounds start; each case is (name of the series, batch, tokens)."""

    def begin(self, series: str, batch: int, tokens: int, number: int) -> None:
        """Round `number`, from 1, of a case starts."""

    def finish(self, case: CaseResult) -> None:
        """A round of a case ended; `case` is its result so far."""


_TIME_LIMIT_S = 3600.0
"""Time limit of one step: exports of large models take minutes."""


class Preparation:
    """Files that were made for a plan, in an empty directory."""

    def __init__(self, plan: Plan, folder: Path, watcher: Watcher) -> None:
        self._plan, self._folder, self._watcher = plan, folder, watcher
        available = [planned for planned in plan.series if planned.is_available]
        self._models = list(dict.fromkeys(planned.model for planned in available))
        self._max_len = {model: _max_len(model, plan) for model in self._models}
        self._baselines = [planned for planned in available if planned.baseline is not None]
        self._artefacts: dict[str, tuple[ProcessOutcome, Prepared | None]] = {}
        self._notes: list[str] = []

    def run(self) -> None:
        """Make every file. Inputs that cannot be made raise BackendError."""
        for model in self._models:
            self._folder_of(model).mkdir()
            self._make_inputs(model)
            if model.checkpoint is not None:
                self._make_expected(model)
        for planned in self._baselines:
            self._make_artefact(planned)

    @property
    def notes(self) -> tuple[str, ...]:
        """Files that could not be made, in sentences."""
        return tuple(self._notes)

    def inputs(self, planned: PlannedSeries, batch: int, tokens: int) -> Path:
        """File with the inputs of a case."""
        return inputs_path(self._folder_of(planned.model), batch, tokens)

    def expected(self, planned: PlannedSeries, batch: int, tokens: int) -> Path | None:
        """Directory of PyTorch's outputs for these inputs, or None."""
        path = expected_path(self._folder_of(planned.model), batch, tokens)
        return path if path.exists() else None

    def made(self, planned: PlannedSeries) -> Prepared | None:
        """Artefact of a baseline; None for a bundle, and if the preparation failed."""
        return self._artefacts.get(planned.series.name, (None, None))[1]

    def failure(self, planned: PlannedSeries) -> str | None:
        """Why a baseline has no artefact, or None."""
        outcome, _ = self._artefacts.get(planned.series.name, (None, None))
        if outcome is None or outcome.status is RunStatus.OK:
            return None
        return f"The baseline could not be prepared ({outcome.status.value}): {outcome.reason}"

    def _folder_of(self, model: MeasuredModel) -> Path:
        return self._folder / f"model-{self._models.index(model)}"

    def _shapes(self, model: MeasuredModel) -> list[tuple[int, int]]:
        lengths = [tokens for tokens in self._plan.lengths if tokens <= self._max_len[model]]
        return [(batch, tokens) for tokens in lengths for batch in self._plan.batches]

    def _make_inputs(self, model: MeasuredModel) -> None:
        self._watcher.step("Making the inputs")
        call = partial(write_inputs, model, self._folder_of(model), self._shapes(model))
        outcome, _ = run_function(call, time_limit_s=_TIME_LIMIT_S)
        if outcome.status is not RunStatus.OK:
            raise BackendError(
                f"The inputs for {model.bundle} could not be made: {outcome.reason}",
                hint=f"Look at the bundle: hdexport inspect {shlex.quote(str(model.bundle))}",
            )

    def _make_expected(self, model: MeasuredModel) -> None:
        failures: dict[str, list[str]] = {}
        left, folder = self._shapes(model), self._folder_of(model)
        while left:
            # All shapes in one process, because PyTorch takes seconds to start; after a failure a new one continues.
            shapes = ", ".join(f"{batch} x {tokens}" for batch, tokens in left)
            self._watcher.step(f"Computing PyTorch's outputs in float32, {shapes}")
            call = partial(write_expected, model, folder, left)
            outcome, _ = run_function(call, time_limit_s=len(left) * _TIME_LIMIT_S)
            left = [shape for shape in left if not expected_path(folder, *shape).exists()]
            if left:
                reason, (batch, tokens) = f"{outcome.status.value}: {outcome.reason}", left.pop(0)
                failures.setdefault(reason, []).append(f"{batch} x {tokens}")
        for reason, failed in failures.items():
            self._notes.append(f"{', '.join(failed)} tokens were not compared with PyTorch, which failed: {reason}")

    def _make_artefact(self, planned: PlannedSeries) -> None:
        assert planned.baseline is not None
        self._watcher.step(f"Preparing {planned.series.name}")
        folder = self._folder_of(planned.model)
        call = partial(planned.baseline.prepare, planned.model, folder, device=planned.device)
        self._artefacts[planned.series.name] = run_function(call, time_limit_s=_TIME_LIMIT_S)


def inputs_path(folder: Path, batch: int, tokens: int) -> Path:
    """File of a batch's inputs: an ``.npz`` of int64 [batch, tokens] arrays."""
    return folder / f"inputs-{batch}x{tokens}.npz"


def expected_path(folder: Path, batch: int, tokens: int) -> Path:
    """Directory of PyTorch's outputs for a batch: float32 arrays, one ``.npy`` file each."""
    return folder / f"expected-{batch}x{tokens}"


def write_inputs(model: MeasuredModel, folder: Path, shapes: Sequence[tuple[int, int]]) -> None:
    """Write the inputs of every (batch, tokens)."""
    texts = Texts(open_bundle(model.bundle, check_files=False))
    for batch, tokens in shapes:
        with whole_file(inputs_path(folder, batch, tokens)) as file:
            # NumPy's type stub confuses the names of arrays with options.
            np.savez(file, **texts.batch(batch, tokens))  # type: ignore[arg-type]


def write_expected(model: MeasuredModel, folder: Path, shapes: Sequence[tuple[int, int]]) -> None:
    """Write PyTorch's outputs for the inputs of every (batch, tokens)."""
    assert model.checkpoint is not None
    bundle = open_bundle(model.bundle, check_files=False)
    checkpoint = find_checkpoint(model.checkpoint, trust=model.trust)
    reference = reference_of(bundle, checkpoint)
    for batch, tokens in shapes:
        with np.load(inputs_path(folder, batch, tokens)) as file:
            inputs = {name: file[name] for name in file.files}
        write_rows(expected_path(folder, batch, tokens), _outputs(reference, inputs, batch), batch=batch)


def write_rows(path: Path, rows: Iterable[Mapping[str, FloatArray]], *, batch: int) -> None:
    """Write a directory of ``.npy`` files, float32 [batch, ...] each, atomically.

    Each row has the outputs of one sequence, name -> array without the batch axis. Memory does not grow with the batch.
    """
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


def _max_len(model: MeasuredModel, plan: Plan) -> int:
    """Largest max_len of a model's bundles."""
    return max(planned.bundle.manifest.max_len for planned in plan.series if planned.model == model)


def _outputs(reference: Reference, inputs: Mapping[str, IntArray], batch: int) -> Iterator[dict[str, FloatArray]]:
    # All rows have one length and no padding: outputs of a row alone equal its outputs in the batch.
    for row in range(batch):
        outputs = reference.batch({name: ids[row : row + 1] for name, ids in inputs.items()})
        yield {name: values[0] for name, values in outputs.items()}
