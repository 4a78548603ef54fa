"""Dense attention on a CPU beside OpenVINO: a bundle in float32, bfloat16 and int8 against what OpenVINO makes itself.

Usage: python -m benchmarks.cpu.openvino [--tokens 128 512 2048 4096] [--rounds 5] [--output FILE]

OpenVINO's cases are its users' ways: `openvino.convert_model` of the Hugging Face model in float32, the same as it
runs by default (in bfloat16 on a CPU that has it), and NNCF's static int8 of it. The bundle's int8 in ONNX Runtime, for
machines without OpenVINO, is to be faster than its float32 there. Listed beside: the int8 of large models, whose
activations OpenVINO quantizes while it runs. ONNX Runtime's own case is a plain export with its
dynamic quantisation. The input is text: the topics of Python's own help.

"cosine loss" is 1 less the worst cosine with PyTorch, over text vectors (the mean of the tokens') of 24 texts
of up to 512 tokens, none of which calibrates anything; it is a figure of each model at the shortest length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.cpu.dense import load_plain, torch_model, write_plain_export
from benchmarks.cpu.models import build_bundle, load_bundle, run_of_torch
from benchmarks.cpu.targets import Figure, Ids, Run, Target, cosines, figures_of, run_cases
from benchmarks.texts import HELP, tokenizer_of

BUNDLES = {
    "bundle": ("float32", "auto", "float32"),
    "bundle-openvino": ("float32", "openvino", "float32"),
    "bundle-bfloat16": ("bfloat16", "openvino", "bfloat16"),
    "bundle-int8": ("float32", "openvino", "int8"),
    "bundle-int8-onnxruntime": ("float32", "onnxruntime", "int8"),
    "bundle-int8-uncalibrated": ("uncalibrated", "openvino", "int8"),
}
"""Case -> its bundle, and the backend and precision that it is loaded with."""

OPENVINO = ("openvino", "openvino-default", "openvino-int8")
"""Baselines of `hdexport bench`."""

TORCH, ONNXRUNTIME_INT8 = "torch-sdpa", "onnxruntime-dynamic-int8"
MODELS = (*BUNDLES, *OPENVINO, ONNXRUNTIME_INT8, TORCH)
RIVALS = {
    "bundle": "openvino",
    "bundle-bfloat16": "openvino-default",
    "bundle-int8": "openvino-int8",
    "bundle-int8-onnxruntime": "bundle",
}
"""Who must be faster -> than whom, without more memory at peak."""

_LATENCY, _LONG_LATENCY, _LONG_TOKENS = 0.95, 0.80, 2048
"""Targets of the ratio of latencies; the second in float32, from so many tokens on."""

_COSINE_LOSS = 0.002
"""Largest cosine loss of bundles in bfloat16 and int8."""

_SAME = {"bundle": 1e-3, "bundle-openvino": 1e-3, "openvino": 1e-3}
_LEAST_COSINE = {
    "bundle-bfloat16": 0.998,
    "openvino-default": 0.998,
    "bundle-int8": 0.95,
    "bundle-int8-onnxruntime": 0.95,
    "bundle-int8-uncalibrated": 0.95,
    "openvino-int8": 0.5,
    ONNXRUNTIME_INT8: 0.5,
}
"""Cosine of 16 of a text's tokens together with PyTorch's, at any length. The rivals' bounds only tell a poor answer
from none: NNCF's scales are of texts of up to 512 tokens."""

_TEXTS, _LONGEST_TEXT, _FIRST_TOKEN = 24, 512, 96_000
"""Texts whose vectors are compared, and the token of the help where they begin: its first 64 topics calibrate."""

_LEAST_SECONDS = 2.0
"""Least duration of a case's timed runs together: at 128 tokens, hundreds of runs."""


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=(128, 512, 2048, 4096), help="lengths")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS, help="models; PyTorch checks them")
    return run_cases("benchmarks.cpu.openvino", parser, _case_figures, _comparison)


def targets(lengths: Sequence[int], models: Sequence[str]) -> list[Target]:
    """Targets of all models that run and whose rivals run."""
    found = []
    for ours, theirs in RIVALS.items():
        if ours in models and ours != "bundle":
            found.append(Target(f"{ours} {min(lengths)}", None, Figure.COSINE_LOSS, _COSINE_LOSS))
        if ours in models and theirs in models:
            for tokens in lengths:
                is_long = ours == "bundle" and tokens >= _LONG_TOKENS
                at_most = _LONG_LATENCY if is_long else _LATENCY
                found.append(Target(f"{ours} {tokens}", f"{theirs} {tokens}", Figure.LATENCY, at_most))
                found.append(Target(f"{ours} {tokens}", f"{theirs} {tokens}", Figure.PEAK, 1.0))
    return found


def text_vectors(run: Run, texts: Sequence[Ids]) -> npt.NDArray[np.float64]:
    """[texts, hidden]: the mean of the tokens' vectors, of each text alone.

    Args:
        texts: [1, tokens] each.
    """
    return np.stack([np.asarray(run(ids))[0].astype(np.float64).mean(axis=0) for ids in texts])


