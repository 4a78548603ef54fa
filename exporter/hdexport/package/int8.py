"""8-bit weights in standard operators, by onnxruntime's dynamic quantization: any ONNX Runtime runs them.

`quantize_dynamic` rounds the weights of matmuls and embedding tables. The matmuls become ``MatMulInteger``, for which
``DynamicQuantizeLinear`` rounds activations while the model runs. What it lacks is here: it leaves weights in half
precision as they are (`_widen_weights`), and rejects shapes that it makes wrong itself (`_source`).
"""

from __future__ import annotations

import functools
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.convenience import replace_all_uses_with
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.quant_utils import add_pre_process_metadata

from hdruntime.errors import ExportError, Setting

_WEIGHTS_FILE = "weights"


def quantized(model: ir.Model, directory: Path) -> ir.Model:
    """The graph with 8-bit weights.

    Weights have 7 bits and a scale for each output, as in Transformers.js' own conversion. Processors without VNNI add
    pairs of products of 8 bits in 16 bits, which saturates, so that outputs would depend on the processor; unsigned
    weights of 8 bits do not saturate, but take 1.3 to 1.4 times the time on a processor with VNNI (onnxruntime 1.31.1).
    One scale for all outputs takes cosines from 0.99 to 0.90.

    Args:
        model: a graph of standard operators; its weights become float32.
        directory: directory for files of weights, which the result reads.

    Raises:
        ExportError: the graph has no matmul with a weight.
    """
    _widen_weights(model)
    path = directory / "int8.onnx"
    quantize_dynamic(
        _source(model, directory),
        path,
        per_channel=True,
        reduce_range=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=True,
        extra_options={"EnableSubgraph": True},
    )
    proto = onnx.load(path, load_external_data=False)
    # For tract, as in the float32 graph; readers need no metadata of ONNX Runtime's quantization.
    del proto.graph.value_info[:], proto.metadata_props[:]
    int8_model = ir.from_proto(proto)
    ir.external_data.set_base_dir(int8_model.graph, directory)
    if not any(node.op_type == "MatMulInteger" for node in int8_model.graph.all_nodes()):
        raise ExportError(
            "The graph has no matmul with a weight, so nothing can be int8.",
            hint=("Leave out ", Setting("dtype", "int8"), "."),
        )
    return int8_model


def _widen_weights(model: ir.Model) -> None:
    """Make weights of half precision float32, and remove casts of weights.

    Quantization sees the float32 weights of a matmul, and neither casts of weights nor weights of another type.
    """
    for weight in model.graph.initializers.values():
        tensor = weight.const_value
        if tensor is not None and tensor.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            weight.const_value = ir.LazyTensor(
                functools.partial(_float32, tensor), dtype=ir.DataType.FLOAT, shape=tensor.shape, name=weight.name
            )
            weight.type = ir.TensorType(ir.DataType.FLOAT)
    for node in list(model.graph.all_nodes()):
        source = node.inputs[0] if node.op_type == "Cast" else None
        if source is not None and source.is_initializer() and source.dtype == node.attributes["to"].as_int():
            replace_all_uses_with(node.outputs[0], source)
            assert node.graph is not None
            node.graph.remove(node, safe=True)


def _float32(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype("float32"))


def _source(model: ir.Model, directory: Path) -> Path:
    """A file without shapes of inner values.

    onnxruntime transposes the weights of ``Gemm`` and leaves their shapes, which its own inference then rejects
    (1.31.1; findings/onnxruntime_quantize_dynamic_rejects_shapes_of_weights.sh).
    """
    path = directory / "float32.onnx"
    ir.save(model, path, external_data=_WEIGHTS_FILE)
    proto = onnx.load(path, load_external_data=False)
    del proto.graph.value_info[:]
    # Its preprocessing would fuse nodes into operators that only ONNX Runtime has.
    add_pre_process_metadata(proto)
    onnx.save(proto, path)
    return path
