"""The cost of a build, from the shell: wall time, CPU time and peak memory, against exporters that do less.

Usage: python -m benchmarks.cpu.build_time [--shapes sample bert longformer] [--rounds 3] [--output FILE]

Each case is a command in a fresh process that ends with a model on the disk, and is measured as a whole: imports,
loading, exporting, writing. The checkpoints are all-MiniLM-L6-v2, and random weights in the shapes of BERT-base and of
Longformer-base with 4 layers.

* build: ``hdexport build --no-verify --target onnx``: both ONNX graphs, no engine.
* plain: `torch.onnx.export` of the same PyTorch model with dynamic batch and tokens, its weights beside it. Longformer
  takes ``dynamo=False``, for ``dynamo=True`` fails; the graph is wrong for longer texts and fails on single ones.
* verified: ``hdexport build --target onnx``, which compares both graphs with PyTorch at many lengths and paddings.
* optimum: ``optimum-cli export onnx``, if it is on the PATH; it compares one short batch, and is listed only.

A process begins with no memory, so the growth of its memory is its peak. A build and a plain export must give the same
answer, except for Longformer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.targets import Figure, Target, run_cases

SHAPES = ("sample", "bert", "longformer")
TASK = "feature-extraction"
OUTPUT = "last_hidden_state"

_WRONG_WHEN_PLAIN = "longformer"
_LONGFORMER_LAYERS = 4
_TOKENS = 37
"""Length of the text that answers are compared for."""

_BUILD = "import sys; from hdexport.cli import main; sys.exit(main())"
"""The program of the command ``hdexport``."""

_PLAIN = """
import sys
import torch
from transformers import AutoModel

class LastHiddenState(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = AutoModel.from_pretrained(sys.argv[1])

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

model = LastHiddenState().eval()
ids = torch.ones(2, 37, dtype=torch.long)
inputs = (ids, ids.clone())  # one tensor given twice would be traced as one input
names = {"input_names": ["input_ids", "attention_mask"], "output_names": ["last_hidden_state"]}
axes, file = {0: "batch", 1: "tokens"}, sys.argv[2] + "/model.onnx"
if sys.argv[3] == "dynamo":
    program = torch.onnx.export(model, inputs, **names, dynamic_shapes=(axes, axes), dynamo=True, verbose=False)
    program.save(file, external_data=True)
else:
    dynamic_axes = dict.fromkeys(["input_ids", "attention_mask", "last_hidden_state"], axes)
    torch.onnx.export(model, inputs, file, **names, dynamic_axes=dynamic_axes, dynamo=False)
"""
"""The whole program of a plain export: nothing of ours is imported, let alone measured, beside it."""


def main() -> int:
    """Run all cases, or the one that a child process is for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12, help="of BERT; Longformer has at most 4")
    return run_cases("benchmarks.cpu.build_time", parser, _measured, _comparison)


def _comparison(options: argparse.Namespace) -> dict[str, Any]:
    models, shapes = options.models, options.shapes
    sizes = {"hidden_size": options.hidden_size, "layers": options.layers}
    for shape in shapes:
        _save_checkpoint(shape, models / shape, **sizes)
    refusals = {shape: refusal for shape in shapes if (refusal := _optimum_refusal(models / shape))}
    for shape, refusal in refusals.items():
        print(f"{shape} optimum: not measured: {refusal}", file=sys.stderr)
    return {
        "cases": [case for shape in shapes for case in _cases(shape, has_optimum=shape not in refusals)],
        "targets": [target for shape in shapes for target in _targets(shape)],
        "same_answers": {f"{shape} plain": (f"{shape} build", 1e-3) for shape in shapes if shape != _WRONG_WHEN_PLAIN},
        **sizes,
        "without_optimum": refusals,
    }


def _cases(shape: str, *, has_optimum: bool) -> list[str]:
    kinds = ["build", "plain", "verified", *(["optimum"] if has_optimum else [])]
    return [f"{shape} {kind}" for kind in kinds]


