"""PyTorch compiled: the model of `torch_eager` through torch.compile."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from hdexport.bench.measure.case import CaseSpec
from hdexport.bench.peers.peer import Inputs, OpenCase, first_cause, runs_in_half
from hdexport.bench.peers.torch_model import TorchEager, load_module, open_module
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import BackendError

_COMPILER = "g++"
"""Unless the environment variable ``CXX`` names another, as for torch.compile itself."""


class TorchCompile(TorchEager):
    """See `Peer`."""

    name = "torch-compile"

    def unavailable(self, manifest: Manifest) -> str | None:
        missing = super().unavailable(manifest)
        compiler = os.environ.get("CXX", _COMPILER)
        if missing is None and shutil.which(compiler) is None:
            return f"torch.compile needs a C++ compiler, {compiler}: apt-get install g++"
        if missing is None and not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
            return "torch.compile needs the headers of Python: apt-get install python3-dev"
        return missing

    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        """Load the model; the first call compiles it, for the shape of the case alone."""
        import torch
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError

        assert spec.artefact is not None
        half_precision = runs_in_half(spec.device, manifest)
        module = load_module(spec.artefact, manifest, half_precision=half_precision).to(spec.device)
        compiled = torch.compile(module, dynamic=False)
        names = [output.name for output in manifest.answers]

        def run(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            try:
                return dict(zip(names, compiled(**tensors), strict=True))
            except (TorchDynamoException, InductorError) as error:
                raise BackendError(f"torch.compile failed: {first_cause(error)}") from error

        return open_module(run, spec, manifest, inputs, is_compiled=True)