def _case_figures(options: argparse.Namespace) -> dict[str, Any]:
    model, tokens = options.case.split()
    run = _load(model, options.models, max(options.tokens))
    found = figures_of(run, np.load(options.models / f"{tokens}.npy"), least_seconds=_LEAST_SECONDS)
    if int(tokens) == min(options.tokens):
        with np.load(options.models / "texts.npz") as file:
            expected, texts = file["expected"], [file[f"text-{number}"] for number in range(_TEXTS)]
        found["cosine_loss"] = float(1 - cosines(text_vectors(run, texts), expected).min())
    return found


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    lengths = sorted(options.tokens)
    models = [model for model in MODELS if model in options.only or model == TORCH]
    _make_models(options.models, models, longest=lengths[-1])
    _write_texts(options.models, lengths)
    return {
        "cases": [f"{model} {tokens}" for tokens in lengths for model in models],
        "targets": targets(lengths, models),
        "same_answers": {
            f"{model} {tokens}": (f"{TORCH} {tokens}", most)
            for model, most in _SAME.items()
            for tokens in lengths
            if model in models
        },
        "alike_answers": {
            f"{model} {tokens}": (f"{TORCH} {tokens}", least)
            for model, least in _LEAST_COSINE.items()
            for tokens in lengths
            if model in models
        },
        "tokens": lengths,
    }


def _make_models(folder: Path, models: Sequence[str], *, longest: int) -> None:
    from onnxruntime.quantization import quantize_dynamic

    from benchmarks.baselines import BASELINES
    from hdexport.bench.baselines.baseline import MeasuredModel
    from hdexport.checkpoint import default_model
    from hdexport.quantize import Int8Options
    from hdexport.quantize import bundle as quantize

    source, _ = default_model()
    int8: dict[str, Any] = {}
    if {"bundle-int8", "bundle-int8-onnxruntime"} & set(models):
        int8 = {"int8": Int8Options()}
    about = {"source": source, "max_len": longest, "targets": ("openvino",)}
    build_bundle(folder, name="float32", precision="float32", **about, **int8)
    build_bundle(folder, name="bfloat16", precision="bfloat16", **about)
    if "bundle-int8-uncalibrated" in models:
        with mock.patch.object(quantize, "MIN_PARAMETERS", 0):
            build_bundle(folder, name="uncalibrated", precision="float32", int8=Int8Options(), **about)
    subject = MeasuredModel(bundle=folder / "float32", checkpoint=str(source))
    for baseline in OPENVINO:
        if baseline in models:
            BASELINES[baseline].prepare(subject, folder, device="cpu")
    if ONNXRUNTIME_INT8 in models:
        write_plain_export(folder / "plain.onnx", longest)
        quantize_dynamic(folder / "plain.onnx", folder / "int8.onnx")


def _write_texts(folder: Path, lengths: Sequence[int]) -> None:
    """The timed texts, and the texts whose vectors are compared, with PyTorch's vectors."""
    from hdexport.bench.baselines.baseline import Texts
    from hdruntime.bundle.reader import open_bundle

    bundle = open_bundle(folder / "float32")
    for tokens in lengths:
        np.save(folder / f"{tokens}.npy", Texts(bundle).batch(1, tokens)["input_ids"])
    assert bundle.manifest.tokenizer is not None
    (first, *content, last) = tokenizer_of(bundle.file(bundle.manifest.tokenizer.file)).encode(HELP).ids
    longest = min(_LONGEST_TEXT, max(lengths))
    texts = {}
    for number in range(_TEXTS):
        begin, count = _FIRST_TOKEN + number * longest, longest * (number + 1) // _TEXTS
        texts[f"text-{number}"] = np.array([[first, *content[begin : begin + count - 2], last]], np.int64)
    expected = text_vectors(run_of_torch(torch_model(max(lengths))), list(texts.values()))
    np.savez(folder / "texts.npz", expected=expected, **texts)  # type: ignore[arg-type]


def _load(model: str, folder: Path, longest: int) -> Run:
    if model == TORCH:
        return run_of_torch(torch_model(longest))
    if model == ONNXRUNTIME_INT8:
        return load_plain(folder / "int8.onnx")
    if model in OPENVINO:
        return load_openvino(folder / ("openvino-int8" if model == "openvino-int8" else "openvino"), model)
    bundle, backend, precision = BUNDLES[model]
    return load_bundle(folder / bundle, backend, precision=precision)


def load_openvino(folder: Path, model: str) -> Run:
    """The file of the baseline `model`, in float32 for `openvino`, else as OpenVINO runs it by default."""
    from benchmarks.baselines.openvino import MODEL_FILE
    from hdruntime.optional import require

    settings = {"INFERENCE_PRECISION_HINT": "f32"} if model == "openvino" else {}
    compiled = require("openvino").Core().compile_model(folder / MODEL_FILE, "CPU", settings)
    request, names = compiled.create_infer_request(), [value.any_name for value in compiled.inputs]
    tokens = compiled.output("last_hidden_state")

    def run(ids: Ids) -> Any:
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        return request.infer({name: inputs[name] for name in names}, share_inputs=True, share_outputs=True)[tokens]

    return run


if __name__ == "__main__":
    sys.exit(main())
