"""The state that an unfinished tuning keeps beside its output, so that the same command continues it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hdruntime.errors import InputError
from hdruntime.jobs.files import (
    JOB_FILE,
    LOCK_FILE,
    RESULTS_FILE,
    OpenFolder,
    damaged,
    disk_errors_explained,
    locked_folder,
    opened_folder,
)
from hdruntime.jobs.identity import Identity, difference

_SAVE_SECONDS = 20
"""Time between two saves. A process that is killed repeats this much, and a micro-batch."""


class TuneFolder:
    """The folder of a tuning, held by this process."""

    def __init__(self, files: OpenFolder, output: Path) -> None:
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
            self._files.remove_all()


@contextlib.contextmanager
def opened_tune_folder(output: Path, identity: Identity, *, restart: bool) -> Iterator[TuneFolder]:
    """The folder of a tuning for this process alone; a folder in which nothing was saved is removed. `restart` discards
    the state that is there; else a tuning of another identity is refused."""
    with locked_folder(output) as (files, _):
        folder = TuneFolder(files, output)
        try:
            has_state = files.has(RESULTS_FILE) and not restart
            what = difference(files.identity(), identity) if has_state else None
            if what is not None:
                raise InputError(
                    f"{output} has an unfinished tuning in {files.path}; this is another one: {what}.\n"
                    "Continue that one by its own command, or discard it and start this one with --restart."
                )
            with disk_errors_explained(output):
                if not has_state:
                    files.remove_all(keep=(LOCK_FILE,))
                    with files.replacing(JOB_FILE) as file:
                        file.write(json.dumps(identity).encode())
            yield folder
        finally:
            if files.is_in_place() and not files.has(RESULTS_FILE):
                files.remove_all()


def kept_steps(output: Path) -> int | None:
    """Steps of an unfinished tuning that are safe; None where nothing is kept."""
    with opened_folder(output) as files:
        state = None if files is None else TuneFolder(files, output).load()
    return None if state is None else len(state["losses"])
