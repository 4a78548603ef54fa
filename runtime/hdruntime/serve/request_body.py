"""Bodies of requests, as OpenAI, Cohere, Jina, Voyage, text-embeddings-inference, vLLM and infinity have them.

A key is a field here or of an interface's body, or another name of such a field, or changes no answer. Any other key is
rejected, since its sender expects something of it. docs/serve_api.md has a table of the keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from hdruntime.bundle.manifest import Manifest, Side
from hdruntime.errors import InputError, Setting
from hdruntime.text.encoding import Overflow
from hdruntime.text.prompts import prompt_name_of, prompts_of
from hdruntime.text.tokenization import TextTokenizer

Content = TypeVar("Content", bound=msgspec.Struct)

LARGE_BYTES = 2**18
"""A body of more bytes is read outside the event loop's thread, in steps."""

OTHER_NAMES: Mapping[str, str] = {
    "embedding_type": "encoding_format",
    "encoding_type": "encoding_format",
    "normalized": "normalize",
    "output_dimension": "dimensions",
    "return_text": "return_documents",
    "top_k": "top_n",
    "truncation_direction": "truncation_side",
}
"""A key -> the field that it is, on routes that have the field."""

WITHOUT_EFFECT: Mapping[str, tuple[object, ...] | None] = {
    "model": None,
    "request_id": None,
    "user": None,
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "modality": ("text",),
    "priority": (0,),
    "rank_fields": (["text"],),
    "return_multivector": (False,),
}
"""A key that changes no answer -> the values with which it does not, None for any; other values are rejected."""

Truncate = Literal["error", "end", "split", "NONE", "END", "START"]
"""The treatment of a text of too many tokens; words of Cohere are in upper case."""

OVERFLOWS: dict[Truncate | bool, Overflow] = {
    "error": Overflow.ERROR,
    "end": Overflow.TRUNCATE,
    "split": Overflow.SPLIT,
    "NONE": Overflow.ERROR,
    "END": Overflow.TRUNCATE,
    "START": Overflow.TRUNCATE,
    False: Overflow.ERROR,
    True: Overflow.TRUNCATE,
}
"""The session's word for a request's."""


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The keys of every body, which say what happens to texts of too many tokens: at most one of them is given."""

    overflow_by_default: ClassVar[Overflow] = Overflow.ERROR

    truncate: Truncate | bool | None = None
    truncation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right", "Left", "Right"] | None = None

    @property
    def says_overflow(self) -> bool:
        """Whether the request has a key for texts of too many tokens."""
        return (self.truncate, self.truncation, self.truncate_prompt_tokens) != (None, None, None)

    @property
    def overflow(self) -> Overflow:
        """Treatment of texts with too many tokens; keys that contradict each other raise an InputError."""
        truncates = None if self.truncate_prompt_tokens is None else True
        choices = {OVERFLOWS[key] for key in (self.truncate, self.truncation, truncates) if key is not None}
        if len(choices) > 1:
            raise InputError(
                "truncate, truncation and truncate_prompt_tokens contradict each other.", hint="Give one of them."
            )
        return choices.pop() if choices else self.overflow_by_default

    @property
    def side(self) -> Side | None:
        """The side of a text whose tokens are removed; None for the side of the model's tokenizer."""
        sides: list[Side] = []
        if self.truncate in ("START", "END"):
            sides.append("left" if self.truncate == "START" else "right")
        if self.truncation_side is not None:
            sides.append("left" if self.truncation_side.lower() == "left" else "right")
        if len(set(sides)) > 1:
            raise InputError("truncate and truncation_side contradict each other.", hint="Give one of them.")
        return sides[0] if sides else None

    def token_limit(self, tokenizer: TextTokenizer, *, is_pair: bool) -> int:
        """Maximum tokens of a text or a pair; vLLM's -1 stands for the tokenizer's number."""
        tokens = None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        return limit_of("truncate_prompt_tokens", tokens, tokenizer, is_pair=is_pair, hint=", or -1 for as many as fit")


