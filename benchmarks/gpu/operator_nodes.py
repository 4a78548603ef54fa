"""The step about operators in ONNX Runtime: nodes of its CUDA provider that launch our kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import FAMILIES, Case
from benchmarks.gpu.job import Job, SkippedError, StepFailedError
from benchmarks.gpu.kernels import architecture_of, difference, write_shipped
from hdexport.graph.targets.onnxruntime.shared_block_indexes import ShareBlockIndexes
from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, ONNX_OPSET
from hdplugins.attention.function_bodies import function_of_node
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.onnxruntime.operators import KernelOperators, launcher_unavailable_reason, library_path
from hdruntime.backends.onnxruntime import CUDA_PROVIDER
from hdruntime.optional import installed_version

_DTYPES = ("float16", "float32")
"""The dtypes that NumPy has: a session takes its inputs as arrays of NumPy."""

_REHEARSED_HEAD_DIM, _HEAD_DIM = 32, 64


def check(job: Job) -> None:
    """Every operator in ONNX Runtime by its kernels, against its definition in float64; fails if an answer is wrong.

    A graph has two nodes of one mask; where kernels plan, the second node takes the block index of the first. A
    rehearsal runs the bodies of standard operators, which ignore block indexes.
    """
    if not job.rehearsal:
        _check_machine()
    problems = []
    for family, cases in FAMILIES.items():
        for dtype in _DTYPES:
            case = list(cases.checked(_REHEARSED_HEAD_DIM if job.rehearsal else _HEAD_DIM, dtype))[-1]
            found = _problem(job, case)
            problems += [f"{family}, {dtype}: {found}"] if found else []
            job.write(case="operator nodes", family=family, **case.row, problem=found)
    if problems:
        raise StepFailedError(f"{len(problems)} wrong answers, the first: {problems[0]}")


def _check_machine() -> None:
    import onnxruntime

    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        raise SkippedError(f"ONNX Runtime {onnxruntime.__version__} has no {CUDA_PROVIDER}")
    launcher = launcher_unavailable_reason()
    if launcher is not None:
        raise SkippedError(f"the library that launches kernels {launcher}: see hdexport doctor")
    if installed_version("cuda-bindings") is None:
        raise SkippedError("the package 'cuda-bindings' is not installed")


def _problem(job: Job, case: Case) -> str | None:
    """What is wrong with the answers of either node, or None."""
    import onnxruntime
    import torch

    tensors = [tensor for tensor in case.tensors(job.device, is_ragged=True) if tensor is not None]
    model, op_type = _model(case, tensors)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        if not job.rehearsal:
            write_shipped(Path(folder), case, tensors, architecture=architecture_of(job.device))
            library = library_path()
            assert library is not None
            KernelOperators(library, Path(folder), node_types={op_type: case.OPERATOR}).register(options)
        providers = ["CPUExecutionProvider"] if job.rehearsal else [CUDA_PROVIDER, "CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(model, options, providers=providers)
        feeds = dict(zip(case.OPERATOR.inputs, (tensor.cpu().numpy() for tensor in tensors), strict=False))
        answers = session.run(None, feeds)
    found = (difference(case, tensors, torch.from_numpy(answer).to(job.device)) for answer in answers)
    return next(filter(None, found), None)


def _model(case: Case, tensors: Sequence[Any]) -> tuple[bytes, str]:
    """Two nodes of the same inputs, and the type that they have where they share no block index."""
    import numpy as np
    import onnx_ir as ir
    from onnx import helper

    def value(name: str, kind: str, tensor: Any) -> Any:
        return helper.make_tensor_value_info(name, int(ir.DataType.from_numpy(np.dtype(kind))), list(tensor.shape))

    operator = case.OPERATOR
    body = function_of_node(operator, inputs=len(tensors), attributes=case.attributes)
    kinds = [kind or case.dtype for kind in plugin_spec_of(operator).INPUT_DTYPES]
    inputs = [value(*given) for given in zip(operator.inputs, kinds, tensors, strict=False)]
    outputs = [value(name, case.dtype, tensors[0]) for name in ("first", "second")]
    names = [given.name for given in inputs]
    nodes = [
        helper.make_node(body.name, names, [output.name], domain=ONNX_DOMAIN, **case.attributes) for output in outputs
    ]
    opsets = [helper.make_opsetid("", ONNX_OPSET), helper.make_opsetid(ONNX_DOMAIN, ONNX_DOMAIN_VERSION)]
    graph = helper.make_graph(nodes, "operators", inputs, outputs)
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    model.functions[body.identifier()] = body
    ShareBlockIndexes()(model)
    return ir.to_proto(model).SerializeToString(), body.name
