"""Every type of text model in transformers that no family has, tiny, with random weights: built and proved, or why not.

Usage: python -m benchmarks.cpu.any_types [MODEL_TYPE ...] [--kind encoder] [--again] [--output FILE]

Each type has a process of its own, with a time limit. Rows that the output has already are left out; --again does them
once more. `python docs/generate_models.py` makes the lists of docs/models.md of benchmarks/results/any_types.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import append, now
from hdexport.bench.measure.processes import run_process
from hdexport.bench.results.result import RunStatus
from hdexport.families import SUPPORTED_MODEL_TYPES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MODULE = "benchmarks.cpu.any_types"
_TIME_LIMIT_S = 240.0

BUILT, HAS_A_FAMILY = "built", "has a family"
"""The outcomes of a type whose bundle was verified, and of one that is not tried; of any other it is the refusal."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "encoder": ("MASKED_LM", "TEXT_ENCODING"),
    "decoder": ("CAUSAL_LM",),
    "generator": ("CAUSAL_LM",),
    "other": ("TOKEN_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "QUESTION_ANSWERING"),
}
"""Kind of a type -> the auto classes that load it; a type is of the first kind that has it. Decoders are those that the
library has a head for sequences for, which embedders and rerankers are made of; generators are the others."""

_GENERATES = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
"""Auto classes of models that generate text, of more than the text before."""

_WIDTH, _LAYERS, _HEADS, _WIDE, _LONGEST, _VOCABULARY = 64, 2, 4, 96, 200, 120

_SIZES: Mapping[str, int | float] = {
    r"hidden_size|d_model|n_embd|emb_dim|dim|embedding_size|word_embed_proj_dim|model_dim": _WIDTH,
    r"num_hidden_layers|n_layers?|num_layers|encoder_layers|n_encoder_layers|num_hidden_groups": _LAYERS,
    r"decoder_layers|num_decoder_layers": 1,
    r"num_attention_heads|n_heads?|num_heads|\w+_attention_heads": _HEADS,
    r"num_key_value_heads|num_kv_heads": 2,
    r"head_dim|d_kv|v_head_dim|qk_nope_head_dim|qk_rope_head_dim": _WIDTH // _HEADS,
    r"kv_lora_rank|q_lora_rank": 24,
    r"intermediate_size|n_inner|\w*ffn_dim|d_ff|d_inner|ffn_hidden_size|moe_intermediate_size|dff": _WIDE,
    r"vocab_size|n_words": _VOCABULARY,
    r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_length": _LONGEST,
    r"num_experts|num_local_experts|n_routed_experts": 4,
    r"num_experts_per_tok|moe_topk": 2,
    r"initializer_range|init_std|embed_init_std|initializer_factor": 0.2,
    r"pad_token_id": 1,
    r"bos_token_id|eos_token_id": 2,
}
"""Keys of configurations -> their value in a tiny model."""

_OF_DEEPSEEK = {"n_group": 1, "topk_group": 1, "num_key_value_heads": _HEADS}

_OF_MODEL_TYPE: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "axk1": _OF_DEEPSEEK,
    "axk2": _OF_DEEPSEEK,
    "deepseek_v2": _OF_DEEPSEEK,
    "deepseek_v3": _OF_DEEPSEEK,
    "emu3": {"vocabulary_map": {"<image>": 119, "<|extra_200|>": 118, "<|visual token 000000|>": 117}},
    "funnel": {"architectures": ["FunnelModel"], "block_sizes": [1, 1], "n_head": 4, "d_head": 16, "d_inner": 96},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12},
    "lilt": {"hidden_size": 48},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32, "embedding_size": 32, "initializer_range": 0.1},
    "lxmert": {"l_layers": 2, "x_layers": 1, "r_layers": 1},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]},
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16},
}
"""Sizes that a type needs to fit the others."""


def main() -> int:
    """Try all types that are not recorded yet, or, in a child process, one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE", help="default: all")
    parser.add_argument("--kind", choices=KINDS, help="of the types; default: all")
    parser.add_argument("--again", action="store_true", help="also types that the output has")
    parser.add_argument("--output", type=Path, help="append a JSON line per type to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(outcome(options.case)))
        return 0
    recorded: Mapping[str, Any] = {} if options.again else recorded_types(options.output)
    kinds = text_types()
    for model_type in options.types or [name for name, kind in kinds.items() if options.kind in (None, kind)]:
        if model_type not in recorded:
            row = {**tried(model_type), "kind": kinds.get(model_type)}
            print(f"{model_type}: {row['outcome']} {row['attention']}", flush=True)
            append(options.output, row)
    return 0


def text_types() -> dict[str, str]:
    """Types of models of texts -> their kind. Encoders are named whether they have a family or not."""
    with_images = {name for auto_class in _GENERATES for name in _types(auto_class)}
    found: dict[str, str] = {}
    for kind, auto_classes in KINDS.items():
        left_out = set() if kind == "encoder" else {*with_images, *SUPPORTED_MODEL_TYPES, *found}
        names = {name for auto_class in auto_classes for name in _types(auto_class)} - left_out
        if kind == "decoder":
            names &= _types("SEQUENCE_CLASSIFICATION")
        found |= dict.fromkeys(sorted(names), kind)
    return found


def recorded_types(output: Path | None) -> dict[str, dict[str, Any]]:
    """Type -> its last row in a file."""
    if output is None or not output.exists():
        return {}
    rows = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    return {row["model_type"]: row for row in rows}


def tried(model_type: str) -> dict[str, Any]:
    """A type's row, by a process of its own."""
    if model_type in SUPPORTED_MODEL_TYPES:
        return _row(model_type, {"outcome": HAS_A_FAMILY, "attention": {}})
    found = run_process(["-m", _MODULE, "--case", model_type], time_limit_s=_TIME_LIMIT_S)
    if found.status is RunStatus.OK and found.output is not None:
        row: Mapping[str, Any] = found.output
    else:
        row = {"outcome": f"{found.status.value}: {found.reason}", "attention": {}}
    return _row(model_type, row)


def _row(model_type: str, found: Mapping[str, Any]) -> dict[str, Any]:
    version = importlib.metadata.version("transformers")
    return {"model_type": model_type, "date": now()[:10], "transformers": version, **found}


def outcome(model_type: str) -> dict[str, Any]:
    """Build and prove a tiny model: "built", or the refusal's first line; and attention types -> layers."""
    import torch
    from transformers import AutoModel

    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint import find_checkpoint
    from hdruntime.bundle.manifest import Task
    from hdruntime.errors import HdexportError

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        torch.manual_seed(0)
        try:
            model = AutoModel.from_config(tiny_config(model_type)).eval()
        except Exception as error:
            return {"outcome": f"no tiny model: {type(error).__name__}: {str(error)[:200]}", "attention": {}}
        for parameter in model.parameters():
            # Initialisation leaves biases at 0 and normalisations at 1, which would hide a mix-up of these.
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.data += torch.empty_like(parameter).normal_(std=0.1)
        model.save_pretrained(path / "model")
        try:
            checkpoint = find_checkpoint(path / "model")
            longest = min(checkpoint.usual_len, _LONGEST)
            options = BuildOptions(
                model=checkpoint,
                output=path / "bundle",
                max_len=longest,
                tokenizer=None,
                task=Task.FEATURE_EXTRACTION,
            )
            manifest = build(options)
        except HdexportError as error:
            return {"outcome": str(error).splitlines()[0].replace(str(path.resolve()), ""), "attention": {}}
    layers = Counter({str(record["type"]): int(str(record["layers"])) for record in manifest.attention})
    return {"outcome": BUILT, "attention": dict(layers)}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The configuration of a model type, as small as its keys allow."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    return type(default)(**{**_small(default), **_OF_MODEL_TYPE.get(model_type, {})})


def _small(config: PreTrainedConfig) -> dict[str, Any]:
    """Small sizes for the keys of a configuration, and for those of its parts."""
    names = type(config).attribute_map
    keys = {*config.to_dict(), *names.values()} - set(names)
    sizes: dict[str, Any] = {
        key: value for key in keys for pattern, value in _SIZES.items() if re.fullmatch(pattern, key)
    }
    if getattr(config, "num_key_value_heads", None) == getattr(config, "num_attention_heads", None):
        sizes = {key: _HEADS if key == "num_key_value_heads" else value for key, value in sizes.items()}
    parts = {key: getattr(config, key, None) for key in type(config).sub_configs}
    return sizes | {key: _small(part) for key, part in parts.items() if part is not None}


@functools.cache
def _types(auto_class: str) -> frozenset[str]:
    """Model types that an auto class loads; none where the installed library has no such class."""
    import transformers.models.auto.modeling_auto as auto

    return frozenset(getattr(auto, f"MODEL_FOR_{auto_class}_MAPPING_NAMES", ()))


if __name__ == "__main__":
    raise SystemExit(main())
