"""Text to ids, by the tokenizer that the bundle carries."""

from __future__ import annotations

__all__ = ["Encoding", "Overflow", "TextTokenizer", "read_tokenizer"]

import bisect
import functools
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hdruntime.bundle.manifest import Side
from hdruntime.bundle.pair_template import PairTemplate, WrittenPair
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BundleCorruptError, InputError
from hdruntime.text.checks import check_text_lengths, checked_choice, checked_texts


class Overflow(str, Enum):
    """The treatment of a text of more tokens than the bundle accepts."""

    ERROR = "error"
    """The text is refused."""
    TRUNCATE = "truncate"
    """The text's end is cut off, or its beginning, as the checkpoint's tokenizer does: in a pair, the longer text is
    cut; in a pair in a chat template, the part before the template's end, whichever text that is."""
    SPLIT = "split"
    """The text is run in pieces, whose results are put together; see :mod:`hdruntime.text.splitting`."""
    RECUR = "recur"
    """Every text is streamed, by bundles that remember the segments before; see :meth:`hdruntime.Session.stream`."""


@dataclass(frozen=True)
class Encoding:
    """One text or pair as ids, unpadded.

    Attributes:
        input_ids: [tokens], special tokens included.
        token_type_ids: [tokens], 0 for the first text of a pair, 1 for the second.
        offsets: [tokens], (start, end) in characters of the token's own text; (0, 0) for special tokens.
        sequence_ids: [tokens], 0 for tokens of the first text, 1 for tokens of the second, None for special tokens and
            a template's.
        prompt_tokens: how many of the first tokens are the prompt's, a special token before it included.
        unattended_tokens: how many of the last tokens no token attends to.
        is_cut: whether tokens of the text were cut off.
    """

    input_ids: list[int]
    token_type_ids: list[int]
    offsets: list[tuple[int, int]]
    sequence_ids: list[int | None]
    prompt_tokens: int = 0
    unattended_tokens: int = 0
    is_cut: bool = False

    @classmethod
    def of_ids(cls, ids: list[int]) -> Encoding:
        """An encoding of ids alone: one text, without places in it."""
        return cls(ids, [0] * len(ids), [(0, 0)] * len(ids), [0] * len(ids))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.input_ids)


class TextTokenizer:
    """A ``tokenizer.json`` with a limit on tokens. Safe to use from several threads.

    Args:
        path: the file, which is read once: later changes of the file change nothing.
        max_len: most tokens of a text or pair, special tokens and template included.
        template: writes a pair as one text, which is read without special tokens; None for a pair of texts. With a
            template there are no texts but pairs.
        truncation_side: which end of a text is cut off: ``right`` or ``left``.

    Attributes:
        max_len: as above.
        whole: the ``tokenizers.Tokenizer``, which neither cuts nor pads.

    Raises:
        BundleCorruptError: the file cannot be read.
    """

    def __init__(
        self, path: Path, *, max_len: int, template: PairTemplate | None = None, truncation_side: Side = "right"
    ) -> None:
        self.max_len = max_len
        self._path = path
        self.whole = read_tokenizer(path)
        # Files carry settings of their own, such as truncation to 128 tokens and padding to the longest.
        self.whole.no_truncation()
        self.whole.no_padding()
        self._template, self._side = template, truncation_side

    @classmethod
    def of(cls, bundle: Bundle, *, max_len: int, template: PairTemplate | None = None) -> TextTokenizer:
        """The tokenizer of a bundle that has one.

        Raises:
            BundleCorruptError: its file cannot be read.
        """
        info = bundle.manifest.tokenizer
        assert info is not None, "a bundle without a tokenizer takes ids"
        path = bundle.file(info.file)
        return cls(path, max_len=max_len, template=template, truncation_side=info.truncation_side)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its file: a tokenizer may have many megabytes."""
        new = functools.partial(TextTokenizer, template=self._template, truncation_side=self._side)
        return functools.partial(new, max_len=self.max_len), (self._path,)

    def limited(self, max_len: int) -> TextTokenizer:
        """The same tokenizer with another limit."""
        other = object.__new__(TextTokenizer)
        vars(other).update(vars(self), max_len=max_len)
        vars(other).pop("_truncating", None)
        return other

    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        overflow: Overflow | str = Overflow.ERROR,
        prompt: str = "",
    ) -> list[Encoding]:
        """Encode texts, or pairs of texts, with their special tokens and without padding.

        Args:
            texts: may be empty strings, which become special tokens only.
            pairs: the second text of each pair, as many as ``texts``.
            overflow: ``truncate`` cuts a text, or the longer of a pair, at the tokenizer's side, and keeps the special
                tokens; in a pair in a template, the part before the template's end. ``split`` and ``recur`` give the
                whole text, however long it is.
            prompt: the text before every text, or before the first text of every pair, or where the template has it.

        Raises:
            InputError: not a list of strings, a text has no token (an empty one, where there are no special tokens),
                or it has too many and ``overflow`` is ``error``; the tokenizer cannot encode a text; or there is a
                template, and there are no pairs, or a prompt that it refuses.
        """
        choice = checked_choice(Overflow, overflow, option="overflow")
        texts = _unicode_texts(texts, "texts")
        _unicode_texts([prompt], "prompt")
        if pairs is not None:
            pairs = _unicode_texts(pairs, "pairs")
            if len(texts) != len(pairs):
                raise InputError(f"There are {len(texts)} texts but {len(pairs)} pairs; give one for each.")
        tokenizer = self._truncating if choice is Overflow.TRUNCATE else self.whole
        if self._template is not None:
            return self._encode_written(self._template, texts, pairs, tokenizer, choice, prompt)
        texts = [prompt + text for text in texts]
        encoded = self._encoded(tokenizer, texts if pairs is None else list(zip(texts, pairs, strict=True)), choice)
        in_prompt = _tokens_of_prompt(tokenizer, prompt)
        return [
            Encoding(
                item.ids,
                item.type_ids,
                item.offsets,
                item.sequence_ids,
                min(in_prompt, len(item)),
                is_cut=bool(item.overflowing),
            )
            for item in encoded
        ]

    def _encode_written(
        self,
        template: PairTemplate,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        tokenizer: Any,
        choice: Overflow,
        prompt: str,
    ) -> list[Encoding]:
        """Pairs by the template; a cut pair ends with the template's last tokens, as sentence-transformers has it."""
        if pairs is None:
            raise InputError(
                "This bundle reads pairs: its chat template has places for a query and a document.\n"
                "Give both: session.rank(query, documents), CrossEncoder, or hdexport run --text-pair-column"
            )
        written = [template.write(text, pair, prompt=prompt) for text, pair in zip(texts, pairs, strict=True)]
        encoded = self._encoded(tokenizer, [each.text for each in written], choice)
        ending: list[int] = []
        if choice is Overflow.TRUNCATE and any(len(item) >= self.max_len for item in encoded):
            ending = _ending(self.whole, template, prompt)
        return [
            _of_template(item, each, ending if len(item) >= self.max_len else [])
            for item, each in zip(encoded, written, strict=True)
        ]

    def _encoded(self, tokenizer: Any, batch: list[Any], choice: Overflow) -> Any:
        """The ``tokenizers.Encoding`` of each text or pair, their lengths checked."""
        try:
            encoded = tokenizer.encode_batch(batch, add_special_tokens=self._template is None)
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises nothing more specific
                raise
            raise _unencodable(tokenizer, batch, error) from error
        # Before there are lists of a text's tokens: of one with millions they take a gigabyte.
        any_length = choice in (Overflow.SPLIT, Overflow.RECUR)
        check_text_lengths([len(item) for item in encoded], sys.maxsize if any_length else self.max_len)
        return encoded

    @functools.cached_property
    def _truncating(self) -> Any:
        # The truncation of a `Tokenizer` is state of the object, so switching it per call would race between threads.
        tokenizer = type(self.whole).from_str(self.whole.to_str())
        tokenizer.enable_truncation(self.max_len, direction=self._side)
        return tokenizer


