"""The loop, AdamW with a cosine schedule over accumulated gradients, and the state that it keeps to continue from."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hdexport.support.progress import Progress
from hdexport.tune.objectives import Objective
from hdexport.tune.options import TuneOptions
from hdexport.tune.student import Student
from hdruntime.errors import InputError, NonFiniteOutputError, Setting
from hdruntime.jobs.checksums import json_with_checksum
from hdruntime.jobs.identity import Identity, difference
from hdruntime.jobs.state_folder import (
    JOB_FILE,
    RESULTS_FILE,
    StateFolder,
    damaged,
    disk_errors_explained,
    locked_folder,
    state_folder,
)

logger = logging.getLogger(__name__)

_WARMUP_STEPS = 10
_LEAST_RATE = 0.05
"""Share of the highest learning rate that is left at the end of the schedule."""

OWN_RATE = 0.05
"""Share of the learning rate for the differences of single rows, whose gradients are mostly noise."""

_BETAS = (0.9, 0.98)
_MOST_NORM = 1.0
"""Largest norm of the gradient; steeper gradients are scaled down."""

_SAVE_SECONDS = 20
"""Time between two saves. A process that is killed repeats this much, and a micro-batch."""


@dataclass
class Outcome:
    """The outcome of all runs of the command.

    Attributes:
        losses: mean loss of the texts of each step.
        documents: number of documents that were run, repeats included.
        seconds: training time in seconds.
    """

    losses: list[float] = field(default_factory=list)
    documents: int = 0
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of the optimizer."""
        return len(self.losses)


def train(
    student: Student, objective: Objective, options: TuneOptions, folder: TuneFolder, progress: Progress
) -> Outcome:
    """Trains, or continues. A loss or a gradient that is not finite is a NonFiniteOutputError, and the state before it
    is kept."""
    training = _Training(student, objective, options, folder)
    if training.outcome.steps or training.micro:
        progress.result(f"Continuing after step {training.outcome.steps}, from {folder.path}.")
    while not training.is_done:
        training.step()
        outcome = training.outcome
        left = outcome.seconds * (1 / training.share - 1)
        text = f"loss {outcome.losses[-1]:.4g}, about {_clock(left)} left, step"
        logger.info("step %d: loss %.4g, %s", outcome.steps, outcome.losses[-1], _clock(outcome.seconds))
        progress.detail(text, outcome.steps, max(outcome.steps, round(outcome.steps / training.share)))
    training.save()
    return training.outcome


