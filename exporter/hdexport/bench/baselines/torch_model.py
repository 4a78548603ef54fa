"""The Hugging Face model in PyTorch, eager and by `torch.compile`, with the outputs of the manifest."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hdexport.bench.baselines.baseline import (
    Baseline,
    CaseSpec,
    Inputs,
    MeasuredModel,
    OpenCase,
    Texts,
    checkpoint_folder,
    first_cause,
    not_installed,
    runs_in_half,
)
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.trust import Trust
from hdexport.model.family import Family
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hdexport.model.graph_module import GraphModule

_COMPILER = "g++"
"""Compiler of torch.compile, unless the environment variable ``CXX`` names another compiler."""


class TorchEager(Baseline):
    name = "torch"
    is_compiled: ClassVar[bool] = False

    def unavailable(self, manifest: Manifest) -> str | None:
        return not_installed("torch", "transformers", "safetensors", install="pip install 'hdexport[export]'")

    def open(self, spec: CaseSpec, manifest: Manifest, inputs: Inputs) -> OpenCase:
        assert spec.artefact is not None
        half_precision = runs_in_half(spec.device, manifest)
        module = load_module(spec.artefact, manifest, half_precision=half_precision).to(spec.device)
        names, run = [output.name for output in manifest.result_outputs], self._prepared(module)

        def named(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            return dict(zip(names, run(**tensors), strict=True))

        return open_module(named, spec, manifest, inputs, is_compiled=self.is_compiled)

    def _prepared(self, module: GraphModule) -> Callable[..., Sequence[torch.Tensor]]:
        return module


def load_module(folder: Path, manifest: Manifest, *, half_precision: bool) -> GraphModule:
    """The model of a `checkpoint_folder` on the CPU, without inputs for a memory cache.

    Its attention is PyTorch's scaled_dot_product_attention if transformers has that for the model. Weights are float32,
    or in half precision of the bundle's type.
    """
    import torch

    from hdexport.checkpoint.heads import task_head
    from hdexport.model.graph_module import GraphModule

    task = manifest.task
    checkpoint = find_checkpoint(folder, trust=Trust(allow_pickle=True, trust_remote_code=True))
    # The bundle was compared with code of the checkpoint when it was made, and the folder may be a changed copy.
    model = checkpoint.load(task, runs_code=False)
    scale_queries(model, checkpoint.family, manifest)
    # A decoder's keys and values would be kept for a next call, and openvino.convert_model cannot convert that.
    model.config.use_cache = False
    if half_precision:
        for parameter in model.parameters():
            # Not the buffers: computed values, such as RoPE frequencies, stay in float32 in transformers too.
            parameter.data = parameter.data.to(getattr(torch, manifest.dtype))
    return GraphModule(
        model,
        task,
        inputs=[spec for spec in manifest.inputs if spec.role is not Role.RECURRENT_STATE],
        head=task_head(checkpoint, task),
    ).eval()


def module_and_example(
    model: MeasuredModel, folder: Path, *, device: str, batch: int, tokens: int
) -> tuple[GraphModule, dict[str, IntArray]]:
    """A model's module, and an example for its export, name -> [batch, tokens], shortened to the bundle's max_len."""
    bundle = open_bundle(model.bundle, check_files=False)
    half_precision = runs_in_half(device, bundle.manifest)
    module = load_module(checkpoint_folder(model, folder), bundle.manifest, half_precision=half_precision)
    return module, Texts(bundle).batch(batch, min(tokens, bundle.manifest.max_len))


def scale_queries(model: PreTrainedModel, family: Family, manifest: Manifest) -> None:
    """Scale the queries of transformers' model if the bundle scales its queries, in place."""
    from hdexport.attention.query_scale import LogScale
    from hdexport.attention.reference_attention import use_query_scale

    query_scale = LogScale.of_positions(manifest.positions)
    if query_scale is not None:
        use_query_scale(model, family, query_scale)


def open_module(
    run: Callable[..., dict[str, torch.Tensor]],
    spec: CaseSpec,
    manifest: Manifest,
    inputs: Inputs,
    *,
    is_compiled: bool = False,
) -> OpenCase:
    """A case that runs a batch through a module, with copies to and from the GPU.

    `run` takes the inputs by name, tensors [batch, tokens] on the case's device, and returns tensors by the names of
    the manifest.
    """
    import torch

    # Inference mode saves a little, but in it PyTorch 2.13 cannot compile code that makes tensors of NumPy's arrays, as
    # BigBird's does ("Guard failed on the same frame").
    without_gradients = torch.no_grad if is_compiled else torch.inference_mode

    torch.set_num_threads(spec.threads)

    def call() -> dict[str, FloatArray]:
        with without_gradients():
            outputs = run(**{name: torch.from_numpy(ids).to(spec.device) for name, ids in inputs.items()})
        # The copy to the host waits for the GPU.
        return {name: values.float().cpu().numpy() for name, values in outputs.items()}

    on_gpu = spec.device == "cuda"
    return OpenCase(
        call,
        half_precision=runs_in_half(spec.device, manifest),
        allocator_bytes=lambda: torch.cuda.max_memory_allocated() if on_gpu else None,
    )


class TorchCompile(TorchEager):
    name = "torch-compile"
    is_compiled = True

    def unavailable(self, manifest: Manifest) -> str | None:
        missing = super().unavailable(manifest)
        compiler = os.environ.get("CXX", _COMPILER)
        if missing is None and shutil.which(compiler) is None:
            return f"torch.compile needs a C++ compiler, {compiler}: apt-get install g++"
        if missing is None and not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
            return "torch.compile needs the headers of Python: apt-get install python3-dev"
        return missing

    def _prepared(self, module: GraphModule) -> Callable[..., Sequence[torch.Tensor]]:
        """Compile the model in the first call, for the shape of the case."""
        import torch
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError

        compiled = torch.compile(module, dynamic=False)

        def run(**tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            try:
                made: Sequence[torch.Tensor] = compiled(**tensors)
            except (TorchDynamoException, InductorError) as error:
                raise BackendError(f"torch.compile failed: {first_cause(error)}") from error
            return made

        return run
