"""sentence-transformers: its own forward pass on given ids."""

from __future__ import annotations

from typing import Any

from hdexport.bench.baselines.baseline import Baseline, CaseSpec, Inputs, OpenCase, not_installed, runs_in_half
from hdexport.bench.baselines.torch_model import open_module, scale_queries
from hdexport.families import family_of
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.tasks.of_bundle import class_of

_WITH_DECODERS = ("bigbird_pegasus", "led")

_NAME_OF_OUTPUT = {"last_hidden_state": "token_embeddings", "sparse_embedding": "sentence_embedding"}
"""Name in the manifest -> in sentence-transformers, where they differ."""


class SentenceTransformers(Baseline):
    name = "sentence-transformers"

    def unavailable(self, manifest: Manifest) -> str | None:
        encoder = class_of(manifest.task).encoder_of(manifest)
        if encoder is None or encoder.texts == "pairs":
            return f"it embeds texts, and the bundle's task is {manifest.task}"
        if manifest.model_type in _WITH_DECODERS:
            return f"it runs the decoder of a {manifest.model_type} as well, and the bundle is the encoder"
        return not_installed("sentence_transformers", "safetensors", install="pip install sentence-transformers")

    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        """Loads the model, on a GPU in the type of the bundle."""
        import sentence_transformers
        import torch

        encoder = class_of(manifest.task).encoder_of(manifest)
        assert encoder is not None, "the bundle of an available baseline has one"
        model = getattr(sentence_transformers, encoder.library)(
            str(spec.artefact),
            device=spec.device,
            local_files_only=True,
            trust_remote_code=True,
            model_kwargs={
                "dtype": getattr(torch, manifest.dtype) if runs_in_half(spec.device, manifest) else torch.float32
            },
        ).eval()
        scale_queries(model[0].auto_model, family_of(manifest.model_type), manifest)
        names = {output.name: _NAME_OF_OUTPUT.get(output.name, output.name) for output in manifest.result_outputs}
        attended = manifest.input_of(Role.ATTENDED)

        def run(**features: Any) -> dict[str, Any]:
            if attended is not None:
                # The library has one mask; it knows by their places which unattended tokens have vectors.
                features["attention_mask"] = features["attention_mask"] * features.pop(attended.name)
            result = model(features)
            return {name: result[own] for name, own in names.items()}

        return open_module(run, spec, manifest, inputs)
