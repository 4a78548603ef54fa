"""Text to ids, by the tokenizer that the bundle carries."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hdruntime.arrays import IntArray
from hdruntime.bundle.manifest import Side
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.sentence_settings import PairTemplate, Slot, TextTemplate, Written
from hdruntime.errors import BundleCorruptError, InputError, Setting
from hdruntime.text.checks import (
    RejectedTextsError,
    check_text_lengths,
    checked_choice,
    checked_texts,
    uncounted_length_error,
)
from hdruntime.text.kept_part import KeptParts

Template = PairTemplate | TextTemplate


class Overflow(str, Enum):
    """The treatment of a text of more tokens than the bundle accepts."""

    ERROR = "error"
    """The text is refused."""
    TRUNCATE = "truncate"
    """The text's end is cut off, or its beginning, as the checkpoint's tokenizer does: in a pair, the longer text is
    cut; in a pair in a chat template, the part before the template's end, whichever text that is."""
    SPLIT = "split"
    """The text is run in chunks, whose results are put together; see :mod:`hdruntime.text.splitting`."""
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
        is_truncated: whether tokens of the text were cut off.
        ids, types: int64 [tokens], `input_ids` and `token_type_ids` as arrays.
    """

    input_ids: list[int]
    token_type_ids: list[int]
    # Not shown: `of_arrays` leaves them out.
    offsets: list[tuple[int, int]] = dataclasses.field(repr=False)
    sequence_ids: list[int | None] = dataclasses.field(repr=False)
    prompt_tokens: int = 0
    unattended_tokens: int = 0
    is_truncated: bool = False

    def __post_init__(self) -> None:
        # Kept, as it is asked for often.
        vars(self)["_tokens"] = len(self.input_ids)

    @classmethod
    def of_ids(cls, ids: list[int]) -> Encoding:
        """An encoding of ids alone: one text, without places in it."""
        return cls(ids, [0] * len(ids), [(0, 0)] * len(ids), [0] * len(ids))

    @classmethod
    def of_arrays(
        cls,
        ids: IntArray,
        types: IntArray,
        *,
        prompt_tokens: int = 0,
        unattended_tokens: int = 0,
        is_truncated: bool = False,
    ) -> Encoding:
        """An encoding without `offsets` and `sequence_ids`; its other lists are made when they are asked for."""
        made = object.__new__(cls)
        vars(made).update(
            ids=ids,
            types=types,
            prompt_tokens=prompt_tokens,
            unattended_tokens=unattended_tokens,
            is_truncated=is_truncated,
            _tokens=len(ids),
        )
        return made

    @functools.cached_property
    def ids(self) -> IntArray:
        return np.array(self.input_ids, np.int64)

    @functools.cached_property
    def types(self) -> IntArray:
        return np.array(self.token_type_ids, np.int64)

    if not TYPE_CHECKING:  # which sees the fields of a dataclass

        def __getattr__(self, name: str) -> Any:
            array = {"input_ids": "ids", "token_type_ids": "types"}.get(name)
            if array in vars(self):
                return vars(self).setdefault(name, vars(self)[array].tolist())
            raise AttributeError(f"The encoding has no {name}: its text was encoded without offsets.")

    def as_truncated(self) -> Encoding:
        """The same encoding, marked as that of a truncated text."""
        made = object.__new__(Encoding)
        vars(made).update(vars(self), is_truncated=True)
        return made

    def __len__(self) -> int:
        """Number of tokens."""
        tokens: int = vars(self)["_tokens"]
        return tokens


class TextTokenizer:
    """A ``tokenizer.json`` with a limit on tokens. Safe to use from several threads.

    Args:
        path: the file, which is read once: later changes of the file change nothing.
        max_len: most tokens of a text or pair, special tokens and template included: the longest that the bundle runs.
        template: writes a pair or a text as one text, which is read without special tokens; None for texts and pairs as
            they are. With a template of pairs there are no texts but pairs, and with one of texts no pairs.
        truncation_side: which end of a text is cut off: ``right`` or ``left``.

    Attributes:
        max_len: most tokens of a text or pair.
        longest: the longest that the bundle runs; `limited` changes `max_len` alone.
        whole: the ``tokenizers.Tokenizer``, which neither cuts nor pads.

    Raises:
        BundleCorruptError: the file cannot be read.
    """

    def __init__(
        self, path: Path, *, max_len: int, template: Template | None = None, truncation_side: Side = "right"
    ) -> None:
        self.max_len = self.longest = max_len
        self._path = path
        self.whole = read_tokenizer(path)
        # Files carry settings of their own, such as truncation to 128 tokens and padding to the longest.
        self.whole.no_truncation()
        self.whole.no_padding()
        self._template, self._side = template, truncation_side
        self._kept_parts = KeptParts(self.whole)
        self._max_characters: int | None = None
        self._most_of_each: tuple[int | None, int | None] = (None, None)

    @classmethod
    def of(cls, bundle: Bundle, *, max_len: int, template: Template | None = None) -> TextTokenizer:
        """The tokenizer of a bundle that has one."""
        info = bundle.manifest.tokenizer
        assert info is not None, "a bundle without a tokenizer takes ids"
        path = bundle.file(info.file)
        return cls(path, max_len=max_len, template=template, truncation_side=info.truncation_side)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its file: a tokenizer may have many megabytes."""
        new = functools.partial(TextTokenizer, template=self._template, truncation_side=self._side)
        return functools.partial(new, max_len=self.longest), (self._path,), {"max_len": self.max_len}

    def limited(self, max_len: int, *, text: int | None = None, pair: int | None = None) -> TextTokenizer:
        """The same tokenizer with other limits.

        Args:
            max_len: most tokens of a text or pair.
            text, pair: tokens that the first text, and the second of a pair, is cut to before anything else; None: all.
        """
        other = self._copied(max_len=max_len, _most_of_each=(text, pair))
        if max_len != self.max_len:
            vars(other).pop("_truncating", None)
        return other

    def written_by(self, template: Template | None) -> TextTokenizer:
        """The same tokenizer with another template."""
        return self._copied(_template=template)

    def bounded(self, characters: int) -> TextTokenizer:
        """The same tokenizer, which refuses to read more than that many characters of a text.

        Of a text that is cut, or refused, for its tokens, it reads the part that decides. Other texts are read whole,
        and so are texts that the tokenizer takes for one long word; characters take about 150 bytes each meanwhile.
        """
        return self._copied(_max_characters=max(characters, 16 * self.max_len + 4096))

    def _copied(self, **changes: Any) -> TextTokenizer:
        other = object.__new__(TextTokenizer)
        vars(other).update(vars(self), **changes)
        return other

    @functools.cached_property
    def sample(self) -> str:
        """A short text that has a token: ``a``, or the first word of the vocabulary where that has none."""
        words = (self.whole.decode([number]) for number in range(self.whole.get_vocab_size()))
        for text in itertools.chain("a", words):
            # tokenizers raises nothing more specific for a text that it cannot encode.
            with contextlib.suppress(Exception):
                if self.whole.encode(text, add_special_tokens=False).ids:
                    return text
        return ""

    @functools.cached_property
    def _types_texts(self) -> bool:
        """Whether single texts have types other than 0, as XLNet's last token."""
        return any(self.whole.encode(self.sample).type_ids)

    @functools.cached_property
    def special_ids(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after the tokens of every text, each empty where there are none."""
        if self._template is not None:
            return [], []
        encoded = self.whole.encode(self.sample)
        of_text = [place for place, number in enumerate(encoded.sequence_ids) if number is not None]
        return (encoded.ids[: of_text[0]], encoded.ids[of_text[-1] + 1 :]) if of_text else ([], [])

    def checked_ids(self, ids: list[int], *, most: int | None = None) -> list[int]:
        """The ids of a text, special tokens included, cut as a text is to `most` tokens; None for all.

        Ids without the special tokens around a text are refused: they are another tokenizer's.
        """
        first, last = self.special_ids
        if not self.has_special_tokens(ids):
            around = [
                f"{', '.join(f'{number} ({self.whole.id_to_token(number)})' for number in special)} {place} every text"
                for special, place in ((first, "before"), (last, "after"))
                if special
            ]
            raise InputError(
                "The ids lack special tokens, as another tokenizer's do: "
                f"this bundle's tokenizer puts {' and '.join(around)}."
            )
        if most is None or len(ids) <= most:
            return ids
        kept, end = max(0, most - len(first) - len(last)), len(ids) - len(last)
        begin = end - kept if self._side == "left" else len(first)
        return [*first, *ids[begin : begin + kept], *last]

    def has_special_tokens(self, ids: list[int]) -> bool:
        """Whether ids begin and end with the special tokens of every text."""
        first, last = self.special_ids
        end = len(ids) - len(last)
        return end >= len(first) and ids[: len(first)] == first and ids[end:] == last

    def whole_encodings(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        """The ``tokenizers.Encoding`` of each whole text, without a limit on tokens."""
        for text in _unicode_texts(texts, "texts"):
            self._check_size(text)
        try:
            return list(self.whole.encode_batch(list(texts), add_special_tokens=add_special_tokens))
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises nothing more specific
                raise
            raise _unencodable(self.whole, list(texts), error) from error

    def beginning(self, text: str, tokens: int) -> str:
        """The longest beginning of a text that has only the text's first tokens, and at most so many.

        Special tokens do not count. Tokens with a part of a character whose other parts are left out are left out, too.
        """

        part = self._kept_parts.of(text, tokens=tokens + 1, side="right", in_pair=True, most=self._max_characters)
        self._check_size(part)
        found = self.whole.encode(part, add_special_tokens=False)
        ids, offsets = found.ids, found.offsets
        if len(ids) <= tokens:
            return text
        for kept in range(tokens, 0, -1):
            # A mark that belongs to the last character may be in no token.
            for end in (offsets[kept - 1][1], offsets[kept][0]):
                if self.whole.encode(text[:end], add_special_tokens=False).ids == ids[:kept]:
                    return text[:end]
        return ""

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
            overflow: ``truncate`` cuts a text, or the longer of a pair, at the tokenizer's side, and keeps the special
                tokens; in a pair in a template, the part before the template's end. ``split`` and ``recur`` give the
                whole text, however long it is.
            prompt: the text before every text, or before the first text of every pair, or where the template has it.
            offsets: whether the encodings have `offsets` and `sequence_ids`; it is faster without, and pairs in a
                template have them in any case.

        Of a long text that is cut or refused, only the part that decides is tokenized.

        Raises:
            InputError: not a list of strings, a text has no token (an empty one, where there are no special tokens),
                or it has too many and ``overflow`` is ``error``; the tokenizer cannot encode a text; or there is a
                template, and there are no pairs for it, or pairs that it does not write, or a prompt that it refuses.
        """
        choice = checked_choice(Overflow, overflow, option="overflow")
        texts = _unicode_texts(texts, "texts")
        _unicode_texts([prompt], "prompt")
        if pairs is not None:
            pairs = _unicode_texts(pairs, "pairs")
            if len(texts) != len(pairs):
                raise InputError(f"There are {len(texts)} texts but {len(pairs)} pairs; give one for each.")
        given, (for_text, for_pair) = (texts, pairs), self._most_of_each
        if for_text is not None:
            texts = [self.beginning(text, for_text) for text in texts]
        if for_pair is not None and pairs is not None:
            pairs = [self.beginning(text, for_pair) for text in pairs]
        are_cut = _that_differ(given, (texts, pairs))
        tokenizer = self._truncating if choice is Overflow.TRUNCATE else self.whole
        begins: list[int] = []
        if self._template is None:
            texts = [prompt + text for text in texts]
        elif isinstance(self._template, TextTemplate):
            # Offsets count the prompt's characters, too, as without a template.
            begins = [len(prompt)] * len(texts)
            if self._template.strips:
                begins = [len(prompt) + len(text) - len(text.lstrip()) for text in texts]
                texts = [text.strip() for text in texts]
        whole, texts, pairs = (texts, pairs), *self._kept(texts, pairs, choice)
        if self._template is not None:
            encodings = self._encode_written(self._template, texts, pairs, tokenizer, choice, prompt)
            if any(begins):
                encodings = [_moved(encoding, begin) for encoding, begin in zip(encodings, begins, strict=True)]
        else:
            encodings = self._encode_bare(texts, pairs, tokenizer, choice, prompt, offsets=offsets)
        if self._side == "left" and offsets:
            encodings = _placed(encodings, whole, (texts, pairs))
        return [each.as_truncated() if index in are_cut else each for index, each in enumerate(encodings)]

    def _encode_bare(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        tokenizer: Any,
        choice: Overflow,
        prompt: str,
        *,
        offsets: bool,
    ) -> list[Encoding]:
        """Encode texts that begin with the prompt already, or pairs whose first texts do, without a template."""
        batch = list(texts if pairs is None else zip(texts, pairs, strict=True))
        encoded = self._encoded(tokenizer, batch, choice, offsets=offsets)
        in_prompt = _tokens_of_prompt(tokenizer, prompt)
        if offsets:
            return [
                Encoding(
                    item.ids,
                    item.type_ids,
                    item.offsets,
                    item.sequence_ids,
                    min(in_prompt, len(item)),
                    is_truncated=bool(item.overflowing),
                )
                for item in encoded
            ]
        ends = list(itertools.accumulate(map(len, encoded)))
        # One array of all texts, of which each has a part: an array of its own for every short text costs more.
        ids = np.fromiter(
            itertools.chain.from_iterable(item.ids for item in encoded), np.int64, ends[-1] if ends else 0
        )
        types = np.zeros_like(ids)
        if pairs is not None or self._types_texts:
            types[:] = np.fromiter(itertools.chain.from_iterable(item.type_ids for item in encoded), np.int64)
        return [
            Encoding.of_arrays(
                ids[start:end],
                types[start:end],
                prompt_tokens=min(in_prompt, end - start),
                is_truncated=bool(item.overflowing),
            )
            for item, start, end in zip(encoded, [0, *ends], ends, strict=False)
        ]

    def _kept(
        self, texts: Sequence[str], pairs: Sequence[str] | None, choice: Overflow
    ) -> tuple[Sequence[str], Sequence[str] | None]:
        """The parts of the texts, and of the second texts of pairs, that are read; one of too many tokens for
        ``error``, or of too many characters for `bounded`, is refused."""
        if choice in (Overflow.SPLIT, Overflow.RECUR):
            for text in (*texts, *(pairs or ())):
                self._check_size(text)
            return texts, pairs
        kept: list[tuple[str, ...]]
        if pairs is None:
            in_template = self._template is not None
            kept = [(self._kept_part(text, self.max_len + 1, in_pair=in_template),) for text in texts]
        else:
            kept = [self._kept_pair(text, pair) for text, pair in zip(texts, pairs, strict=True)]
        if choice is Overflow.ERROR:
            given = [(text,) for text in texts] if pairs is None else list(zip(texts, pairs, strict=True))
            refused = [index for index, parts in enumerate(kept) if parts != given[index]]
            if refused:
                what = "The text" if len(texts) == 1 else f"Text {refused[0]}"
                characters = sum(map(len, given[refused[0]]))
                error = uncounted_length_error(what, characters, self.max_len, longest=self.longest)
                raise RejectedTextsError(*error.args, hint=error.hint, texts=refused) from None
        return [parts[0] for parts in kept], None if pairs is None else [parts[-1] for parts in kept]

    def _kept_part(self, text: str, tokens: int, *, in_pair: bool = False) -> str:
        most = self._max_characters
        part = self._kept_parts.of(text, tokens=tokens, side=self._side, in_pair=in_pair, most=most)
        self._check_size(part)
        return part

    def _kept_pair(self, text: str, pair: str) -> tuple[str, str]:
        """The parts of a pair: the library cuts the text of more tokens, and two long ones in the middle."""
        tokens = self.max_len + 1
        parts = self._kept_part(text, tokens, in_pair=True), self._kept_part(pair, tokens, in_pair=True)
        if self._template is not None or parts == (text, pair):
            return parts
        room = self.max_len - self.whole.num_special_tokens_to_add(True)
        are_cut = parts[0] != text, parts[1] != pair
        if all(are_cut) and room % 2 == 0:
            return parts
        # Of two long texts the one of more tokens keeps an odd one, so that the parts must compare as the texts do.
        counts = [self._count(text if all(are_cut) else parts[0]), self._count(pair if all(are_cut) else parts[1])]
        if are_cut[0] and (not are_cut[1] or counts[0] > counts[1]):
            return self._kept_part(text, max(tokens, self._count(parts[1]) + 1), in_pair=True), parts[1]
        return parts[0], self._kept_part(pair, max(tokens, self._count(parts[0]) + 1), in_pair=True)

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

    def _encode_written(
        self,
        template: Template,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        tokenizer: Any,
        choice: Overflow,
        prompt: str,
    ) -> list[Encoding]:
        """Encode texts or pairs as a template writes them; a cut one ends with the last tokens of the template, as in
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
        encoded = self._encoded(tokenizer, [each.text for each in written], choice)
        ending: list[int] = []
        if choice is Overflow.TRUNCATE and any(len(item) >= self.max_len for item in encoded):
            ending = _ending(self.whole, template, prompt)
        return [
            _of_template(item, each, ending if len(item) >= self.max_len else [])
            for item, each in zip(encoded, written, strict=True)
        ]

    def _encoded(self, tokenizer: Any, batch: list[Any], choice: Overflow, *, offsets: bool = True) -> Any:
        """The ``tokenizers.Encoding`` of each text or pair, their lengths checked."""
        special = self._template is None
        try:
            if len(batch) == 1:
                # In this thread: those of the library are shared, and may be busy with a long text.
                (item,) = batch
                of_item = (item,) if isinstance(item, str) else item
                encoded = [tokenizer.encode(*of_item, add_special_tokens=special)]
            else:
                encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
                encoded = encode(batch, add_special_tokens=special)
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises nothing more specific
                raise
            raise _unencodable(tokenizer, batch, error) from error
        # Before there are lists of a text's tokens: of one with millions they take a gigabyte.
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
        # The truncation of a `Tokenizer` is state of the object, so switching it per call would race between threads.
        tokenizer = type(self.whole).from_str(self.whole.to_str())
        tokenizer.enable_truncation(self.max_len, direction=self._side)
        return tokenizer


def _that_differ(given: tuple[Any, Any], kept: tuple[Any, Any]) -> set[int]:
    """Indices of texts, or pairs, that are not kept as they were given."""
    return {
        index
        for of_given, of_kept in zip(given, kept, strict=True)
        if of_given is not of_kept
        for index, (text, part) in enumerate(zip(of_given, of_kept, strict=True))
        if text != part
    }


def _placed(
    encodings: list[Encoding],
    whole: tuple[Sequence[str], Sequence[str] | None],
    kept: tuple[Sequence[str], Sequence[str] | None],
) -> list[Encoding]:
    """Encodings of the ends of texts, with offsets counted in the whole texts."""
    before = [
        [len(text) - len(part) for text, part in zip(texts or (), parts or (), strict=True)]
        for texts, parts in zip(whole, kept, strict=True)
    ]
    if not any(map(any, before)):
        return encodings
    placed = []
    for index, encoding in enumerate(encodings):
        skipped = {0: before[0][index], 1: before[1][index] if before[1] else 0, None: 0}
        of_tokens = zip(encoding.offsets, encoding.sequence_ids, strict=True)
        offsets = [(start + skipped[text], end + skipped[text]) for (start, end), text in of_tokens]
        placed.append(dataclasses.replace(encoding, offsets=offsets))
    return placed


def read_tokenizer(path: Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a ``tokenizer.json``, which gives a text the same ids at every load and call."""
    from tokenizers import Tokenizer

    try:
        # Only Python can open every path.
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises nothing more specific
        raise BundleCorruptError(
            f"The tokenizer {path} cannot be read: {error}.",
            hint="If the bundle was built with a newer `tokenizers`: pip install -U tokenizers",
        ) from error
    random = random_ids_of(tokenizer)
    if random is not None:
        raise BundleCorruptError(
            f"The tokenizer {path} gives a text random ids: {random.reason}.",
            hint="Build the bundle again from its checkpoint: the build says what to change there.",
        )
    return tokenizer


class RandomIds(NamedTuple):
    """Why a tokenizer gives a text other ids at another load or call, as half a sentence, and the remedy in a
    checkpoint's files, as a sentence."""

    reason: str
    remedy: str


def random_ids_of(tokenizer: Any) -> RandomIds | None:
    """Why a ``tokenizers.Tokenizer`` gives a text random ids; None where a text always has the same ids."""
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        return RandomIds(
            f"its model has the dropout {dropout:g}, which leaves out merges at random",
            "Set dropout to null in the model of tokenizer.json.",
        )
    if tokenizer.normalizer is None:
        return None
    # tokenizers normalizes the contents of these tokens, too, and takes one of several equal ones by a random hash.
    tokens: dict[str, list[str]] = {}
    for number, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        if token.normalized:
            content = tokenizer.normalizer.normalize_str(token.content)
            tokens.setdefault(content, []).append(f"{token.content!r} ({number})")
    equal = next(((content, names) for content, names in tokens.items() if content and len(names) > 1), None)
    if equal is None:
        return None
    return RandomIds(
        f"its normalizer makes {equal[0]!r} of each of the added tokens {' and '.join(equal[1])}, and `tokenizers` "
        "takes one of their ids at random at each load",
        "Rename all of these tokens but the first to words that no text has, such as '[unused-1]', in tokenizer.json "
        "and in added_tokens_decoder of tokenizer_config.json: the first is the token that `tokenizers` took before "
        "0.23.",
    )


def _tokens_of_prompt(tokenizer: Any, prompt: str) -> int:
    """Tokens of a prompt alone, without a special token at its end, as sentence-transformers counts them."""
    if not prompt:
        return 0
    encoded = tokenizer.encode(prompt)
    return len(encoded) - int(encoded.special_tokens_mask[-1:] == [1])


def _moved(encoding: Encoding, characters: int) -> Encoding:
    """An encoding whose tokens of the text are that many characters later in the text."""
    if not characters:
        return encoding
    of_tokens = zip(encoding.offsets, encoding.sequence_ids, strict=True)
    offsets = [(a, b) if text is None else (a + characters, b + characters) for (a, b), text in of_tokens]
    return dataclasses.replace(encoding, offsets=offsets)


def _of_template(item: Any, written: Written, ending: list[int]) -> Encoding:
    """A text or a pair in a template: the ``tokenizers.Encoding`` of all of it, and where text, query and document are
    in it; the ids of `ending` take the place of its last ones."""
    ids, spans = item.ids, item.offsets
    sequences: list[int | None] = [None] * len(ids)
    offsets = [(0, 0)] * len(ids)
    # A token with characters of both is the query's, which every chunk of the document has.
    numbers: tuple[tuple[int, Slot], ...] = ((1, "document"), (0, "query"), (0, "text"))
    for number, slot in numbers:
        start, end = written.places.get(slot, (0, 0))
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
    return Encoding(ids, item.type_ids, offsets, sequences, is_truncated=bool(item.overflowing))


def _ending(tokenizer: Any, template: Template, prompt: str) -> list[int]:
    """The ids that a template ends with, found as sentence-transformers finds them: the common end of two texts or
    pairs."""
    first, second = (
        tokenizer.encode(template.write(*given, prompt=prompt).text, add_special_tokens=False).ids
        for given in ([text] * (1 if isinstance(template, TextTemplate) else 2) for text in ("0", "1 2 3 4"))
    )
    alike = [one == other for one, other in zip(reversed(first), reversed(second), strict=False)]
    shared = alike.index(False) if False in alike else 0
    return list(first[len(first) - shared :])


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
        hint="Leave it out, or build the bundle again of a checkpoint whose tokenizer knows an unknown token.",
        texts=list(errors) or range(len(batch)),
    )


def _unicode_texts(inputs: object, name: str) -> list[str]:
    texts = checked_texts(inputs, name=name)
    for index, text in enumerate(texts):
        try:
            _ = text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{name}[{index}] is not valid Unicode: {error}.", hint="Leave out its lone surrogates."
            ) from None
    return texts