class PromptedBody(RequestBody, kw_only=True):
    """The keys of bodies whose texts may have a prompt."""

    prompt_name: str | None = None
    input_type: str | None = None

    def chosen_prompt_name(self, manifest: Manifest) -> str | None:
        """The name of the prompt that a request asks for, by name or by `input_type`; None for the default prompt."""
        if self.input_type is None:
            return self.prompt_name
        if self.prompt_name is not None:
            raise InputError("prompt_name and input_type are both there.", hint="Give one of them.")
        return prompt_name_of(prompts_of(manifest)[0], self.input_type)


def limit_of(key: str, tokens: int | None, tokenizer: TextTokenizer, *, is_pair: bool, hint: str = "") -> int:
    """Maximum tokens of a text or a pair by a request's key, at most the tokenizer's number; None for this number."""
    special_tokens = tokenizer.whole.num_special_tokens_to_add(is_pair)
    if tokens is not None and tokens <= special_tokens:
        raise InputError(
            f"{key} is {tokens}, and the special tokens alone are {special_tokens}.",
            hint=f"Give {special_tokens + 1} or more{hint}.",
        )
    return tokenizer.max_len if tokens is None else min(tokens, tokenizer.max_len)


def read_values(content: bytes | bytearray) -> dict[str, Any]:
    if not content:
        raise InputError("The body is empty.", hint="Send a JSON object with the keys of the route.")
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except _NOT_VALID as error:
        raise _no_text(content) or _not_valid(error) from None


def read_large_values(content: bytes | bytearray, *, max_texts: int, max_ids: int) -> dict[str, Any]:
    """The keys and values of a JSON object of many megabytes, read without a long hold of Python's lock, which would
    stop other threads.

    A list that is too long is rejected by its length, before its values are read.

    Args:
        max_texts: maximum texts, or lists of ids, in a list.
        max_ids: maximum ids of a text.
    """
    try:
        return _object(bytes(content), max_texts=max_texts, max_ids=max_ids)
    except _NOT_VALID as error:
        raise _no_text(content) or _not_valid(error) from None


def body_of(values: Mapping[str, Any], kind: type[Content]) -> Content:
    """A request's body of its keys. A key whose value is null is absent; one that a route cannot honour is rejected."""
    try:
        return msgspec.convert(_fields(values, kind.__struct_fields__), kind)
    except _NOT_VALID as error:
        raise _not_valid(error) from None


def _fields(values: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for key, value in values.items():
        has_no_effect = key in WITHOUT_EFFECT and key not in keys
        if value is None or (has_no_effect and _changes_nothing(key, value)):
            continue
        if has_no_effect:
            fits = " or ".join(msgspec.json.encode(each).decode() for each in WITHOUT_EFFECT[key] or ())
            raise InputError(f"{key} has a value that is not supported.", hint=f"Send {fits}, or no {key}.")
        name = field_of(key, keys)
        if name in body and body[name] != value:
            raise InputError(f"{key} and another name of it contradict each other.", hint="Give one of them.")
        if name not in keys:
            raise InputError(f"The body has the unknown field `{key}`.", hint=f"The route has {', '.join(keys)}.")
        body[name] = value
    return body


def _changes_nothing(key: str, value: object) -> bool:
    """Whether a key that has no effect has none with this value; 0 is another value than False."""
    values = WITHOUT_EFFECT[key]
    return values is None or any(value == each and type(value) is type(each) for each in values)


def field_of(key: str, fields: Sequence[str]) -> str:
    """The name of a key's field, of a body with these fields."""
    name = OTHER_NAMES.get(key, key)
    return name if name in fields else key


_NOT_VALID = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def _not_valid(error: Exception) -> InputError:
    return InputError(f"The body is not valid: {error}.")


_HEX = rb"[0-9a-fA-F]{2}"
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB]" + _HEX + rb"\\u[dD][c-fC-F]" + _HEX + rb"|(u[dD][89a-fA-F]" + _HEX + rb")|.)", re.DOTALL
)
"""Escapes in JSON: a surrogate pair, half of one, which is the group, or any other."""


