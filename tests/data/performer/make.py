"""Tiny Performer checkpoints, and what lucidrains' performer-pytorch answers.

Run once, in an environment of its own, with the versions that this line names: Python 3.11, performer-pytorch 1.1.4,
torch 2.13.0, einops 0.8.2, local-attention 1.11.2, axial-positional-embedding 0.3.12::

    python -m venv performer
    performer/bin/pip install performer-pytorch==1.1.4 torch==2.13.0 safetensors setuptools
    performer/bin/python tests/data/performer/make.py

Each folder beside this file is a checkpoint as a user would write it, ``config.json`` with the arguments of
``PerformerLM``, and ``expected.npz``: ``ids`` [3, 24], ``mask`` [3, 24] with rows of 24, 11 and 1 real tokens on the
left, ``states`` and ``logits`` without the mask, and ``masked_states`` with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from performer_pytorch import PerformerLM
from safetensors.torch import save_file

TOKENS, LENGTHS = 24, (24, 11, 1)
SIZES: dict[str, Any] = {
    "num_tokens": 60,
    "max_seq_len": 24,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "dim_head": 8,
}
VARIANTS: dict[str, dict[str, Any]] = {
    # What PerformerLM does where nothing is said: 16 features, a head of its own, no biases; positions are the next.
    "plain": {"rotary_position_emb": False},
    "rotary": {},
    "biases": {
        "rotary_position_emb": False,
        "nb_features": 21,
        "ff_mult": 2,
        "ff_glu": True,
        "tie_embed": True,
        "qkv_bias": True,
        "attn_out_bias": True,
    },
}


def make(folder: Path, changes: dict[str, Any]) -> None:
    """Write a checkpoint and its answers."""
    torch.manual_seed(len(folder.name))
    model = PerformerLM(**SIZES, **changes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm.weight" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                # Attention is far from uniform at these.
                parameter.normal_(std=0.1 if name.endswith(".bias") else 0.25)
    folder.mkdir(exist_ok=True)
    config = {"model_type": "performer", "architectures": ["PerformerForMaskedLM"], **SIZES, **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if folder.name != "plain":
        # Without the second names of the layers, which safetensors does not write.
        weights = {name: value for name, value in model.state_dict().items() if "proj_updater.instance" not in name}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    ids = torch.randint(0, SIZES["num_tokens"], (len(LENGTHS), TOKENS))
    mask = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        answers = {
            "states": model(ids, return_encodings=True),
            "logits": model(ids),
            "masked_states": model(ids, return_encodings=True, mask=mask),
        }
    arrays = {name: value.numpy() for name, value in answers.items()}
    np.savez_compressed(folder / "expected.npz", ids=ids.numpy(), mask=mask.numpy().astype(np.int64), **arrays)


if __name__ == "__main__":
    for variant, values in VARIANTS.items():
        make(Path(__file__).parent / variant, values)
