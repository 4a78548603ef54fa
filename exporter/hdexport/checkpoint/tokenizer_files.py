"""The tokenizer of a checkpoint, as the one file that the runtime reads."""

from __future__ import annotations

__all__ = ["first_special_id", "read_tokenizer", "write_tokenizer"]

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdexport.checkpoint.multi_vector import register_markers
from hdexport.checkpoint.sentence_settings import lowercases
from hdexport.support.json_files import shown
from hdruntime.bundle.manifest import TokenizerInfo
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from hdexport.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model")


def write_tokenizer(checkpoint: Checkpoint, directory: Path) -> TokenizerInfo | None:
    """Write ``tokenizer.json``, converted from the checkpoint's own format where needed.

    Args:
        checkpoint: the checkpoint.
        directory: where the file goes.

    Returns:
        What the runtime must know of it, or None where the checkpoint has no tokenizer; its bundle then takes ids.

    Raises:
        ModelError: the tokenizer's files cannot be read, or it knows ids that the model has no embeddings for.
    """
    # First, because transformers' tokenizers read config.json, too, and would be blamed for errors in it.
    vocab_size = checkpoint.settings().vocab_size
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        logger.warning("%s has no tokenizer; the bundle will take input_ids, not texts.", checkpoint.path)
        return None
    _check_ids(checkpoint, tokenizer, vocab_size)
    # Not a copy of the checkpoint's file: transformers lets tokenizer_config.json overrule it (do_lower_case, say), and
    # the runtime's ids must be those that the model was verified and fine-tuned with.
    tokenizer.backend_tokenizer.save(str(directory / _FILE), pretty=False)
    return TokenizerInfo(
        file=_FILE,
        pad_token_id=tokenizer.pad_token_id or 0,
        pad_token=tokenizer.pad_token or "",
        unk_token_id=tokenizer.unk_token_id,
        mask_token_id=tokenizer.mask_token_id,
        token_types="token_type_ids" in tokenizer.model_input_names,
        truncation_side=tokenizer.truncation_side,
        model_max_length=shorter if (shorter := tokenizer.model_max_length) < checkpoint.base_positions else None,
    )


def first_special_id(checkpoint: Checkpoint) -> int | None:
    """The id of the token that every text begins with (BERT's ``[CLS]``), None where the tokenizer knows none.

    Raises:
        ModelError: the tokenizer's files cannot be read.
    """
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        return None
    first: int | None = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    return first


def read_tokenizer(path: Path) -> Any:
    """A checkpoint's tokenizer in transformers, with what sentence-transformers changes of it; None without one.

    Raises:
        ModelError: its files cannot be read.
    """
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:
        # Each tokenizer class fails in its own way on a damaged file.
        raise ModelError(f"The tokenizer of {path} could not be read: {shown(error)}\n{_remedy(path)}") from error
    if lowercases(path):
        _lowercase(tokenizer.backend_tokenizer)
    register_markers(tokenizer, path)
    return tokenizer


def _remedy(path: Path) -> str:
    of_sentencepiece = next(
        (name for name in _TOKENIZER_FILES if name.endswith(".model") and (path / name).is_file()), ""
    )
    if not of_sentencepiece or (path / _FILE).is_file() or importlib.util.find_spec("sentencepiece") is not None:
        return "Download the model again."
    return (
        f"{of_sentencepiece} is converted by sentencepiece: pip install sentencepiece. Or put the {_FILE} beside it "
        "that save_pretrained() of the tokenizer writes."
    )


def _lowercase(tokenizer: Any) -> None:
    """Make a ``tokenizers.Tokenizer`` lower the case of texts first."""
    from tokenizers.normalizers import Lowercase, Sequence

    present: Any = tokenizer.normalizer
    is_chain = isinstance(present, Sequence)
    steps = list(present) if is_chain else [] if present is None else [present]
    if not any(isinstance(step, Lowercase) for step in steps):
        tokenizer.normalizer = Sequence([Lowercase(), *steps])


def _check_ids(checkpoint: Checkpoint, tokenizer: Any, vocab_size: int) -> None:
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if highest >= vocab_size:
        raise ModelError(
            f"The tokenizer of {checkpoint.path} gives the id {highest} to {shown(token)}, and the model has "
            f"embeddings for the ids 0 to {vocab_size - 1} (vocab_size of config.json).\n"
            "Use the tokenizer that the model was trained with; for tokens that were added since, call "
            "model.resize_token_embeddings(len(tokenizer)) and fine-tune it."
        )
