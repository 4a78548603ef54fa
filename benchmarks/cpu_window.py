"""Sliding windows on a CPU: a Longformer's bundle against Hugging Face's Longformer and dense attention of that shape.

Usage: python benchmarks/cpu_window.py [--tokens 2048 4096 8192] [--rounds 5] [--output FILE]

The models have the shape of Longformer-base with four layers, 256 tokens on each side, and random weights: speed does
not depend on them. The first token is global, Hugging Face's default. "dense-sdpa" is a BERT of that shape in PyTorch,
which knows no windows: what a user takes who does without them. Every case runs in a process of its own, all cases once
a round; ratios are taken within a round, and their median is printed with the smallest and largest. The bundle must
give Hugging Face's answer. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from targets import Figure, Run, Target, compare, figures_of, random_ids, read_options, report

MODELS = ("bundle", "hugging-face", "dense-sdpa")

_VOCAB_SIZE = 1000
_HEAD_DIM = 64
_TOLERANCE = 1e-3


def main() -> int:
    """Parse, and run all cases or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs=3, default=(2048, 4096, 8192), help="three lengths, rising")
    parser.add_argument("--hidden-size", type=int, default=768, help="of heads of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--window", type=int, default=256, help="tokens on each side; Longformer counts both")
    options = read_options(parser)
    if options.case:
        model, _, tokens = options.case.rpartition(" ")
        run = _load(model, options.models)
        # Hugging Face pads shorter pieces to the whole window: much time for the same warmth.
        print(json.dumps(figures_of(run, random_ids(int(tokens), _VOCAB_SIZE), warm_up_tokens=2 * options.window)))
        return 0
    lengths = sorted(options.tokens)
    shape = {"hidden_size": options.hidden_size, "layers": options.layers, "window": options.window}
    with tempfile.TemporaryDirectory() as folder:
        _make_models(Path(folder), longest=lengths[-1], **shape)
        result = compare(
            __file__,
            [f"{model} {tokens}" for tokens in lengths for model in MODELS],
            targets(*lengths),
            rounds=options.rounds,
            arguments=["--models", folder, "--window", str(options.window)],
            same_answers={f"bundle {tokens}": (f"hugging-face {tokens}", _TOLERANCE) for tokens in lengths},
            **shape,
        )
    return report(result, options.output)


def targets(short: int, middle: int, long: int) -> tuple[Target, ...]:
    """What is asked of the bundle, for 2048, 4096 and 8192 tokens."""
    return (
        Target(f"bundle {middle}", f"hugging-face {middle}", Figure.LATENCY, 0.5),
        Target(f"bundle {middle}", f"dense-sdpa {middle}", Figure.LATENCY, 0.5),
        Target(f"bundle {long}", f"dense-sdpa {long}", Figure.LATENCY, 0.45),
        Target(f"bundle {long}", f"bundle {short}", Figure.LATENCY, 4.6),
        Target(f"bundle {middle}", f"hugging-face {middle}", Figure.MEMORY, 0.5),
        Target(f"bundle {long}", f"hugging-face {long}", Figure.MEMORY, 0.5),
    )


def _make_models(models: Path, *, hidden_size: int, layers: int, window: int, longest: int) -> None:
    import torch
    import transformers

    from hdexport.build import BuildOptions, build

    transformers.utils.logging.disable_progress_bar()
    sizes = {
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // _HEAD_DIM,
        "intermediate_size": 4 * hidden_size,
    }
    torch.manual_seed(0)
    # Longformer's positions begin behind the padding id, 1. It pads texts to a multiple of its window.
    rows = longest + 2 * window + 2
    longformer = transformers.LongformerConfig(
        **sizes, max_position_embeddings=rows, attention_window=2 * window, pad_token_id=1, sep_token_id=2
    )
    transformers.LongformerModel(longformer).save_pretrained(models / "longformer")
    bert = transformers.BertConfig(**sizes, max_position_embeddings=longest)
    transformers.BertModel(bert).save_pretrained(models / "bert")
    build(BuildOptions(model=models / "longformer", output=models / "bundle", max_len=longest, verify=None))


def _load(model: str, models: Path) -> Run:
    if model == "bundle":
        import hdruntime

        session = hdruntime.load(models / "bundle", backend="onnxruntime")
        return lambda ids: session(input_ids=ids)["last_hidden_state"]
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if model == "hugging-face":
        return _run_of(transformers.LongformerModel.from_pretrained(models / "longformer"), has_global_tokens=True)
    return _run_of(transformers.BertModel.from_pretrained(models / "bert", attn_implementation="sdpa"))


def _run_of(model: Any, *, has_global_tokens: bool = False) -> Run:
    import torch

    model.eval()

    def run(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            input_ids = torch.from_numpy(ids)
            masks = {"attention_mask": torch.ones_like(input_ids)}
            if has_global_tokens:
                masks["global_attention_mask"] = torch.zeros_like(input_ids)
                masks["global_attention_mask"][:, 0] = 1
            return model(input_ids=input_ids, **masks).last_hidden_state.numpy()

    return run


if __name__ == "__main__":
    sys.exit(main())
