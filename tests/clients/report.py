"""What a program gets and says: servers and texts on standard input, what its client received on standard output."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any, NamedTuple


class Given(NamedTuple):
    """The servers' addresses, and the texts that they are asked about; `chunks` are those of
    each document."""

    embedder: str
    reranker: str
    classifier: str
    texts: list[str]
    many: list[str]
    query: str
    documents: list[str]
    labelled: list[str]
    chunks: list[list[str]]


GIVEN = Given(**json.load(sys.stdin))
_ROWS: list[dict[str, Any]] = []


def received(packages: str, call: str, expected: str, value: Any) -> None:
    """Note what a call of a client returned.

    Args:
        packages: names of the client's distributions, the client first.
        call: the call, for the table.
        expected: name of the bundle's own numbers that the value must equal.
        value: as JSON.
    """
    client = ", ".join(f"{name} {version(name)}" for name in packages.split())
    _ROWS.append({"client": client, "call": call, "expected": expected, "value": value})


def in_order(results: Any, score: str = "relevance_score") -> list[float]:
    """The scores of ranked documents, in the order in which they were sent."""
    rows = [each if isinstance(each, dict) else vars(each) for each in results]
    return [each[score] for each in sorted(rows, key=lambda row: row["index"])]


def finish() -> None:
    """Print what was received."""
    json.dump(_ROWS, sys.stdout)
