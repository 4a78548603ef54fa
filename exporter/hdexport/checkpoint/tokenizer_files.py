"""The tokenizer of a checkpoint, as the one file that the runtime reads.

A tokenizer that transformers runs in Python becomes a ``tokenizer.json`` where that gives the same ids. Where the
checkpoint has a ``tokenizer.json``, the bundle's ids are those of transformers' class, or those of the file.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdexport.checkpoint.multi_vector import register_markers
from hdexport.checkpoint.sentence_settings import lowercases
from hdexport.checkpoint.tokenizer_ids import (
    FLAGS,
    backend_of,
    gives_ids_of,
    ignored_tokenizer_keys,
    tokenizer_mismatch,
)
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdexport.support.json_files import read_object, reject_pointer, shown
from hdruntime.bundle.manifest import TokenizerInfo, TokenizerSource
from hdruntime.errors import Message, ModelError, Setting, joined
from hdruntime.optional import is_installed
from hdruntime.text.tokenizer_file import random_ids_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hdexport.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_MOST_TRIED = 1000
"""Words that are tokenized to see whether texts use them."""

TOKENIZER_CONFIG = "tokenizer_config.json"
_VOCABULARIES = ("*.model", "vocab.txt", "vocab.json", "merges.txt", "bpe.codes")
"""Names of tokenizers' files, for any class."""

_OF_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
"""Package by which SentencePiece's models are read -> its module."""

_NO_TOKENIZER = Setting("tokenizer", None)


def write_tokenizer(checkpoint: Checkpoint, directory: Path) -> TokenizerInfo | None:
    """Writes ``tokenizer.json``, converted from the checkpoint's own format where needed. The result is the runtime's
    settings for it; None where the checkpoint has no tokenizer, whose bundle then takes ids."""
    from tokenizers import Tokenizer

    # Read first: transformers' tokenizers read config.json, too, and would be blamed for errors in it.
    vocab_size = checkpoint.settings().vocab_size
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        why = "is built without its tokenizer" if checkpoint.tokenizer_source is None else "has no tokenizer"
        logger.warning("%s %s; the bundle will take input_ids, not texts.", checkpoint.path, why)
        return None
    _check_ids(checkpoint, tokenizer, vocab_size)
    backend_of(tokenizer).save(str(directory / _FILE), pretty=False)
    if not gives_ids_of(Tokenizer.from_file(str(directory / _FILE)), tokenizer):
        raise _unfit(tokenizer, checkpoint.path)
    return TokenizerInfo(
        file=_FILE,
        pad_token_id=tokenizer.pad_token_id or 0,
        pad_token=tokenizer.pad_token or "",
        unk_token_id=tokenizer.unk_token_id,
        mask_token_id=tokenizer.mask_token_id,
        token_types="token_type_ids" in tokenizer.model_input_names,
        truncation_side=tokenizer.truncation_side,
        model_max_length=shorter if (shorter := tokenizer.model_max_length) < checkpoint.base_positions else None,
        source=checkpoint.tokenizer_source or "library",
    )


def settings_of_file(tokenizer: Any) -> dict[str, object]:
    """Settings by which transformers reads the ``tokenizer.json`` of a tokenizer as it is: the named classes would make
    its normalizer and its splitting anew."""
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    special = {
        # Without the token's flags, transformers would change the file's.
        name: {"__type": "AddedToken", **{flag: getattr(added[token], flag) for flag in (*FLAGS, "special")}}
        if token in added
        else token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": list(tokenizer.model_input_names),
        **special,
    }


def first_special_id(checkpoint: Checkpoint) -> int | None:
    """The id of the token that every text begins with (BERT's ``[CLS]``); None where the tokenizer has none."""
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        return None
    return tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id


def code_of_tokenizer(path: Path) -> str | None:
    """The class of its own code that a checkpoint names for its tokenizer; None for none."""
    named = read_object(path / TOKENIZER_CONFIG, missing_ok=True).get("auto_map")
    if isinstance(named, dict):
        named = named.get("AutoTokenizer")
    # The slow class, and the fast one.
    classes = named if isinstance(named, list) else [named]
    return next((name for name in reversed(classes) if isinstance(name, str)), None)