def _no_text(content: bytes | bytearray) -> InputError | None:
    """The error of a body that is no Unicode; None for another body."""
    half = next((match for match in _ESCAPES.finditer(content) if match[1]), None)
    if half is not None:
        return InputError(
            f"The body has {half[0].decode()} at byte {half.start()}: half of a surrogate pair, which is no character.",
            hint="Texts must be Unicode: remove it, or send \\ufffd in its place.",
        )
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return InputError(
            f"The body is no UTF-8: it has the byte 0x{content[error.start]:02x} at byte {error.start}.",
            hint="Encode the JSON as UTF-8.",
        )
    return None


def too_many_texts(texts: int | str, max_texts: int) -> InputError:
    """The error of a request with more texts than it may have, or none."""
    return InputError(f"There are {texts} texts in the request; 1 to {max_texts} fit.", hint="Send several requests.")


_LIST_OF_IDS = re.compile(rb"\s*\[\s*[-0-9]")
_LIST_OF_DOCUMENTS = re.compile(rb'\s*\[\s*\[\s*"')
_LIST_OF_LISTS = re.compile(rb"\s*\[\s*\[\s*[-0-9\]]")
_LIST_OF_OBJECTS = re.compile(rb"\s*\[\s*\{")
_SPACE_OR_COMMA = re.compile(r"[\s,]*")


def _object(raw: bytes, *, max_texts: int, max_ids: int) -> dict[str, Any]:
    values = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {key: _value(key, bytes(value), max_texts=max_texts, max_ids=max_ids) for key, value in values.items()}


def _value(key: str, raw: bytes, *, max_texts: int, max_ids: int) -> Any:
    """The value of a key; a long list of ids, of lists of ids, of texts or of objects is counted before it is
    converted."""
    first = raw.lstrip()[:1]
    if len(raw) <= LARGE_BYTES or first not in b"[{":
        return msgspec.json.decode(raw)
    if first == b"{":
        return _object(raw, max_texts=max_texts, max_ids=max_ids)
    if _LIST_OF_IDS.match(raw):
        _check_ids(raw, key, max_ids)
        return msgspec.json.decode(raw)
    if _LIST_OF_LISTS.match(raw):
        # No text: a bracket ends a list.
        if (lists := raw.count(b"]") - 1) > max_texts:
            raise too_many_texts(lists, max_texts)
        parts = msgspec.json.decode(raw, type=list[msgspec.Raw])
        for number, part in enumerate(parts):
            _check_ids(bytes(part), f"{key}[{number}]", max_ids)
        # One at a time, between which other threads run.
        return [msgspec.json.decode(part) for part in parts]
    has_objects = bool(_LIST_OF_OBJECTS.match(raw))
    if _LIST_OF_DOCUMENTS.match(raw) and raw.count(b"]") - 1 <= max_texts:
        left = max_texts
        for part in msgspec.json.decode(raw, type=list[msgspec.Raw]):
            left -= _count_values(bytes(part).decode(), left)
            if left < 0:
                raise too_many_texts(f"more than {max_texts}", max_texts)
        return msgspec.json.decode(raw)
    # No object: a brace begins one.
    if not (has_objects and raw.count(b"{") <= max_texts) and _count_values(raw.decode(), max_texts) > max_texts:
        raise too_many_texts(f"more than {max_texts}", max_texts)
    if has_objects:
        parts = msgspec.json.decode(raw, type=list[msgspec.Raw])
        return [
            _value(f"{key}[{number}]", bytes(part), max_texts=max_texts, max_ids=max_ids)
            for number, part in enumerate(parts)
        ]
    return msgspec.json.decode(raw)


def _check_ids(raw: bytes, name: str, max_ids: int) -> None:
    if (ids := raw.count(b",") + 1) > max_ids:
        larger = Setting("max_text_characters", command="serve")
        raise InputError(
            f"{name}: The text has {ids} ids; at most {max_ids} can be read at once.",
            hint=("Send the text in parts, or start the server with a larger ", larger, "."),
        )


def _count_values(text: str, most: int) -> int:
    """The number of values of a JSON list, at most one more than `most`: no more are read. What is no list has none."""
    place, values, decoder = text.find("[") + 1, 0, json.JSONDecoder()
    while values <= most:
        match = _SPACE_OR_COMMA.match(text, place)
        assert match is not None, "the pattern fits nothing, too"
        try:
            _, place = decoder.raw_decode(text, match.end())
        except ValueError:
            break
        values += 1
    return values
