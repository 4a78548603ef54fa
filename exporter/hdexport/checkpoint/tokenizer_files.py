"""The tokenizer of a checkpoint, as the one file that the runtime reads."""

from __future__ import annotations

__all__ = ["first_special_id", "write_tokenizer"]

import logging
from pathlib import Path
from typing import Any

from hdexport.checkpoint import Checkpoint
from hdexport.support.json_files import shown
from hdruntime.bundle.manifest import TokenizerInfo
from hdruntime.errors import ModelError

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
    # First, for transformers' tokenizers read config.json, too, and what is wrong with it is not their fault.
    vocab_size = checkpoint.settings().vocab_size
    tokenizer = _tokenizer(checkpoint)
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
    )


def first_special_id(checkpoint: Checkpoint) -> int | None:
    """The id of the token that every text begins with (BERT's ``[CLS]``), None where the tokenizer knows none.

    Raises:
        ModelError: the tokenizer's files cannot be read.
    """
    tokenizer = _tokenizer(checkpoint)
    if tokenizer is None:
        return None
    first: int | None = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    return first


def _check_ids(checkpoint: Checkpoint, tokenizer: Any, vocab_size: int) -> None:
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if highest >= vocab_size:
        raise ModelError(
            f"The tokenizer of {checkpoint.path} gives the id {highest} to {shown(token)}, and the model has "
            f"embeddings for the ids 0 to {vocab_size - 1} (vocab_size of config.json).\n"
            "Use the tokenizer that the model was trained with; for tokens that were added since, call "
            "model.resize_token_embeddings(len(tokenizer)) and fine-tune it."
        )


def _tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer in transformers, None where it has none."""
    if not any((checkpoint.path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:
        # Each tokenizer class fails in its own way on a damaged file.
        raise ModelError(
            f"The tokenizer of {checkpoint.path} could not be read: {shown(error)}\nDownload the model again."
        ) from error