def read_tokenizer(path: Path, *, trust: Trust = UNTRUSTED, source: TokenizerSource = "library") -> Any:
    """A checkpoint's tokenizer in transformers, which a ``tokenizer.json`` can hold; None without one. `source` says
    whose ids it gives: transformers', with sentence-transformers' changes, or those of the checkpoint's
    ``tokenizer.json``."""
    tokenizer = _of_library(path, trust)
    if source == "file":
        tokenizer = _of_file(path, tokenizer)
    elif tokenizer is not None:
        tokenizer = _finished(path, tokenizer)
    if tokenizer is not None:
        register_markers(tokenizer, path)
        random = random_ids_of(tokenizer.backend_tokenizer)
        if random is not None:
            raise ModelError(f"The tokenizer of {path} gives a text random ids: {random.reason}.", hint=random.hint)
    return tokenizer


def tokenizer_remarks(checkpoint: Checkpoint) -> list[Message]:
    """A line about the ids of ``tokenizer.json`` and of transformers' tokenizer where they differ, and about each
    setting of ``tokenizer_config.json`` that the ids do not follow."""
    tokenizer, path = checkpoint.tokenizer, checkpoint.path
    if tokenizer is None:
        return []
    values = read_object(path / TOKENIZER_CONFIG, missing_ok=True)
    if lowercases(path):
        values.pop("do_lower_case", None)
    ignored_keys = ignored_tokenizer_keys(tokenizer, values, file=f"{checkpoint.name}/{TOKENIZER_CONFIG}")
    return [*_difference_remark(checkpoint, tokenizer), *ignored_keys]


def _difference_remark(checkpoint: Checkpoint, tokenizer: Any) -> list[Message]:
    path, is_file = checkpoint.path, checkpoint.tokenizer_source == "file"
    if not (path / _FILE).is_file():
        return []
    try:
        other = read_tokenizer(path, trust=checkpoint.trust, source="library" if is_file else "file")
    except ModelError:
        # Its ids are random, or no file can hold them: there is no choice.
        return []
    file, library = (tokenizer, other) if is_file else (other, tokenizer)
    mismatch = tokenizer_mismatch(file, library)
    if mismatch is None:
        return []
    lowered = " with sentence-transformers' do_lower_case" if lowercases(path) else ""
    option = Setting("tokenizer", "file")
    choice: Message = (
        ("The ids are the file's, by ", option, ".")
        if is_file
        else (
            "The ids are the class's, as in sentence-transformers; ",
            option,
            " takes the file's, as text-embeddings-inference, fastembed and transformers 4 do.",
        )
    )
    return [
        joined(
            f"{checkpoint.name}/{_FILE} and transformers' {type(library).__name__}{lowered} give other ids for "
            f"{mismatch.differing} of {mismatch.samples} texts. {' and '.join(map(shown, mismatch.sample))} has the "
            f"tokens {mismatch.by_file} by the file, and {mismatch.by_library} by the class. ",
            choice,
        )
    ]


def _of_library(path: Path, trust: Trust) -> Any:
    """The tokenizer that AutoTokenizer loads, or that the checkpoint's trusted code is; None without one."""
    code = code_of_tokenizer(path) if trust.trust_remote_code else None
    if code is not None:
        return _of_code(path, code)
    kind = _tokenizer_class(path)
    files = _files(path, kind)
    if not files:
        return None
    for file in files:
        reject_pointer(file)
    return _loaded(path, files, kind)


def _of_file(path: Path, library: Any) -> Any:
    """The checkpoint's ``tokenizer.json`` as it is, with transformers' special tokens and limits."""
    from tokenizers import Tokenizer

    if not (path / _FILE).is_file():
        made = "the checkpoint has no tokenizer" if library is None else "transformers makes one of other files"
        raise ModelError(
            Setting("tokenizer", "file"),
            f" takes the ids of {_FILE}, which is not in {path}: {made}.",
            hint=("Leave ", Setting("tokenizer"), " out."),
        )
    file = Tokenizer.from_file(str(path / _FILE))
    tokenizer = _held(library, file)
    # The class adds special tokens that the file lacks, which would be found in texts.
    tokenizer._tokenizer = file
    return tokenizer


def as_tokenizer_file(tokenizer: Any, path: Path) -> Any:
    """A tokenizer that a file can hold, with the ids of one for which `_fits_a_file` is false. Raises where
    the ids of any sample differ; `path` is the checkpoint's, for messages."""
    converted = _framed(tokenizer)
    if converted is None or not gives_ids_of(converted, tokenizer):
        raise _unfit(tokenizer, path)
    return _held(tokenizer, converted)


def _held(tokenizer: Any, held: Tokenizer) -> Any:
    """A ``tokenizers.Tokenizer`` in transformers, with the limits of another tokenizer, and those of its special tokens
    that have an id."""
    from transformers import PreTrainedTokenizerFast

    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return PreTrainedTokenizerFast(
        tokenizer_object=held,
        model_input_names=tokenizer.model_input_names,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        chat_template=getattr(tokenizer, "chat_template", None),
        **{name: token for name, token in special.items() if held.token_to_id(token) is not None},
    )


