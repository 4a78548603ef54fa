"""Checks of texts, of their lengths, and of options that name one of several choices."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AnySet
from enum import Enum
from typing import Any, TypeVar

from hdruntime.errors import InputError, Message, Setting, joined

Choice = TypeVar("Choice", bound=Enum)

_SHORTER: Message = (
    "Truncate it (",
    Setting("overflow", "truncate"),
    "), run it in chunks (",
    Setting("overflow", "split"),
    ")",
)
"""Hint for a text that is too long: what to do with it."""


class RefusedTextsError(InputError):
    """Some of several texts do not fit; the message is about the first of them.

    Attributes:
        texts: their indices.
    """

    def __init__(self, *problem: str | Setting, hint: Message = "", texts: Sequence[int] = (0,)) -> None:
        super().__init__(*problem, hint=hint)
        self.texts = texts


def check_text_lengths(lengths: Sequence[int], max_len: int, *, longest: int | None = None) -> None:
    """Refuse texts without tokens, and texts of more tokens than `max_len`; the error names the first.

    `longest` is the number of tokens that the bundle runs, where `max_len` is the model's own length.
    """
    if lengths and (min(lengths) < 1 or max(lengths) > max_len):
        refused = [index for index, tokens in enumerate(lengths) if not 1 <= tokens <= max_len]
        what = "The text" if len(lengths) == 1 else f"Text {refused[0]}"
        error = length_error(what, lengths[refused[0]], max_len, _SHORTER, longest=longest)
        raise RefusedTextsError(*error.args, hint=error.hint, texts=refused)


def checked_texts(inputs: object, *, name: str, may_be_one: bool = False) -> list[str]:
    """The texts that a caller gave, as a list: an iterator is read, an array or a column goes by position.

    Args:
        inputs: any number of strings; a mapping is refused, whose keys are no texts.
        name: their name in an error.
        may_be_one: whether one string is a list of one.
    """
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
    """The items that a caller gave several of, in the order given; an iterator stays unread.

    Args:
        inputs: a list, an iterator, an array, or a column of a data frame; one string is refused, and what has keys,
            columns or no order.
        name: its name in an error.
        of: its items, as an error calls them.
        example: how one of them is given.
    """
    if isinstance(inputs, str):
        raise InputError(f"{name} is one string; it must be a list of {of}: {example}")
    if isinstance(inputs, (bytes, bytearray, memoryview)):
        raise InputError(f"{name} is of type {type(inputs).__name__}; it must be a list of {of}. Decode it: .decode()")
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
    if hasattr(inputs, "to_pylist"):  # a column of Arrow's, whose items are no strings of Python's
        return list(inputs.to_pylist())
    if not isinstance(inputs, Iterable) or getattr(inputs, "shape", None) == ():
        raise InputError(f"{name} is of type {type(inputs).__name__}; it must be a list of {of}.")
    return inputs


def plain_name(value: Any) -> Any:
    """A name without its enumeration, such as ``SimilarityFunction.DOT_PRODUCT`` of sentence-transformers; any other
    value is returned as it is."""
    return value.value if isinstance(value, Enum) and isinstance(value.value, str) else value


def checked_choice(choices: type[Choice], value: Enum | str, *, option: str) -> Choice:
    """The member of an enumeration that an option names, also by a member of another enumeration; any other name is
    refused."""
    try:
        return choices(plain_name(value))
    except ValueError:
        valid = ", ".join(repr(choice.value) for choice in choices)
        raise InputError(f"{option} is {value!r}; it must be one of {valid}.") from None


def length_error(what: str, tokens: int, max_len: int, hint: Message, *, longest: int | None = None) -> InputError:
    """The error for a text of that length, with a hint; `longest` is as of `check_text_lengths`."""
    if max_len < tokens and max_len < (longest or max_len):
        return InputError(
            f"{what} has {tokens} tokens; max_seq_length is {max_len}.", hint=joined(hint, *_longer(longest))
        )
    fits = "1 or more" if max_len == sys.maxsize else f"1 to {max_len}"
    rebuild = (", or build the bundle again with ", Setting("max_len", tokens, command="build"), ".")
    return InputError(
        f"{what} has {tokens} tokens; this bundle accepts {fits}.",
        hint=joined(hint, *rebuild) if tokens > max_len else "",
    )


def _longer(longest: int | None) -> tuple[str | Setting, ...]:
    return (f", or run up to {longest} tokens of it (", Setting("max_seq_length", "bundle"), ").")


def unread_length_error(what: str, characters: int, max_len: int, *, longest: int) -> InputError:
    """The error for a long text whose tokens were not counted to its end; `longest` is as of `check_text_lengths`."""
    read = f"{what} has {characters} characters and more than {max_len} tokens"
    if max_len < longest:
        return InputError(f"{read}; max_seq_length is {max_len}.", hint=joined(_SHORTER, *_longer(longest)))
    return InputError(
        f"{read}; this bundle accepts 1 to {max_len}.",
        hint=joined(_SHORTER, ", or build the bundle again with a larger ", Setting("max_len", command="build"), "."),
    )
