"""Block-sparse attention on a CPU: a BigBird's bundle against Hugging Face's BigBird and dense attention of that shape.

Usage: python benchmarks/cpu_bigbird.py [--lengths 4096 8192 16384] [--rounds 5] [--output FILE]

The models have the shape of BigBird-base with four layers, blocks of 64, three random blocks, and random weights: speed
does not depend on them. Hugging Face's is in block-sparse eager mode, all it has. "dense-sdpa" is a BERT of that shape
in PyTorch, which knows no blocks: what a user takes who does without them. Every case runs in a process of its own, all
cases once a round; ratios are taken within a round, and their median is printed with the smallest and largest. The
bundle must give Hugging Face's answer. The longest texts are for memory: Hugging Face fills a matrix of all pairs of
tokens for each head, whether asked for it or not, so how far it grows there is found out once, and may be that it does
not fit. Exits with 1 where a target is missed.
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

from hdexport.bench.measure.calls import with_growth
from hdexport.bench.measure.processes import run_process
from hdexport.bench.results.result import Status
from targets import Figure, Run, Target, compare, figures_of, random_ids, read_options, report

_VOCAB_SIZE = 1000
_HEAD_DIM = 64
_TOLERANCE = 1e-3
_TIME_LIMIT_S = 3600.0
_HUGGING_FACE = "hugging-face"
_GROWTH_ALONE = "growth"
"""What the name of a case begins with that is run once, and not timed."""


def main() -> int:
    """Parse, and run all cases or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs=3, default=(4096, 8192, 16384), help="three, rising, in tokens")
    parser.add_argument("--hidden-size", type=int, default=768, help="of heads of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--random", type=int, default=3, help="random blocks")
    options = read_options(parser)
    sparse_tokens = _sparse_tokens(options.block, options.random)
    if options.case:
        print(json.dumps(_run_case(options.case, options.models, sparse_tokens)))
        return 0
    lengths = sorted(options.lengths)
    if any(tokens % sparse_tokens for tokens in lengths):
        parser.error(f"--lengths {' '.join(map(str, lengths))}: multiples of {sparse_tokens} are needed here.")
    shape = {name: getattr(options, name) for name in ("hidden_size", "layers", "block", "random")}
    with tempfile.TemporaryDirectory() as folder:
        _make_models(Path(folder), longest=lengths[-1], **shape)
        arguments = ["--models", folder, "--block", str(options.block), "--random", str(options.random)]
        growth = _growth_of_hugging_face(lengths[-1], arguments)
        result = compare(
            __file__,
            cases(*lengths),
            targets(*lengths),
            rounds=options.rounds,
            arguments=arguments,
            same_answers={f"bundle {tokens}": (f"hugging-face {tokens}", _TOLERANCE) for tokens in lengths[:2]},
            hugging_face_growth=growth,
            **shape,
        )
    status = report(result, options.output)
    print(f"  hugging-face {lengths[-1]}, memory growth, run once: {_said(growth)}")
    return status


def cases(short: int, middle: int, long: int) -> list[str]:
    """What is timed."""
    compared = [f"{model} {tokens}" for tokens in (short, middle) for model in ("bundle", _HUGGING_FACE)]
    return [*compared, f"dense-sdpa {middle}", f"bundle {long}"]


def targets(short: int, middle: int, long: int) -> tuple[Target, ...]:
    """What is asked of the bundle, for 4096, 8192 and 16384 tokens."""
    return (
        Target(f"bundle {short}", f"hugging-face {short}", Figure.LATENCY, 0.6),
        Target(f"bundle {middle}", f"hugging-face {middle}", Figure.LATENCY, 0.3),
        Target(f"bundle {middle}", f"dense-sdpa {middle}", Figure.LATENCY, 0.55),
        Target(f"bundle {long}", f"bundle {middle}", Figure.MEMORY, 2.2),
    )


def _sparse_tokens(block: int, random: int) -> int:
    """A power of two that Hugging Face attends to sparsely: after a shorter text it would be dense for good."""
    return int(2 ** ((5 + 2 * random) * block).bit_length())


def _run_case(case: str, models: Path, sparse_tokens: int) -> dict[str, Any]:
    *alone, model, tokens = case.split()
    run, ids = _load(model, models), random_ids(int(tokens), _VOCAB_SIZE)
    if alone == [_GROWTH_ALONE]:
        run(ids[:, :sparse_tokens])
        return {"growth_bytes": with_growth(lambda: run(ids))[1]}
    # What others are warmed up with is short: the memory that it takes is missing in the growth.
    return figures_of(run, ids, **({"warm_up_tokens": sparse_tokens} if model == _HUGGING_FACE else {}))


def _growth_of_hugging_face(tokens: int, arguments: list[str]) -> dict[str, Any]:
    """How far its memory grows, or why that is not known."""
    case = f"{_GROWTH_ALONE} {_HUGGING_FACE} {tokens}"
    outcome = run_process([__file__, "--case", case, *arguments], time_limit_s=_TIME_LIMIT_S)
    found = outcome.output if outcome.status is Status.OK and outcome.output is not None else {"reason": outcome.reason}
    return {"tokens": tokens, "status": outcome.status.value, "peak_rss_bytes": outcome.peak_rss_bytes, **found}


def _said(growth: dict[str, Any]) -> str:
    if growth["status"] == Status.OK.value:
        return f"{growth['growth_bytes'] / 1e6:.0f} MB"
    return f"{growth['status']}, at {growth['peak_rss_bytes'] / 1e6:.0f} MB resident: {growth['reason']}"


def _make_models(models: Path, *, hidden_size: int, layers: int, block: int, random: int, longest: int) -> None:
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
        "max_position_embeddings": longest,
    }
    torch.manual_seed(0)
    big_bird = transformers.BigBirdConfig(
        **sizes, attention_type="block_sparse", block_size=block, num_random_blocks=random, sep_token_id=2
    )
    transformers.BigBirdModel(big_bird).save_pretrained(models / "bigbird")
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(models / "bert")
    build(BuildOptions(model=models / "bigbird", output=models / "bundle", max_len=longest, verify=None))


def _load(model: str, models: Path) -> Run:
    if model == "bundle":
        import hdruntime

        session = hdruntime.load(models / "bundle", backend="onnxruntime")
        return lambda ids: session(input_ids=ids)["last_hidden_state"]
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if model == _HUGGING_FACE:
        return _run_of(transformers.BigBirdModel.from_pretrained(models / "bigbird"))
    return _run_of(transformers.BertModel.from_pretrained(models / "bert", attn_implementation="sdpa"))


def _run_of(model: Any) -> Run:
    import torch

    model.eval()

    def run(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            input_ids = torch.from_numpy(ids)
            return model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state.numpy()

    return run


if __name__ == "__main__":
    sys.exit(main())
