"""8-bit weights without calibration: OpenVINO quantizes activations while it runs.

OpenVINO (2026.4.1) reads ``DequantizeLinear`` of a constant as a compressed weight, and quantizes activations by token
and group of channels (findings/int8_weights_round_activations.sh). A sequence's outputs are equal alone and in a batch,
and no text is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from hdexport.graph.bundle_graph import read_graph, write_graph
from hdexport.graph.weights import initializer_of
from hdexport.quantize.matmuls import weight_matmuls
from hdplugins.op_builder import OpBuilder
from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import GraphFile
from hdruntime.bundle.reader import Bundle

MIN_PARAMETERS = 256 * 10**6
"""Parameters from which a model's weights are quantized without calibration.

Calibration solves a system of equations for each weight: a model of 350 million parameters had not ended after 9
minutes. Dynamic scales make small models no faster than calibrated ones, and lose up to 0.003 of cosine against them.
"""

_MIN_TABLE_ROWS = 4096
"""Rows from which an embedding table is stored in 8 bits."""

_TABLE_BLOCK = 4096
"""Rows of a table that are quantized at once."""

_ALIGNMENT = 64
"""Bytes; the place of a tensor in the file is a multiple."""

_LEVELS = 255


def quantize_weights(bundle: Bundle, graphs: list[GraphFile], weights_file: str) -> tuple[list[GraphFile], int]:
    """Write 8-bit graphs beside float ones, whose weights are in one file.

    1. The weight of a linear layer is uint8, with a scale and zero point for each output.
    2. A table of embeddings is uint8, with a scale and zero point for each row, and the rows that are read are upcast.

    Args:
        bundle: the bundle; its graphs' weights are read one at a time.
        graphs: the graphs.
        weights_file: name of the file.

    Returns:
        The records of the new graphs, and the number of weights in 8 bits.
    """
    with (bundle.path / weights_file).open("wb") as file:
        stored = _StoredTensors(file, bundle.path)
        written = []
        for graph in graphs:
            model = read_graph(bundle, graph)
            quantize_model(model, stored)
            name = f"{graph.lowering}_int8"
            written.append(write_graph(model, bundle.path, lowering=graph.lowering, dtype="int8", name=name))
    return written, stored.weights


def quantize_model(model: ir.Model, stored: _StoredTensors) -> None:
    """Quantize the weights of a float graph's linear layers and its embedding tables, in place."""
    for matmul in weight_matmuls(model):
        weight = initializer_of(matmul.node.inputs[1])
        assert weight is not None
        tensors = [stored.value(model.graph, weight, part, axis=0) for part in _PARTS]  # 1
        op = OpBuilder.before(matmul.node)
        matmul.node.replace_input_with(1, op.DequantizeLinear(*tensors, axis=1))
    for node in list(model.graph):
        table = initializer_of(node.inputs[0]) if node.op_type == "Gather" else None
        if table is not None and _is_table(table):
            _dequantize_rows(node, [stored.value(model.graph, table, part, axis=1) for part in _PARTS])  # 2
    RemoveUnusedNodesPass()(model)


_PARTS = ("values", "scale", "zero_point")


def _is_table(value: ir.Value) -> bool:
    shape, dtype = value.shape, value.dtype
    is_large = shape is not None and len(shape) == 2 and int(shape[0]) >= _MIN_TABLE_ROWS
    return is_large and dtype is not None and dtype.is_floating_point()


def _dequantize_rows(gather: ir.Node, tensors: list[ir.Value]) -> None:
    """Read rows of a quantized table in the place of a Gather, whose result may be cast."""
    rows = gather.outputs[0]
    op = OpBuilder.before(gather)
    values, scale, zero_point = (op.Gather(tensor, gather.inputs[1], axis=0) for tensor in tensors)
    difference = op.Sub(op.Cast(values, to=ir.DataType.FLOAT), op.Cast(zero_point, to=ir.DataType.FLOAT))
    upcast = op.Mul(difference, scale)
    upcast.dtype, upcast.shape = ir.DataType.FLOAT, rows.shape
    casts = [use.node for use in rows.uses() if use.node.op_type == "Cast"]
    for cast in casts if rows.dtype is not ir.DataType.FLOAT else ():
        ir.convenience.replace_all_uses_with(cast.outputs[0], upcast, replace_graph_outputs=True)
    if rows.dtype is ir.DataType.FLOAT:
        ir.convenience.replace_all_uses_with(rows, upcast, replace_graph_outputs=True)


def quantized(weight: FloatArray, *, axis: int) -> dict[str, npt.NDArray[Any]]:
    """Round a weight [rows, columns] to uint8 with a scale and zero point for each slice along the reduced `axis`.

    Returns:
        ``values``, uint8, [rows, columns]; ``scale``, float32, and ``zero_point``, uint8: [columns] where `axis` is 0,
        [rows, 1] where it is 1.
    """
    low = np.minimum(weight.min(axis, keepdims=True), 0)
    high = np.maximum(weight.max(axis, keepdims=True), 0)
    scale = np.where(high > low, (high - low) / _LEVELS, 1).astype(np.float32)
    zero_point = np.round(-low / scale)
    values = np.clip(np.round(weight / scale) + zero_point, 0, _LEVELS).astype(np.uint8)
    zero_point = zero_point.astype(np.uint8)
    if axis == 0:
        scale, zero_point = scale[0], zero_point[0]
    return {"values": values, "scale": scale, "zero_point": zero_point}


class _StoredTensors:
    """The quantized weights in a file, each once for all graphs.

    Attributes:
        weights: number of quantized weights.
    """

    def __init__(self, file: BinaryIO, directory: Path) -> None:
        self._file, self._directory = file, directory
        self._tensors: dict[str, dict[str, ir.ExternalTensor]] = {}

    @property
    def weights(self) -> int:
        return len(self._tensors)

    def value(self, graph: ir.Graph, weight: ir.Value, part: str, *, axis: int) -> ir.Value:
        name = f"{weight.name}.int8_{part}"
        if name not in graph.initializers:
            tensor = self._of(weight, axis=axis)[part]
            graph.initializers[name] = ir.Value(
                name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return graph.initializers[name]

    def _of(self, weight: ir.Value, *, axis: int) -> dict[str, ir.ExternalTensor]:
        name = str(weight.name)
        if name not in self._tensors:
            assert weight.const_value is not None
            array = weight.const_value.numpy()
            rows = _TABLE_BLOCK if axis == 1 else len(array)
            blocks = [
                quantized(array[start : start + rows].astype(np.float32), axis=axis)
                for start in range(0, len(array), rows)
            ]
            self._tensors[name] = {
                part: self._write(np.concatenate([block[part] for block in blocks]), f"{name}.{part}")
                for part in _PARTS
            }
        return self._tensors[name]

    def _write(self, array: npt.NDArray[Any], name: str) -> ir.ExternalTensor:
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        place = self._file.tell()
        self._file.write(array.data)
        dtype = ir.DataType.from_numpy(array.dtype)
        return ir.ExternalTensor(
            Path(self._file.name).name, place, array.nbytes, dtype, shape=ir.Shape(array.shape), name=name,
            base_dir=self._directory,
        )  # fmt: skip
