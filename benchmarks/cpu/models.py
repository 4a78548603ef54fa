"""Random models of base shape, their bundles, and ways to run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cpu.family_shapes import base_config
from benchmarks.cpu.targets import Ids, Run
from hdruntime.backends.openvino.devices import chosen_device, new_core

BUNDLE, HUGGING_FACE = "bundle", "hugging-face"
"""The bundle in ONNX Runtime, and the library's own model, from which the bundle is built."""

OPENVINO, OPENVINO_BFLOAT16 = "openvino", "openvino-bfloat16"
"""The bundle in OpenVINO, in float32 and in bfloat16."""


def save_checkpoint(models: Path, model_type: str, **sizes: Any) -> None:
    """Save the library's model of such sizes; see `base_config`."""
    import torch
    import transformers

    from hdexport.families import family_of
    from hdexport.model.task import model_from_config
    from hdruntime.bundle.manifest import Task

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = base_config(model_type, **sizes)
    model = model_from_config(config, family=family_of(model_type), task=Task.FEATURE_EXTRACTION)
    model.save_pretrained(models / HUGGING_FACE)


def build_bundle(models: Path, *, max_len: int, name: str = BUNDLE, source: Path | None = None, **options: Any) -> None:
    """Build a bundle whose answers are the model's own at all lengths.

    Args:
        models: the folder of models, which gets it.
        max_len: of the bundle.
        name: of the bundle.
        source: its checkpoint; None for the library's model in the folder.
        options: others of a build.
    """
    from hdexport.build import BuildOptions, build

    own: dict[str, Any] = {"alpha": 0.4, "attention_scale": "none", "verify": None, "unverified": True}
    model = source or models / HUGGING_FACE
    build(BuildOptions(model=model, output=models / name, max_len=max_len, **{**own, **options}))


def openvino_cases(*lengths: int) -> list[str]:
    """The cases that are timed through OpenVINO: bfloat16 where the CPU computes in it."""
    models = [OPENVINO, OPENVINO_BFLOAT16] if chosen_device(new_core(), None).has_bfloat16 else [OPENVINO]
    return [f"{model} {tokens}" for tokens in lengths for model in models]


def load(model: str, models: Path) -> Run:
    """Load the library's model, or its bundle in one of the three ways."""
    if model == HUGGING_FACE:
        return _load_reference(models)
    backend = "onnxruntime" if model == BUNDLE else "openvino"
    precision = "bfloat16" if model == OPENVINO_BFLOAT16 else "float32"
    return load_bundle(models / BUNDLE, backend, precision=precision)


def load_bundle(bundle: Path, backend: str, *, precision: str = "auto") -> Run:
    """Load a bundle as `hdruntime.load` does."""
    import hdruntime

    session = hdruntime.load(bundle, backend, precision=precision)
    return lambda ids: session(input_ids=ids)["last_hidden_state"]


def _load_reference(models: Path) -> Run:
    from hdexport.checkpoint import find_checkpoint
    from hdexport.verify.pytorch_reference import reference_of
    from hdruntime.bundle.reader import open_bundle
    from hdruntime.inference.inputs import checked_inputs

    bundle = open_bundle(models / BUNDLE)
    manifest, reference = bundle.manifest, reference_of(bundle, find_checkpoint(models / HUGGING_FACE))

    def run(ids: Ids) -> Any:
        inputs = checked_inputs({manifest.ids: ids}, manifest, memory=manifest.min_memory)
        of_role = {spec.role: inputs[spec.name] for spec in manifest.inputs}
        return reference.batch(reference.named(of_role, inputs))["last_hidden_state"]

    return run


def run_of_torch(model: Any) -> Run:
    """A model of PyTorch that takes ids and a mask, [1, tokens]."""
    import torch

    model.eval()

    def run(ids: Ids) -> Any:
        with torch.inference_mode():
            input_ids = torch.from_numpy(ids)
            return model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state.numpy()

    return run
