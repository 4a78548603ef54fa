"""Checks that tasks share."""

from __future__ import annotations

__all__ = ["check_task"]

from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import InputError
from hdruntime.text.tokenization import Overflow


def check_task(manifest: Manifest, task: str, *, method: str, overflow: Overflow | str) -> None:
    """Refuse bundles of other tasks, and streamed texts.

    Args:
        manifest: of the bundle.
        task: the method's.
        method: the session's method that was called.
        overflow: its option.

    Raises:
        InputError: the bundle's task is another one, or ``overflow`` is ``recur``.
    """
    if manifest.task != task:
        raise InputError(f"session.{method} is for {task}, and the bundle's task is {manifest.task}.")
    if overflow == Overflow.RECUR:
        raise InputError(
            f"session.{method} does not stream texts.\nUse overflow='split', or hdexport run --overflow recur."
        )
