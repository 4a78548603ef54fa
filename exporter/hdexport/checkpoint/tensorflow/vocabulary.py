"""Google's vocabularies as the files of a Hugging Face tokenizer: WordPiece, or SentencePiece for English ALBERT."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdexport.checkpoint.tensorflow.formats import DamagedError, fields_of
from hdexport.support.json_files import read_object, shown
from hdruntime.errors import ModelError

_CONFIG = "tokenizer_config.json"
_COPIED = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json")
_USUAL = "vocab.txt"
_SPECIAL_TOKENS = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}

_UNIFIED_IDEOGRAPHS = ("一", "鿿")

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3

_UNIGRAM = 1

_UNKNOWN = 2
"""Kind of the entry that stands for all others."""

_CLS, _SEP, _MASK, _PAD = "[CLS]", "[SEP]", "[MASK]", "<pad>"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The files of a tokenizer.

    Attributes:
        files: name of a file -> its text, or the value of a JSON file; empty for a checkpoint without a tokenizer.
        links: name of a file -> the checkpoint's own, which stays as it is.
        pad_token_id: id of the padding token; None where it is not known here.
        remarks: choices that were made, a line each.
    """

    files: dict[str, Any] = field(default_factory=dict)
    links: dict[str, Path] = field(default_factory=dict)
    pad_token_id: int | None = None
    remarks: tuple[str, ...] = ()


