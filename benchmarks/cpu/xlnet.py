"""Relative attention on a CPU: segments of an XLNet's bundle against Hugging Face's XLNet.

Usage: python -m benchmarks.cpu.xlnet [--segment 512] [--memory 512] [--documents 4096 65536] [--rounds 5]
    [--output FILE]

Both models have base shape (hidden size 768, heads of 64, feed-forward 3072, GELU, four layers of it) and random
weights, on which speed does not depend. A case is one segment, with a full memory of the segments before; Hugging
Face's model runs in eager mode, its only one, and also leaves its memory for the next segment. The bundle must give
Hugging Face's answer.

The other cases stream a document through the bundle. The longer one may take no more memory than 1.3 times what the
shorter one takes, weights and all, and as long for each segment.
"""

from __future__ import annotations

import argparse
import collections
import sys
from typing import Any

import numpy as np

from benchmarks.cpu.family_shapes import VOCAB_SIZE
from benchmarks.cpu.models import BUNDLE, HUGGING_FACE, build_bundle, save_checkpoint
from benchmarks.cpu.targets import Figure, Ids, Run, Target, figures_of, random_ids, run_cases

_MODULE = "benchmarks.cpu.xlnet"
_TOLERANCE = 1e-3
_LATENCY, _PEAK, _PER_SEGMENT = 0.6, 1.3, 1.15
_STREAM = "stream"


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--segment", type=int, default=512)
    parser.add_argument("--memory", type=int, default=512)
    parser.add_argument("--documents", type=int, nargs=2, default=(4096, 65536), help="two, rising, in tokens")
    parser.add_argument("--layers", type=int, default=4)
    return run_cases(_MODULE, parser, _case_figures, _comparison)


def cases(short: int, long: int) -> list[str]:
    """The timed cases."""
    return [BUNDLE, HUGGING_FACE, f"{_STREAM} {short}", f"{_STREAM} {long}"]


def targets(short: int, long: int) -> tuple[Target, ...]:
    """Targets of a segment, and of documents of two lengths."""
    shorter, longer = f"{_STREAM} {short}", f"{_STREAM} {long}"
    return (
        Target(BUNDLE, HUGGING_FACE, Figure.LATENCY, _LATENCY),
        Target(longer, shorter, Figure.PEAK, _PEAK),
        Target(longer, shorter, Figure.LATENCY, _PER_SEGMENT * long / short),
    )


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    model, _, tokens = options.case.partition(" ")
    if model == _STREAM:
        return _stream_figures(options, int(tokens))
    load = _load_bundle if model == BUNDLE else _load_hugging_face
    past = random_ids(options.memory + options.segment, VOCAB_SIZE)[:, : options.memory]
    ids = random_ids(options.memory + options.segment, VOCAB_SIZE)[:, options.memory :]
    return figures_of(load(options, past), ids)


def _load_bundle(options: argparse.Namespace, past: Ids) -> Run:
    import hdruntime

    session = hdruntime.load(options.models / BUNDLE, backend="onnxruntime")
    left = session(input_ids=past)
    carried = {spec.name: left[str(spec.fed_from)] for spec in session.manifest.recurrent_states}
    return lambda ids: session(input_ids=ids, **carried)["last_hidden_state"]


def _load_hugging_face(options: argparse.Namespace, past: Ids) -> Run:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModel.from_pretrained(options.models / HUGGING_FACE).eval()

    def run(ids: Ids, memory: Any = None) -> Any:
        input_ids = torch.from_numpy(ids)
        mask = torch.ones(ids.shape)
        with torch.inference_mode():
            return model(input_ids=input_ids, attention_mask=mask, mems=memory, use_mems=True)

    memory = run(past).mems
    return lambda ids: run(ids, memory).last_hidden_state.numpy()


def _stream_figures(options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    import hdruntime

    session = hdruntime.load(options.models / BUNDLE, backend="onnxruntime")

    def run(ids: Ids) -> Any:
        """The states of the last segment: a caller who keeps all of them keeps a document's."""
        (last,) = collections.deque(session.stream(ids[0], segment=options.segment), maxlen=1)
        return last.outputs["last_hidden_state"][np.newaxis]

    return figures_of(run, random_ids(tokens, VOCAB_SIZE), warm_up_tokens=tokens)


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    save_checkpoint(options.models, "xlnet", layers=options.layers, changes={"mem_len": options.memory})
    build_bundle(options.models, max_len=max(options.segment, options.memory))
    documents = sorted(options.documents)
    return {
        "cases": cases(*documents),
        "targets": targets(*documents),
        "same_answers": {BUNDLE: (HUGGING_FACE, _TOLERANCE)},
        **{name: getattr(options, name) for name in ("layers", "segment", "memory")},
    }


if __name__ == "__main__":
    sys.exit(main())
