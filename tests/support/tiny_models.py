"""Tiny checkpoints of every family, with random weights that make attention far from uniform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast

from hdexport.families import family_of
from hdexport.model.task import model_from_config
from hdruntime.bundle.manifest import Task

BASE = 64
"""Positions of every tiny checkpoint."""

VOCAB_SIZE = 120
COPIES = {"camembert": "roberta", "data2vec-text": "roberta", "xlm-roberta": "roberta"}
"""Model types whose code in transformers is a copy of another's.

Their graphs are the other's, node for node, as test_families.py shows; so changes of a graph, of its precision or
its attention, are tested with the other alone.
"""

LABELS = ("negative", "neutral", "positive")
WINDOWS = (8, 16)
"""Longformer's and LED's ``attention_window``, one per layer: both sides of a token together.

With a head on top, both of Longformer's layers have the first: layers that are alike are traced once.
"""

MANY_GLOBAL_TOKENS = {"max_len": 4096, "max_global": 64, "attention_window": [WINDOWS[1]] * 2}
"""Longformer's bundle of more global tokens than a head is wide, so that the graph projects all tokens for them.

Its layers have one window, and are traced once.
"""

BLOCK_SIZE, RANDOM_BLOCKS = 4, 3
"""BigBird's, and BigBird-Pegasus'."""

_SPECIAL_TOKENS = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
PAD_TOKEN_ID = 1
SEPARATOR_ID = 2

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": PAD_TOKEN_ID,
    "max_position_embeddings": BASE,
    "initializer_range": 0.15,
    "id2label": dict(enumerate(LABELS)),
    "label2id": {label: index for index, label in enumerate(LABELS)},
}

_AFTER_PADDING_ROW = {"max_position_embeddings": BASE + PAD_TOKEN_ID + 1}
_ROBERTA = _AFTER_PADDING_ROW | {"type_vocab_size": 1}
_T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_GROUPS: dict[str, Any] = {"num_key_value_heads": 2}
_SIZES_OF_MODEL_TYPE: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    # Texts of up to 44 tokens are short.
    "big_bird": {"block_size": BLOCK_SIZE, "num_random_blocks": RANDOM_BLOCKS, "sep_token_id": SEPARATOR_ID},
    "bigbird_pegasus": {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_layers": 1,
        "decoder_attention_heads": 1,
        "decoder_ffn_dim": 8,
        "init_std": 0.15,
        "block_size": BLOCK_SIZE,
        "num_random_blocks": RANDOM_BLOCKS,
    },
    "camembert": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "deberta": {
        "position_biased_input": False,
        "relative_attention": True,
        "max_relative_positions": 40,
        "pos_att_type": "c2p|p2c",
    },
    # Third version's; distances beyond 30 count as one.
    "deberta-v2": {
        "position_biased_input": False,
        "relative_attention": True,
        "position_buckets": 10,
        "max_relative_positions": 30,
        "pos_att_type": "p2c|c2p",
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "electra": {"embedding_size": 16},
    "eurobert": _GROUPS,
    "jina_embeddings_v3": {"type_vocab_size": 1},
    # transformers counts the masks of padding, too; no test's random ids are this one: see test_esm.py.
    "esm": {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 0},
    # Local, global, both with groups of heads; a global layer's heads are wider.
    "embedding_gemma2_text": _GROUPS
    | {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "hidden_size_per_layer_input": 24,
        "embedding_dim": 40,
    },
    # A window of 17 tokens has 8 on each side.
    "gemma3_text": _GROUPS
    | {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "use_bidirectional_attention": True,
    },
    "led": {
        "d_model": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_layers": 1,
        "decoder_attention_heads": 1,
        "decoder_ffn_dim": 8,
        "init_std": 0.1,
        "max_encoder_position_embeddings": BASE,
        "max_decoder_position_embeddings": BASE,
        "attention_window": list(WINDOWS),
    },
    "longformer": _ROBERTA
    | {
        # Heads wider than the default bound of global tokens, as real models have: see `absorbs_projections`.
        "hidden_size": 128,
        "initializer_range": 0.1,
        "attention_window": list(WINDOWS),
        "sep_token_id": SEPARATOR_ID,
    },
    # Blocks of 8 tokens, and sides of 16.
    "longt5": _T5
    | {
        "encoder_attention_type": "transient-global",
        "local_radius": 7,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
    },
    # Entities have a table of their own, which texts do not use.
    "luke": _AFTER_PADDING_ROW | {"entity_vocab_size": 6, "entity_emb_size": 8},
    "modernbert": {"local_attention": 16, "classifier_pooling": "mean"}
    | dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 0),
    # Of a window, half that counts: a token and seven before it.
    "modernbert-decoder": {"local_attention": 16, "num_hidden_layers": 4}
    | dict.fromkeys(("bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 0),
    "mpnet": _AFTER_PADDING_ROW,
    "neomme": _GROUPS
    | {
        "embedding_rank": 20,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "patch_size": 4,
        "embedding_dim": 16,
    },
    "performer": {
        "num_tokens": VOCAB_SIZE,
        "max_seq_len": BASE,
        "dim": 32,
        "depth": 2,
        "heads": 4,
        "dim_head": 8,
        "ff_mult": 2,
        "rotary_position_emb": False,
    },
    # Its heads together are wider than the model.
    "mt5": _T5 | {"num_heads": 3, "d_kv": 16},
    "nezha": {"max_relative_position": 20},
    # Chunks of two sizes, whose whole ones are multiples of 16 tokens; the two types of layers alternate.
    "reformer": {
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [12, 20],
        "axial_norm_std": 0.15,
        "feed_forward_size": 48,
        "hash_seed": 5,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 8,
        "num_hashes": 2,
    },
    "qwen3": _GROUPS | {"head_dim": 16},
    "qwen3_moe": _GROUPS | {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "roberta": _ROBERTA,
    # Few buckets, so that distances count as one early.
    "t5": _T5 | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    # Without a memory, as XLNet's.
    "transfo-xl": {
        "cutoffs": [30, 70],
        "d_embed": 32,
        "d_head": 8,
        "d_inner": 48,
        "div_val": 2,
        "init_std": 0.15,
        "proj_init_std": 0.15,
        "mem_len": 0,
        "same_length": False,
        "clamp_len": 50,
    },
    "ultrabert": _GROUPS
    | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "classifier_pooling": "mean"}
    | dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    "umt5": _T5,
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": _ROBERTA,
    # Without a memory, unless a test asks for one.
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "mem_len": None},
    "xmod": _ROBERTA | {"languages": ["de_DE", "en_XX"], "default_language": "en_XX"},
}

_NOT_OF_T5 = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "initializer_range",
    "max_position_embeddings",
)

_NAMED_OTHERWISE: dict[str, tuple[str, ...]] = {
    "performer": (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    ),
    **dict.fromkeys(("longt5", "mt5", "t5", "umt5"), _NOT_OF_T5),
    "reformer": ("num_hidden_layers", "intermediate_size"),
    "transfo-xl": ("intermediate_size", "initializer_range", "max_position_embeddings"),
    "xlnet": (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    ),
    "bigbird_pegasus": (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "initializer_range",
    ),
    "distilbert": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "led": (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "initializer_range",
    ),
}
"""Sizes that a model type knows by names of its own."""


def save_tiny_model(directory: Path, model_type: str, task: Task, **changes: Any) -> transformers.PreTrainedModel:
    """Write a tiny checkpoint with its tokenizer and return the model.

    Args:
        directory: where to; made when missing.
        model_type: a supported one.
        task: decides the head.
        changes: values of the config that differ from the tiny defaults.
    """
    family = family_of(model_type)  # from then on transformers knows the classes that it lacks
    sizes = _SIZES | _SIZES_OF_MODEL_TYPE.get(model_type, {})
    if model_type == "longformer" and task is not Task.FEATURE_EXTRACTION:
        sizes |= {"attention_window": [WINDOWS[0]] * len(WINDOWS)}
    if model_type == "modernbert" and task is Task.FEATURE_EXTRACTION:
        # Global, local, local, global: the first lacks a normalisation. Under a head, the first two.
        sizes |= {"num_hidden_layers": 4}
    sizes |= changes
    if task is Task.QUESTION_ANSWERING:
        sizes = {name: value for name, value in sizes.items() if name not in ("id2label", "label2id")}
    others = _NAMED_OTHERWISE.get(model_type, ())
    sizes = {name: value for name, value in sizes.items() if name not in others}
    torch.manual_seed(len(model_type))
    config = AutoConfig.for_model(model_type, **sizes)
    model = model_from_config(config, family=family, task=task).eval()
    with torch.no_grad():
        # Initialisation leaves biases at 0 and normalisations at 1, which would hide a mix-up of these.
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif "relative_attention_bias" in name:
                parameter.normal_(std=1.0)
            elif "norm" in name.lower() or name.endswith("lambdas"):
                least = -0.5 if model_type == "gemma3_text" else 0.5  # the term that it adds to 1
                parameter.uniform_(least, least + 1)
                if "q_norm" in name and model_type == "embedding_gemma2_text":
                    parameter /= 4  # which scales its scores: its heads have 16 numbers
            elif not parameter.any():
                parameter.normal_(std=0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return model


def save_sentence_modules(directory: Path, *modules: str, pooling: dict[str, Any]) -> None:
    """Make a checkpoint one of sentence-transformers.

    Args:
        directory: the checkpoint.
        modules: types after the Transformer and the Pooling, such as ``"Normalize"``; their folders stay empty.
        pooling: content of ``1_Pooling/config.json``.
    """
    kinds = ("Transformer", "Pooling", *modules)
    folders = ("", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index))
    chain = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(chain))
    for folder in folders:
        (directory / folder).mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def change_json(file: Path, **values: object) -> None:
    """Set values of a JSON object in a file; a missing file is an empty object."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | values))


def pickle_weights(directory: Path, content: object | None = None) -> None:
    """Put a checkpoint's weights, or something else, into a pickle in place of its safetensors."""
    weights = load_file(directory / "model.safetensors") if content is None else content
    torch.save(weights, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def _tokenizer() -> PreTrainedTokenizerFast:
    words = [*_SPECIAL_TOKENS, *(f"w{index}" for index in range(VOCAB_SIZE - len(_SPECIAL_TOKENS)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", SEPARATOR_ID)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        pad_token="[PAD]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )
