"""Tokenization of texts and pairs with a bundle's tokenizer."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hdruntime.bundle.manifest import Side
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.sentence_settings import TextTemplate
from hdruntime.errors import InputError, Setting
from hdruntime.text.checks import (
    RejectedTextsError,
    check_text_lengths,
    checked_choice,
    checked_texts,
    uncounted_length_error,
)
from hdruntime.text.encoding import Encoding, Overflow
from hdruntime.text.partial_texts import PartialTexts
from hdruntime.text.templates import Template, template_encoding, template_suffix
from hdruntime.text.tokenizer_file import copied_tokenizer, read_tokenizer


class TextTokenizer:
    """A ``tokenizer.json`` with a limit on tokens. Safe to use from several threads.

    Args:
        path: the file, which is read once.
        max_len: maximum tokens of a text or pair in the bundle, special tokens and template included.
        template: chat template of pairs or of texts, which is encoded without special tokens; None for no template.
            A tokenizer with a template of pairs accepts pairs only, one with a template of texts accepts texts only.
        truncation_side: end of a text that is removed: ``right`` or ``left``.

    Attributes:
        max_len: maximum tokens of a text or pair; see `limited`.
        longest: maximum tokens of a text or pair in the bundle.
        whole: the ``tokenizers.Tokenizer``, without truncation and padding.

    Raises:
        BundleCorruptError: the file cannot be read.
    """

    def __init__(
        self, path: Path, *, max_len: int, template: Template | None = None, truncation_side: Side = "right"
    ) -> None:
        self.max_len = self.longest = max_len
        self._path = path
        self.whole = read_tokenizer(path)
        # Files may enable truncation to 128 tokens, or padding to the longest text.
        self.whole.no_truncation()
        self.whole.no_padding()
        self._template, self._side = template, truncation_side
        self._parts = PartialTexts(self.whole)
        self._max_characters: int | None = None
        self._part_limits: tuple[int | None, int | None] = (None, None)

    @classmethod
    def of(cls, bundle: Bundle, *, max_len: int, template: Template | None = None) -> TextTokenizer:
        info = bundle.manifest.tokenizer
        assert info is not None, "a bundle without a tokenizer takes ids"
        path = bundle.file(info.file)
        return cls(path, max_len=max_len, template=template, truncation_side=info.truncation_side)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path: a tokenizer may have many megabytes."""
        new = functools.partial(TextTokenizer, template=self._template, truncation_side=self._side)
        return functools.partial(new, max_len=self.longest), (self._path,), {"max_len": self.max_len}

    def limited(
        self, max_len: int, *, text: int | None = None, pair: int | None = None, side: Side | None = None
    ) -> TextTokenizer:
        """The tokenizer with other limits.

        Args:
            max_len: maximum tokens of a text or pair.
            text, pair: tokens to which the first text, and the second text of a pair, is truncated in advance; None for
                no such limit.
            side: end of a text that is removed; None for the tokenizer's own.
        """
        side = side or self._side
        other = self._copied(max_len=max_len, _part_limits=(text, pair), _side=side)
        if (max_len, side) != (self.max_len, self._side):
            vars(other).pop("_truncating", None)
        return other

    def with_template(self, template: Template | None) -> TextTokenizer:
        return self._copied(_template=template)

    def bounded(self, characters: int) -> TextTokenizer:
        """The tokenizer with a limit on the characters that are tokenized in full, for servers.

        A text that is truncated or rejected for its number of tokens is tokenized in part. Other texts are tokenized in
        full, and so are texts without spaces; a character takes about 150 bytes meanwhile.
        """
        return self._copied(_max_characters=max(characters, 16 * self.max_len + 4096))

    def _copied(self, **changes: Any) -> TextTokenizer:
        other = object.__new__(TextTokenizer)
        vars(other).update(vars(self), **changes)
        return other

    @functools.cached_property
    def sample(self) -> str:
        """A short text with a token: ``a``, or without a token for it the first word of the vocabulary."""
        words = (self.whole.decode([number]) for number in range(self.whole.get_vocab_size()))
        for text in itertools.chain("a", words):
            # tokenizers raises nothing more specific for a text that it cannot encode.
            with contextlib.suppress(Exception):
                if self.whole.encode(text, add_special_tokens=False).ids:
                    return text
        return ""

    @functools.cached_property
    def _types_texts(self) -> bool:
        """Whether single texts have token types other than 0, as the last token in XLNet."""
        return any(self.whole.encode(self.sample).type_ids)

    @functools.cached_property
    def special_ids(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after the tokens of every text; empty lists without such tokens."""
        if self._template is not None:
            return [], []
        encoded = self.whole.encode(self.sample)
        positions = [index for index, number in enumerate(encoded.sequence_ids) if number is not None]
        return (encoded.ids[: positions[0]], encoded.ids[positions[-1] + 1 :]) if positions else ([], [])

    def checked_ids(self, ids: list[int], *, max_len: int | None = None) -> list[int]:
        """The ids of a text, special tokens included, truncated to `max_len` tokens as a text is; None for all ids.

        Rejects ids without the special tokens of every text: another tokenizer made them.
        """
        first, last = self.special_ids
        if not self.has_special_tokens(ids):
            around = [
                f"{', '.join(f'{number} ({self.whole.id_to_token(number)})' for number in special)} {side} every text"
                for special, side in ((first, "before"), (last, "after"))
                if special
            ]
            raise InputError(
                "The ids lack special tokens, so another tokenizer made them: "
                f"this bundle's tokenizer puts {' and '.join(around)}."
            )
        if max_len is None or len(ids) <= max_len:
            return ids
        kept, end = max(0, max_len - len(first) - len(last)), len(ids) - len(last)
        start = end - kept if self._side == "left" else len(first)
        return [*first, *ids[start : start + kept], *last]

    def has_special_tokens(self, ids: list[int]) -> bool:
        """Whether ids start and end with the special tokens of every text."""
        first, last = self.special_ids
        end = len(ids) - len(last)
        return end >= len(first) and ids[: len(first)] == first and ids[end:] == last

    def whole_encodings(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        """The ``tokenizers.Encoding`` of each text, without a limit on tokens."""
        for text in _unicode_texts(texts, "texts"):
            self._check_size(text)
        try:
            return list(self.whole.encode_batch(list(texts), add_special_tokens=add_special_tokens))
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises nothing more specific
                raise
            raise _unencodable(self.whole, list(texts), error) from error

    def prefix(self, text: str, tokens: int) -> str:
        """The longest prefix of a text whose tokens are the text's first tokens, at most a number of them.

        Special tokens do not count. A character whose tokens do not all fit is left out.
        """
        return self._prefix(text, tokens)[0]

    def _prefix(self, text: str, tokens: int) -> tuple[str, int | None]:
        """The `prefix`, and the number of tokens after it, or None if the rest was not tokenized."""
        limit = self._max_characters
        part = self._parts.of(text, tokens=tokens + 1, side="right", in_pair=True, max_characters=limit)
        self._check_size(part)
        encoded = self.whole.encode(part, add_special_tokens=False)
        ids, offsets = encoded.ids, encoded.offsets
        if len(ids) <= tokens:
            return text, 0
        for count in range(tokens, 0, -1):
            # A combining mark after the last character may be in no token.
            for end in (offsets[count - 1][1], offsets[count][0]):
                if self.whole.encode(text[:end], add_special_tokens=False).ids == ids[:count]:
                    return text[:end], len(ids) - count if part is text else None
        return "", len(ids) if part is text else None

    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        overflow: Overflow | str = Overflow.ERROR,
        prompt: str = "",
        offsets: bool = True,
    ) -> list[Encoding]:
        """Encode texts, or pairs of texts, with their special tokens and without padding.

        Args:
            texts: may be empty strings, which become special tokens only.
            pairs: the second text of each pair, as many as ``texts``.
            overflow: see `Overflow`; ``split`` and ``recur`` encode texts of any length in full.
            prompt: text before every text, or before the first text of every pair, or in the template.
            offsets: whether encodings have `offsets` and `sequence_ids`, which take time; always in a template.

        A long text that is truncated or rejected is tokenized in part.

        Raises:
            InputError: ``texts`` is not a list of strings; a text has no token, or too many and ``overflow`` is
                ``error``; the tokenizer cannot encode a text; or the template does not accept the texts, the pairs or
                the prompt.
        """
        choice = checked_choice(Overflow, overflow, option="overflow")
        texts = _unicode_texts(texts, "texts")
        _unicode_texts([prompt], "prompt")
        if pairs is not None:
            pairs = _unicode_texts(pairs, "pairs")
            if len(texts) != len(pairs):
                raise InputError(f"There are {len(texts)} texts but {len(pairs)} pairs; pass one for each text.")
        text_limit, pair_limit = self._part_limits
        removed: list[tuple[int | None, ...]] = [()] * len(texts)
        if text_limit is not None:
            texts, removed = self._prefixes(texts, text_limit, removed)
        if pair_limit is not None and pairs is not None:
            pairs, removed = self._prefixes(pairs, pair_limit, removed)
        tokenizer = self._truncating if choice is Overflow.TRUNCATE else self.whole
        shifts: list[int] = []
        if self._template is None:
            texts = [prompt + text for text in texts]
        elif isinstance(self._template, TextTemplate):
            # Offsets include the prompt's characters, as without a template.
            shifts = [len(prompt)] * len(texts)
            if self._template.strips:
                shifts = [len(prompt) + len(text) - len(text.lstrip()) for text in texts]
                texts = [text.strip() for text in texts]
        full, texts, pairs = (texts, pairs), *self._tokenized_parts(texts, pairs, choice)
        if self._template is not None:
            encodings = self._encode_in_template(self._template, texts, pairs, tokenizer, choice, prompt)
            for encoding, shift in zip(encodings, shifts, strict=False):
                encoding.shift_offsets(shift, shift)
        else:
            encodings = self._encode_plain(texts, pairs, tokenizer, choice, prompt, offsets=offsets)
        if self._side == "left" and offsets:
            for encoding, characters in zip(encodings, _removed_characters(full, (texts, pairs)), strict=True):
                encoding.shift_offsets(*characters)
        for index in _changed(full, (texts, pairs)):
            encodings[index].given_tokens = None
        for encoding, counts in zip(encodings, removed, strict=True):
            for tokens in counts:
                if tokens != 0:
                    encoding.is_truncated = True
                    known = encoding.given_tokens is not None and tokens is not None
                    encoding.given_tokens = (encoding.given_tokens or 0) + (tokens or 0) if known else None
        return encodings

    def _prefixes(
        self, texts: Sequence[str], tokens: int, removed: Sequence[tuple[int | None, ...]]
    ) -> tuple[list[str], list[tuple[int | None, ...]]]:
        """The `prefix` of each text, and the tokens that were removed, here and before."""
        prefixes = [self._prefix(text, tokens) for text in texts]
        counts = [(*before, rest) for before, (_, rest) in zip(removed, prefixes, strict=True)]
        return [prefix for prefix, _ in prefixes], counts

    def _encode_plain(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        tokenizer: Any,
        choice: Overflow,
        prompt: str,
        *,
        offsets: bool,
    ) -> list[Encoding]:
        """Encode texts or pairs without a template; the (first) texts begin with the prompt."""
        batch: list[Any] = list(texts if pairs is None else zip(texts, pairs, strict=True))
        encoded = self._encoded(tokenizer, batch, choice, offsets=offsets)
        in_prompt = _tokens_of_prompt(tokenizer, prompt)
        rests = [item.overflowing for item in encoded]
        counts = [
            self._given_tokens(item, rest, text) if rest else None
            for item, rest, text in zip(encoded, rests, batch, strict=True)
        ]
        if offsets:
            return [
                Encoding(
                    item.ids,
                    item.type_ids,
                    item.offsets,
                    item.sequence_ids,
                    prompt_tokens=min(in_prompt, len(item)),
                    is_truncated=bool(rest),
                    given_tokens=tokens,
                )
                for item, rest, tokens in zip(encoded, rests, counts, strict=True)
            ]
        ends = list(itertools.accumulate(map(len, encoded)))
        if len(encoded) == 1:
            ids = np.array(encoded[0].ids, np.int64)
        else:
            # One array for all texts, of which each has a slice: an array per short text costs more.
            ids = np.fromiter(itertools.chain.from_iterable(item.ids for item in encoded), np.int64, sum(ends[-1:]))
        types = np.zeros_like(ids)
        if pairs is not None or self._types_texts:
            types[:] = np.fromiter(itertools.chain.from_iterable(item.type_ids for item in encoded), np.int64)
        return [
            Encoding(
                ids[start:end],
                types[start:end],
                prompt_tokens=min(in_prompt, end - start),
                is_truncated=bool(rest),
                given_tokens=tokens,
            )
            for rest, tokens, start, end in zip(rests, counts, [0, *ends], ends, strict=False)
        ]

    def _given_tokens(self, item: Any, rest: Sequence[Any], texts: str | tuple[str, str]) -> int:
        """Number of tokens of a truncated text or pair before truncation, special tokens included.

        Args:
            item: ``tokenizers.Encoding`` of the text or pair.
            rest: the encodings of what was removed, each with special tokens.
            texts: the text or pair.
        """
        if isinstance(texts, str):
            special = self.whole.num_special_tokens_to_add(False)
            return len(item) + sum(len(each) - special for each in rest)
        special = self.whole.num_special_tokens_to_add(True)
        first = item.sequence_ids.count(0)
        shorter = min(first, len(item) - special - first)
        if shorter < (len(item) - special) // 2:
            # The shorter text is complete, and every part of the longer text stands beside it.
            return len(item) + sum(len(each) - special - shorter for each in rest)
        # `rest` may combine each part of the first text with each part of the second.
        return special + sum(map(self._count, texts))

    def _tokenized_parts(
        self, texts: Sequence[str], pairs: Sequence[str] | None, choice: Overflow
    ) -> tuple[Sequence[str], Sequence[str] | None]:
        """The parts of texts and second texts that are tokenized.

        Rejects texts of too many tokens for ``error``, and of too many characters for `bounded`.
        """
        if choice in (Overflow.SPLIT, Overflow.RECUR):
            for text in (*texts, *(pairs or ())):
                self._check_size(text)
            return texts, pairs
        parts: list[tuple[str, ...]]
        if pairs is None:
            in_template = self._template is not None
            parts = [(self._part(text, self.max_len + 1, in_pair=in_template),) for text in texts]
        else:
            parts = [self._parts_of_pair(text, pair) for text, pair in zip(texts, pairs, strict=True)]
        if choice is Overflow.ERROR:
            full = [(text,) for text in texts] if pairs is None else list(zip(texts, pairs, strict=True))
            rejected = [index for index, part in enumerate(parts) if part != full[index]]
            if rejected:
                what = "The text" if len(texts) == 1 else f"Text {rejected[0]}"
                characters = sum(map(len, full[rejected[0]]))
                error = uncounted_length_error(what, characters, self.max_len, longest=self.longest)
                raise RejectedTextsError(*error.args, hint=error.hint, texts=rejected) from None
        return [part[0] for part in parts], None if pairs is None else [part[-1] for part in parts]

    def _part(self, text: str, tokens: int, *, in_pair: bool = False) -> str:
        limit = self._max_characters
        part = self._parts.of(text, tokens=tokens, side=self._side, in_pair=in_pair, max_characters=limit)
        self._check_size(part)
        return part

    def _parts_of_pair(self, text: str, pair: str) -> tuple[str, str]:
        """The tokenized parts of a pair: tokenizers truncates the longer text, or both where both are long."""
        tokens = self.max_len + 1
        parts = self._part(text, tokens, in_pair=True), self._part(pair, tokens, in_pair=True)
        if self._template is not None or parts == (text, pair):
            return parts
        room = self.max_len - self.whole.num_special_tokens_to_add(True)
        is_long = parts[0] != text, parts[1] != pair
        if all(is_long) and room % 2 == 0:
            return parts
        # Of two long texts the one with more tokens keeps the odd token, so that parts must compare as texts do.
        counts = [self._count(text if all(is_long) else parts[0]), self._count(pair if all(is_long) else parts[1])]
        if is_long[0] and (not is_long[1] or counts[0] > counts[1]):
            return self._part(text, max(tokens, self._count(parts[1]) + 1), in_pair=True), parts[1]
        return parts[0], self._part(pair, max(tokens, self._count(parts[0]) + 1), in_pair=True)

    def _count(self, text: str) -> int:
        self._check_size(text)
        return len(self.whole.encode(text, add_special_tokens=False))

    def _check_size(self, text: str) -> None:
        if self._max_characters is not None and len(text) > self._max_characters:
            raise InputError(
                f"The text has {len(text)} characters; at most {self._max_characters} can be tokenized in full.",
                hint=(
                    "Truncate the text, send it in parts, or start the server with a larger ",
                    Setting("max_text_characters", command="serve"),
                    ".",
                ),
            )

    def _encode_in_template(
        self,
        template: Template,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        tokenizer: Any,
        choice: Overflow,
        prompt: str,
    ) -> list[Encoding]:
        """Encode texts or pairs in a template; truncated ones keep the suffix of the template, as in
        sentence-transformers."""
        if isinstance(template, TextTemplate):
            if pairs is not None:
                raise InputError(
                    "This bundle accepts texts, not pairs: its chat template has one text.",
                    hint="Leave out the second texts.",
                )
            written = [template.write(text, prompt=prompt) for text in texts]
        elif pairs is None:
            raise InputError(
                "This bundle accepts pairs: its chat template has a query and a document.",
                hint=(
                    "Pass both: session.rank(query, documents), CrossEncoder, or hdexport run with ",
                    Setting("text_pair_column", command="run"),
                    ".",
                ),
            )
        else:
            written = [template.write(text, pair, prompt=prompt) for text, pair in zip(texts, pairs, strict=True)]
        encoded = self._encoded(tokenizer, [item.text for item in written], choice)
        suffix: list[int] = []
        if choice is Overflow.TRUNCATE and any(len(item) >= self.max_len for item in encoded):
            suffix = template_suffix(self.whole, template, prompt)
        return [
            template_encoding(item, ranges, suffix if len(item) >= self.max_len else [])
            for item, ranges in zip(encoded, written, strict=True)
        ]

    def _encoded(self, tokenizer: Any, batch: list[Any], choice: Overflow, *, offsets: bool = True) -> Any:
        """The ``tokenizers.Encoding`` of each text or pair, their lengths checked."""
        special = self._template is None
        try:
            if len(batch) == 1:
                # In this thread: the threads of tokenizers are shared and may be busy with a long text
                # (findings/tokenizers_batches_wait_for_other_threads.sh).
                (item,) = batch
                texts = (item,) if isinstance(item, str) else item
                encoded = [tokenizer.encode(*texts, add_special_tokens=special)]
            else:
                encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
                encoded = encode(batch, add_special_tokens=special)
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises nothing more specific
                raise
            raise _unencodable(tokenizer, batch, error) from error
        # Before lists of tokens are made: for millions of tokens they take a gigabyte.
        any_length = choice in (Overflow.SPLIT, Overflow.RECUR)
        lengths = [len(item) for item in encoded]
        if choice is Overflow.TRUNCATE and max(lengths, default=0) > self.max_len:
            special = tokenizer.num_special_tokens_to_add(isinstance(batch[0], tuple))
            raise InputError(
                f"A text cannot be truncated to {self.max_len} tokens: it has {special} special tokens.",
                hint=("Build the bundle again with ", Setting("max_len", special + 1, command="build"), " or more."),
            )
        check_text_lengths(lengths, sys.maxsize if any_length else self.max_len, longest=self.longest)
        return encoded

    @functools.cached_property
    def _truncating(self) -> Any:
        # Truncation is state of a `Tokenizer`: switching it per call would be a race between threads.
        tokenizer = copied_tokenizer(self.whole)
        tokenizer.enable_truncation(self.max_len, direction=self._side)
        return tokenizer


def _changed(full: tuple[Any, Any], parts: tuple[Any, Any]) -> set[int]:
    """Indices of texts, or pairs, whose parts are shorter."""
    return {
        index
        for full_texts, text_parts in zip(full, parts, strict=True)
        if full_texts is not text_parts
        for index, (text, part) in enumerate(zip(full_texts, text_parts, strict=True))
        if text != part
    }


def _removed_characters(full: tuple[Any, Any], parts: tuple[Any, Any]) -> Iterator[tuple[int, int]]:
    """The characters before the part of each text, and before the part of the second text of a pair."""
    texts, pairs = full
    for index, text in enumerate(texts):
        yield len(text) - len(parts[0][index]), len(pairs[index]) - len(parts[1][index]) if pairs else 0


def _tokens_of_prompt(tokenizer: Any, prompt: str) -> int:
    """Number of tokens of a prompt, without a special token at its end, as in sentence-transformers."""
    if not prompt:
        return 0
    encoded = tokenizer.encode(prompt)
    return len(encoded) - int(encoded.special_tokens_mask[-1:] == [1])


def _unencodable(tokenizer: Any, batch: list[Any], error: Exception) -> InputError:
    """The error of the texts of a batch that the tokenizer cannot encode."""
    errors = {}
    for index, item in enumerate(batch):
        try:
            tokenizer.encode_batch([item])
        except Exception as alone:
            errors[index] = alone
    first = next(iter(errors), None)
    what = "The batch" if first is None else "The text" if len(batch) == 1 else f"Text {first}"
    return RejectedTextsError(
        f"{what} cannot be encoded by the bundle's tokenizer: {error if first is None else errors[first]}.",
        hint="Leave it out, or build the bundle again from a checkpoint whose tokenizer has an unknown token.",
        texts=list(errors) or range(len(batch)),
    )


def _unicode_texts(inputs: object, name: str) -> list[str]:
    texts = checked_texts(inputs, name=name)
    for index, text in enumerate(texts):
        try:
            _ = text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{name}[{index}] is not valid Unicode: {error}.", hint="Remove lone surrogates."
            ) from None
    return texts
