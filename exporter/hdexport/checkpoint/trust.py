"""The parts of a checkpoint that may run code on this machine: none, unless its user says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The parts of a checkpoint that its user lets run code.

    Attributes:
        pickles: weights that are stored as a pickle (``--allow-pickle``).
        code: Python files of the checkpoint, with modules, a tokenizer or a model of its own (``--trust-remote-code``).
    """

    pickles: bool = False
    code: bool = False


UNTRUSTED = Trust()
"""Nothing of a checkpoint may run."""
