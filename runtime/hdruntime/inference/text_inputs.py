"""Encoded texts as the inputs of a bundle's graphs."""

from __future__ import annotations

__all__ = ["inputs_of_texts"]

from collections.abc import Sequence

from hdruntime.arrays import AnyArray
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.inference.batching import padded
from hdruntime.inference.inputs import filled_inputs
from hdruntime.text.tokenization import Encoding


def inputs_of_texts(encodings: Sequence[Encoding], manifest: Manifest, *, memory: int) -> dict[str, AnyArray]:
    """A batch of texts, shorter ones padded on the right.

    Args:
        encodings: of the texts, with a token each, and no more tokens than the bundle takes.
        manifest: of the bundle.
        memory: size of the axis ``memory``; memories hold their defaults.

    Returns:
        As :func:`hdruntime.inference.inputs.filled_inputs`.

    Raises:
        InputError: likewise.
    """
    tokenizer = manifest.tokenizer
    values = {
        Role.IDS: padded(
            [encoding.input_ids for encoding in encodings], value=tokenizer.pad_token_id if tokenizer else 0
        ),
        Role.MASK: padded([[1] * len(encoding) for encoding in encodings], value=0),
        Role.TOKEN_TYPES: padded([encoding.token_type_ids for encoding in encodings], value=0),
        Role.POOLED: padded([_pooled_tokens(encoding) for encoding in encodings], value=0),
        Role.ATTENDED: padded([_attended_tokens(encoding) for encoding in encodings], value=0),
    }
    if tokenizer and not tokenizer.token_types:
        del values[Role.TOKEN_TYPES]
    given = {spec.name: values[spec.role] for spec in manifest.inputs if spec.role in values}
    return filled_inputs(given, manifest, memory=memory)


def _pooled_tokens(encoding: Encoding) -> list[int]:
    return [0] * encoding.prompt_tokens + [1] * (len(encoding) - encoding.prompt_tokens)


def _attended_tokens(encoding: Encoding) -> list[int]:
    return [1] * (len(encoding) - encoding.unattended_tokens) + [0] * encoding.unattended_tokens