def _unfit(tokenizer: Any, path: Path) -> ModelError:
    whose = "its own" if _is_code_of_a_checkpoint(tokenizer) else "transformers'"
    hint: Message = ("Build for token ids, which that class makes of texts: ", _NO_TOKENIZER)
    if (path / _FILE).is_file():
        hint = joined(hint, "\nOr take the ids of tokenizer.json: ", Setting("tokenizer", "file"))
    return ModelError(
        f"The tokenizer of {path} is {whose} {type(tokenizer).__name__}, a program of Python; a bundle holds "
        f"a tokenizer.json, and none is known that gives the same ids.",
        hint=hint,
    )


def _fits_a_file(tokenizer: Any) -> bool:
    """Whether a ``tokenizer.json`` can hold a tokenizer of transformers as it is."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    if _is_code_of_a_checkpoint(tokenizer) and not gives_ids_of(backend_of(tokenizer), tokenizer):
        return False
    try:
        # A step that is written in Python cannot be serialised.
        tokenizer.backend_tokenizer.pre_tokenizer.__getstate__()
    except AttributeError:
        return True
    except Exception:
        return False
    return True


def _finished(path: Path, tokenizer: Any) -> Any:
    """A tokenizer that a file can hold, with sentence-transformers' changes."""
    if tokenizer.split_special_tokens:
        raise ModelError(
            f"{path / TOKENIZER_CONFIG} has split_special_tokens true, which a {_FILE} cannot say.",
            hint=("Set it to false if no text has special tokens in it, or build for token ids: ", _NO_TOKENIZER),
        )
    if not _fits_a_file(tokenizer):
        tokenizer = as_tokenizer_file(tokenizer, path)
    if lowercases(path):
        _lowercase(tokenizer.backend_tokenizer)
    return tokenizer


def _tokenizer_class(path: Path) -> Any:
    """The class of transformers that a checkpoint's files name for its tokenizer; None where none is named or known."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    named = [
        read_object(path / file, missing_ok=True).get(key)
        for file, key in (
            (TOKENIZER_CONFIG, "tokenizer_class"),
            ("config.json", "tokenizer_class"),
            ("config.json", "model_type"),
        )
    ]
    if isinstance(named[0], str) and tokenizer_class_from_name(named[0]) is None and not (path / _FILE).is_file():
        raise ModelError(
            f"{path / TOKENIZER_CONFIG} names the class {shown(named[0])}, which is not in transformers; code of a "
            f"checkpoint is not run without ",
            Setting("trust_remote_code", True),
            ".",
            hint=(f"Put a {_FILE} beside it, or build for token ids: ", _NO_TOKENIZER),
        )
    for name in named:
        name = TOKENIZER_MAPPING_NAMES.get(name, name) if isinstance(name, str) else None
        kind = tokenizer_class_from_name(name) if name else None
        if kind is not None:
            return kind
    return None


def _files(path: Path, kind: Any) -> list[Path]:
    """The vocabulary's files that are read; empty for a checkpoint without a tokenizer. Rejects a tokenizer whose class
    needs other files than are there."""
    if (path / _FILE).is_file():
        return [path / _FILE]
    of_class = getattr(kind, "vocab_files_names", {})
    names = {argument: name for argument, name in of_class.items() if name != _FILE}
    if of_class and not names:
        # transformers reads this file for a class that names tokenizer.json alone.
        names = {"vocab_file": "tokenizer.model"}
    there = [path / name for name in names.values() if (path / name).is_file()]
    is_named = kind is not None and (path / TOKENIZER_CONFIG).is_file()
    others = sorted(file.name for pattern in _VOCABULARIES for file in path.glob(pattern) if file not in there)
    # transformers would make merges for a vocabulary that lacks its own.
    missing = [name for argument, name in names.items() if argument == "merges_file" and not (path / name).is_file()]
    if there and not missing:
        return there
    if is_named and not names and not others:
        # A tokenizer of bytes or characters, without a vocabulary.
        return [path / TOKENIZER_CONFIG]
    if not there and not others and not (is_named and "tokenizer_class" in read_object(path / TOKENIZER_CONFIG)):
        return []
    wanted = " and ".join(names.values())
    present = ", ".join((*(file.name for file in there), *others)) or TOKENIZER_CONFIG
    raise ModelError(
        f"{path} holds {present} of a tokenizer; "
        + (f"transformers' {kind.__name__} reads {wanted}, or {_FILE}." if wanted else f"{_FILE} is read."),
        hint=("Put the missing files there, or build for token ids: ", _NO_TOKENIZER),
    )


def _of_code(path: Path, code: str) -> Any:
    """The tokenizer that the checkpoint's own code is."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only="--" not in code, trust_remote_code=True)
    except MemoryError:
        raise
    except Exception as error:
        # The code may raise any error.
        raise ModelError(
            f"{path / TOKENIZER_CONFIG} names Python code for the tokenizer, {shown(code)}, which cannot be run "
            f"here: {shown(error)}",
            hint=(
                "Install what it needs, leave ",
                Setting("trust_remote_code"),
                " out, or build for token ids: ",
                _NO_TOKENIZER,
            ),
        ) from error


