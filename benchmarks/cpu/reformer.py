"""LSH attention on a CPU: a Reformer's bundle against Hugging Face's Reformer.

Usage: python -m benchmarks.cpu.reformer [--lengths 4096 8192 16384] [--rounds 5] [--output FILE]

The models have the shape of the library's default configuration (hidden size 256, 12 heads of 64, six layers, local and
LSH ones by turns, chunks of 64 tokens), four rounds of hashing (``--hashes``), as Google's larger Reformer has, and
random weights, on which speed does not depend. ``--hidden-size 768 --feed-forward 3072`` is the shape of BERT-base,
whose linear layers take most of the time. Hugging Face's runs in eager mode, its only one. The bundle must give Hugging
Face's answer to the shortest text: of longer ones a few tokens are hashed as rounding decides, which `hdexport verify`
takes into account and this does not.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

from benchmarks.cpu.models import BUNDLE, HUGGING_FACE, VOCAB_SIZE, load, save_models
from benchmarks.cpu.targets import Figure, Target, figures_of, random_ids, run_cases
from hdexport.attention.lsh.record import buckets_for

_MODULE = "benchmarks.cpu.reformer"
_TOLERANCE = 1e-3
_HEAD_DIM = 64


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs=3, default=(4096, 8192, 16384), help="three, rising, in tokens")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--feed-forward", type=int, default=512)
    parser.add_argument("--heads", type=int, default=12, help="of 64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--hashes", type=int, default=4, help="rounds of hashing")
    return run_cases(_MODULE, parser, _case_figures, _comparison)


def cases(short: int, middle: int, long: int) -> list[str]:
    """The timed cases."""
    compared = [f"{model} {tokens}" for tokens in (short, long) for model in (BUNDLE, HUGGING_FACE)]
    return [*compared, f"{BUNDLE} {middle}"]


def targets(short: int, middle: int, long: int) -> tuple[Target, ...]:
    """The bundle's targets for 4096, 8192 and 16384 tokens."""
    return (
        *(
            Target(f"{BUNDLE} {tokens}", f"{HUGGING_FACE} {tokens}", figure, 0.5)
            for tokens in (short, long)
            for figure in (Figure.LATENCY, Figure.MEMORY)
        ),
        Target(f"{BUNDLE} {long}", f"{BUNDLE} {middle}", Figure.LATENCY, 2.2),
    )


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    model, tokens = options.case.split()
    return figures_of(load(model, options.models), random_ids(int(tokens), VOCAB_SIZE))


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    lengths = sorted(options.lengths)
    shape = {"hidden_size": options.hidden_size, "layers": options.layers}
    others = {name: getattr(options, name) for name in ("feed_forward", "heads", "chunk", "hashes")}
    config_from = functools.partial(config_of, **others)
    save_models(options.models, config_from, **shape, longest=lengths[-1])
    return {
        "cases": cases(*lengths),
        "targets": targets(*lengths),
        "same_answers": {f"{BUNDLE} {lengths[0]}": (f"{HUGGING_FACE} {lengths[0]}", _TOLERANCE)},
        **shape,
        **others,
    }


def config_of(*, feed_forward: int, heads: int, chunk: int, hashes: int, **sizes: Any) -> Any:
    from transformers import ReformerConfig

    hidden_size, positions = sizes["hidden_size"], sizes["max_position_embeddings"]
    layers = sizes["num_hidden_layers"]
    return ReformerConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=hidden_size,
        max_position_embeddings=positions,
        num_attention_heads=heads,
        feed_forward_size=feed_forward,
        attention_head_size=_HEAD_DIM,
        attn_layers=[("local", "lsh")[layer % 2] for layer in range(layers)],
        axial_pos_shape=[positions // chunk, chunk],
        axial_pos_embds_dim=[hidden_size // 4, hidden_size - hidden_size // 4],
        lsh_attn_chunk_length=chunk,
        local_attn_chunk_length=chunk,
        num_hashes=hashes,
        num_buckets=list(buckets_for(positions, chunk=chunk, positions=positions)),
        hash_seed=0,
    )


if __name__ == "__main__":
    sys.exit(main())
