"""Small models of late interaction with the sample model's tokenizer, as each library saves them."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AddedToken,
    AutoTokenizer,
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
)

from support.made_once import made_once
from support.sentence_bundles import with_settings_of
from support.tiny_models import change_json

POSITIONS, DOCUMENT_TOKENS, WIDTH = 64, 40, 12

MODELS = ("classic", "attending", "unexpanded", "windowed", "pylate", "stanford")
"""Expanded by tokens that no token sees; by tokens that all see, punctuation left out of queries, too; not expanded; as
the first, of a ModernBERT with windows that a query exceeds; PyLate's and Stanford's formats, with markers that are
tokens of their own."""

UNSEEN = ("classic", "windowed")
"""Models whose added tokens are not seen, and whose bundles have graphs for OpenVINO."""

MAX_LEN = 90

WINDOW = 4
"""Tokens on each side that a token of "windowed" sees in every second layer."""

_OF_TOKENS = {"module_input_name": "token_embeddings"}


def made_colbert(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder with a model of `MODELS`, its ``checkpoint`` and its ``bundle``, verified for `UNSEEN`: made once."""

    def make(directory: Path) -> None:
        from hdexport.build import BuildOptions, build

        save_colbert(directory / "checkpoint", name)
        if name == "unexpanded":
            # A bundle of the same weights and graph.
            other = made_colbert(tmp_path_factory, "attending") / "bundle"
            with_settings_of(directory / "checkpoint", other, directory / "bundle")
            return
        options = {
            "max_len": MAX_LEN,
            "alpha": 0.4,
            "attention_scale": "none",
            "targets": ("openvino",) if name in UNSEEN else (),
        }
        options |= {} if name in UNSEEN else {"verify": None}
        build(BuildOptions(model=directory / "checkpoint", output=directory / "bundle", **options))

    return made_once(tmp_path_factory, f"colbert {name}", make)


def save_colbert(path: Path, name: str, **config: Any) -> None:
    """Save a model of `MODELS`; sentence-transformers, transformers and torch are imported for it.

    Args:
        path: the folder to make; another beside it holds the encoder.
        name: of the model.
        config: values of the encoder's configuration.
    """
    from hdexport.checkpoint import default_model

    torch.manual_seed(len("attending" if name == "unexpanded" else name))
    tokenizer = AutoTokenizer.from_pretrained(str(default_model()[0]), model_max_length=POSITIONS)
    if name == "pylate":
        # As PyLate saves them: with the space, and normalised, so that a tokenizer of lower case never finds them.
        tokenizer.add_tokens([AddedToken("[Q] "), AddedToken("[D] ")])
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.4,
    }
    model = _windowed(sizes, tokenizer) if name == "windowed" else BertModel(BertConfig(**(sizes | config))).eval()
    weight = torch.randn(WIDTH, 32)
    if name == "stanford":
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        _as_stanford(path, model, weight)
        return
    base = path.with_name(f"{path.name} base")
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    _save_modules(path, base, name, weight)
    if name == "pylate":
        _as_pylate(path)


def _windowed(sizes: dict[str, Any], tokenizer: Any) -> PreTrainedModel:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep")}
    ids |= {"bos_token_id": ids["cls_token_id"], "eos_token_id": ids["sep_token_id"]}
    windows = {"num_hidden_layers": 4, "global_attn_every_n_layers": 2, "local_attention": 2 * WINDOW}
    return ModernBertModel(ModernBertConfig(**(sizes | ids | windows))).eval()


def _save_modules(path: Path, base: Path, name: str, weight: torch.Tensor) -> None:
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    punctuation = list(string.punctuation)
    lengths: dict[str, Any] = {"document_length": DOCUMENT_TOKENS}
    mask = MultiVectorMask(skiplist_words=punctuation)
    if name == "attending":
        lengths["query_expansion"] = {"strategy": "min", "length": 12, "attend": True, "token": "[unused5]"}
        lengths["query_length"] = 20
        mask = MultiVectorMask(skiplist_words=[*punctuation, "the"], skiplist_tasks=["query", "document"])
    elif name == "unexpanded":
        lengths, mask = {"query_length": 9}, MultiVectorMask()
    else:
        lengths["query_expansion"] = {"strategy": "fixed", "length": 16}
    model = MultiVectorEncoder(
        modules=[
            Transformer(str(base), **lengths),
            Dense(32, WIDTH, bias=False, activation_function=torch.nn.Identity(), init_weight=weight, **_OF_TOKENS),
            mask,
            Normalize(**_OF_TOKENS),
        ],
        prompts={"query": "[Q] ", "document": "[D] "},
        similarity_fn_name="meanmaxsim" if name == "attending" else "maxsim",
        device="cpu",
    )
    model.save_pretrained(str(path))


def _as_pylate(path: Path) -> None:
    """The files that PyLate 1.3 writes: a Dense of its own class, and its settings among sentence-transformers'."""
    modules = json.loads((path / "modules.json").read_text())[:2]
    modules[0]["type"], modules[1]["type"] = "sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"
    (path / "modules.json").write_text(json.dumps(modules))
    dense = json.loads((path / "1_Dense/config.json").read_text())
    kept = {name: dense[name] for name in ("in_features", "out_features", "bias", "activation_function")}
    (path / "1_Dense/config.json").write_text(json.dumps(kept))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 39, "do_lower_case": False}))
    (path / "config_sentence_transformers.json").write_text(
        json.dumps({
            "model_type": "ColBERT",
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "MaxSim",
            "query_prefix": "[Q] ",
            "document_prefix": "[D] ",
            "query_length": 16,
            "document_length": DOCUMENT_TOKENS,
            "attend_to_expansion_tokens": False,
            "skiplist_words": list(string.punctuation),
        })
    )  # fmt: skip


def _as_stanford(path: Path, model: BertModel, weight: torch.Tensor) -> None:
    """The files of ``HF_ColBERT``: BERT's weights with their prefix, the projection beside them, and its metadata."""
    weights = {f"bert.{name}": value.contiguous() for name, value in model.state_dict().items()}
    save_file({**weights, "linear.weight": weight}, path / "model.safetensors", metadata={"format": "pt"})
    change_json(path / "config.json", architectures=["HF_ColBERT"])
    metadata = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 16,
        "doc_maxlen": DOCUMENT_TOKENS,
        "attend_to_mask_tokens": False,
        "mask_punctuation": True,
        "dim": WIDTH,
    }
    (path / "artifact.metadata").write_text(json.dumps(metadata))
