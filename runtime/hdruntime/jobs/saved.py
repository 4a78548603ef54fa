"""What a job has done so far, as it is saved and read back."""

from __future__ import annotations

__all__ = ["Saved", "json_from_saved", "saved_from_json"]

import dataclasses
import json
from dataclasses import dataclass, field

from hdruntime.bundle.checked_json import from_json
from hdruntime.bundle.manifest import LargeCount
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.rows import Position


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What is done.

    Attributes:
        position: where reading goes on.
        stamp: of the file there, as `hdruntime.jobs.input_watch` tells them apart.
        counts: of the rows before that.
        seconds: that it took.
        result_bytes: length of their results; what comes after that in the file does not count.
        complete: whether there are no more rows.
    """

    position: Position = field(default_factory=Position)
    stamp: tuple[int, int] | None = None
    counts: RowCounts = field(default_factory=RowCounts)
    seconds: float = 0.0
    result_bytes: LargeCount = 0
    complete: bool = False


def json_from_saved(saved: Saved) -> str:
    """A JSON object."""
    return json.dumps(dataclasses.asdict(saved))


def saved_from_json(text: str | bytes) -> Saved:
    """What `json_from_saved` wrote.

    Raises:
        ValueError: it is something else.
    """
    saved = from_json(text, Saved, name="progress")
    if json.loads(json_from_saved(saved)) != json.loads(text):
        raise ValueError("not what a job saves: something is missing, or there is more")
    return saved
