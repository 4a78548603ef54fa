"""PyTorch as it is: Hugging Face's model in eager mode."""

from __future__ import annotations

__all__ = ["TorchEager", "torch_unavailable"]

from pathlib import Path

from hdexport.bench.measure.case import CaseSpec
from hdexport.bench.measure.subject import Subject
from hdexport.bench.peers.checkpoint_folder import checkpoint_folder
from hdexport.bench.peers.peer import Inputs, OpenCase, Prepared, attention_remark, not_installed, runs_in_half
from hdexport.bench.peers.torch_model import load_module, open_module
from hdruntime.bundle.manifest import Manifest


class TorchEager:
    """See `hdexport.bench.peers.peer.Peer`; the artefact is a checkpoint's folder."""

    name = "torch"
    has_artefact = True

    def unavailable(self, manifest: Manifest) -> str | None:
        """Where PyTorch or transformers is missing."""
        return torch_unavailable()

    def remark(self, manifest: Manifest) -> str | None:
        """What of the bundle's attention it does not know."""
        return attention_remark(manifest)

    def prepare(self, subject: Subject, folder: Path, *, device: str) -> Prepared:
        """Extend the checkpoint's positions."""
        return Prepared(artefact=checkpoint_folder(subject, folder))

    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        """Load the model."""
        assert spec.artefact is not None
        half_precision = runs_in_half(spec.device, manifest)
        module = load_module(Path(spec.artefact), manifest, half_precision=half_precision).to(spec.device)
        names = [output.name for output in manifest.outputs]
        return open_module(module, spec, manifest, inputs, lambda result: dict(zip(names, result, strict=True)))


def torch_unavailable() -> str | None:
    """What is missing to load the model in PyTorch, with the command that installs it; None where nothing is."""
    return not_installed("torch", "transformers", "safetensors", install="pip install 'hdexport[export]'")
