"""What a bundle takes for granted of a model, asked of transformers' own code: padding, batch and call change nothing.

A known family was written with this in mind. Of any other model it is found by running it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hdexport.support.json_files import shown
from hdruntime.errors import ModelError

_LENGTHS = (21, 8, 1)
"""Tokens of the texts of a batch."""

_LONG = 1024
"""Tokens of a text that is long: models of long texts compute those of a few hundred tokens in another way."""

_SPECIAL_IDS = 4
"""Ids below this are in no text: in most vocabularies they are the special tokens."""

_TOLERANCE = 1e-3
"""Largest difference, of the largest value: a hundred times what rounding of float32 makes of a tiny or a large
model, and far below what a token of padding makes that is seen."""


def check_behaviour(model: PreTrainedModel, *, most_positions: int = 0) -> None:
    """Reject a loaded model in float32 whose answers to a text depend on its padding, its batch or the calls before.

    `most_positions` are those of its configuration, 0 for any number.
    """
    model_type = model.config.model_type
    # Some rows of a table may be the padding's, or before it.
    tokens = max(_LENGTHS[0], min(_LONG, most_positions * 3 // 4 or _LONG))
    long, *texts = _texts(model, (tokens, *_LENGTHS))
    # First of all: the code may go another way for good once it was given a short text.
    before = _run(model, long[None], torch.ones(1, len(long), dtype=torch.int64))
    alone = [_run(model, text[None], torch.ones(1, len(text), dtype=torch.int64))[0] for text in texts]
    again = [_run(model, text[None], torch.ones(1, len(text), dtype=torch.int64))[0] for text in texts]
    for text, first, second in zip(texts, alone, again, strict=True):
        _check_numbers(model_type, first, f"a text of {len(text)} tokens")
        # The negation, here and below, because NaN is within no bound.
        if not (error := _difference(first, second)) <= 0:
            raise _unsupported(
                model_type,
                f"two calls with the same {len(text)} tokens differ by {error:.2g}: they draw random numbers, such as "
                "dropout's, or keep something of the call before",
            )
    same = _run(model, texts[0].expand(3, -1).clone(), torch.ones(3, len(texts[0]), dtype=torch.int64))
    others = torch.stack([texts[0], texts[0].flip(0), texts[0].roll(5)])
    mixed = _run(model, others, torch.ones_like(others))
    for output, what in ((same[0], "three copies"), (mixed[0], "two other texts")):
        if not (error := _difference(output, alone[0])) <= _TOLERANCE:
            raise _unsupported(
                model_type,
                f"a text of {len(texts[0])} tokens alone and in a batch of {what} differ by {error:.2g} of their size",
            )
    _check_padding(model, texts, alone)
    after = _run(model, long[None], torch.ones(1, len(long), dtype=torch.int64))
    if not (error := _difference(after, before)) <= _TOLERANCE:
        raise _unsupported(
            model_type,
            f"a text of {len(long)} tokens, before and after the code was given shorter texts, differs by {error:.2g} "
            "of its size: the code keeps something of earlier calls",
        )


def _check_padding(model: PreTrainedModel, texts: list[torch.Tensor], alone: list[torch.Tensor]) -> None:
    """Padding on the right changes nothing. Padding on the left may move a text to other positions, but what is in it
    changes nothing."""
    padding, fillers = getattr(model.config, "pad_token_id", None), (texts[0].flip(0), texts[0].roll(3))
    is_of_tokens = all(len(answer) == len(text) for answer, text in zip(alone, texts, strict=True))
    # Some models find padding by its id, which a graph has there, whatever it is given.
    filler = fillers[0] if padding is None else torch.full_like(fillers[0], padding)
    right = _padded(model, texts, filler, "right", is_of_tokens)
    pairs = [("right", "and the text alone", outputs, wanted) for outputs, wanted in zip(right, alone, strict=True)]
    if is_of_tokens:
        # Classifiers may read the first token, padding or not.
        left, other = (_padded(model, texts, filler, "left", is_of_tokens) for filler in fillers)
        pairs += [("left", "and with other padding there", *both) for both in zip(left, other, strict=True)]
    for (side, beside, outputs, wanted), text in zip(pairs, [*texts, *texts], strict=False):
        padded_text = f"a text of {len(text)} tokens with {len(filler) - len(text)} of padding on the {side}"
        _check_numbers(model.config.model_type, outputs, padded_text)
        if not (error := _difference(outputs, wanted)) <= _TOLERANCE:
            raise _unsupported(
                model.config.model_type,
                f"{padded_text} {beside} differ by {error:.2g} of their size",
            )


def _check_numbers(model_type: str, answer: torch.Tensor, given: str) -> None:
    if not bool(answer.isfinite().all()):
        raise ModelError(
            f"The code of this {model_type} fails: the answer to {given} has values that are no numbers.",
            hint="Choose a model whose code answers every text.",
        )


def _padded(
    model: PreTrainedModel, texts: list[torch.Tensor], filler: torch.Tensor, side: str, is_of_tokens: bool
) -> list[torch.Tensor]:
    """The answers to a batch of texts, those of padding left out."""
    tokens = len(filler)
    ids, mask = filler.expand(len(texts), -1).clone(), torch.zeros(len(texts), tokens, dtype=torch.int64)
    places = [slice(0, len(text)) if side == "right" else slice(tokens - len(text), None) for text in texts]
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        ids[row, place], mask[row, place] = text, 1
    outputs = _run(model, ids, mask)
    return [row[place] if is_of_tokens else row for row, place in zip(outputs, places, strict=True)]


def _texts(model: PreTrainedModel, lengths: Sequence[int]) -> list[torch.Tensor]:
    size, padding = int(model.config.vocab_size), getattr(model.config, "pad_token_id", None)
    ids = [number for number in range(size) if number >= _SPECIAL_IDS and number != padding] or [0]
    generator = torch.Generator().manual_seed(0)
    return [torch.tensor(ids)[torch.randint(len(ids), (tokens,), generator=generator)] for tokens in lengths]


def _run(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The first output of a model's own code, which may fail in any way; a ModelError says how."""
    try:
        with torch.inference_mode():
            states: torch.Tensor = model(input_ids=ids, attention_mask=mask, return_dict=True)[0]
    except MemoryError:
        raise
    except Exception as error:
        texts = "a text" if len(ids) == 1 else f"{len(ids)} texts"
        tokens = "1 token" if ids.shape[1] == 1 else f"{ids.shape[1]} tokens"
        raise ModelError(
            f"The code of this {model.config.model_type} does not run with ids and a mask alone, on {texts} of "
            f"{tokens}: {shown(error)}",
            hint="A bundle has no other inputs, and takes texts of any length; choose a model whose code runs so.",
        ) from error
    return states.float()


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference as a part of the largest value; infinite for other shapes."""
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


def _unsupported(model_type: str, how: str) -> ModelError:
    return ModelError(
        f"The answers of this {model_type} by its own code depend on more than the text: {how}.",
        hint="A bundle's answer to a text must be the same in every batch; choose a model whose code sees to that.",
    )
