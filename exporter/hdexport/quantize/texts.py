"""The texts that scales of activations are measured on."""

from __future__ import annotations

import ast
import itertools
import re
import sysconfig
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from hdexport.support.texts import read_texts
from hdexport.verify.single_texts import ENGLISH, RANDOM_IDS, english_texts, random_ids, sample_ids
from hdruntime.arrays import IntArray
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting
from hdruntime.text.encoding import Overflow
from hdruntime.text.tokenization import TextTokenizer

_EVERYDAY = "everyday.txt"
"""File beside this one, of sentences of many kinds that documentation lacks: models have channels for them, a question
mark's first. English first, then other languages and letters, of which a vocabulary may have little more than single
letters."""

_TEXTS = 64
_TOKENS = 512

_LONG_TOKENS = 2048
_LONG_CHECKED = 8
"""Number of long chunks that are checked: as many tokens as verification reads, of which the worst one tells."""

_VALUES = 2**26
"""Most values of the answers to long checked texts, which are all in memory at once: 256 MB. A head over a vocabulary
has 30,000 and more for each token."""

_CUT_TOKENS = 160
"""Tokens that two texts of three are cut to: many texts tell more than long ones, and take as much time."""

_CHECK_EVERY = 4
"""Every so many texts are checked instead of calibrated with."""

_SHORT_TEXTS = (2, 3, 4, 5, 6, 8, 11, 16, 23, 33, 47, 65)
"""Tokens of short texts, whose activations are unlike long texts' activations: few tokens share all attention."""

_SENTENCE = re.compile(r"(?:^|(?<=[.!?]))[^.!?]+[.!?](?=\s)")
"""A sentence begins only where another may have ended: elsewhere, each letter of a text without full stops would be
tried, and 400 KB take an hour."""

_WORDS = range(2, 31)
"""Words of a sentence. Among short texts, sentences that end with a full stop are unlike texts that are cut."""

_RARE_LENGTHS = (*(2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) * 2, *(512,) * 2)
"""Tokens of texts of random ids. Texts of another kind have words that the calibration's lack, and without these, up to
all of the error of such a word was clipping."""

_DOCSTRING_TOKENS = 64
"""Tokens of a module's docstrings: many kinds of text tell more of ranges than long texts. Without docstrings, single
tokens of the same language were clipped, by more than a channel's range."""

_PADDING = (1, 2, 3, 5, 9, 17, 33, 64)
_BEHIND_PADDING = (1, 1, 2, 3)
"""Tokens before a few that are alone, and how many those are. A token that has no special one to attend to, and is not
in the place of one, attends to itself: then the averages of attention are single vectors, and far larger."""

_Text = TypeVar("_Text")

