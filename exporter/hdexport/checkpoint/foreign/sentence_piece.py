"""A SentencePiece model of English ALBERT as a fast tokenizer, read without the package that wrote it.

Texts are prepared as Google's ``tokenization.py`` of ALBERT does: quotes, accents, case, and then the model's own map
of characters. Pieces that the model's makers defined, such as brackets, stay pieces: as tokens of their own they would
lose the space before them.

Source: ``sentencepiece_model.proto``.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from hdexport.checkpoint.foreign.wire_format import DamagedError, fields_of
from hdexport.support.json_files import shown
from hdruntime.errors import ModelError

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_UNIGRAM = 1
_UNKNOWN = 2
"""Kind of the piece that stands for all others."""

_CLS, _SEP, _MASK, _PAD = "[CLS]", "[SEP]", "[MASK]", "<pad>"


def tokenizer_of_sentence_piece(file: Path, *, lowercase: bool) -> tuple[str, dict[str, Any]]:
    """The content of ``tokenizer.json``, and its settings in ``tokenizer_config.json``.

    Args:
        file: the model.
        lowercase: whether texts are lowercased first.

    Raises:
        ModelError: the file is no such model, of another algorithm, or lacks a special token.
    """
    try:
        fields = fields_of(file.read_bytes())
        pieces = [_piece(record) for record in fields.get(_PIECES, ())]
        algorithm = _message(fields, _TRAINER).get(3, [_UNIGRAM])[-1]
        characters = _message(fields, _NORMALIZER).get(2, [b""])[-1]
        unknown = [index for index, (_, _, kind) in enumerate(pieces) if kind == _UNKNOWN]
        if len(unknown) != 1 or not isinstance(characters, bytes) or not isinstance(algorithm, int):
            raise DamagedError("it has no piece for unknown text")
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if algorithm != _UNIGRAM:
        raise ModelError(
            f"{file} is a SentencePiece model of the algorithm {algorithm}; ALBERT's are unigram models (1).\n"
            "Use the model that was published with the checkpoint."
        )
    ids = {text: index for index, (text, _, _) in enumerate(pieces)}
    missing = [token for token in (_CLS, _SEP, _MASK, _PAD) if token not in ids]
    if missing:
        raise ModelError(
            f"{file} has no {', '.join(missing)}, which ALBERT's texts are framed with.\n"
            "Use the model that was published with the checkpoint."
        )
    try:
        text = _tokenizer(pieces, unknown[0], characters, ids, lowercase=lowercase).to_str()
    except Exception as error:
        # Errors of tokenizers, written in Rust, for a damaged map of characters have no class of their own.
        raise _unreadable(file, error) from error
    names = {
        "cls_token": _CLS,
        "sep_token": _SEP,
        "mask_token": _MASK,
        "pad_token": _PAD,
        "unk_token": pieces[unknown[0]][0],
    }
    return text, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "pad_token_id": ids[_PAD],
        **names,
    }


def _tokenizer(
    pieces: list[tuple[str, float, int]], unknown: int, characters: bytes, ids: dict[str, int], *, lowercase: bool
) -> Any:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.Unigram([(text, score) for text, score, _ in pieces], unknown, False))
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
    return ModelError(f"{file} cannot be read as a SentencePiece model: {shown(error)}.\nCopy or download it again.")


def _piece(record: int | bytes) -> tuple[str, float, int]:
    """A piece, its score and its kind."""
    if not isinstance(record, bytes):
        raise DamagedError("a piece in it is a number")
    fields = fields_of(record)
    text, score, kind = (fields.get(number, [default])[-1] for number, default in ((1, b""), (2, 0), (3, 1)))
    if not isinstance(text, bytes) or not isinstance(score, int) or score >> 32 or not isinstance(kind, int):
        raise DamagedError("a piece in it has no text or score")
    return text.decode("utf-8"), struct.unpack("<f", score.to_bytes(4, "little"))[0], kind


def _message(fields: dict[int, list[int | bytes]], number: int) -> dict[int, list[int | bytes]]:
    value = fields.get(number, [b""])[-1]
    return fields_of(value) if isinstance(value, bytes) else {}
