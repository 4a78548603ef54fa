"""Google's vocabularies as the files of a Hugging Face tokenizer: WordPiece, or SentencePiece for English ALBERT."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdexport.checkpoint.foreign.sentence_piece import tokenizer_of_sentence_piece
from hdexport.support.json_files import read_object, shown
from hdruntime.errors import ModelError

_CONFIG = "tokenizer_config.json"
_COPIED = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json")
_USUAL = "vocab.txt"
_SPECIAL_TOKENS = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
_MASK = "[MASK]"

_UNIFIED_IDEOGRAPHS = ("一", "鿿")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The files of a tokenizer.

    Attributes:
        files: name of a file -> its text, or the value of a JSON file; empty for a checkpoint without a tokenizer.
        links: name of a file -> the checkpoint's own, which stays as it is.
        pad_token_id: of the padding; None where it is not known here.
        remarks: choices that were made, a line each.
    """

    files: dict[str, Any] = field(default_factory=dict)
    links: dict[str, Path] = field(default_factory=dict)
    pad_token_id: int | None = None
    remarks: tuple[str, ...] = ()


def read_vocabulary(directory: Path, *, config: dict[str, Any], model_type: str) -> Vocabulary:
    """The tokenizer of a checkpoint.

    ``tokenizer_config.json`` in the directory overrules the settings that are chosen here.

    Args:
        directory: of the checkpoint.
        config: the model's, with Hugging Face's keys.
        model_type: of the model.

    Raises:
        ModelError: a file cannot be read, there are several vocabularies, or tokens are missing.
    """
    given = read_object(directory / _CONFIG, missing_ok=True)
    own = {name: directory / name for name in _COPIED if (directory / name).is_file()}
    if "tokenizer.json" in own:
        return Vocabulary(links=own, files={_CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast"} | given})
    words = [directory / _USUAL] if (directory / _USUAL).is_file() else sorted(directory.glob("vocab*.txt"))
    if len(words) > 1:
        raise ModelError(
            f"{directory} holds several vocabularies: {', '.join(word.name for word in words)}.\n"
            f"Name the checkpoint's {_USUAL}."
        )
    settings = {"model_max_length": config["max_position_embeddings"]}
    if words:
        return _word_pieces(words[0], settings, given, own, config, model_type)
    models = sorted(directory.glob("*.model"))
    if model_type != "albert" or not models:
        return Vocabulary()
    if len(models) > 1:
        raise ModelError(
            f"{directory} holds several SentencePiece models: {', '.join(model.name for model in models)}.\n"
            "Leave one of them in the directory."
        )
    lowers = given.get("do_lower_case", config.get("do_lower_case"))
    remarks: tuple[str, ...] = ()
    if not isinstance(lowers, bool):
        lowers = True
        remarks = (f'Texts are lowercased, as for ALBERT; "do_lower_case" in {_CONFIG} says otherwise.',)
    text, names = tokenizer_of_sentence_piece(models[0], lowercase=lowers)
    padding = names.pop("pad_token_id")
    return Vocabulary(
        files={"tokenizer.json": text, _CONFIG: settings | names | given},
        links=own,
        pad_token_id=padding,
        remarks=remarks,
    )


def _word_pieces(
    file: Path,
    settings: dict[str, Any],
    given: dict[str, Any],
    own: dict[str, Path],
    config: dict[str, Any],
    model_type: str,
) -> Vocabulary:
    tokens = _tokens(file)
    missing = [token for token in (*_SPECIAL_TOKENS.values(), _MASK) if token not in tokens]
    if missing and not any(key in given for key in _SPECIAL_TOKENS):
        raise ModelError(
            f"{file} has no {', '.join(missing)}, which BERT's texts are framed with.\n"
            f"Use the vocabulary of the checkpoint, or name its tokens in {file.with_name(_CONFIG)}."
        )
    remarks = []
    lowers = given.get("do_lower_case", config.get("do_lower_case"))
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
    padding = str(given.get("pad_token", _SPECIAL_TOKENS["pad_token"]))
    return Vocabulary(
        # With the usual ends of lines: a carriage return would be part of a token.
        files={_USUAL: "".join(f"{token}\n" for token in tokens), _CONFIG: settings | given},
        links=own,
        pad_token_id=tokens.index(padding) if padding in tokens else None,
        remarks=tuple(remarks),
    )


def _tokens(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {shown(error)}\nCopy or download it again.") from error
    tokens = [line.strip() for line in lines]
    while tokens and not tokens[-1]:
        tokens.pop()
    return tokens


def _is_chinese_word(token: str) -> bool:
    first, last = _UNIFIED_IDEOGRAPHS
    return len(token) > 1 and all(first <= character <= last for character in token)
