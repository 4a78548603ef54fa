"""What a job has done so far, as it is saved and read back."""

from __future__ import annotations

__all__ = ["Saved", "json_from_saved", "saved_from_json"]

import dataclasses
import json
from dataclasses import dataclass, field

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
        result_bytes: length of their results; what comes after that in the file is of no account.
        complete: whether there are no more rows.
    """

    position: Position = field(default_factory=Position)
    stamp: tuple[int, int] | None = None
    counts: RowCounts = field(default_factory=RowCounts)
    seconds: float = 0.0
    result_bytes: int = 0
    complete: bool = False


def json_from_saved(saved: Saved) -> str:
    """A JSON object."""
    return json.dumps(dataclasses.asdict(saved) | {"position": saved.position._asdict()})


def saved_from_json(text: str | bytes) -> Saved:
    """What `json_from_saved` wrote.

    Raises:
        ValueError: it is something else.
    """
    values = json.loads(text)
    try:
        values["position"] = Position(**values["position"])
        values["counts"] = RowCounts(**values["counts"])
        values["stamp"] = values["stamp"] and tuple(values["stamp"])
        return Saved(**values)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not what a job saves: {error}") from error
