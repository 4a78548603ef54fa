"""The models that servers run, as a checkpoint for all and a bundle; and texts of chosen numbers of tokens."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.texts import HELP, tokenizer_of

MAX_LEN = 4096

MODELS: Mapping[str, int] = {"tiny": 1, "sample": 6}
"""Name -> layers of all-MiniLM-L6-v2 that it has; its positions are extended to `MAX_LEN`."""

MIXES: Mapping[str, int | None] = {"4 to 20 words": None, "1 to 512 tokens": 512, "1 to 4096 tokens": MAX_LEN}
"""Name -> the most tokens of a text, on a logarithmic scale; None for words, each number as often."""


class Model(NamedTuple):
    """A model as files.

    Attributes:
        checkpoint: what sentence-transformers of any version loads, with ``model.onnx`` if it was exported.
        bundle: the bundle of the checkpoint.
        openvino_bundle: the bundle with graphs for OpenVINO.
    """

    checkpoint: Path
    bundle: Path
    openvino_bundle: Path


class Request(NamedTuple):
    """The body of a request for one embedding, and the tokens of its text."""

    body: bytes
    tokens: int


def make_model(folder: Path, name: str, optimum: Path | None) -> Model:
    """The model, made unless the folder has it.

    Args:
        folder: where models stay.
        name: of `MODELS`.
        optimum: ``optimum-cli`` that exports the checkpoint to ONNX; None for no export.
    """
    from hdexport.build import BuildOptions, build
    from hdexport.checkpoint import default_model
    from hdexport.extend import ExtendOptions, extend

    model = Model(folder / f"{name}-checkpoint", folder / f"{name}-bundle", folder / f"{name}-openvino-bundle")
    if not model.checkpoint.exists():
        short = folder / f"{name}-of-{MODELS[name]}-layers"
        shutil.rmtree(short, ignore_errors=True)
        _save_first_layers(Path(default_model()[0]), short, MODELS[name])
        extend(ExtendOptions(model=short, output=model.checkpoint, max_len=MAX_LEN))
    for bundle, targets in ((model.bundle, ()), (model.openvino_bundle, ("openvino",))):
        if not bundle.exists():
            build(BuildOptions(model=model.checkpoint, output=bundle, targets=targets, max_len=MAX_LEN, verify=None))
    # Beside the configuration: infinity 0.0.78 with optimum 2.1 finds it nowhere else.
    onnx = model.checkpoint / "model.onnx"
    if optimum is not None and not onnx.exists():
        exported = folder / f"{name}-onnx"
        task = ["--task", "feature-extraction", "--library", "transformers"]
        subprocess.run([optimum, "export", "onnx", "--model", model.checkpoint, *task, exported], check=True)
        (exported / "model.onnx").rename(onnx)
    return model


def requests_of(mix: str, bundle: Path, *, seed: int) -> Iterator[Request]:
    """Requests without end, the same ones for the same seed: texts of Python's own help."""
    draw, most = np.random.default_rng(seed), MIXES[mix]
    if most is None:
        tokenizer, words = tokenizer_of(bundle / "tokenizer.json"), HELP.split()
        while True:
            size = int(draw.integers(4, 21))
            start = int(draw.integers(0, len(words) - size))
            text = " ".join(words[start : start + size])
            yield _request(text, len(tokenizer.encode(text)))
    offsets = tokenizer_of(bundle / "tokenizer.json").encode(HELP, add_special_tokens=False).offsets
    while True:
        tokens = round(float(np.exp(draw.uniform(0, np.log(most)))))
        # Two of them are special.
        size = max(1, tokens - 2)
        start = int(draw.integers(0, len(offsets) - size))
        yield _request(HELP[offsets[start][0] : offsets[start + size - 1][1]], size + 2)


def _request(text: str, tokens: int) -> Request:
    return Request(json.dumps({"input": text}).encode(), tokens)


def _save_first_layers(model: Path, folder: Path, layers: int) -> None:
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    kept = {
        name: weights
        for name, weights in load_file(model / "model.safetensors").items()
        if not (layer := re.search(r"\.layer\.(\d+)\.", name)) or int(layer[1]) < layers
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
