"""The length to which sessions, encoders, jobs, servers and Ray workers truncate texts."""

from __future__ import annotations

import numbers
from typing import Literal

from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.errors import InputError, Setting

MaxSeqLength = Literal["model", "bundle"]
"""Names of lengths: ``model`` is `model_length`, and ``bundle`` is the maximum length of the bundle."""

Role = Literal["query", "document"]
"""Role of a text, for models that encode queries and documents differently."""


def model_length(manifest: Manifest, role: Role | None = None) -> int:
    """The number of tokens, prompt and special tokens included, to which sentence-transformers truncates texts.

    Args:
        manifest: manifest of the bundle.
        role: role of the texts; None for texts that are neither queries nor documents.
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
    length: int | MaxSeqLength | None,
    manifest: Manifest,
    *,
    max_tokens: int,
    min_tokens: int = 1,
    role: Role | None = None,
    name: str = "max_seq_length",
) -> int:
    """The number of tokens to which texts are truncated.

    Args:
        length: a number of tokens; ``"model"`` for `model_length`; ``"bundle"`` for `max_tokens`; None for the value of
            ``hdexport build --max-len``, or `model_length` without one. For queries of late interaction None is
            `model_length`.
        manifest: manifest of the bundle.
        max_tokens, min_tokens: bounds of a number.
        role: see `model_length`.
        name: name of the parameter.

    Raises:
        InputError: the number is out of range, or `length` is of another type.
    """
    if length is None and role != "query" and manifest.tokenizer is not None:
        length = manifest.tokenizer.text_length and min(manifest.tokenizer.text_length, max_tokens)
    if length is None or length == "model":
        return min(model_length(manifest, role), max_tokens)
    if length == "bundle":
        return max_tokens
    if not isinstance(length, (int, numbers.Integral)) or isinstance(length, bool):
        raise InputError(parameter=name, value=length, accepted="a number of tokens, 'model' or 'bundle'")
    if not min_tokens <= length <= max_tokens:
        longer = ("Build the bundle again with ", Setting("max_len", int(length), command="build"), ".")
        raise InputError(
            parameter=name,
            value=length,
            accepted=f"{min_tokens} to {max_tokens} tokens for this bundle",
            hint=longer if length > max_tokens else "",
        )
    return int(length)
