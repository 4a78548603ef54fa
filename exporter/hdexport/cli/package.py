"""Package a bundle as a Python-backend model of Triton Inference Server: texts in, embeddings or scores out.

The command writes config.pbtxt, 1/model.py and the bundle to DIR/NAME. The server's Python needs hdexport with the
extra of the backend, see docs/triton.md. `hdexport serve` needs no Triton.
"""

from __future__ import annotations

import argparse
import shlex

from hdexport.cli.arguments import local_path
from hdexport.cli.process import outlive_readers
from hdruntime.backends.registry import backend_names

SUMMARY = "package a bundle for Triton Inference Server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=local_path, help="directory of a bundle")
    parser.add_argument(
        "--triton",
        metavar="DIR",
        type=local_path,
        required=True,
        help="Triton model repository; created if missing",
    )
    parser.add_argument("--name", help="name of the model (default: name of the bundle)")
    parser.add_argument(
        "--backend",
        choices=["auto", *backend_names()],
        default="auto",
        help="backend that runs the bundle in Triton (default: auto)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a model that this command wrote, including config.pbtxt"
    )


def run(options: argparse.Namespace) -> int:
    from hdexport.publish.triton import package_for_triton
    from hdruntime.bundle.reader import open_bundle

    outlive_readers()
    path = package_for_triton(
        open_bundle(options.bundle), options.triton, name=options.name, backend=options.backend, force=options.force
    )
    print(f"{path}: a model of Triton's Python backend, whose Python needs hdexport")
    print(f"Serve it: tritonserver --model-repository {shlex.quote(str(options.triton))}")
    return 0