_MODULES = (
    *("argparse", "ast", "bdb", "bisect", "calendar", "codecs", "configparser", "contextlib", "copy", "csv"),
    *("datetime", "difflib", "dis", "doctest", "enum", "fileinput", "fnmatch", "fractions", "ftplib", "functools"),
    *("getopt", "gettext", "glob", "hashlib", "heapq", "imaplib", "inspect", "ipaddress", "locale", "mailbox"),
    *("mimetypes", "optparse", "os", "pathlib", "pickle", "pickletools", "platform", "poplib", "pprint", "random"),
    *("sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "ssl", "stat", "statistics", "string"),
    *("subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "traceback"),
    *("turtle", "typing", "uuid", "warnings", "weakref", "zipfile"),
)
"""Modules of many subjects, named so that a release of Python that adds modules changes no bundle."""


class CalibrationTexts(NamedTuple):
    """Texts in a model's tokens, [tokens], int64 each.

    Attributes:
        checked: texts that are not among `ids`, unless there is one text alone.
        source: the file's name, `ENGLISH` or `RANDOM_IDS`.
        rare: sentences of many kinds, docstrings, and ids drawn from the whole vocabulary.
        behind_padding: number of tokens of padding before each text, and the text of few tokens.
    """

    ids: Sequence[IntArray]
    checked: Sequence[IntArray]
    source: str
    rare: Sequence[IntArray] = ()
    behind_padding: Sequence[tuple[int, IntArray]] = ()


def check_source(file: Path | None) -> None:
    """Reject a file or folder without texts that can be read; for a check before long work."""
    if file is not None:
        _read(file)


def calibration_texts(bundle: Bundle, file: Path | None) -> CalibrationTexts:
    """Up to 64 texts of up to 512 tokens, short ones, and long ones where the model takes longer texts. `file` has the
    texts; None takes English texts that ship with Python, or random ids where there is no tokenizer for them."""
    if file is None:
        if sample_ids(bundle, [min(_TOKENS, bundle.manifest.max_len)])[1] == RANDOM_IDS:
            return _random_texts(bundle)
        texts, source = english_texts()[:_TEXTS], ENGLISH
    elif bundle.manifest.tokenizer is None:
        raise InputError(
            Setting("calibrate", file),
            " names texts, but the checkpoint has no tokenizer to read them with.",
            hint=("Add its tokenizer.json, or leave ", Setting("calibrate"), " out: random ids are used then."),
        )
    else:
        texts, source = _read(file), file.name
    calibrated, checked = _parted(texts)
    ids = [*_long_and_short(bundle, calibrated), *_joined(bundle, calibrated)[:1]]
    rare = [
        *_encoded(bundle, resources.files(__package__).joinpath(_EVERYDAY).read_text("utf-8").splitlines()),
        *_encoded(bundle, docstrings(), tokens=_DOCSTRING_TOKENS),
        *random_ids(bundle.manifest, _lengths(bundle, _RARE_LENGTHS)),
    ]
    long_checked = min(_LONG_CHECKED, tokens_in_memory(bundle) // _LONG_TOKENS)
    return CalibrationTexts(
        ids=ids,
        checked=[*_long_and_short(bundle, checked), *_joined(bundle, checked)[:long_checked]],
        source=source,
        rare=rare,
        behind_padding=_behind_padding(bundle, [*ids, *rare]),
    )


def tokens_in_memory(bundle: Bundle) -> int:
    """How many tokens' answers may be kept."""
    widths = [spec.shape[-1] for spec in bundle.manifest.result_outputs if spec.has_tokens_axis]
    return _VALUES // max(1, sum(width for width in widths if isinstance(width, int)))


def docstrings() -> list[str]:
    """The docstrings of each module of Python's library, its own first, as one text: prose, dialogues, tables and
    drawings in letters. Modules whose source is not installed have none."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [(library / f"{name}.py", library / name / "__init__.py") for name in _MODULES]
    files_of_modules = [next((file for file in places if file.is_file()), None) for places in files]
    return [text for file in files_of_modules if file is not None and (text := _docstrings(file))]


def _random_texts(bundle: Bundle) -> CalibrationTexts:
    long = [_LONG_TOKENS] if bundle.manifest.max_len > _TOKENS else []
    lengths = [_most_tokens(number) for number in range(_TEXTS)]
    ids, checked = _parted(random_ids(bundle.manifest, _lengths(bundle, [*lengths, *long])))
    return CalibrationTexts(ids=ids, checked=checked, source=RANDOM_IDS, behind_padding=_behind_padding(bundle, ids))


def _lengths(bundle: Bundle, lengths: Sequence[int]) -> list[int]:
    return [min(length, bundle.manifest.max_len) for length in lengths]


def _most_tokens(number: int) -> int:
    return _CUT_TOKENS if number % 3 else _TOKENS


def _parted(texts: Sequence[_Text]) -> tuple[list[_Text], list[_Text]]:
    """Texts that calibrate, and texts that are checked."""
    checked = list(texts[_CHECK_EVERY - 1 :: _CHECK_EVERY])
    others = [text for number, text in enumerate(texts) if number % _CHECK_EVERY != _CHECK_EVERY - 1]
    return others, checked or others


def _long_and_short(bundle: Bundle, texts: Sequence[str]) -> list[IntArray]:
    """Texts, two sentences of each, and two beginnings of each of the short sizes, which end as the whole does."""
    long = _encoded(bundle, texts)
    sentences = [
        sentence
        for text in texts
        for by_length in [sorted((each for each in _SENTENCE.findall(text) if len(each.split()) in _WORDS), key=len)]
        for sentence in dict.fromkeys([*by_length[:1], *by_length[len(by_length) // 2 :][:1]])
    ]
    short = []
    for number, length in enumerate((*_SHORT_TEXTS, *_SHORT_TEXTS)):
        text = long[number % len(long)]
        if len(text) > length:
            short.append(_beginning(text, length))
    cut = [_beginning(text, min(len(text), _most_tokens(number))) for number, text in enumerate(long)]
    return [*cut, *_encoded(bundle, [" ".join(sentence.split()) for sentence in sentences]), *short]


def _beginning(text: IntArray, length: int) -> IntArray:
    """The first tokens of a text, with the text's last token at the end."""
    return np.concatenate([text[: length - 1], text[-1:]])


def _behind_padding(bundle: Bundle, texts: Sequence[IntArray]) -> list[tuple[int, IntArray]]:
    """A few tokens from within texts, behind every size of padding that the model's length allows; and the token that
    begins texts, alone, there and where half of a long text and all of it end. Positions that are made of two learned
    ones are larger than learned ones, most of all where one is the last."""
    generator, longest = np.random.default_rng(0), bundle.manifest.max_len
    within = np.concatenate([text[1:-1] for text in texts])
    if not len(within):
        return []
    places = [each for each in itertools.product(_PADDING, _BEHIND_PADDING * 3) if sum(each) <= longest]
    few = [(padding, generator.choice(within, count)) for padding, count in places]
    long = min(longest, _LONG_TOKENS)
    before = dict.fromkeys([*(padding for padding, _ in places), long // 2 - 1, long - 1])
    return few + [(padding, texts[0][:1]) for padding in before if padding > 0]


def _read(file: Path) -> list[str]:
    return [text.text for text in itertools.islice(read_texts(file, parameter="calibrate"), _TEXTS)]


def _joined(bundle: Bundle, texts: Sequence[str]) -> list[IntArray]:
    """All texts as one, in long chunks that begin and end as it does; none for a model that takes no longer texts."""
    if bundle.manifest.max_len <= _TOKENS:
        return []
    (whole,) = _encoded(bundle, ["\n".join(texts)], overflow=Overflow.SPLIT)
    inside, step = whole[1:-1], min(_LONG_TOKENS, bundle.manifest.max_len) - 2
    chunks = (inside[start : start + step] for start in range(0, len(inside), step))
    return [np.concatenate([whole[:1], chunk, whole[-1:]]) for chunk in chunks]


def _encoded(
    bundle: Bundle, texts: Sequence[str], tokens: int = _TOKENS, overflow: Overflow = Overflow.TRUNCATE
) -> list[IntArray]:
    encoder = TextTokenizer.of(bundle, max_len=min(tokens, bundle.manifest.max_len))
    return [np.array(each.input_ids, np.int64) for each in encoder.encode(texts, overflow=overflow)]


def _docstrings(file: Path) -> str:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = (ast.get_docstring(node) for node in nodes if isinstance(node, documented))
    return "\n".join(filter(None, texts))
