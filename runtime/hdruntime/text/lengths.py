"""The length to which texts are truncated: one rule for sessions, encoders, jobs, servers and Ray."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.errors import InputError

MaxSeqLength = Literal["model", "bundle"]
"""Names of lengths: the model's own, as its library truncates texts, and the longest that the bundle runs."""

Role = Literal["query", "document"]
"""What a text is for, in models that read queries and documents differently."""


def model_length(manifest: Manifest, role: Role | None = None) -> int:
    """The tokens to which the model's own library truncates texts, special tokens and prompt included.

    Args:
        manifest: of the bundle.
        role: of the texts; None for texts that are neither queries nor documents.
    """
    settings, info = manifest.sentence, manifest.tokenizer
    if settings is None:
        # Without settings, sentence-transformers' CrossEncoder goes as far as the checkpoint has positions.
        plain = manifest.positions.base if manifest.task == Task.TEXT_CLASSIFICATION else manifest.max_len
        return (info and info.model_max_length) or plain
    own = settings.multi_vector
    length = None
    if own is not None and role == "document":
        length = own.document_length
    elif own is not None and role == "query":
        length, expansion = own.query_length, own.expansion
        if expansion is not None:
            is_fixed = expansion.strategy == "fixed"
            length = expansion.length if is_fixed else length and max(length, expansion.length)
    return length or settings.max_seq_length


def checked_length(
    asked: int | MaxSeqLength | None,
    manifest: Manifest,
    *,
    most: int,
    fewest: int = 1,
    role: Role | None = None,
    name: str = "max_seq_length",
) -> int:
    """The tokens to which texts are truncated.

    Args:
        asked: a number; ``"model"`` for `model_length`; ``"bundle"`` for the longest that runs; None for the length
            that the build was asked to serve, or else for the model's own. Queries of late interaction keep the
            model's own.
        manifest: of the bundle.
        most, fewest: tokens that a number may be.
        role: as of `model_length`.
        name: of the argument, for the error.

    Raises:
        InputError: the number is out of range, or is no number.
    """
    if asked is None and role != "query" and manifest.tokenizer is not None:
        asked = manifest.tokenizer.text_length and min(manifest.tokenizer.text_length, most)
    if asked is None or asked == "model":
        return min(model_length(manifest, role), most)
    if asked == "bundle":
        return most
    if not isinstance(asked, (int, np.integer)) or isinstance(asked, bool):
        raise InputError(f"{name} is {asked!r}; it must be a number of tokens, 'model' or 'bundle'.")
    if not fewest <= asked <= most:
        hint = f"Build the bundle again with --max-len {asked}." if asked > most else "Give more, or leave it out."
        raise InputError(f"{name} is {asked}; this bundle takes {fewest} to {most} tokens.", hint=hint)
    return int(asked)