def _targets(shape: str) -> list[Target]:
    return [
        Target(f"{shape} build", f"{shape} plain", figure, 1.0)
        for figure in (Figure.LATENCY, Figure.CPU_TIME, Figure.MEMORY)
    ]


def _save_checkpoint(shape: str, directory: Path, *, hidden_size: int, layers: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModel

    from hdexport.checkpoint import default_model

    sample = default_model()[0]
    if shape == "sample":
        shutil.copytree(sample, directory)
        return
    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_attention_heads": hidden_size // 64,
        "num_hidden_layers": layers,
    }
    if shape == "longformer":
        layers = min(layers, _LONGFORMER_LAYERS)
        sizes |= {
            "num_hidden_layers": layers,
            "attention_window": [512] * layers,
            "max_position_embeddings": 4098,
            "vocab_size": 50265,
            "pad_token_id": 1,
            "type_vocab_size": 2,  # Longformer has 1, for which optimum makes an input that is out of range
        }
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(shape, **sizes)).save_pretrained(directory)
    if shape == "bert":
        # The same vocabulary.
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
            if (sample / name).is_file():
                shutil.copyfile(sample / name, directory / name)


def _command(kind: str, checkpoint: Path, output: Path) -> list[str]:
    if kind == "plain":
        exporter = "torchscript" if checkpoint.name == _WRONG_WHEN_PLAIN else "dynamo"
        return [sys.executable, "-c", _PLAIN, str(checkpoint), str(output), exporter]
    if kind == "optimum":
        return ["optimum-cli", "export", "onnx", "--model", str(checkpoint), "--task", TASK, str(output)]
    build = [sys.executable, "-c", _BUILD, "build", str(checkpoint), "--task", TASK, "--target", "onnx"]
    return [*build, "-o", str(output), "--force", *(["--no-verify"] if kind == "build" else [])]


def _optimum_refusal(checkpoint: Path) -> str | None:
    """Why optimum is not measured, with the last line of its own reason."""
    if shutil.which("optimum-cli") is None:
        return "optimum-cli is not on the PATH"
    with tempfile.TemporaryDirectory() as output:
        run = subprocess.run(_command("optimum", checkpoint, Path(output)), capture_output=True, text=True)
    return None if run.returncode == 0 else (run.stderr.strip().splitlines() or ["no message"])[-1]


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    shape, kind = options.case.split()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        if kind == "plain":
            output.mkdir()
        figures = process_figures(_command(kind, options.models / shape, output))
        is_compared = kind in ("build", "plain") and shape != _WRONG_WHEN_PLAIN
        return figures | {"answer": _answer(output / "model.onnx")} if is_compared else figures


def process_figures(command: Sequence[str]) -> dict[str, Any]:
    """Wall time, CPU time and peak memory of a process and its children, as the system accounts for them.

    Exits, with the process' own words, if it fails. Linux counts into the peak the resident memory of the parent
    process at that moment, so call it from a process that has not loaded much.
    """
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        latency_ms = (time.perf_counter() - began) * 1e3
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            sys.exit(f"{' '.join(command)}: exit status {process.returncode}\n{said.read()}")
    cpu_ms = (usage.ru_utime + usage.ru_stime) * 1e3
    return {"latency_ms": latency_ms, "cpu_ms": cpu_ms, "growth_bytes": usage.ru_maxrss * 1024}


def _answer(model: Path) -> list[float]:
    """A few values of an ONNX file's answer for a text of `_TOKENS` tokens."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    ids = np.arange(1000, 1000 + _TOKENS)[None]
    ones, zeros = np.ones_like(ids), np.zeros_like(ids)
    known = {"input_ids": ids, "attention_mask": ones, "token_type_ids": zeros, "global_attention_mask": zeros}
    feeds = {value.name: known[value.name] for value in session.get_inputs()}
    values: list[float] = session.run([OUTPUT], feeds)[0][0, ::8, :8].ravel().tolist()
    return values


if __name__ == "__main__":
    sys.exit(main())
