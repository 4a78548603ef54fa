"""The parts of a checkpoint that may run code on this machine: none, unless its user says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The parts of a checkpoint that its user lets run code.

    Attributes:
        allow_pickle: weights that are stored as a pickle.
        trust_remote_code: Python files of the checkpoint: modules, a tokenizer or a model.
    """

    allow_pickle: bool = False
    trust_remote_code: bool = False


UNTRUSTED = Trust()
"""Nothing of a checkpoint may run."""
