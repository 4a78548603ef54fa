"""A tiny BGE-M3 in the published layout, what PyTorch makes of it, and its bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers

from hdruntime.bundle.manifest import Task
from support.made_once import made_once
from support.tiny_models import BASE, save_sentence_modules, save_tiny_model

WIDTH, TOKEN_WIDTH = 32, 24


class Expected(NamedTuple):
    """What FlagEmbedding's ``BGEM3FlagModel`` returns for a text: dense_vecs, lexical_weights and colbert_vecs."""

    dense: np.ndarray
    sparse: dict[int, float]
    colbert: np.ndarray


def save_bge_m3(path: Path) -> None:
    """Save a checkpoint with random weights, whose heads are files of FlagEmbedding's."""
    save_tiny_model(path, "xlm-roberta", Task.FEATURE_EXTRACTION)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    # FlagEmbedding leaves out the token that ends a text by this name, which XLM-RoBERTa's tokenizer has.
    tokenizer.eos_token = tokenizer.sep_token
    tokenizer.save_pretrained(path)
    save_sentence_modules(path, "Normalize", pooling={"pooling_mode_cls_token": True})
    torch.manual_seed(4)
    for name, width in (("sparse", 1), ("colbert", TOKEN_WIDTH)):
        weights = torch.nn.Linear(WIDTH, width).state_dict()
        if name == "sparse":
            # Most weights above 0, as trained ones are.
            weights["bias"] += 0.5
        torch.save(weights, path / f"{name}_linear.pt")


def made_bge_m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the ``checkpoint`` and its ``bundle`` of as many tokens, which was verified: made once."""

    def make(directory: Path) -> None:
        from hdexport.build import BuildOptions, build
        from hdexport.checkpoint.trust import Trust

        save_bge_m3(directory / "checkpoint")
        build(
            BuildOptions(
                model=directory / "checkpoint",
                output=directory / "bundle",
                task=Task.HYBRID_SIMILARITY,
                max_len=BASE,
                trust=Trust(allow_pickle=True),
            )
        )

    return made_once(tmp_path_factory, "bge-m3", make)


def expected(checkpoint: Path, texts: Sequence[str]) -> list[Expected]:
    """The embeddings of texts by PyTorch, one text at a time, truncated to the checkpoint's positions."""
    model = transformers.AutoModel.from_pretrained(checkpoint).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    sparse, colbert = (torch.load(checkpoint / f"{name}_linear.pt") for name in ("sparse", "colbert"))
    found = []
    for text in texts:
        batch = tokenizer(text, truncation=True, max_length=BASE, return_tensors="pt")
        with torch.inference_mode():
            (states,) = model(**batch).last_hidden_state
            weights = torch.relu(states @ sparse["weight"].T + sparse["bias"])[:, 0].tolist()
            tokens = torch.nn.functional.normalize(states[1:] @ colbert["weight"].T + colbert["bias"], dim=-1)
            dense = torch.nn.functional.normalize(states[0], dim=-1)
        largest: dict[int, float] = {}
        for token, weight in zip(batch["input_ids"][0].tolist(), weights, strict=True):
            if token not in unused and weight > largest.get(token, 0.0):
                largest[token] = weight
        found.append(Expected(dense.numpy(), largest, tokens.numpy()))
    return found
