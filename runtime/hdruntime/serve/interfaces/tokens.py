"""Tokens of texts, as text-embeddings-inference and vLLM give them.

Both have a route ``/tokenize``; the keys of a request say whose it is: ``inputs`` or ``prompt``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from hdruntime.errors import InputError, Setting
from hdruntime.serve.interface import Interface, Route, ServeRequest
from hdruntime.serve.interfaces.tei import tei_error
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.tokenization import TextTokenizer


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: `inputs` and `prompt_name` of text-embeddings-inference, or `prompt` and `return_token_strs`
    of vLLM."""

    inputs: str | list[str] | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    return_token_strs: bool = False
    add_special_tokens: bool = True


class DecodeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /decode``: the ids of a text, or lists of them."""

    ids: list[int | list[int]]
    skip_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``: the ids of a text."""

    tokens: list[int]


class TokensInterface(Interface):
    """The bundle's tokenizer."""

    def routes(self) -> Sequence[Route]:
        return [
            Route("/tokenize", TokenizeBody, self._tokenize, error=tei_error),
            Route("/decode", DecodeBody, self._decode, error=tei_error),
            Route("/detokenize", DetokenizeBody, self._detokenize),
        ]

    async def _tokenize(self, request: ServeRequest, body: TokenizeBody) -> object:
        if (body.inputs is None) == (body.prompt is None):
            raise InputError(
                "The request must have either inputs or prompt.",
                hint="Send inputs, as to text-embeddings-inference, or prompt, as to vLLM.",
            )
        is_vllm = body.prompt is not None
        if is_vllm and body.prompt_name is not None:
            raise InputError("prompt_name goes with inputs, and the request has prompt.", hint="Give one of them.")
        if not is_vllm and body.return_token_strs:
            raise InputError("return_token_strs goes with prompt.", hint="The answer to inputs has texts of tokens.")
        content = body.prompt if is_vllm else body.inputs
        texts = [content] if isinstance(content, str) else content or []
        request.check_number(len(texts))
        self._check_size(sum(map(len, texts)), "characters", self.model.options.max_text_characters)
        if not is_vllm:
            prompts, default = prompts_of(self.model.session.manifest) if self.model.task.prompts else ({}, None)
            if body.prompt_name is not None and body.prompt_name not in prompts:
                # By these words a client of text-embeddings-inference lists the prompts of a server.
                names = ", ".join(f'"{name}"' for name in prompts)
                raise InputError(f"There is no prompt {body.prompt_name!r}.", hint=f"Available prompts: [{names}]")
            prompt = chosen_prompt(prompts, default, name=body.prompt_name, prompt=None)
            texts = [prompt + text for text in texts]
        return await asyncio.to_thread(self._tokens, request.tokenizer, texts, body)

    def _tokens(self, tokenizer: TextTokenizer, texts: Sequence[str], body: TokenizeBody) -> object:
        """The answer to texts, which begin with their prompt; the JSON of many tokens is made here, too."""
        encodings = tokenizer.whole_encodings(texts, add_special_tokens=body.add_special_tokens)
        if body.prompt is None:
            lists = (_tokens_of(text, encoding) for text, encoding in zip(texts, encodings, strict=True))
            return [msgspec.Raw(msgspec.json.encode(tokens)) for tokens in lists]
        (encoding,) = encodings
        return {
            "count": len(encoding),
            "max_model_len": self.model.session.max_seq_length,
            "tokens": encoding.ids,
            "token_strs": encoding.tokens if body.return_token_strs else None,
        }

    async def _decode(self, request: ServeRequest, body: DecodeBody) -> object:
        texts_ids: Sequence[Any] = body.ids if any(isinstance(each, list) for each in body.ids) else [body.ids]
        return await self._decoded(request, texts_ids, skip_special_tokens=body.skip_special_tokens, key="ids")

    async def _detokenize(self, request: ServeRequest, body: DetokenizeBody) -> object:
        (text,) = await self._decoded(request, [body.tokens], skip_special_tokens=False, key="tokens")
        return {"prompt": text}

    async def _decoded(
        self, request: ServeRequest, texts_ids: Sequence[Any], *, skip_special_tokens: bool, key: str
    ) -> list[str]:
        request.check_number(len(texts_ids))
        # An id counts as four characters, as of a text to embed.
        ids = sum(len(each) for each in texts_ids if isinstance(each, list))
        self._check_size(ids, "ids", max(1, self.model.options.max_text_characters // 4))
        return await asyncio.to_thread(_texts, request.tokenizer, texts_ids, skip_special_tokens, key)

    @staticmethod
    def _check_size(size: int, what: str, limit: int) -> None:
        """Limit the response, which takes some hundred bytes per token."""
        if size > limit:
            larger = Setting("max_text_characters", command="serve")
            raise InputError(
                f"The request has {size} {what}; at most {limit} are answered at once.",
                hint=("Send several requests, or start the server with a larger ", larger, "."),
            )


INTERFACE = TokensInterface


def _tokens_of(text: str, encoding: Any) -> list[dict[str, Any]]:
    """The tokens of a text; special tokens that the text does not have are at no place in it."""
    columns = zip(encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True)
    return [
        {
            "id": number,
            "text": token if special else text[start:stop],
            "special": bool(special),
            "start": None if special else start,
            "stop": None if special else stop,
        }
        for number, token, (start, stop), special in columns
    ]


def _texts(tokenizer: TextTokenizer, texts_ids: Sequence[Any], skip_special_tokens: bool, key: str) -> list[str]:
    size = tokenizer.whole.get_vocab_size()
    for number, ids in enumerate(texts_ids):
        if not isinstance(ids, list):
            raise InputError(f"{key} is neither a list of ids nor a list of lists of ids.")
        for token_id in ids:
            if not 0 <= token_id < size or tokenizer.whole.id_to_token(token_id) is None:
                raise InputError(
                    f"{key}[{number}]: {token_id} is no id of the bundle's tokenizer; ids are 0 to {size - 1}."
                )
    return [tokenizer.whole.decode(ids, skip_special_tokens=skip_special_tokens) for ids in texts_ids]