def read_vocabulary(directory: Path, *, config: dict[str, Any], model_type: str) -> Vocabulary:
    """The tokenizer of a checkpoint; ``tokenizer_config.json`` in the directory overrules the settings that are chosen
    here."""
    configured = read_object(directory / _CONFIG, missing_ok=True)
    own = {name: directory / name for name in _COPIED if (directory / name).is_file()}
    if "tokenizer.json" in own:
        return Vocabulary(links=own, files={_CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast"} | configured})
    words = [directory / _USUAL] if (directory / _USUAL).is_file() else sorted(directory.glob("vocab*.txt"))
    if len(words) > 1:
        raise ModelError(
            f"{directory} holds several vocabularies: {', '.join(word.name for word in words)}.",
            hint=f"Name the checkpoint's {_USUAL}.",
        )
    settings = {"model_max_length": config["max_position_embeddings"]}
    if words:
        return _wordpiece(words[0], settings, configured, own, config, model_type)
    models = sorted(directory.glob("*.model"))
    if model_type != "albert" or not models:
        return Vocabulary()
    if len(models) > 1:
        raise ModelError(
            f"{directory} holds several SentencePiece models: {', '.join(model.name for model in models)}.",
            hint="Leave one of them in the directory.",
        )
    lowers = configured.get("do_lower_case", config.get("do_lower_case"))
    remarks: tuple[str, ...] = ()
    if not isinstance(lowers, bool):
        lowers = True
        remarks = (f'Texts are lowercased, as for ALBERT; "do_lower_case" in {_CONFIG} says otherwise.',)
    text, names = _tokenizer_of_sentence_piece(models[0], lowercase=lowers)
    padding = names.pop("pad_token_id")
    return Vocabulary(
        files={"tokenizer.json": text, _CONFIG: settings | names | configured},
        links=own,
        pad_token_id=padding,
        remarks=remarks,
    )


def _tokenizer_of_sentence_piece(file: Path, *, lowercase: bool) -> tuple[str, dict[str, Any]]:
    """The content of ``tokenizer.json``, and its settings in ``tokenizer_config.json``, from a SentencePiece model of
    English ALBERT that is read without the package that wrote it.

    Texts are prepared as Google's ``tokenization.py`` of ALBERT does: quotes, accents, case, and then the model's own
    map of characters. Entries that the model's makers defined, such as brackets, stay entries: as tokens of their own
    they would lose the space before them. Source: ``sentencepiece_model.proto``.
    """
    try:
        fields = fields_of(file.read_bytes())
        entries = [_entry(record) for record in fields.get(_PIECES, ())]
        algorithm = _message(fields, _TRAINER).get(3, [_UNIGRAM])[-1]
        characters = _message(fields, _NORMALIZER).get(2, [b""])[-1]
        unknown = [index for index, (_, _, kind) in enumerate(entries) if kind == _UNKNOWN]
        if len(unknown) != 1 or not isinstance(characters, bytes) or not isinstance(algorithm, int):
            raise DamagedError("it has no entry for unknown text")
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if algorithm != _UNIGRAM:
        raise ModelError(
            f"{file} is a SentencePiece model of the algorithm {algorithm}; ALBERT's are unigram models (1).",
            hint="Use the model that was published with the checkpoint.",
        )
    ids = {text: index for index, (text, _, _) in enumerate(entries)}
    missing = [token for token in (_CLS, _SEP, _MASK, _PAD) if token not in ids]
    if missing:
        raise ModelError(
            f"{file} has no {', '.join(missing)}, which ALBERT's texts are framed with.",
            hint="Use the model that was published with the checkpoint.",
        )
    try:
        text = _tokenizer(entries, unknown[0], characters, ids, lowercase=lowercase).to_str()
    except Exception as error:
        # Errors of tokenizers, written in Rust, for a damaged map of characters have no class of their own.
        raise _unreadable(file, error) from error
    names = {
        "cls_token": _CLS,
        "sep_token": _SEP,
        "mask_token": _MASK,
        "pad_token": _PAD,
        "unk_token": entries[unknown[0]][0],
    }
    return text, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "pad_token_id": ids[_PAD],
        **names,
    }


def _wordpiece(
    file: Path,
    settings: dict[str, Any],
    configured: dict[str, Any],
    own: dict[str, Path],
    config: dict[str, Any],
    model_type: str,
) -> Vocabulary:
    tokens = _tokens(file)
    missing = [token for token in (*_SPECIAL_TOKENS.values(), _MASK) if token not in tokens]
    if missing and not any(key in configured for key in _SPECIAL_TOKENS):
        raise ModelError(
            f"{file} has no {', '.join(missing)}, which BERT's texts are framed with.",
            hint=f"Use the vocabulary of the checkpoint, or name its tokens in {file.with_name(_CONFIG)}.",
        )
    remarks = []
    lowers = configured.get("do_lower_case", config.get("do_lower_case"))
    if not isinstance(lowers, bool):
        lowers = "A" not in tokens
        why = (
            "has no capital letter, so texts are lowercased" if lowers else "has capital letters, so texts keep theirs"
        )
        remarks.append(f'{file.name} {why}; "do_lower_case" in {_CONFIG} says otherwise.')
    if model_type == "roformer" and any(_is_chinese_word(token) for token in tokens):
        remarks.append(
            f"{file.name} has words of several Chinese characters, which bert4keras finds with jieba; the bundle's "
            "tokenizer splits Chinese into characters, as BERT's does."
        )
    settings |= {"tokenizer_class": "BertTokenizer", "do_lower_case": lowers, "tokenize_chinese_chars": True}
    padding = str(configured.get("pad_token", _SPECIAL_TOKENS["pad_token"]))
    return Vocabulary(
        # With the usual ends of lines: a carriage return would be part of a token.
        files={_USUAL: "".join(f"{token}\n" for token in tokens), _CONFIG: settings | configured},
        links=own,
        pad_token_id=tokens.index(padding) if padding in tokens else None,
        remarks=tuple(remarks),
    )


def _tokens(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {shown(error)}", hint="Copy or download it again.") from error
    tokens = [line.strip() for line in lines]
    while tokens and not tokens[-1]:
        tokens.pop()
    return tokens


def _is_chinese_word(token: str) -> bool:
    first, last = _UNIFIED_IDEOGRAPHS
    return len(token) > 1 and all(first <= character <= last for character in token)


def _tokenizer(
    entries: list[tuple[str, float, int]], unknown: int, characters: bytes, ids: dict[str, int], *, lowercase: bool
) -> Any:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.Unigram([(text, score) for text, score, _ in entries], unknown, False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            *([normalizers.Lowercase()] if lowercase else []),
            *([normalizers.Precompiled(characters)] if characters else []),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_CLS} $A {_SEP}",
        pair=f"{_CLS} $A {_SEP} $B:1 {_SEP}:1",
        special_tokens=[(token, ids[token]) for token in (_CLS, _SEP)],
    )
    return tokenizer


def _unreadable(file: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{file} cannot be read as a SentencePiece model: {shown(error)}.", hint="Copy or download it again."
    )


def _entry(record: int | bytes) -> tuple[str, float, int]:
    """A token, its score and its kind."""
    if not isinstance(record, bytes):
        raise DamagedError("an entry of its vocabulary is a number")
    fields = fields_of(record)
    text, score, kind = (fields.get(number, [default])[-1] for number, default in ((1, b""), (2, 0), (3, 1)))
    if not isinstance(text, bytes) or not isinstance(score, int) or score >> 32 or not isinstance(kind, int):
        raise DamagedError("an entry of its vocabulary has no text or score")
    return text.decode("utf-8"), struct.unpack("<f", score.to_bytes(4, "little"))[0], kind


def _message(fields: dict[int, list[int | bytes]], number: int) -> dict[int, list[int | bytes]]:
    value = fields.get(number, [b""])[-1]
    return fields_of(value) if isinstance(value, bytes) else {}
