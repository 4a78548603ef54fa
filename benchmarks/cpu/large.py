"""A large embedder on a CPU: what its build takes, and what texts take in a bundle and in other programs.

Usage: python -m benchmarks.cpu.large [--shape 0.6B] [--layers N] [--only build session] [--lengths 128 512]
           [--programs "hdexport openvino bfloat16"]
           [--llama PYTHON] [--optimum PYTHON] [--folder FOLDER] [--output FILE]

The model has random bfloat16 weights in the shape of Qwen3-Embedding-0.6B or -4B; --layers takes fewer layers. Each
case is a process of its own, measured as a whole: imports, loading, the work.

* build: ``hdexport build --target openvino``, for 4096 tokens or the longest text, with the comparison with PyTorch;
  build-no-verify, which runs only if named, without it; int8 is ``hdexport rebuild --int8`` of the bundle.
* session: the bundle by `hdruntime.load` on a backend in a precision, one text of each length.
* sentence-transformers: the checkpoint in bfloat16, and in float32, with whose embeddings those of all others are
  compared.
* llama: llama.cpp, weights in Q8_0 and F16. PYTHON is the interpreter of an environment with llama-cpp-python, compiled
  there: ``pip install llama-cpp-python gguf``.
* openvino-export: the model as optimum-intel exports it, weights in 16 and in 8 bits. PYTHON is the interpreter of an
  environment with ``optimum-intel[openvino]``.

Goals are printed as met or missed; the exit status is 1 if one is missed. A goal whose cases do not run, or that is of
another shape, is not printed. The folder keeps the checkpoint, the bundle and the converted models for a second run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu import embedders
from benchmarks.cpu.build_time import process_figures
from benchmarks.cpu.embedders import figures_of_process, size_of
from benchmarks.cpu.targets import TARGET_MISSED, cosines
from benchmarks.record import show

SHAPES: dict[str, dict[str, int]] = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
_VOCAB_SIZE = 151_669
_THREADS = 2
_MAX_LEN = 4096


@dataclass(frozen=True)
class Embedder:
    """A program, and the model that it loads.

    Attributes:
        case: the benchmark's case.
        file: of the program, in `embedders`.
        variant: backend, precision, dtype or type of weights, as the file's `load` and `convert` take it.
        min_cosine: least cosine of its embeddings with `REFERENCE`'s; lower ones are of another model.
        environment: the option with the program's interpreter; None for the interpreter of this process.
    """

    case: str
    file: str
    variant: str
    min_cosine: float
    environment: str | None = None


EMBEDDERS = {
    "hdexport openvino bfloat16": Embedder("session", "bundle", "openvino bfloat16", 0.99),
    "hdexport openvino int8": Embedder("session", "bundle", "openvino int8", 0.98),
    "hdexport openvino float32": Embedder("session", "bundle", "openvino float32", 0.9999),
    "hdexport onnxruntime float32": Embedder("session", "bundle", "onnxruntime float32", 0.9999),
    "sentence-transformers float32": Embedder("sentence-transformers", "pytorch", "float32", 1 - 1e-6),
    "sentence-transformers bfloat16": Embedder("sentence-transformers", "pytorch", "bfloat16", 0.99),
    "llama.cpp Q8_0": Embedder("llama", "llama", "Q8_0", 0.98, "llama"),
    "llama.cpp F16": Embedder("llama", "llama", "F16", 0.99, "llama"),
    "optimum-intel fp16": Embedder("openvino-export", "openvino_export", "fp16", 0.99, "optimum"),
    "optimum-intel int8": Embedder("openvino-export", "openvino_export", "int8", 0.98, "optimum"),
}
REFERENCE = "sentence-transformers float32"

_BUILDS = {"build-no-verify": ["--verify", "none"], "build": [], "int8": []}
"""Case -> options of the build."""

_ONLY_IF_NAMED = "build-no-verify"
CASES = (*_BUILDS, *dict.fromkeys(embedder.case for embedder in EMBEDDERS.values()))

_HDEXPORT = "import sys; from hdexport.cli import main; sys.exit(main())"
_WITHOUT_CALIBRATION = "from hdexport.quantize import bundle; bundle.MIN_PARAMETERS = 0; "
"""So that a model of fewer layers is quantized as the whole one."""


@dataclass(frozen=True)
class Goal:
    """A ratio of the figures of two cases, or a figure, and its limit.

    Attributes:
        text: what is compared.
        value: the ratio or the figure.
        limit: largest value, or smallest where `is_least`.
    """

    text: str
    value: float
    limit: float
    is_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def __str__(self) -> str:
        bound = "at least" if self.is_least else "at most"
        return f"{self.text}: {self.value:.3g}, {bound} {self.limit:g}: {'met' if self.is_met else 'MISSED'}"


def goals(found: Mapping[str, Mapping[str, Any]], *, shape: str, is_whole: bool) -> Iterator[Goal]:
    """Yield the goals whose cases ran.

    Args:
        found: name of a build or of an embedder -> its figures.
        shape: of the model.
        is_whole: whether the model has all layers; times and bytes are goals of whole models.
    """
    int8, bfloat16 = "hdexport openvino int8", "hdexport openvino bfloat16"
    q8, library = "llama.cpp Q8_0", "sentence-transformers bfloat16"
    for ours, theirs, least in (
        (int8, q8, 2.0),
        (int8, library, 1.5),
        (bfloat16, library, 1.5),
        (int8, bfloat16, 1 / 0.7),
    ):
        if {ours, theirs} <= found.keys():
            for tokens, rate in found[ours]["tokens_per_s"].items():
                text = f"tokens per second at {tokens} tokens, {ours} / {theirs}"
                yield Goal(text, rate / found[theirs]["tokens_per_s"][tokens], least, is_least=True)
    if {int8, q8, library} <= found.keys():
        smaller = min(found[q8]["peak_bytes"], found[library]["peak_bytes"])
        yield Goal(f"peak memory, {int8} / the smaller of the two", found[int8]["peak_bytes"] / smaller, 1.1)
    if shape != "0.6B" or not is_whole:
        return
    for name, figure, limit, text in (
        ("build", "peak_bytes", 3.0e9, "peak memory of a build, bytes"),
        ("build", "wall_s", 75, "time of a build, seconds"),
        ("build", "bundle_bytes", 1.25e9, "size of a bundle, bytes"),
        ("int8", "wall_s", 20, "time of --int8, seconds"),
        ("int8", "added_bytes", 0.65e9, "size that --int8 adds, bytes"),
        (bfloat16, "peak_bytes", 1.5e9, f"peak memory, {bfloat16}, bytes"),
        (int8, "peak_bytes", 0.9e9, f"peak memory, {int8}, bytes"),
    ):
        if name in found:
            yield Goal(text, found[name][figure], limit)


def save_checkpoint(directory: Path, shape: str, layers: int | None = None) -> None:
    """Save a random model in bfloat16 with a tokenizer of numbered words and the modules of Qwen3-Embedding."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    sizes = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = Qwen3Config(
        vocab_size=_VOCAB_SIZE,
        head_dim=128,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        tie_word_embeddings=True,
        dtype="bfloat16",
        **sizes,
    )
    with tempfile.TemporaryDirectory() as base:
        torch.set_default_dtype(torch.bfloat16)
        try:
            Qwen3Model(config).save_pretrained(base)
        finally:
            torch.set_default_dtype(torch.float32)
        words = Tokenizer(WordLevel({f"w{number}": number for number in range(_VOCAB_SIZE)}, unk_token="w3"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w3", eos_token="w1").save_pretrained(
            base
        )
        encoder = Transformer(base, model_kwargs={"dtype": torch.bfloat16})
        modules = [encoder, Pooling(sizes["hidden_size"], "lasttoken"), Normalize()]
        SentenceTransformer(modules=modules).save_pretrained(str(directory))


def measured_build(case: str, checkpoint: Path, bundle: Path, *, max_len: int) -> dict[str, Any]:
    """The figures of a build, or of int8 graphs that are added to a bundle."""
    before = size_of(bundle)
    if case == "int8":
        command = [_WITHOUT_CALIBRATION + _HDEXPORT, "rebuild", str(bundle), "--int8"]
    else:
        command = [_HDEXPORT, "build", str(checkpoint), "--max-len", str(max_len), "--target", "openvino"]
        command += ["--force", "-o", str(bundle), *_BUILDS[case]]
    figures = figures_of_process([sys.executable, "-c", *command])
    size = size_of(bundle)
    return {**figures, "bundle_bytes": size, "added_bytes": size - before}


def measured(
    embedder: Embedder, *, checkpoint: Path, folder: Path, python: str, lengths: Sequence[int]
) -> dict[str, Any]:
    """The figures and embeddings of a program; its model is converted first if it loads neither bundle nor checkpoint.

    Args:
        checkpoint: the checkpoint.
        folder: has the bundle and the converted models.
        python: interpreter of the program's environment.
        lengths: tokens of each text.
    """
    model = {"bundle": folder / "bundle", "pytorch": checkpoint}.get(embedder.file)
    found: dict[str, Any] = {}
    request = {
        "embedder": embedder.file, "variant": embedder.variant, "checkpoint": str(checkpoint), "threads": _THREADS,
        "lengths": list(lengths), "vocab_size": _VOCAB_SIZE,
    }  # fmt: skip
    if model is None:
        model = folder / f"{embedder.file}-{embedder.variant}"
        if not model.is_dir():
            staged = model.with_suffix(".partial")
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()
            converted = embedders.measured(python, **request, step="convert", model=str(staged))
            found["convert_s"], found["convert_peak_bytes"] = converted["wall_s"], converted["peak_bytes"]
            staged.rename(model)
        found["model_bytes"] = size_of(model)
    found |= embedders.measured(python, **request, step="run", model=str(model))
    rates = {tokens: int(tokens) / seconds["median"] for tokens, seconds in found["run_s"].items()}
    return {**found, "tokens_per_s": rates}


def least_cosines(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Least cosine of each program's embeddings with the reference's.

    Args:
        found: name of an embedder -> its figures, with ``embeddings``: tokens -> [hidden].
    """
    least = {}
    for name, figures in found.items():
        given, expected = figures["embeddings"], found[REFERENCE]["embeddings"]
        each = [float(cosines(np.array(given[tokens]), np.array(expected[tokens]))) for tokens in expected]
        least[name] = min(each)
    return least


def check_cosines(least: Mapping[str, float]) -> None:
    """Exit where a program runs another model; `least` is of `least_cosines`."""
    for name, cosine in least.items():
        if not cosine >= EMBEDDERS[name].min_cosine:
            sys.exit(
                f"{name} runs another model: the cosine of an embedding with that of {REFERENCE} is {cosine:.5f}, "
                f"not {EMBEDDERS[name].min_cosine} or more."
            )


def main() -> int:
    """Measure, and print; the exit status says whether all goals were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--only", nargs="+", choices=CASES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--programs", nargs="+", choices=list(EMBEDDERS), default=list(EMBEDDERS))
    parser.add_argument("--llama", metavar="PYTHON", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--optimum", metavar="PYTHON", help="interpreter of an environment with optimum-intel")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    pythons = {None: sys.executable, "llama": options.llama, "optimum": options.optimum}
    missing = {each.case: each.environment for each in EMBEDDERS.values() if pythons[each.environment] is None}
    cases = options.only or [case for case in CASES if case not in missing and case != _ONLY_IF_NAMED]
    for case in missing.keys() & set(cases):
        parser.error(f"{case} needs --{missing[case]} PYTHON")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        checkpoint, bundle = folder / "checkpoint", folder / "bundle"
        if not checkpoint.is_dir():
            # In a process of its own, so that its memory is no part of the others' peaks.
            process_figures([
                sys.executable, "-c", "import sys, pathlib; from benchmarks.cpu.large import save_checkpoint; "
                "save_checkpoint(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) or None)",
                str(checkpoint), options.shape, str(options.layers or 0),
            ])  # fmt: skip
        if not bundle.is_dir() and not {"build", "build-no-verify"} & set(cases) and {"int8", "session"} & set(cases):
            parser.error(f"{bundle} is no bundle: build it first, with --only build int8 session")
        about = {"shape": options.shape, "layers": options.layers, "checkpoint_bytes": size_of(checkpoint)}
        found: dict[str, dict[str, Any]] = {}
        for case in cases:
            if case in _BUILDS:
                found[case] = measured_build(case, checkpoint, bundle, max_len=max(_MAX_LEN, *options.lengths))
                show(options.output, module="benchmarks.cpu.large", case=case, **about, **found[case])
        programs = {name: EMBEDDERS[name] for name in options.programs if EMBEDDERS[name].case in cases}
        for name, each in programs.items():
            python = str(pythons[each.environment])
            found[name] = measured(each, checkpoint=checkpoint, folder=folder, python=python, lengths=options.lengths)
            print(f"{name}: done", file=sys.stderr)
    least = least_cosines({name: found[name] for name in programs}) if REFERENCE in found else {}
    for name, each in programs.items():
        figures = {key: value for key, value in found[name].items() if key != "embeddings"}
        cosine = {"min_cosine": least[name]} if name in least else {}
        show(options.output, module="benchmarks.cpu.large", case=each.case, embedder=name, **about, **figures, **cosine)
    check_cosines(least)
    reached = list(goals(found, shape=options.shape, is_whole=options.layers is None))
    print(*reached, sep="\n")
    return 0 if all(goal.is_met for goal in reached) else TARGET_MISSED


if __name__ == "__main__":
    sys.exit(main())
