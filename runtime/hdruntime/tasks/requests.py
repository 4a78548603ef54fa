"""Bodies of requests, as OpenAI, Cohere, Jina, Voyage, text-embeddings-inference, vLLM and infinity have them.

A key has a field here or in a body of a task, or another name of one, or changes no answer; any other key would change
the answer that its author expects, so it is refused. docs/serve.md has a table of the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from hdruntime.errors import InputError
from hdruntime.text.tokenization import Overflow, TextTokenizer

Content = TypeVar("Content", bound="Body")

OTHER_NAMES: Mapping[str, str] = {
    "embedding_type": "encoding_format",
    "encoding_type": "encoding_format",
    "input_type": "prompt_name",
    "normalized": "normalize",
    "output_dimension": "dimensions",
    "top_k": "top_n",
}
"""A key -> the field that it is, on routes that have the field."""

WITHOUT_EFFECT: Mapping[str, tuple[object, ...] | None] = {
    "model": None,
    "priority": None,
    "request_id": None,
    "user": None,
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "modality": ("text",),
    "output_dtype": ("float",),
    "rank_fields": (["text"],),
    "return_multivector": (False,),
    "truncation_direction": ("Right", "right"),
    "truncation_side": ("right",),
}
"""A key that changes no answer -> the values with which it does not, None for any; other values are refused."""

Truncate = Literal["error", "end", "split", "NONE", "END"]
"""The treatment of a text of too many tokens; the last two are Cohere's words for the first two."""

OVERFLOWS: dict[Truncate | bool, Overflow] = {
    "error": Overflow.ERROR,
    "end": Overflow.TRUNCATE,
    "split": Overflow.SPLIT,
    "NONE": Overflow.ERROR,
    "END": Overflow.TRUNCATE,
    False: Overflow.ERROR,
    True: Overflow.TRUNCATE,
}
"""The session's word for a request's."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The keys of every body, which say what happens to texts of too many tokens: at most one of them is given."""

    overflow_by_default: ClassVar[Overflow] = Overflow.ERROR

    truncate: Truncate | bool | None = None
    truncation: bool | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def overflow(self) -> Overflow:
        """What happens to texts of too many tokens; keys that contradict each other are refused."""
        is_cut = None if self.truncate_prompt_tokens is None else True
        given = {OVERFLOWS[each] for each in (self.truncate, self.truncation, is_cut) if each is not None}
        if len(given) > 1:
            raise InputError(
                "truncate, truncation and truncate_prompt_tokens contradict each other.\nGive one of them."
            )
        return given.pop() if given else self.overflow_by_default

    def most_tokens(self, tokenizer: TextTokenizer, *, is_pair: bool) -> int:
        """Most tokens of a text or a pair; vLLM's -1 stands for the tokenizer's number."""
        asked = self.truncate_prompt_tokens
        if asked is None or asked == -1:
            return tokenizer.max_len
        special = tokenizer.whole.num_special_tokens_to_add(is_pair)
        if asked <= special:
            raise InputError(
                f"truncate_prompt_tokens is {asked}, of which the special tokens are {special}.\n"
                f"Give {special + 1} or more, or -1 for as many as fit."
            )
        return min(asked, tokenizer.max_len)


def read_body(content: bytes | bytearray, kind: type[Content]) -> Content:
    """A request's body from JSON. A key whose value is null is absent; one that the route cannot honour is refused."""
    keys = kind.__struct_fields__
    try:
        given = msgspec.json.decode(content, type=dict[str, Any])
        body: dict[str, Any] = {}
        for key, value in given.items():
            if value is None or (key in WITHOUT_EFFECT and value in (WITHOUT_EFFECT[key] or (value,))):
                continue
            if key in WITHOUT_EFFECT:
                fits = " or ".join(msgspec.json.encode(each).decode() for each in WITHOUT_EFFECT[key] or ())
                raise InputError(f"{key} has a value that is not supported.\nSend {fits}, or no {key}.")
            name = OTHER_NAMES.get(key, key)
            name = name if name in keys else key
            if name in body and body[name] != value:
                raise InputError(f"{key} and another name of it contradict each other.\nGive one of them.")
            body[name] = value
        return msgspec.convert(body, kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        remedy = f" The route has {', '.join(keys)}." if "unknown field" in str(error) else ""
        raise InputError(f"The body is not valid: {error}.{remedy}") from None
