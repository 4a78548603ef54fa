"""Checks of texts, of their lengths, and of options that name one of several choices."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AnySet
from enum import Enum
from typing import Any, TypeVar

from hdruntime.errors import InputError, Message, Setting, joined

Choice = TypeVar("Choice", bound=Enum)

TRUNCATE, SPLIT = Setting("overflow", "truncate"), Setting("overflow", "split")
"""Settings for texts of more tokens than the bundle accepts."""

_SHORTEN: Message = ("Truncate it (", TRUNCATE, "), run it in chunks (", SPLIT, ")")
"""Hint for such a text."""


class RejectedTextsError(InputError):
    """Some of several texts do not fit; the message is about the first of these.

    Attributes:
        texts: indices of the rejected texts.
    """

    def __init__(self, *problem: str | Setting, hint: Message = "", texts: Sequence[int] = (0,)) -> None:
        super().__init__(*problem, hint=hint)
        self.texts = texts


def check_text_lengths(lengths: Sequence[int], max_len: int, *, longest: int | None = None) -> None:
    """Reject texts without tokens and texts of more tokens than `max_len`; the error is about the first one, and its
    hint has the length of the longest.

    `longest` is the maximum length of the bundle, if `max_len` is less.
    """
    if lengths and (min(lengths) < 1 or max(lengths) > max_len):
        rejected = [index for index, tokens in enumerate(lengths) if not 1 <= tokens <= max_len]
        what = "The text" if len(lengths) == 1 else f"Text {rejected[0]}"
        tokens = lengths[rejected[0]]
        error = length_error(what, tokens, max_len, _SHORTEN, longest=longest, needed=max(lengths))
        raise RejectedTextsError(*error.args, hint=error.hint, texts=rejected)


def checked_texts(inputs: object, *, name: str, may_be_one: bool = False) -> list[str]:
    """A caller's texts as a list, from a list, an iterator, an array or a column of a data frame.

    Args:
        inputs: any number of strings; see `several` for rejected types.
        name: name of the parameter.
        may_be_one: whether a single string is accepted, as a list of one text.
    """
    if type(inputs) is list and all(type(text) is str for text in inputs):
        return list(inputs)
    if isinstance(inputs, str) and may_be_one:
        return [inputs]
    texts = list(several(inputs, name=name, of="strings", example="[text]"))
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(
                f"{name}[{index}] is {text!r:.60}, of type {type(text).__name__}; it must be a string.",
                hint="Leave it out, or put a string in its place.",
            )
    return [str(text) for text in texts]


def several(inputs: object, *, name: str, of: str, example: str) -> Iterable[Any]:
    """A caller's list of items, in order; an iterator is not consumed.

    Args:
        inputs: a list, an iterator, an array, or a column of a data frame. A single string is rejected, and so are
            types with keys, with columns or without an order.
        name: name of the parameter.
        of: noun for the items, in the plural.
        example: Python code of a valid value.
    """
    if isinstance(inputs, str):
        raise InputError(f"{name} is one string; it must be a list of {of}: {example}")
    if isinstance(inputs, (bytes, bytearray, memoryview)):
        raise InputError(
            f"{name} is of type {type(inputs).__name__}; it must be a list of {of}.", hint="Decode it: .decode()"
        )
    if isinstance(inputs, Mapping) or hasattr(inputs, "columns"):
        raise InputError(
            f"{name} is of type {type(inputs).__name__}, which has keys or columns; it must be a list of {of}.",
            hint="Choose the part that holds them: list(data['text'])",
        )
    if isinstance(inputs, AnySet):
        raise InputError(
            f"{name} is of type {type(inputs).__name__}, which has no order; it must be a list of {of}.",
            hint="Sort it: sorted(texts)",
        )
    if hasattr(inputs, "to_pylist"):  # a column of Arrow, whose items are not Python strings
        return list(inputs.to_pylist())
    if not isinstance(inputs, Iterable) or getattr(inputs, "shape", None) == ():
        raise InputError(f"{name} is of type {type(inputs).__name__}; it must be a list of {of}.")
    return inputs


def plain_name(value: Any) -> Any:
    """The string value of an enum member, such as sentence-transformers' ``SimilarityFunction.DOT_PRODUCT``; any other
    value unchanged."""
    return value.value if isinstance(value, Enum) and isinstance(value.value, str) else value


def checked_choice(choices: type[Choice], value: Enum | str, *, option: str) -> Choice:
    """The enum member with a value, which may be a member of another enum; rejects any other value."""
    if isinstance(value, choices):
        return value
    try:
        return choices(plain_name(value))
    except ValueError:
        valid = ", ".join(repr(choice.value) for choice in choices)
        raise InputError(parameter=option, value=value, accepted=f"one of {valid}") from None


def length_error(
    what: str, tokens: int, max_len: int, hint: Message, *, longest: int | None = None, needed: int = 0
) -> InputError:
    """The error for a text of that length, with a hint; see `check_text_lengths` for `longest`. `needed` is the length
    of the longest of several texts."""
    if max_len < tokens and max_len < (longest or max_len):
        return InputError(
            f"{what} has {tokens} tokens; max_seq_length is {max_len}.", hint=joined(hint, *_longer(longest))
        )
    fits = "1 or more" if max_len == sys.maxsize else f"1 to {max_len}"
    rebuild = (", or build the bundle again with ", Setting("max_len", max(needed, tokens), command="build"), ".")
    return InputError(
        f"{what} has {tokens} tokens; this bundle accepts {fits}.",
        hint=joined(hint, *rebuild) if tokens > max_len else "",
    )


def _longer(longest: int | None) -> tuple[str | Setting, ...]:
    return (f", or run up to {longest} tokens of it (", Setting("max_seq_length", "bundle"), ").")


def uncounted_length_error(what: str, characters: int, max_len: int, *, longest: int) -> InputError:
    """The error for a text whose tokens were counted up to `max_len`; see `check_text_lengths` for `longest`."""
    read = f"{what} has {characters} characters and more than {max_len} tokens"
    if max_len < longest:
        return InputError(f"{read}; max_seq_length is {max_len}.", hint=joined(_SHORTEN, *_longer(longest)))
    return InputError(
        f"{read}; this bundle accepts 1 to {max_len}.",
        hint=joined(_SHORTEN, ", or build the bundle again with a larger ", Setting("max_len", command="build"), "."),
    )
