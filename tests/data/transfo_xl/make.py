"""Tiny Transformer-XL checkpoints, and what the last transformers that had the model answers.

Run once, in an environment of its own, with the versions that each ``config.json`` and this line name: Python 3.11,
transformers 4.57.6, torch 2.13.0, huggingface_hub 0.36.2, sacremoses 0.2.0 (which the model's package imports)::

    python -m venv transformers4
    transformers4/bin/pip install transformers==4.57.6 torch==2.13.0 sacremoses
    transformers4/bin/python tests/data/transfo_xl/make.py

transformers 4.35.2, the last before the model was deprecated, gives the same bits for these weights, with nothing
replaced.

Each folder beside this file is a checkpoint with ``expected.npz``, for batches of 1 and 3 rows. A row's document comes
in consecutive segments; arrays of all of them are side by side: ``ids_3`` [3, tokens], ``states_3`` [3, tokens,
d_model], ``scores_3`` [3, tokens] (log-probabilities, 0 for the first token), and after the last segment ``mems_3``
[layers, 3, mem_len, d_model]. ``segments`` has their tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.deprecated.transfo_xl.configuration_transfo_xl import TransfoXLConfig
from transformers.models.deprecated.transfo_xl.modeling_transfo_xl import TransfoXLLMHeadModel

SEGMENTS = (7, 1, 12, 5, 9)
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "d_model": 24,
    "d_embed": 24,
    "n_head": 3,
    "d_head": 8,
    "d_inner": 32,
    "n_layer": 2,
    "mem_len": 9,
}
VARIANTS: dict[str, dict[str, Any]] = {
    # As transfo-xl-wt103.
    "clusters": {"cutoffs": [20, 35], "div_val": 2, "clamp_len": 6, "same_length": True},
    "pre_lnorm": {
        "cutoffs": [],
        "div_val": 1,
        "clamp_len": -1,
        "same_length": False,
        "pre_lnorm": True,
        "d_head": 10,
    },
    "shared_biases": {
        "cutoffs": [20, 35],
        "div_val": 1,
        "d_embed": 16,
        "clamp_len": 11,
        "same_length": False,
        "untie_r": False,
    },
    "untied": {
        "cutoffs": [10, 30, 50],
        "div_val": 3,
        "d_embed": 30,
        "clamp_len": 0,
        "same_length": True,
        "proj_share_all_but_first": False,
        "tie_word_embeddings": False,
    },
}


def make(folder: Path, changes: dict[str, Any]) -> None:
    """Write a checkpoint and its answers."""
    torch.manual_seed(len(folder.name))
    model = TransfoXLLMHeadModel(TransfoXLConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm.weight" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                # Embeddings are multiplied by sqrt(d_model), and attention is far from uniform at these.
                parameter.normal_(std=0.1 if name.endswith(".bias") else 0.25)
    # Where layers share their biases, this version writes no safetensors.
    model.save_pretrained(folder, safe_serialization=model.config.untie_r)
    answers: dict[str, np.ndarray] = {"segments": np.array(SEGMENTS)}
    for rows in (1, 3):
        answers |= {f"{name}_{rows}": value for name, value in answers_of(model, rows).items()}
    np.savez_compressed(folder / "expected.npz", **answers)


def type_as(
    tensor: torch.Tensor, other: torch.Tensor | None = None, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`torch.Tensor.type_as` with an argument that PyTorch's lacks: this version's forward fails without it."""
    return tensor.to(other.dtype if dtype is None else dtype)


@torch.no_grad()
def answers_of(model: TransfoXLLMHeadModel, rows: int) -> dict[str, np.ndarray]:
    """The answers for one batch of documents."""
    ids = torch.randint(
        0, model.config.vocab_size, (rows, sum(SEGMENTS)), generator=torch.Generator().manual_seed(rows)
    )
    mems, states, predictions = None, [], []
    for segment in ids.split(SEGMENTS, dim=1):
        output = model(segment, mems=mems, output_hidden_states=True)
        if segment.shape[1] > 1:
            check_losses(model(segment, mems=mems, labels=segment).losses, output.prediction_scores, segment)
        mems = output.mems
        states.append(output.hidden_states[-1])
        predictions.append(output.prediction_scores)  # [rows, tokens, vocab_size], log-probabilities
    before = torch.cat(predictions, dim=1)[:, :-1]
    scores = before.gather(2, ids[:, 1:, None])[..., 0]
    return {
        "ids": ids.numpy(),
        "states": torch.cat(states, dim=1).numpy(),
        "scores": torch.nn.functional.pad(scores, (1, 0)).numpy(),
        "mems": torch.stack(mems).transpose(1, 2).numpy(),
    }


def check_losses(losses: torch.Tensor, predictions: torch.Tensor, ids: torch.Tensor) -> None:
    """The losses of labels are the same numbers; this version returns them cluster by cluster, not token by token."""
    scores = predictions[:, :-1].gather(2, ids[:, 1:, None])
    torch.testing.assert_close(losses.flatten().sort().values, (-scores).flatten().sort().values)


if __name__ == "__main__":
    torch.Tensor.type_as = type_as
    for variant, values in VARIANTS.items():
        make(Path(__file__).parent / variant, values)
