"""A tiny NEZHA checkpoint, and what the last transformers that had the model answers.

Run once, in an environment of its own, with the versions that ``config.json`` and this line name: Python 3.11,
transformers 4.57.6, torch 2.13.0, huggingface_hub 0.36.2::

    python -m venv transformers4
    transformers4/bin/pip install transformers==4.57.6 torch==2.13.0
    transformers4/bin/python tests/data/nezha/make.py

Beside this file are the checkpoint, of a model with a head that fills masks, and ``expected.npz``, for batches of 1 and
3 rows of each length N: ``ids_B_N``, ``types_B_N`` and ``mask_B_N`` [B, N], ``states_B_N`` [B, N, hidden_size] and
``logits_B_N`` [B, N, vocab_size], 0 where the mask is. Row 0 is whole, row 1 has padding on its right, row 2 on its
left and a hole.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import NezhaConfig, NezhaForMaskedLM

LENGTHS = (1, 6, 7, 12, 13, 14, 40)
"""Distances are clipped at 6: around it, around twice as much, and far beyond."""

CONFIG = {
    "vocab_size": 60,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 48,
    "max_relative_position": 6,
}


def mask_of(rows: int, tokens: int) -> torch.Tensor:
    """[rows, tokens], int64, 0 for padding; no row is all padding."""
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    if rows > 1 and tokens > 3:
        mask[1, -(tokens // 3) :] = 0
        mask[2, : tokens // 4] = 0
        mask[2, tokens // 2] = 0
    return mask


@torch.no_grad()
def main(folder: Path) -> None:
    """Write the checkpoint and its answers."""
    torch.manual_seed(0)
    model = NezhaForMaskedLM(NezhaConfig(**CONFIG)).eval()
    for name, parameter in model.named_parameters():
        if "LayerNorm.weight" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            # Attention is far from uniform at these.
            parameter.normal_(std=0.1 if name.endswith("bias") else 0.4)
    model.save_pretrained(folder)
    answers: dict[str, np.ndarray] = {}
    for rows in (1, 3):
        for tokens in LENGTHS:
            random = torch.Generator().manual_seed(100 * rows + tokens)
            ids = torch.randint(1, CONFIG["vocab_size"], (rows, tokens), generator=random)
            types = torch.randint(0, 2, (rows, tokens), generator=random)
            mask = mask_of(rows, tokens)
            output = model(ids, attention_mask=mask, token_type_ids=types, output_hidden_states=True)
            real = mask[..., None]
            case = f"{rows}_{tokens}"
            answers |= {f"ids_{case}": ids.numpy(), f"types_{case}": types.numpy(), f"mask_{case}": mask.numpy()}
            answers[f"states_{case}"] = (output.hidden_states[-1] * real).numpy()
            answers[f"logits_{case}"] = (output.logits * real).numpy()
    np.savez_compressed(folder / "expected.npz", **answers)


if __name__ == "__main__":
    main(Path(__file__).parent)
