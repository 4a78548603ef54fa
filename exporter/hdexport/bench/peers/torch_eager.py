"""PyTorch as it is: Hugging Face's model in eager mode."""

from __future__ import annotations

__all__ = ["TorchEager"]

from pathlib import Path

from hdexport.bench.measure.case import CaseSpec
from hdexport.bench.peers.peer import Inputs, OpenCase, Peer, not_installed, runs_in_half
from hdexport.bench.peers.torch_model import load_module, open_module
from hdruntime.bundle.manifest import Manifest


class TorchEager(Peer):
    """See `Peer`; the artefact is a checkpoint's folder."""

    name = "torch"

    def unavailable(self, manifest: Manifest) -> str | None:
        return not_installed("torch", "transformers", "safetensors", install="pip install 'hdexport[export]'")

    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        assert spec.artefact is not None
        half_precision = runs_in_half(spec.device, manifest)
        module = load_module(Path(spec.artefact), manifest, half_precision=half_precision).to(spec.device)
        names = [output.name for output in manifest.outputs]
        return open_module(module, spec, manifest, inputs, lambda result: dict(zip(names, result, strict=True)))