class TuneFolder:
    """The folder of a tuning, held by this process."""

    def __init__(self, files: StateFolder, output: Path) -> None:
        self.path = files.path
        self._files, self._output = files, output
        self._saved_at = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The state that was saved last; None for none."""
        if not self.has_state:
            return None
        try:
            state: dict[str, Any] = torch.load(self.path / RESULTS_FILE, map_location="cpu", weights_only=True)
        except Exception as error:
            # Zip files, pickles and PyTorch have errors of their own.
            raise damaged(self.path, f"{RESULTS_FILE}: {error}") from error
        return state

    def save(self, state: Mapping[str, Any]) -> None:
        """Replaces the saved state, atomically."""
        with disk_errors_explained(self._output), self._files.replacing(RESULTS_FILE) as file:
            torch.save(dict(state), file)
        self._saved_at = time.monotonic()

    @property
    def has_state(self) -> bool:
        """Whether something was saved."""
        return self._files.has(RESULTS_FILE)

    @property
    def is_due(self) -> bool:
        """Whether the last save is long enough ago."""
        return time.monotonic() - self._saved_at >= _SAVE_SECONDS

    def remove(self) -> None:
        """Removes the folder, because the tuning is done."""
        with disk_errors_explained(self._output):
            self._files.delete()


@contextlib.contextmanager
def opened_tune_folder(output: Path, identity: Identity, *, restart: bool) -> Iterator[TuneFolder]:
    """The folder of a tuning for this process alone; a folder in which nothing was saved is removed. `restart` discards
    the state that is there; else a tuning of another identity is rejected."""
    with locked_folder(output) as files:
        folder = TuneFolder(files, output)
        try:
            has_state = files.has(RESULTS_FILE) and not restart
            what = difference(files.identity(), identity) if has_state else None
            if what is not None:
                raise InputError(
                    f"{output} has an unfinished tuning in {files.path}; this is another one: ",
                    *what,
                    ".",
                    hint=(
                        "Continue that one by its own command, or discard it and start this one with ",
                        *(Setting("restart", True), "."),
                    ),
                )
            with disk_errors_explained(output):
                if not has_state:
                    files.clear()
                    files.write(JOB_FILE, json_with_checksum(identity))
            yield folder
        finally:
            if not files.has(RESULTS_FILE):
                files.delete()


def kept_steps(output: Path) -> int | None:
    """Steps of an unfinished tuning that are safe; None where nothing is kept."""
    files = state_folder(output)
    state = None if files is None else TuneFolder(files, output).load()
    return None if state is None else len(state["losses"])


class _Training:
    """Everything that changes during the training."""

    def __init__(self, student: Student, objective: Objective, options: TuneOptions, folder: TuneFolder) -> None:
        self._student, self._objective, self._options, self._folder = student, objective, options, folder
        self._weights = student.trained()
        own = [weight for weight in self._weights.values() if weight is student.rows.own]
        others = [weight for weight in self._weights.values() if weight is not student.rows.own]
        groups = [{"params": others, "share": 1.0}, {"params": own, "share": OWN_RATE}]
        self._optimizer = torch.optim.AdamW(groups, betas=_BETAS, weight_decay=0.0)
        self.outcome = Outcome()
        self.micro, self._loss = 0, 0.0
        """Micro-batches of the current step that are done, and the sum of their losses."""
        state = folder.load()
        if state is not None:
            self._restore(state)

    @property
    def share(self) -> float:
        """How much is done, above 0 and at most 1."""
        options, outcome = self._options, self.outcome
        of_steps = outcome.steps / options.steps if options.steps else 0.0
        of_time = outcome.seconds / options.seconds if options.seconds else 0.0
        return min(1.0, max(of_steps, of_time, 1e-9))

    @property
    def is_done(self) -> bool:
        """Whether the steps or the minutes are over."""
        return self.share >= 1

    def step(self) -> None:
        began, before = time.monotonic(), self.outcome.seconds
        documents = self._documents_of_step()
        micro_batches = list(self._micro_batches(documents))
        while self.micro < len(micro_batches):
            self._backward(micro_batches[self.micro], len(documents))
            self.micro += 1
            self.outcome.seconds = before + time.monotonic() - began
            if self._folder.is_due:
                self.save()
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.peak_learning_rate * self._factor() * group["share"]
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), _MOST_NORM)
        self._require_finite("gradient", float(norm))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.outcome.losses.append(self._loss)
        self.outcome.documents += len(documents)
        self.outcome.seconds = before + time.monotonic() - began
        self.micro, self._loss = 0, 0.0

    def save(self) -> None:
        """Saves the whole state."""
        outcome = self.outcome
        self._folder.save(
            {
                "losses": outcome.losses,
                "documents": outcome.documents,
                "seconds": outcome.seconds,
                "micro": self.micro,
                "loss": self._loss,
                "weights": {name: weight.detach() for name, weight in self._weights.items()},
                "gradients": {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None},
                "optimizer": self._optimizer.state_dict(),
                "objective": self._objective.state(),
            }
        )

    def _restore(self, state: dict[str, Any]) -> None:
        self.outcome = Outcome(losses=state["losses"], documents=state["documents"], seconds=state["seconds"])
        self.micro, self._loss = state["micro"], state["loss"]
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(state["weights"][name])
        for name, gradient in state["gradients"].items():
            self._weights[name].grad = gradient.to(self._weights[name].device)
        self._optimizer.load_state_dict(state["optimizer"])
        self._objective.load_state(state["objective"])

    def _backward(self, documents: list[int], of_step: int) -> None:
        seed = (self._options.seed << 32) + self.outcome.documents * 4096 + self.micro
        loss = self._objective.loss(self._student, documents, seed)
        self._require_finite("loss", loss.item())
        (loss / of_step).backward()
        self._loss += loss.item() / of_step

    def _require_finite(self, what: str, value: float) -> None:
        if math.isfinite(value):
            return
        kept = f"The last saved state is kept in {self._folder.path}. " if self._folder.has_state else ""
        raise NonFiniteOutputError(
            f"The {what} is {value} in step {self.outcome.steps + 1}: training diverged, and nothing was written.",
            hint=(f"{kept}Use a lower ", Setting("learning_rate", self._options.peak_learning_rate / 4), "."),
        )

    def _documents_of_step(self) -> list[int]:
        """Indices of the next documents, in a new order each time that all were seen."""
        documents: list[int] = []
        tokens = 0
        all_documents = self._objective.documents
        order: np.ndarray | None = None
        while not documents or tokens < self._options.batch_tokens:
            epoch, place = divmod(self.outcome.documents + len(documents), len(all_documents))
            if order is None or place == 0:
                order = np.random.default_rng([self._options.seed, epoch]).permutation(len(all_documents))
            documents.append(int(order[place]))
            tokens += all_documents[documents[-1]].tokens
        return documents

    def _micro_batches(self, documents: list[int]) -> Iterator[list[int]]:
        """Documents of similar lengths, of at most as many tokens as the longest, padding included."""
        all_documents = self._objective.documents
        most = max(all_documents[index].tokens for index in documents)
        batch: list[int] = []
        for index in sorted(documents, key=lambda index: all_documents[index].tokens):
            if batch and all_documents[index].tokens * (len(batch) + 1) > most:
                yield batch
                batch = []
            batch.append(index)
        yield batch

    def _factor(self) -> float:
        """Share of the highest learning rate in this step."""
        cosine = (1 + math.cos(math.pi * self.share)) / 2
        warmup = min(1.0, (self.outcome.steps + 1) / _WARMUP_STEPS)
        return warmup * (_LEAST_RATE + (1 - _LEAST_RATE) * cosine)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
