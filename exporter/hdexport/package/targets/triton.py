"""Triton Inference Server: a model of its Python backend, texts in, embeddings or scores out. See docs/triton.md."""

from __future__ import annotations

from hdexport.package.files import write_bundle
from hdexport.package.target import Package, PackageTarget
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import Bundle
from hdruntime.serve.row_tensors import TRUNCATED
from hdruntime.serve.triton_model import BUNDLE_FOLDER, tensors_of
from hdruntime.tasks.task import Pairs

_MODEL = '''"""hdexport's model for the Python backend."""

from hdruntime.serve.row_tensors import TRUNCATED
from hdruntime.serve.triton_model import TritonPythonModel  # noqa: F401
'''

_CONFIG = """backend: "python"
max_batch_size: 1024
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
{inputs}
output [ {{ name: "{output}" data_type: TYPE_FP32 dims: [ {size} ] }} ]
output [ {{ name: "{truncated}" data_type: TYPE_BOOL dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_AUTO count: 1 }} ]
parameters [ {{ key: "backend" value: {{ string_value: "{backend}" }} }} ]
"""
"""It has no name: Triton takes the directory's."""

_INPUT = 'input [ {{ name: "{name}" data_type: TYPE_STRING dims: [ 1 ] optional: {optional} }} ]'


def _check(bundle: Bundle) -> None:
    tensors_of(bundle)


def _write(package: Package) -> None:
    tensors = tensors_of(package.bundle)
    inputs = {"TEXT": "false"}
    if tensors.pairs is not Pairs.REJECTED:
        inputs["TEXT_PAIR"] = "true" if tensors.pairs is Pairs.ALLOWED else "false"
    version = package.directory / "1"
    write_bundle(package, version / BUNDLE_FOLDER)
    (version / "model.py").write_text(_MODEL, encoding="utf-8")
    config = _CONFIG.format(
        inputs="\n".join(_INPUT.format(name=each, optional=optional) for each, optional in inputs.items()),
        output=tensors.name,
        truncated=TRUNCATED,
        size=tensors.size,
        backend=package.options.backend,
    )
    (package.directory / "config.pbtxt").write_text(config, encoding="utf-8")


TARGET = PackageTarget(
    name="triton",
    system="Triton Inference Server",
    source="https://github.com/triton-inference-server/python_backend",
    tried=("nvidia-pytriton 0.7.0",),
    write=_write,
    next_step="tritonserver --model-repository REPOSITORY, the directory that holds FOLDER; its Python needs hdexport.",
    tasks=frozenset(Task),
    takes=frozenset({"backend"}),
    check=_check,
)
