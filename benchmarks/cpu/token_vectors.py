"""Token vectors on a CPU: `hdruntime.MultiVectorEncoder` against sentence-transformers', side by side.

Usage: python -m benchmarks.cpu.token_vectors [--rounds 5] [--threads 1] [--output FILE]

The model is the sample model with more positions and a random projection to 128 dimensions: its vectors mean nothing,
and cost as much as a ColBERT's of that size. The documents are the topics of Python's own help. Before anything is
timed, both must give the same vectors. CPU time is all threads' together; beside other programs it is steadier than
latency.
"""

from __future__ import annotations

import argparse
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import show
from benchmarks.texts import HELP, tokenizer_of
from hdexport.bench.measure.calls import timed

_MAX_LEN, _DIMENSIONS = 4096, 128

_LENGTHS = {"32 documents of 16 to 512 tokens": tuple(range(16, 513, 16)), "1 document of 4096 tokens": (4096,)}
"""Name of a case -> tokens of each document, special tokens and prompt included."""

_ATOL = 1e-4


def main() -> int:
    """Make the models, compare them, and time them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    import torch
    from sentence_transformers import MultiVectorEncoder as Theirs

    from hdexport.build import BuildOptions, build
    from hdruntime import MultiVectorEncoder

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = _make_checkpoint(Path(scratch))
        build(BuildOptions(model=checkpoint, output=Path(scratch) / "bundle", max_len=_MAX_LEN, verify=None))
        theirs = Theirs(str(checkpoint), device="cpu")
        with MultiVectorEncoder(
            Path(scratch) / "bundle", document_length="bundle", threads=options.threads, backend="onnxruntime"
        ) as ours:
            for name, lengths in _LENGTHS.items():
                documents = _documents(Path(scratch) / "bundle/tokenizer.json", lengths, ours.prompts["document"])
                runs: dict[str, Callable[[], Any]] = {
                    "hdruntime": lambda documents=documents: ours.encode_document(documents),  # type: ignore[misc]
                    "sentence-transformers": lambda documents=documents: theirs.encode_document(  # type: ignore[misc]
                        documents, convert_to_numpy=True, show_progress_bar=False
                    ),
                }
                difference = _difference(*(run() for run in runs.values()))
                if difference > _ATOL:
                    print(f"{name}: the vectors differ by {difference:.2g}, more than {_ATOL:g}")
                    return 1
                show(
                    options.output,
                    module="benchmarks.cpu.token_vectors",
                    case=name,
                    threads=options.threads,
                    max_abs_difference=difference,
                    **_timed(runs, options.rounds),
                )
    return 0


def _timed(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of the rounds, in milliseconds."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(timed(run)[1:])
    return {
        name: {
            f"{kind}_ms": round(float(np.median([times[place] for times in each])), 1)
            for place, kind in enumerate(("latency", "cpu"))
        }
        for name, each in found.items()
    }


def _difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    if [each.shape for each in found] != [each.shape for each in expected]:
        return float("inf")
    return max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))


def _documents(tokenizer: Path, lengths: tuple[int, ...], prompt: str) -> list[str]:
    """Texts of about so many tokens: the longest beginnings of parts of `HELP` that fit."""
    whole = tokenizer_of(tokenizer).encode(HELP)
    around = len(tokenizer_of(tokenizer).encode(prompt).ids)
    documents, first = [], 1
    for length in lengths:
        last = first + length - around
        documents.append(HELP[whole.offsets[first][0] : whole.offsets[last - 1][1]])
        first = last
    return documents


def _make_checkpoint(scratch: Path) -> Path:
    import torch
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    from hdexport.checkpoint import default_model
    from hdexport.extend import ExtendOptions, extend

    extended, of_tokens = scratch / "extended", {"module_input_name": "token_embeddings"}
    extend(ExtendOptions(model=default_model()[0], output=extended, max_len=_MAX_LEN))
    torch.manual_seed(0)
    transformer = Transformer(
        str(extended),
        max_seq_length=_MAX_LEN,
        document_length=_MAX_LEN,
        query_expansion={"strategy": "fixed", "length": 32},
    )
    projection = Dense(384, _DIMENSIONS, bias=False, activation_function=torch.nn.Identity(), **of_tokens)
    mask = MultiVectorMask(skiplist_words=list(string.punctuation))
    modules = [transformer, projection, mask, Normalize(**of_tokens)]
    prompts = {"query": "[Q] ", "document": "[D] "}
    MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu").save_pretrained(str(scratch / "checkpoint"))
    return scratch / "checkpoint"


if __name__ == "__main__":
    raise SystemExit(main())
