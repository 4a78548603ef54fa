"""Hugging Face optimum: its ONNX export, made by ``optimum-cli``, in ONNX Runtime."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from hdexport.bench.baselines.baseline import (
    MeasuredModel,
    Prepared,
    checkpoint_folder,
    not_installed,
    runs_in_half,
    staged_artefact,
)
from hdexport.bench.baselines.onnx_plain import MODEL_FILE, OnnxBaseline, check_provider
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import ExportError

_COMMAND = "optimum-cli"

_INSTALL = "pipx install 'optimum-onnx[onnxruntime]'"
"""optimum-onnx needs transformers 4, and hdexport 5, so Optimum runs in an environment of its own."""


class Optimum(OnnxBaseline):
    name = "optimum"
    example_tokens = 16  # the default of Optimum

    def unavailable(self, manifest: Manifest) -> str | None:
        if shutil.which(_COMMAND) is None:
            return f"{_COMMAND} is not on the PATH: {_INSTALL}"
        return not_installed("torch", "transformers", "safetensors", "onnx", install="pip install 'hdexport[export]'")

    def prepare(self, subject: MeasuredModel, folder: Path, *, device: str) -> Prepared:
        """Exports the extended checkpoint; the remark says which inputs and outputs the graph lacks."""
        check_provider(device)
        manifest = open_bundle(subject.bundle, check_files=False).manifest
        checkpoint = checkpoint_folder(subject, folder)
        output = folder / self.name
        with staged_artefact(output, MODEL_FILE) as directory:
            _export(checkpoint, manifest, directory, device=device)
        return Prepared(artefact=output / MODEL_FILE, remark=_remark(output / MODEL_FILE, manifest))


def _export(checkpoint: Path, manifest: Manifest, directory: Path, *, device: str) -> None:
    """Runs the command; Optimum's own check of one short shape does not change the exit code."""
    command = [_COMMAND, "export", "onnx", "--model", str(checkpoint), "--task", manifest.task]
    if manifest.task != "sentence-similarity":
        # For that task, Optimum would take a folder with sentence-transformers' modules, whatever --task says.
        command += ["--library-name", "transformers"]
    if runs_in_half(device, manifest):
        command += ["--device", "cuda", "--dtype", {"float16": "fp16", "bfloat16": "bf16"}[manifest.dtype]]
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True, errors="replace")
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        raise ExportError(f"{_COMMAND} ended with exit code {done.returncode}: {said[-1] if said else 'no message'}")
    if not (directory / MODEL_FILE).is_file():
        made = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
        raise ExportError(f"{_COMMAND} wrote no {MODEL_FILE}, but {made}.")


def _remark(path: Path, manifest: Manifest) -> str | None:
    """A sentence on the inputs, outputs and computations that the bundle has and the baseline's graph lacks."""
    import onnx

    positions = manifest.positions
    if positions.attention_scale != "none" and manifest.max_len > (positions.trained or positions.base):
        return "does not scale queries by log n: its answers to texts past the trained positions differ"
    graph = onnx.load(path, load_external_data=False).graph
    marks = manifest.input_of(Role.GLOBAL_ATTENTION_MASK)
    if marks is not None and marks.name not in [value.name for value in graph.input]:
        return f"takes no {marks.name}: which tokens are global was fixed at the export"
    if manifest.task == "sentence-similarity" and "sentence_embedding" not in [value.name for value in graph.output]:
        return (
            "gives the tokens' vectors and no sentence_embedding, for its environment lacks sentence-transformers: "
            "pipx inject optimum-onnx sentence-transformers"
        )
    return None
