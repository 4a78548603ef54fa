"""Bodies of requests, as OpenAI, Cohere, Jina, Voyage, text-embeddings-inference, vLLM and infinity have them.

A key has a field here, or another name of one, or changes no answer; any other key would change the answer that its
author expects, so it is refused. docs/serve.md has a table of the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from hdruntime.errors import InputError
from hdruntime.serve.answering import OVERFLOWS, Truncate
from hdruntime.text.tokenization import Overflow

Body = TypeVar("Body", bound="_Body")

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


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The keys of every body, which say what happens to texts of too many tokens: at most one of them is given."""

    overflow_by_default: ClassVar[Overflow] = Overflow.ERROR

    truncate: Truncate | bool | None = None
    truncation: bool | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def overflow(self) -> Overflow:
        """What happens to texts of too many tokens.

        Raises:
            InputError: the keys contradict each other.
        """
        is_cut = None if self.truncate_prompt_tokens is None else True
        given = {OVERFLOWS[each] for each in (self.truncate, self.truncation, is_cut) if each is not None}
        if len(given) > 1:
            raise InputError(
                "truncate, truncation and truncate_prompt_tokens contradict each other.\nGive one of them."
            )
        return given.pop() if given else self.overflow_by_default


class EmbeddingsBody(_Body, kw_only=True):
    """``POST /v1/embeddings``."""

    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool = False
    prompt_name: str | None = None
    late_chunking: bool = False


class RerankBody(_Body, kw_only=True):
    """``POST /rerank``: Cohere's, Jina's and Voyage's `documents`, or `texts` of text-embeddings-inference."""

    overflow_by_default: ClassVar[Overflow] = Overflow.TRUNCATE

    query: str
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    top_n: int | None = None
    return_documents: bool = False
    return_text: bool = False
    raw_scores: bool = False
    use_activation: bool = True
    max_tokens_per_doc: int | None = None
    max_tokens_per_query: int | None = None


class SparseBody(_Body, kw_only=True):
    """``POST /embed_sparse`` of text-embeddings-inference."""

    inputs: str | list[str]
    prompt_name: str | None = None


class EmbedBody(SparseBody, kw_only=True):
    """``POST /embed`` of text-embeddings-inference."""

    normalize: bool = True
    dimensions: int | None = None


class PredictBody(_Body, kw_only=True):
    """``POST /predict`` of text-embeddings-inference: a text, a pair, or a list of either."""

    inputs: Any
    raw_scores: bool = False


def read_body(content: bytes | bytearray, kind: type[Body]) -> Body:
    """A request's body. A key whose value is null is absent.

    Args:
        content: JSON.
        kind: of the route.

    Raises:
        InputError: it is no JSON of that kind, or has a key that the route cannot honour.
    """
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
