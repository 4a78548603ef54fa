#!/usr/bin/env bash
# Library: TensorRT-RTX 1.7.1
# Guess: its attention layer takes any number of heads, of any size up to 256 or so, with a mask as well as without.
# Happens: a single head with a mask, of any type, does not build ("Attention operation was not supported by a dedicated
#   kernel"); without a mask it does, and two heads do with one. Heads of 8 and less, or of more than 256, do not build at all;
#   heads of 9 do. A causal layer takes no mask. It takes no GPU to see this.
# Minded: exporter/hdexport/graph/targets/tensorrt/lowering.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensorrt_rtx_cu13==1.7.1.116 onnx==1.23.2
"$folder/venv/bin/python" - <<'PYTHON'
import itertools

import onnx
import tensorrt_rtx as trt


class Log(trt.ILogger):
    """Keeps errors, which are expected, from standard error."""

    def log(self, severity, message):
        pass


LOG = Log()


def builds(heads, size, *, mask=None, causal=0):
    """Whether an attention of float16 builds, with a mask of this type for each key, or with none."""
    state = f"float16[batch, {heads}, tokens, {size}]"
    given = f", {mask}[batch, 1, 1, tokens] mask" if mask else ""
    model = onnx.parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 23]> g ({state} q, {state} k, {state} v{given}) => ({state} y)
        {{ y = Attention <is_causal = {causal}> (q, k, v{", mask" if mask else ""}) }}""")
    onnx.checker.check_model(model)
    builder = trt.Builder(LOG)
    network = builder.create_network(0)
    if not trt.OnnxParser(network, LOG).parse(model.SerializeToString()):
        return False
    profile, config = builder.create_optimization_profile(), builder.create_builder_config()
    for name in "qkv":
        profile.set_shape(name, (1, heads, 1, size), (8, heads, 192, size), (8, heads, 192, size))
    if mask:
        profile.set_shape("mask", (1, 1, 1, 1), (8, 1, 1, 192), (8, 1, 1, 192))
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config) is not None


masks = (None, "bool", "float16")
by_heads = {(heads, mask): builds(heads, 64, mask=mask) for heads, mask in itertools.product((1, 2), masks)}
by_size = {size: builds(2, size) for size in (4, 8, 9, 11, 12, 256, 257, 264)}
causal = [builds(2, 64, causal=1, mask=mask) for mask in masks]
print("tensorrt_rtx", trt.__version__, "heads and mask:", by_heads)
print("size of two heads:", by_size, "causal, without and with a mask:", causal)
assert by_heads == {(1, None): True, (1, "bool"): False, (1, "float16"): False, **{(2, mask): True for mask in masks}}
assert by_size == {4: False, 8: False, 9: True, 11: True, 12: True, 256: True, 257: False, 264: False}
assert causal == [True, False, False]
PYTHON