def read_tokenizer(path: Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a ``tokenizer.json``.

    Raises:
        BundleCorruptError: the file cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        # Only Python can open every path.
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises nothing more specific
        raise BundleCorruptError(
            f"The tokenizer {path} cannot be read: {error}.\n"
            "If the bundle was built with a newer `tokenizers`: pip install -U tokenizers"
        ) from error


def _tokens_of_prompt(tokenizer: Any, prompt: str) -> int:
    """Tokens of a prompt alone, without a special token at its end, as sentence-transformers counts them."""
    if not prompt:
        return 0
    encoded = tokenizer.encode(prompt)
    return len(encoded) - int(encoded.special_tokens_mask[-1:] == [1])


def _of_template(item: Any, written: WrittenPair, ending: list[int]) -> Encoding:
    """A pair in a template.

    Args:
        item: the ``tokenizers.Encoding`` of the whole text.
        written: that text, and where query and document are in it.
        ending: ids that take the place of its last ones.
    """
    ids, spans = item.ids, item.offsets
    sequences: list[int | None] = [None] * len(ids)
    offsets = [(0, 0)] * len(ids)
    # A token with characters of both is the query's, which every piece of the document has.
    for number, slot in ((1, written.places["document"]), (0, written.places["query"])):
        start, end = slot
        if start == end:
            continue
        first = bisect.bisect_right(spans, start, key=operator.itemgetter(1))
        last = bisect.bisect_left(spans, end, lo=first, key=operator.itemgetter(0))
        sequences[first:last] = [number] * (last - first)
        offsets[first:last] = [(max(a, start) - start, min(b, end) - start) for a, b in spans[first:last]]
    kept = len(ids) - min(len(ending), len(ids))
    if ending:
        ids[kept:] = ending[len(ending) - (len(ids) - kept) :]
        sequences[kept:] = [None] * (len(ids) - kept)
        offsets[kept:] = [(0, 0)] * (len(ids) - kept)
    return Encoding(ids, item.type_ids, offsets, sequences, is_cut=bool(item.overflowing))


def _ending(tokenizer: Any, template: PairTemplate, prompt: str) -> list[int]:
    """The ids that a template ends with, found as sentence-transformers finds them: the common end of two pairs."""
    first, second = (
        tokenizer.encode(template.write(text, text, prompt=prompt).text, add_special_tokens=False).ids
        for text in ("0", "1 2 3 4")
    )
    alike = [one == other for one, other in zip(reversed(first), reversed(second), strict=False)]
    shared = alike.index(False) if False in alike else 0
    return list(first[len(first) - shared :])


def _unencodable(tokenizer: Any, batch: list[Any], error: Exception) -> InputError:
    """The error of a batch, which names no text, with the first text that causes it."""
    what = "The batch"
    for index, item in enumerate(batch):
        try:
            tokenizer.encode_batch([item])
        except Exception as alone:
            what, error = "The text" if len(batch) == 1 else f"Text {index}", alone
            break
    return InputError(
        f"{what} cannot be encoded by the bundle's tokenizer: {error}.\n"
        "Leave it out, or build the bundle again of a checkpoint whose tokenizer knows an unknown token."
    )


def _unicode_texts(inputs: object, name: str) -> list[str]:
    texts = checked_texts(inputs, name=name)
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{name}[{index}] is not valid Unicode: {error}.") from None
    return texts
