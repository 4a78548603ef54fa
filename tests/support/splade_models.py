"""Small SPLADE models with the sample model's tokenizer, as sentence-transformers saves them."""

from __future__ import annotations

__all__ = ["MAX_LEN", "MODELS", "POSITIONS", "made_splade", "save_splade"]

from pathlib import Path

import pytest

from support.made_once import made_once

POSITIONS, MAX_LEN = 64, 600

MODELS = {
    "max": ({}, {"prompts": {"query": "find: "}}),
    "log1p_relu": ({"activation_function": "log1p_relu"}, {"max_active_dims": 100}),
    "sum": ({"pooling_strategy": "sum"}, {}),
}
"""Name -> settings of the pooling, and of the encoder."""


def save_splade(path: Path, name: str) -> None:
    """Save a model of `MODELS`."""
    import torch
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    from hdexport.checkpoint import default_model

    torch.manual_seed(len(name))
    tokenizer = AutoTokenizer.from_pretrained(str(default_model()[0]), model_max_length=POSITIONS)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, initializer_range=0.3, tie_word_embeddings=False,
        **sizes,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    # About half of the logits are below 0 for all tokens of a text.
    torch.nn.init.normal_(model.cls.predictions.decoder.bias, mean=-6.0)
    model.save_pretrained(path.parent / "bert")
    tokenizer.save_pretrained(path.parent / "bert")
    pooling, options = MODELS[name]
    transformer = Transformer(str(path.parent / "bert"), transformer_task="fill-mask")
    modules = [transformer, SpladePooling(**pooling)]
    SparseEncoder(modules=modules, device="cpu", **options).save_pretrained(str(path))


def made_splade(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder with a model of `MODELS`, its ``checkpoint`` and, verified, its ``bundle``: made once for all tests."""

    def make(directory: Path) -> None:
        from hdexport.build import BuildOptions, build

        save_splade(directory / "checkpoint", name)
        options = {"max_len": MAX_LEN, "alpha": 0.4, "attention_scale": "none", "openvino": True}
        build(BuildOptions(model=directory / "checkpoint", output=directory / "bundle", **options))

    return made_once(tmp_path_factory, f"splade {name}", make)
