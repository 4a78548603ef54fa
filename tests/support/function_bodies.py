"""Models of function bodies, run by ONNX Runtime and built by TensorRT-RTX, for the tests of operators."""

from __future__ import annotations

__all__ = ["growth_bytes", "growths_bytes", "new_session", "nodes_within", "operators_of", "planned_bytes", "run"]

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

_MEASURE_PEAK = """
import os
import sys
import numpy as np
import onnxruntime
batch, memory, padding, *lengths = map(int, sys.argv[2:])
def memory_of(name):
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith(name))
def measure(tokens):
    keys = tokens + memory
    sizes = {"batch": batch, "tokens": tokens, "keys": keys, "distances": keys + tokens, "sides": -(-tokens // 16)}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(sys.argv[1], options)
    generator, feeds = np.random.default_rng(0), {}
    for value in session.get_inputs():
        shape = [sizes.get(size, size) for size in value.shape]
        is_state = value.type == "tensor(float)"
        of_mask = {"tensor(bool)": bool, "tensor(int32)": np.int32}
        feeds[value.name] = generator.random(shape, np.float32) if is_state else np.ones(shape, of_mask[value.type])
        if not is_state:
            feeds[value.name][:, :padding] = 0
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = memory_of("VmRSS")
    session.run(None, feeds)
    print(memory_of("VmHWM") - before, flush=True)
for tokens in lengths:
    # A process of its own for each: what a run frees, the next one would find.
    child = os.fork()
    if child == 0:
        measure(tokens)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

_BUILD = """
import re
import sys
import tensorrt_rtx as trt

class Log(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
        self.text = ""
    def log(self, severity, message):
        self.text += message + "\\n"

log = Log()
builder = trt.Builder(log)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, log)
assert parser.parse_from_file(sys.argv[1]), [parser.get_error(i).desc() for i in range(parser.num_errors)]
kinds = {network.get_layer(index).type for index in range(network.num_layers)}
assert not kinds & {trt.LayerType.PLUGIN, trt.LayerType.PLUGIN_V2, trt.LayerType.PLUGIN_V3}
for longest in map(int, sys.argv[3:]):
    config = builder.create_builder_config()
    # kOPT is not a multiple of any block, nor a length that the model was checked at.
    for opt, most in ((1001, longest), (333, longest // 2), (97, longest // 8))[: int(sys.argv[2])]:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            shapes = []
            for batch, tokens, memory in ((1, 1, 0), (1, opt, 211), (2, most, 512)):
                keys = tokens + memory
                sizes = {"batch": batch, "tokens": tokens, "keys": keys, "distances": keys + tokens}
                sizes["sides"] = -(-tokens // 16)
                named = enumerate(tensor.shape)
                shapes.append([sizes[tensor.get_dimension_name(axis)] if size < 0 else size for axis, size in named])
            if min(tensor.shape) < 0:
                profile.set_shape(tensor.name, *shapes)
        config.add_optimization_profile(profile)
    log.text = ""
    assert builder.build_serialized_network(network, config) is not None
    print(max(map(int, re.findall(r"Total Activation Memory: (\\d+) bytes", log.text))))
"""


def new_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session on the CPU; onnx checks the model first, the shapes of its bodies included."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1  # the models are small, and threads that wait spin
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def run(session: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output, of the shape of the first state, written into an array of NaN, so that a row left out shows."""
    output = np.full_like(next(iter(feeds.values())), np.nan)
    (name,) = (value.name for value in session.get_outputs())
    binding = session.io_binding()
    for input_name, feed in feeds.items():
        binding.bind_cpu_input(input_name, feed)
    binding.bind_output(name, "cpu", 0, output.dtype, output.shape, output.ctypes.data)
    session.run_with_iobinding(binding)
    return output


def operators_of(graph: onnx.GraphProto | onnx.FunctionProto) -> Counter[str]:
    """How many nodes of each type there are, in its branches and loops as well."""
    return Counter(node.op_type for node in nodes_within(graph))


def nodes_within(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """A graph's nodes, and the nodes of its branches and loops."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_within(attribute.g)


def growths_bytes(path: Path, *lengths: int, batch: int = 1, memory: int = 0, padding: int = 0) -> list[int]:
    """How far the peak memory of a process of its own grows by texts (Linux), for each of the lengths.

    Args:
        path: a model of float32 inputs and a mask, int32 or of booleans; its dynamic axes are called ``batch``,
            ``tokens``, ``keys`` (a memory and the text) and ``distances`` (enough for these).
        lengths: tokens of each text.
        batch: texts.
        memory: tokens that each text remembers.
        padding: tokens at the beginning of each text that are.
    """
    command = [sys.executable, "-c", _MEASURE_PEAK, str(path), *map(str, (batch, memory, padding, *lengths))]
    measured = subprocess.run(command, capture_output=True, text=True)
    assert measured.returncode == 0, measured.stderr
    return [int(line) for line in measured.stdout.split()]


def growth_bytes(path: Path, *, tokens: int, batch: int = 1, memory: int = 0, padding: int = 0) -> int:
    """`growths_bytes` of one length."""
    (growth,) = growths_bytes(path, tokens, batch=batch, memory=memory, padding=padding)
    return growth


def planned_bytes(model: onnx.ModelProto, folder: Path, *longest: int, profiles: int = 3) -> list[int]:
    """The activations that TensorRT-RTX plans for a model, built with profiles up to each of the lengths.

    A logger is for good in a process, so the builds have one of their own. A test without TensorRT-RTX skips.

    Args:
        model: as `growth_bytes` takes it in a file.
        folder: for the file.
        longest: lengths; two texts of them, with a memory of 512 tokens, are the largest batch.
        profiles: of an engine, 1 to 3; the first is the longest texts'.
    """
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX builds engines without a GPU; not installed")
    path = folder / "model.onnx"
    onnx.save(model, path)
    command = [sys.executable, "-c", _BUILD, str(path), *map(str, (profiles, *longest))]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return [int(line) for line in built.stdout.split()]
