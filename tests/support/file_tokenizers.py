"""Small tokenizers of transformers' named classes, whose ``tokenizer.json`` says more than its class keeps."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from support.tiny_models import SEPARATOR_ID

_SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
"""By the ids of tiny models."""

_LETTERS = string.ascii_lowercase + "ABDNï,."

_NAMES = {
    "cls_token": "[CLS]",
    "pad_token": "[PAD]",
    "sep_token": "[SEP]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}


class FileTokenizer(NamedTuple):
    """A tokenizer of at most 300 words: the class of transformers, the model type, the file, and the class's settings.

    `text` is one that the file and the class split differently.
    """

    kind: str
    model_type: str
    file: Callable[[], Tokenizer]
    settings: dict[str, object]
    text: str


def word_pieces() -> Tokenizer:
    """WordPiece that keeps accents and makes wide letters plain; 71 words."""
    words = [*_SPECIAL, *_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _framed(tokenizer)


def sentence_pieces() -> Tokenizer:
    """Unigram with the normalizer of compatible forms, and lower case."""
    words = [(word, 0.0) for word in _SPECIAL] + [("\u2581", -2.0), *((letter, -3.0) for letter in _LETTERS)]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=3))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _framed(tokenizer)


def byte_pieces() -> Tokenizer:
    """Bytes, of texts in lower case; 261 words."""
    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _framed(tokenizer)


_LOWERED: dict[str, object] = {"do_lower_case": True}

TOKENIZERS = (
    FileTokenizer("BertTokenizer", "bert", word_pieces, _LOWERED, "na\u00efve"),
    FileTokenizer("DistilBertTokenizer", "distilbert", word_pieces, _LOWERED, "na\u00efve"),
    FileTokenizer("MPNetTokenizer", "mpnet", word_pieces, _LOWERED, "na\u00efve"),
    FileTokenizer("ElectraTokenizer", "electra", word_pieces, _LOWERED, "na\u00efve"),
    FileTokenizer("RobertaTokenizer", "roberta", byte_pieces, {}, "BAND"),
    FileTokenizer("XLMRobertaTokenizer", "xlm-roberta", sentence_pieces, {}, "BAND"),
    FileTokenizer("CamembertTokenizer", "camembert", sentence_pieces, {}, "BAND"),
    FileTokenizer("DebertaV2Tokenizer", "deberta-v2", sentence_pieces, {}, "\uff41"),
    FileTokenizer("BigBirdTokenizer", "big_bird", sentence_pieces, {}, "BAND"),
    FileTokenizer("AlbertTokenizer", "albert", sentence_pieces, {}, "na\u00efve"),
    FileTokenizer("T5Tokenizer", "t5", sentence_pieces, {}, "BAND"),
)


def put_tokenizer(checkpoint: Path, file: Tokenizer, kind: str | None, **settings: object) -> None:
    """Give a checkpoint a ``tokenizer.json``, and a ``tokenizer_config.json`` that names a class, or none."""
    file.save(str(checkpoint / "tokenizer.json"))
    named = {} if kind is None else {"tokenizer_class": kind}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({**_NAMES, **named, **settings}))
    (checkpoint / "special_tokens_map.json").unlink(missing_ok=True)


def _framed(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", SEPARATOR_ID)],
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer
