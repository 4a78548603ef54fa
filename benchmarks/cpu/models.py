"""Random models of a long-document architecture in base shape, and ways to run them: common to windows and blocks."""

from __future__ import annotations

__all__ = [
    "BUNDLE",
    "DENSE",
    "HEAD_DIM",
    "HUGGING_FACE",
    "OPENVINO",
    "OPENVINO_BFLOAT16",
    "VOCAB_SIZE",
    "add_shape_arguments",
    "load",
    "openvino_cases",
    "openvino_targets",
    "run_of_torch",
    "save_models",
]

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu.targets import Figure, Ids, Run, Target
from hdruntime.optional import require

BUNDLE, HUGGING_FACE, DENSE = "bundle", "hugging-face", "dense-sdpa"
"""Ours, the library's own model, and a BERT of that shape in PyTorch."""

OPENVINO, OPENVINO_BFLOAT16 = "openvino", "openvino-bfloat16"
"""The bundle through OpenVINO, in float32 and in bfloat16."""

VOCAB_SIZE = 1000
HEAD_DIM = 64


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Settings of all three models."""
    parser.add_argument("--hidden-size", type=int, default=768, help="of heads of 64")
    parser.add_argument("--layers", type=int, default=4)


def save_models(
    models: Path, config_of: Callable[..., Any], *, hidden_size: int, layers: int, longest: int, rows: int | None = None
) -> None:
    """Save all three.

    Args:
        rows: of the architecture's table of positions; None for `longest`.
    """
    import torch
    import transformers

    from hdexport.build import BuildOptions, build

    transformers.utils.logging.disable_progress_bar()
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // HEAD_DIM,
        "intermediate_size": 4 * hidden_size,
    }
    torch.manual_seed(0)
    for name, config in (
        (HUGGING_FACE, config_of(**sizes, max_position_embeddings=rows or longest)),
        (DENSE, transformers.BertConfig(**sizes, max_position_embeddings=longest)),
    ):
        transformers.AutoModel.from_config(config).save_pretrained(models / name)
    options = BuildOptions(
        model=models / HUGGING_FACE, output=models / BUNDLE, max_len=longest, openvino=True, verify=None
    )
    build(options)


def openvino_cases(*lengths: int) -> list[str]:
    """The cases that are timed through OpenVINO: bfloat16 where the CPU computes in it."""
    has_bfloat16 = "BF16" in require("openvino").Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    models = [OPENVINO, OPENVINO_BFLOAT16] if has_bfloat16 else [OPENVINO]
    return [f"{model} {tokens}" for tokens in lengths for model in models]


def openvino_targets(*lengths: int) -> tuple[Target, ...]:
    """Targets of float32 against the bundle in ONNX Runtime, and of bfloat16 against float32, where that is timed."""
    against = {OPENVINO: (BUNDLE, 0.85), OPENVINO_BFLOAT16: (OPENVINO, 0.65)}
    cases = (case.split() for case in openvino_cases(*lengths))
    return tuple(
        Target(f"{model} {tokens}", f"{against[model][0]} {tokens}", Figure.CPU_TIME, against[model][1])
        for model, tokens in cases
    )


def load(model: str, models: Path) -> Run:
    """Load one of the models that `save_models` saved."""
    if model in (BUNDLE, OPENVINO, OPENVINO_BFLOAT16):
        import hdruntime

        backend = "onnxruntime" if model == BUNDLE else "openvino"
        precision = "bfloat16" if model == OPENVINO_BFLOAT16 else "float32"
        session = hdruntime.load(models / BUNDLE, backend=backend, precision=precision)
        return lambda ids: session(input_ids=ids)["last_hidden_state"]
    import transformers

    transformers.utils.logging.disable_progress_bar()
    options = {"attn_implementation": "sdpa"} if model == DENSE else {}
    return run_of_torch(transformers.AutoModel.from_pretrained(models / model, **options))


def run_of_torch(model: Any) -> Run:
    """A model of Hugging Face; no token of a Longformer is global, by default there as in its bundle."""
    import torch

    model.eval()

    def run(ids: Ids) -> Any:
        with torch.inference_mode():
            input_ids = torch.from_numpy(ids)
            return model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state.numpy()

    return run
