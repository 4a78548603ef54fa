#!/usr/bin/env bash
# Library: TensorRT-RTX 1.7.1
# Guess: a node of a domain of one's own is what the model's function of that domain and name says, as ONNX defines it, or a
#   plugin; without either, the parser fails.
# Happens: the parser reads names without domains. A node own.Relu is ONNX's Relu, whether the model has a function of that name
#   (here Neg) or none, without a message. Of two functions of one name in two domains, both nodes get the first. ONNX Runtime
#   1.31.1 computes the functions. It takes no GPU to see this.
# Minded: exporter/hdexport/graph/targets/tensorrt/lowering.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensorrt_rtx_cu13==1.7.1.116 \
    onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
import tensorrt_rtx as trt

OPSETS = 'opset_import: ["" : 20, "own" : 1, "other" : 1]'
NAMED_AS_AN_OPERATOR = f"""
    <ir_version: 10, {OPSETS}> call (float[2] x) => (float[2] y) {{ y = own.Relu(x) }}
    <opset_import: ["" : 20], domain: "own"> Relu (x) => (y) {{ y = Neg(x) }}"""
WITHOUT_A_FUNCTION = f"<ir_version: 10, {OPSETS}> call (float[2] x) => (float[2] y) {{ y = own.Relu(x) }}"
OF_TWO_DOMAINS = f"""
    <ir_version: 10, {OPSETS}> call (float[2] x) => (float[2] y, float[2] z) {{ y = own.turn(x) z = other.turn(x) }}
    <opset_import: ["" : 20], domain: "own"> turn (x) => (y) {{ y = Exp(x) }}
    <opset_import: ["" : 20], domain: "other"> turn (x) => (y) {{ y = Sqrt(x) }}"""


def operations(text):
    """What TensorRT-RTX makes of each output."""
    log = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(log).create_network(0)
    parser = trt.OnnxParser(network, log)
    assert parser.parse(onnx.parser.parse_model(text).SerializeToString()), parser.get_error(0).desc()
    found = {}
    for layer in (network.get_layer(number) for number in range(network.num_layers)):
        is_unary = layer.type == trt.LayerType.UNARY
        layer.__class__ = trt.IUnaryLayer if is_unary else trt.IActivationLayer
        found[layer.get_output(0).name] = (layer.op if is_unary else layer.type).name
    return found


def computed(text):
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.array([1, 4], np.float32)})


np.testing.assert_allclose(computed(NAMED_AS_AN_OPERATOR), [[-1, -4]])
np.testing.assert_allclose(computed(OF_TWO_DOMAINS), [np.exp([1, 4]), [1, 2]], rtol=1e-6)
found = [operations(text) for text in (NAMED_AS_AN_OPERATOR, WITHOUT_A_FUNCTION, OF_TWO_DOMAINS)]
print("tensorrt_rtx", trt.__version__, *found)
assert found == [{"y": "RELU"}, {"y": "RELU"}, {"y": "EXP", "z": "EXP"}]
PYTHON
