"""Package a bundle for a Triton Inference Server: a model directory with its configuration.

DIR/NAME gets config.pbtxt, 1/model.plan or 1/model.onnx, and the tokenizer for clients, which send input_ids and
attention_mask. Triton serves a TensorRT engine without hdexport's plugins (--attention-impl native builds one), or
the graph for ONNX Runtime on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.cli.streams import outlive_readers

if TYPE_CHECKING:
    from hdexport.triton_repository import TritonModel

SUMMARY = "package a bundle for a Triton Inference Server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="directory that `hdexport build` made")
    parser.add_argument(
        "--triton",
        metavar="DIR",
        type=Path,
        required=True,
        help="model repository to add the model to; created if missing",
    )
    parser.add_argument("--name", help="the model's name (default: the bundle's)")
    parser.add_argument(
        "--backend",
        choices=["auto", "tensorrt", "onnxruntime"],
        default="auto",
        help="what Triton runs; auto (default): an engine that Triton can serve, else the graph on a CPU",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a model that this command wrote, its config.pbtxt included"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from hdexport.triton_repository import package_for_triton
    from hdruntime.bundle.reader import open_bundle

    outlive_readers()
    model = package_for_triton(
        open_bundle(options.bundle), options.triton, name=options.name, backend=options.backend, force=options.force
    )
    what = "the graph, in ONNX Runtime on a CPU" if model.engine is None else "the TensorRT engine"
    print(f"{model.path}: {what}, batches of up to {model.max_batch_size}; {model.reason}")
    print(f"Serve it: tritonserver --model-repository {options.triton}{_hint(model)}")
    return 0


def _hint(model: TritonModel) -> str:
    """An engine's requirements of the server."""
    engine = model.engine
    if engine is None:
        return ""
    where = f"TensorRT {engine.version}, on a GPU of {', '.join(engine.architectures)}"
    if engine.version_compatible:
        return f" --backend-config=tensorrt,version-compatible=true\nfrom a release with {where}, or newer"
    return f"\nfrom the release with {where}"