def _loaded(path: Path, files: list[Path], kind: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:
        # Each tokenizer class fails in its own way on a damaged file, or without a package.
        for file in path.glob("*.json"):
            reject_pointer(file)
        raise _unreadable(path, files, kind, error) from error


def _unreadable(path: Path, files: list[Path], kind: Any, error: Exception) -> ModelError:
    model = next((file.name for file in files if file.suffix == ".model"), None)
    packages = [name for name, module in _OF_SENTENCEPIECE.items() if not is_installed(module)]
    if model is None and isinstance(error, ImportError) and kind is not None:
        return ModelError(
            f"The tokenizer of {path} is transformers' {kind.__name__}, which runs further packages, and which no "
            f"{_FILE} can hold.",
            hint=("Build for token ids, which that class makes of texts: ", _NO_TOKENIZER),
        )
    hint = "Download the model again"
    if model is not None and packages:
        hint = (
            f"{model} is converted by {' and '.join(packages)}: pip install {' '.join(packages)}. Or put the {_FILE} "
            "beside it that save_pretrained() of the tokenizer writes"
        )
    return ModelError(
        f"The tokenizer of {path} could not be read: {shown(error)}",
        hint=(f"{hint}; or build for token ids: ", _NO_TOKENIZER),
    )


def _lowercase(tokenizer: Any) -> None:
    """Makes a ``tokenizers.Tokenizer`` lower the case of texts first."""
    from tokenizers.normalizers import Lowercase, Sequence

    present: Any = tokenizer.normalizer
    is_chain = isinstance(present, Sequence)
    steps = list(present) if is_chain else [] if present is None else [present]
    if not any(isinstance(step, Lowercase) for step in steps):
        tokenizer.normalizer = Sequence([Lowercase(), *steps])


def _check_ids(checkpoint: Checkpoint, tokenizer: Any, vocab_size: int) -> None:
    """Rejects a tokenizer whose texts have ids beyond the model's vocabulary; for tokens there that no text has, it
    warns."""
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= vocab_size}
    if not beyond:
        return
    token, highest = max(beyond.items(), key=lambda item: item[1])
    problem = (
        f"The tokenizer of {checkpoint.path} gives the id {highest} to {shown(token)}, and the model has embeddings "
        f"for the ids 0 to {vocab_size - 1} (vocab_size of config.json)."
    )
    words = [tokenizer.decode([number]) for number in beyond.values() if number not in tokenizer.added_tokens_decoder]
    if any(number >= vocab_size for ids in tokenizer(["", *words[:_MOST_TRIED]])["input_ids"] for number in ids):
        raise ModelError(
            problem,
            hint="Use the tokenizer that the model was trained with; for tokens that were added since, call "
            "model.resize_token_embeddings(len(tokenizer)) and fine-tune it.",
        )
    logger.warning("%s Tokens beyond: %d; texts with one of them are rejected.", problem, len(beyond))


def _is_code_of_a_checkpoint(tokenizer: Any) -> bool:
    return not type(tokenizer).__module__.startswith("transformers.")


def _of_words(tokenizer: Any) -> Tokenizer:
    """Words of a vocabulary between spaces; words that are never split are found within other text, as
    amino acids are."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    converted = Tokenizer(models.WordLevel(tokenizer.get_vocab(), unk_token=tokenizer.unk_token))
    # The characters that Python's str.split() takes for spaces.
    converted.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\x1c-\x1f]+"), behavior="removed")
    whole = getattr(tokenizer, "unique_no_split_tokens", [])
    converted.add_tokens([AddedToken(word, normalized=False) for word in whole])
    return converted


def _framed(tokenizer: Any) -> Tokenizer | None:
    """Words with the special tokens of a tokenizer around them; None where its class does not describe these."""
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
        # Each class lacks another attribute, and the results are compared anyway.
        return None
    return converted
