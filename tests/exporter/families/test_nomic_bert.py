"""NomicBERT as it was published: other keys in config.json, other names of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hdexport.checkpoint import find_checkpoint
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.tiny_models import BASE, change_json, save_tiny_model

OTHERS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
}


def save_published(directory: Path, **changes: Any) -> torch.nn.Module:
    """A checkpoint with a config.json like that of nomic-embed-text-v1.5; returns transformers' model."""
    rope = {"rope_type": "default", "rope_theta": 321.0}
    model = save_tiny_model(
        directory, "nomic_bert", Task.FEATURE_EXTRACTION, rope_parameters=rope, hidden_act="silu", layer_norm_eps=1e-6
    )
    config = json.loads((directory / "config.json").read_text())
    for known, other in OTHERS.items():
        config[other] = config.pop(known)
    for known in ("rope_parameters", "hidden_act", "head_dim", "max_position_embeddings"):
        del config[known]
    config |= {"rotary_emb_base": 321, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False}
    config |= {"activation_function": "swiglu", "prenorm": False, "rotary_scaling_factor": None, "causal": False}
    config |= {"n_positions": 4 * BASE, "max_trained_positions": BASE, "qkv_proj_bias": False}
    (directory / "config.json").write_text(json.dumps(config | changes))
    return model


def test_the_published_form_is_read(tmp_path: Path) -> None:
    theirs = save_published(tmp_path)
    assert "encoder.layers.0.attn.Wqkv.weight" in load_file(tmp_path / "model.safetensors")
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint.base_positions == BASE
    settings = checkpoint.settings()
    assert (settings.hidden_size, settings.head_dim, settings.rope_parameters["rope_theta"]) == (32, 8, 321)
    ours = checkpoint.load(Task.FEATURE_EXTRACTION)
    ids = torch.arange(5, 90)[None]
    with torch.inference_mode():
        expected, got = (model(input_ids=ids).last_hidden_state for model in (theirs, ours))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("key", "value"), [("activation_function", "gelu"), ("rotary_emb_fraction", 0.5), ("moe_every_n_layers", 2)]
)
def test_what_transformers_does_not_compute_is_refused(tmp_path: Path, key: str, value: object) -> None:
    save_published(tmp_path, **{key: value})
    with pytest.raises(ModelError, match=rf"config.json has {key} {value!r}; a nomic_bert of transformers has"):
        find_checkpoint(tmp_path)


def test_weights_of_other_names_are_checked_before_they_are_read(tmp_path: Path) -> None:
    """By the names and shapes that transformers makes of them."""
    save_published(tmp_path, n_inner=40)
    with pytest.raises(ModelError, match=r"up_proj.weight.*\[48, 32\] in the file, \[40, 32\] by config.json"):
        find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
    save_published(tmp_path)
    change_json(tmp_path / "config.json", n_layer=3)
    with pytest.raises(ModelError, match=r"num_hidden_layers 3, and the weights are of the layers 0 to 1"):
        find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
