"""Every sparse operator on a CPU in OpenVINO against ONNX Runtime, in bundles of one layer.

Usage: python -m benchmarks.cpu.operators [--only relative favor] [--tokens 512 2048 4096] [--rounds 3] [--output FILE]

The models have base shape (hidden size 768, heads of 64) and random weights, on which speed does not depend. OpenVINO
must give ONNX Runtime's answer. The targets are the conditions under which the runtime's `auto` takes OpenVINO: at
most 0.9 of the CPU time of ONNX Runtime in float32, and no more memory for the text; OpenVINO's library and the second
copy that it has of weights are not in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.cpu.models import (
    BUNDLE,
    HEAD_DIM,
    OPENVINO,
    OPENVINO_BFLOAT16,
    VOCAB_SIZE,
    add_shape_arguments,
    load,
    openvino_cases,
)
from benchmarks.cpu.targets import Figure, Target, figures_of, random_ids, run_cases

_MODULE = "benchmarks.cpu.operators"
_TOLERANCE, _LEAST_COSINE = 1e-3, 0.99
_CPU_TIME, _MEMORY = 0.9, 1.0
_WARM_UP_TOKENS = 256


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=(512, 2048, 4096), help="lengths")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=tuple(MODELS), help="operators")
    add_shape_arguments(parser)
    parser.set_defaults(layers=1)
    return run_cases(_MODULE, parser, _case_figures, _comparison)


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    operator, model, tokens = options.case.split()
    ids = random_ids(int(tokens), VOCAB_SIZE)
    return figures_of(load(model, options.models / operator), ids, warm_up_tokens=_WARM_UP_TOKENS)


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    from hdexport.attention.kinds import attention_from_spec
    from hdexport.build import BuildOptions, build

    for operator in options.only:
        make, spec = MODELS[operator]
        folder = options.models / operator
        make(options).save_pretrained(folder / "checkpoint")
        given: dict[str, Any] = {"attention": attention_from_spec(spec)} if spec else {}
        build(
            BuildOptions(
                model=folder / "checkpoint", output=folder / BUNDLE, max_len=max(options.tokens), openvino=True,
                verify=None, **given,
            )
        )  # fmt: skip
    compared = [
        (f"{operator} {case}", f"{operator} {BUNDLE} {tokens}")
        for operator in options.only
        for tokens in sorted(options.tokens)
        for case in openvino_cases(tokens)
        if (operator, case.split()[0]) not in _REFUSED
    ]
    return {
        "cases": sorted({case for pair in compared for case in pair}),
        "targets": [
            Target(*pair, figure, most)
            for pair in compared
            for figure, most in ((Figure.CPU_TIME, _CPU_TIME), (Figure.MEMORY, _MEMORY))
        ],
        "same_answers": {
            ours: (theirs, _TOLERANCE)
            for ours, theirs in compared
            if f" {OPENVINO} " in ours and not ours.startswith(_ROUNDED)
        },
        "alike_answers": {ours: (theirs, _LEAST_COSINE) for ours, theirs in compared},
        **{name: getattr(options, name) for name in ("tokens", "hidden_size", "layers")},
    }


_ROUNDED = "lsh"
"""Rounding decides the buckets of a few tokens."""

_REFUSED = {(_ROUNDED, OPENVINO_BFLOAT16)}
"""By the runtime: it counts in floats."""


def _bert_like(name: str) -> Callable[[argparse.Namespace], Any]:
    def make(options: argparse.Namespace) -> Any:
        import torch
        import transformers

        from hdexport.families import family_of

        family_of(name)  # transformers knows NEZHA's classes from then on
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            name,
            vocab_size=VOCAB_SIZE,
            hidden_size=options.hidden_size,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden_size // HEAD_DIM,
            intermediate_size=4 * options.hidden_size,
            max_position_embeddings=max(options.tokens) + 2,
        )
        return transformers.AutoModel.from_config(config)

    return make


def _t5_like(name: str, encoder_class: str, **more: Any) -> Callable[[argparse.Namespace], Any]:
    def make(options: argparse.Namespace) -> Any:
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            name,
            vocab_size=VOCAB_SIZE,
            d_model=options.hidden_size,
            d_kv=HEAD_DIM,
            d_ff=2048 * options.hidden_size // 768,
            num_heads=options.hidden_size // HEAD_DIM,
            num_layers=options.layers,
            feed_forward_proj="gated-gelu",
            **more,
        )
        return getattr(transformers, encoder_class)(config)

    return make


def _xlnet(options: argparse.Namespace) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.XLNetModel(
        transformers.XLNetConfig(
            vocab_size=VOCAB_SIZE,
            d_model=options.hidden_size,
            n_head=options.hidden_size // HEAD_DIM,
            d_inner=4 * options.hidden_size,
            n_layer=options.layers,
        )
    )


def _reformer(layer: str) -> Callable[[argparse.Namespace], Any]:
    def make(options: argparse.Namespace) -> Any:
        import torch
        import transformers

        from benchmarks.cpu.reformer import config_of

        torch.manual_seed(0)
        heads = options.hidden_size // HEAD_DIM
        config = config_of(
            feed_forward=4 * options.hidden_size,
            heads=heads,
            chunk=64,
            hashes=4,
            vocab_size=VOCAB_SIZE,
            hidden_size=options.hidden_size,
            num_hidden_layers=options.layers,
            max_position_embeddings=max(options.tokens),
        )
        config.attn_layers = [layer] * options.layers
        return transformers.ReformerModel(config)

    return make


MODELS: dict[str, tuple[Callable[[argparse.Namespace], Any], str | None]] = {
    "chunks": (_reformer("local"), None),
    "clipped-mpnet": (_bert_like("mpnet"), None),
    "clipped-nezha": (_bert_like("nezha"), None),
    "clipped-t5": (_t5_like("t5", "T5EncoderModel"), None),
    "favor": (_bert_like("bert"), "favor:features=256"),
    "local-global": (_t5_like("longt5", "LongT5EncoderModel", encoder_attention_type="transient-global"), None),
    "lsh": (_reformer("lsh"), None),
    "relative": (_xlnet, None),
}
"""Operator, with its architecture where there are several -> the maker of a checkpoint, and the kind of attention."""


if __name__ == "__main__":
    sys.exit(main())
