"""OpenVINO's own export of a checkpoint, by optimum-intel; the variant is its ``--weight-format``.

It runs in the precision that OpenVINO takes by itself: bfloat16 where the processor has it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

PACKAGES = ("optimum-intel", "openvino", "nncf", "transformers", "torch")

_COMMAND = "import sys; from optimum.commands.optimum_cli import main; sys.exit(main())"


def convert(checkpoint: Path, model: Path, weights: str) -> None:
    """Run ``optimum-cli export openvino``."""
    options = ["--task", "feature-extraction", "--library", "transformers", "--weight-format", weights]
    command = ["export", "openvino", "--model", str(checkpoint), *options, str(model)]
    subprocess.run([sys.executable, "-c", _COMMAND, *command], check=True)


def load(model: Path, *, variant: str, threads: int, max_tokens: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function from ids, [1, tokens], to the embedding, [hidden]."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(model / "openvino_model.xml", "CPU", settings)
    request, inputs = compiled.create_infer_request(), {value.any_name for value in compiled.inputs}

    def run(ids: np.ndarray) -> np.ndarray:
        known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
        request.infer({name: known[name] for name in inputs}, share_inputs=True, share_outputs=True)
        last = request.get_tensor(compiled.output("last_hidden_state")).data[0, -1]
        return last / np.linalg.norm(last)

    return run
