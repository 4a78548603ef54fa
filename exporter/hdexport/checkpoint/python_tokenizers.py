"""Tokenizers that transformers runs in Python, as a ``tokenizer.json`` where that gives the same ids."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEXTS = 200
_ODD = (
    "", " ", "  a  b ", "\t\n", "a\r\nb", "a\u00a0b\u3000c", "a\u200bb\u00adc", "a\x1cb\x85c", "a\x00\ufffd\ufeff",
    "Straße İstanbul ŒUVRE", "nai\u0308ve naïve", "e\u0301\u0323", "ﬁ ½ ² \u2167 \u2460", "\uff21\uff42\uff43\uff11",
    "\U0001d518\U0001d52b \ue000", "''quoted`` \u201cquoted\u201d", "don't I'm we'll", "3.14 1,000 10^-5", "!?.,;:",
    "https://example.org/a?b=c#d", "snake_case CamelCase", "a-b\u2014c\u2026d", "MKTAYIAKQR", "x" * 120, "Привет",
    "北京大学 東京都 서울", "今天天气非常好。", "すもももももももものうち", "مرحبا بالعالم", "שלום", "हिन्दी भाषा",
    "ภาษาไทย", "👩\u200d👩\u200d👧 🇩🇪 👍🏽", "<s>a</s>", "[CLS] a [SEP]", "<mask>", "a[MASK]b <pad>",
)  # fmt: skip
"""Texts that tokenizers often split differently."""


def fits_a_file(tokenizer: Any) -> bool:
    """Whether a tokenizer of transformers is written to a ``tokenizer.json`` as it is."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    if _is_code_of_a_checkpoint(tokenizer) and not _is_equal(tokenizer.backend_tokenizer, tokenizer, _texts(tokenizer)):
        return False
    try:
        # A step that is a program of Python refuses.
        tokenizer.backend_tokenizer.pre_tokenizer.__getstate__()
    except AttributeError:
        return True
    except Exception:
        return False
    return True


def _is_code_of_a_checkpoint(tokenizer: Any) -> bool:
    return not type(tokenizer).__module__.startswith("transformers.")


def as_tokenizer_file(tokenizer: Any, path: Path) -> Any:
    """A tokenizer in transformers that is written to a file and gives the ids of one that is not.

    Args:
        tokenizer: for which `fits_a_file` does not hold.
        path: of the checkpoint, for messages.

    Raises:
        ModelError: none is known that gives its ids of every odd text.
    """
    from transformers import PreTrainedTokenizerFast

    converted = _framed(tokenizer)
    if converted is None or not _is_equal(converted, tokenizer, _texts(tokenizer)):
        whose = "its own" if _is_code_of_a_checkpoint(tokenizer) else "transformers'"
        raise ModelError(
            f"The tokenizer of {path} is {whose} {type(tokenizer).__name__}, a program of Python; a bundle holds "
            "a tokenizer.json, and none is known that gives the same ids.\n"
            "Build for token ids, which that class makes of texts: --no-tokenizer"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=converted,
        model_input_names=tokenizer.model_input_names,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        **{name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
    )


def _of_words(tokenizer: Any) -> Tokenizer:
    """Words of a vocabulary between spaces; words that are never split are found in other text, as amino acids are."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    converted = Tokenizer(models.WordLevel(tokenizer.get_vocab(), unk_token=tokenizer.unk_token))
    # The characters that Python's str.split() takes for spaces.
    converted.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\x1c-\x1f]+"), behavior="removed")
    whole = getattr(tokenizer, "unique_no_split_tokens", [])
    converted.add_tokens([AddedToken(word, normalized=False) for word in whole])
    return converted


def _framed(tokenizer: Any) -> Tokenizer | None:
    """Words with the special tokens of a tokenizer around them; None where its class lacks the facts about them."""
    from tokenizers import processors

    try:
        converted = _of_words(tokenizer)
        converted.add_special_tokens(list(tokenizer.added_tokens_decoder.values()))
        single, pair = (tokenizer.build_inputs_with_special_tokens(*ids) for ids in (([-1],), ([-1], [-2])))
        types = tokenizer.create_token_type_ids_from_sequences([-1], [-2])
        specials = {number: tokenizer.convert_ids_to_tokens(number) for number in {*single, *pair} if number >= 0}
        names = {-1: "$A", -2: "$B", **specials}
        converted.post_processor = processors.TemplateProcessing(
            single=[f"{names[number]}:0" for number in single],
            pair=[f"{names[number]}:{kind}" for number, kind in zip(pair, types, strict=True)],
            special_tokens=[(name, number) for number, name in specials.items()],
        )
    except Exception:
        # Each class lacks something else, and the results are compared.
        return None
    return converted


def _is_equal(converted: Tokenizer, tokenizer: Any, texts: Sequence[str]) -> bool:
    # Pairs follow from how a text is framed, so that a few tell.
    for given in (*((text, None) for text in texts), *itertools.pairwise(texts[:20])):
        try:
            expected = tokenizer(*given, verbose=False)["input_ids"]
        except Exception:
            # Some classes fail on foreign vocabularies, and then no ids are the same.
            return False
        if converted.encode(*given).ids != expected:
            return False
    return True


def _texts(tokenizer: Any) -> list[str]:
    """Odd texts, and words of the vocabulary with something between."""
    choice = random.Random(0)
    words = sorted(tokenizer.get_vocab())

    def made() -> Iterator[str]:
        yield from _ODD
        while True:
            count, between = choice.randint(1, 12), choice.choice(("", " ", "  ", "\n", "-", ". "))
            yield between.join(choice.choice((*words, *_ODD)) for _ in range(count))

    texts = made()
    return [next(texts) for _ in range(_TEXTS)]
