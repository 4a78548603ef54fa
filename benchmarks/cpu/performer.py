"""FAVOR+ on a CPU: a BERT's bundle with random features against the same BERT with dense attention.

Usage: python -m benchmarks.cpu.performer [--lengths 4096 16384 65536] [--rounds 3] [--output FILE]

The models are one BERT of hidden size 256 (four heads of 64), one layer, and random weights, on which speed does not
depend; the bundle has 256 features. "dense-sdpa" is PyTorch's model with dense attention, which is not run at the
longest length: there it would take 16 times as long as at the middle one. "favor" is PyTorch's model with FAVOR+, whose
answer the bundle must give to the shortest text. The features' cost in quality is no matter of speed; `hdexport
verify` says it for a model.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.cpu.models import BUNDLE, DENSE, HEAD_DIM, VOCAB_SIZE, load, run_of_torch
from benchmarks.cpu.targets import Figure, Run, Target, figures_of, random_ids, run_cases

_MODULE = "benchmarks.cpu.performer"
_FAVOR = "favor"
_TOLERANCE = 1e-3
_WARM_UP_TOKENS = 1024
_LINEAR = 5.5
"""Most times as long for four times the tokens; 16 would be quadratic."""


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs=3, default=(4096, 16384, 65536), help="three, each four times")
    parser.add_argument("--hidden-size", type=int, default=256, help="of heads of 64")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--features", type=int, default=256)
    return run_cases(_MODULE, parser, _case_figures, _comparison)


def cases(short: int, middle: int, long: int) -> list[str]:
    """The timed cases."""
    compared = [f"{model} {tokens}" for tokens in (short, middle) for model in (BUNDLE, DENSE)]
    return [*compared, f"{BUNDLE} {long}", f"{_FAVOR} {short}"]


def targets(short: int, middle: int, long: int) -> tuple[Target, ...]:
    """The bundle's targets for 4096, 16384 and 65536 tokens."""
    return (
        *(
            Target(f"{BUNDLE} {more}", f"{BUNDLE} {fewer}", figure, _LINEAR)
            for fewer, more in ((short, middle), (middle, long))
            for figure in (Figure.CPU_TIME, Figure.MEMORY)
        ),
        Target(f"{BUNDLE} {short}", f"{DENSE} {short}", Figure.CPU_TIME, 1.0),
        Target(f"{BUNDLE} {middle}", f"{DENSE} {middle}", Figure.CPU_TIME, 0.5),
    )


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    model, tokens = options.case.split()
    run = _load_favor(options) if model == _FAVOR else load(model, options.models)
    return figures_of(run, random_ids(int(tokens), VOCAB_SIZE), warm_up_tokens=_WARM_UP_TOKENS)


def _load_favor(options: argparse.Namespace) -> Run:
    import transformers

    from hdexport.attention.kinds import attention_of
    from hdexport.families import family_of
    from hdruntime.bundle.reader import open_bundle

    bundle = open_bundle(options.models / BUNDLE)
    model = transformers.AutoModel.from_pretrained(options.models / DENSE)
    for item in attention_of(bundle.manifest):
        item.kind.use_reference(item.kind.read(item.record, bundle), model, family_of("bert"))
    return run_of_torch(model)


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from hdexport.attention.kinds import attention_from_spec
    from hdexport.build import BuildOptions, build

    lengths = sorted(options.lengths)
    shape = {name: getattr(options, name) for name in ("hidden_size", "layers", "features")}
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden_size // HEAD_DIM,
        intermediate_size=4 * options.hidden_size,
        max_position_embeddings=lengths[-1],
    )
    transformers.AutoModel.from_config(config).save_pretrained(options.models / DENSE)
    build(
        BuildOptions(
            model=options.models / DENSE,
            output=options.models / BUNDLE,
            max_len=lengths[-1],
            attention=attention_from_spec(f"favor:features={options.features}"),
            verify=None,
        )
    )
    return {
        "cases": cases(*lengths),
        "targets": targets(*lengths),
        "same_answers": {f"{BUNDLE} {lengths[0]}": (f"{_FAVOR} {lengths[0]}", _TOLERANCE)},
        **shape,
    }


if __name__ == "__main__":
    sys.exit(main())
