"""Reading and copying a ``tokenizer.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hdruntime.errors import BundleCorruptError


def read_tokenizer(path: Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a ``tokenizer.json``; rejects a file that gives a text random ids."""
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
            hint="Build the bundle again from its checkpoint; the build explains how to change the tokenizer.",
        )
    return tokenizer


def copied_tokenizer(tokenizer: Any) -> Any:
    """A copy of a ``tokenizers.Tokenizer``, without truncation and padding, that shares the model.

    A copy by ``to_str`` and ``from_str`` has a model of its own: of a vocabulary of 250,000 words it takes a second and
    as much memory again (tokenizers 0.23.3, 2026-11-29).
    """
    copy = type(tokenizer)(tokenizer.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "encode_special_tokens"):
        if (value := getattr(tokenizer, step)) is not None:
            setattr(copy, step, value)
    copy.add_tokens([token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())])
    return copy


class RandomIds(NamedTuple):
    """A tokenizer gives a text different ids at another load or call.

    Attributes:
        reason: clause that names the cause.
        hint: sentence about the change in the checkpoint's files.
    """

    reason: str
    hint: str


def random_ids_of(tokenizer: Any) -> RandomIds | None:
    """Why a ``tokenizers.Tokenizer`` gives a text random ids, or None."""
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        return RandomIds(
            f"its model has the dropout {dropout:g}, which skips merges at random",
            "Set dropout to null in the model of tokenizer.json.",
        )
    if tokenizer.normalizer is None:
        return None
    # tokenizers normalizes the contents of these tokens, too, and chooses one of several equal ones by a random hash.
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
