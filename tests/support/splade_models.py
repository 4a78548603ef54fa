"""Small SPLADE models of a thousand words, as sentence-transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.made_once import made_once

VOCAB_SIZE = 1000
POSITIONS, MAX_LEN = 64, 600

MODELS = {
    "max": ({}, {"prompts": {"query": "find: "}}),
    "sum": ({"activation_function": "log1p_relu", "pooling_strategy": "sum"}, {"max_active_dims": 100}),
}
"""Name -> settings of the pooling, and of the encoder."""

_FIRST_WORD = 1996
"""Before it, the sample model's vocabulary has places that nothing uses, and single characters."""


def _save_splade(path: Path, name: str) -> None:
    """Save a model of `MODELS`."""
    import torch
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(len(name))
    tokenizer = _tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, initializer_range=0.3, tie_word_embeddings=False,
        **sizes,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    # Half or more of the logits are below 0 for all tokens of a text.
    torch.nn.init.normal_(model.cls.predictions.decoder.bias, mean=-4.0)
    model.save_pretrained(path.parent / "bert")
    tokenizer.save_pretrained(path.parent / "bert")
    pooling, options = MODELS[name]
    transformer = Transformer(str(path.parent / "bert"), transformer_task="fill-mask")
    modules = [transformer, SpladePooling(**pooling)]
    SparseEncoder(modules=modules, device="cpu", **options).save_pretrained(str(path))


def made_splade(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder with a model of `MODELS`, its ``checkpoint`` and its ``bundle``, verified for "max": made once."""

    def make(directory: Path) -> None:
        from hdexport.build import BuildOptions, build

        _save_splade(directory / "checkpoint", name)
        options = {"max_len": MAX_LEN, "alpha": 0.4, "attention_scale": "none", "targets": ("openvino",)}
        options |= {} if name == "max" else {"verify": None}
        build(BuildOptions(model=directory / "checkpoint", output=directory / "bundle", **options))

    return made_once(tmp_path_factory, f"splade {name}", make)


def _tokenizer() -> Any:
    """The sample model's, which knows only letters, signs and the most frequent words: it splits the others."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from hdexport.checkpoint import default_model

    content = json.loads((default_model()[0] / "tokenizer.json").read_text())
    special = {each["content"]: each["id"] for each in content["added_tokens"]}
    words = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    letters = [word for word in words if word.isascii() and len(word.removeprefix("##")) == 1]
    frequent = [word for word in words[_FIRST_WORD:] if word not in letters]
    vocabulary = {word: index for index, word in enumerate([*special, *letters, *frequent][:VOCAB_SIZE])}
    content["model"]["vocab"] = vocabulary
    for each in content["added_tokens"]:
        each["id"] = vocabulary[each["content"]]
    for each in content["post_processor"]["special_tokens"].values():
        each["ids"] = [vocabulary[each["id"]]]
    content |= {"truncation": None, "padding": None}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        model_max_length=POSITIONS,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")},
    )
