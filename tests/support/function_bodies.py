"""Models of function bodies, run by ONNX Runtime and built by TensorRT-RTX, for the tests of all operators."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

_MISTAKES = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Add",
    "Max": "Min",
    "Min": "Max",
    "ReduceMax": "ReduceMin",
    "ReduceSum": "ReduceMean",
    "And": "Or",
    "Or": "And",
    "Less": "LessOrEqual",
    "LessOrEqual": "Less",
    "Greater": "GreaterOrEqual",
    "GreaterOrEqual": "Greater",
    "Equal": "Greater",
}
"""Type of a node -> a type that takes the same inputs and computes something else."""

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
    """Return a session on the CPU; onnx checks the model first, and the shapes of the model's bodies."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1  # the models are small, and threads that wait spin
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def run(session: onnxruntime.InferenceSession, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the output, which has the shape of the first state. A row that is left out is NaN."""
    output = np.full_like(next(iter(feeds.values())), np.nan)
    (name,) = (value.name for value in session.get_outputs())
    binding = session.io_binding()
    for input_name, feed in feeds.items():
        binding.bind_cpu_input(input_name, feed)
    binding.bind_output(name, "cpu", 0, output.dtype, output.shape, output.ctypes.data)
    session.run_with_iobinding(binding)
    return output


def operators_of(graph: onnx.GraphProto | onnx.FunctionProto) -> Counter[str]:
    """Count the nodes of each type, also in branches and loops."""
    return Counter(node.op_type for node in nodes_within(graph))


def nodes_within(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Return the nodes of a graph, each followed by the nodes of its branches and loops."""
    return (node for node, _ in _nodes_and_elements(graph))


def unnoticed_mistakes(model: onnx.ModelProto, check: Callable[[onnxruntime.InferenceSession], None]) -> list[str]:
    """Make one mistake after another in the body of a model, and return the mistakes that nothing notices.

    A mistake is a node of another type, a Where whose branches are swapped, or a Gather in a loop by another element
    of the loop.

    Args:
        model: a model with one body, which is changed and put right again.
        check: raises an AssertionError if a session of the model gives a wrong answer. A mistake is also noticed if
            ONNX or ONNX Runtime refuses the model, or cannot run it.

    Returns:
        One line per mistake, such as ``Max 2``: node 2 of the type Max, counted from 0 in the order of the body.
    """
    (body,) = model.functions
    unnoticed, counts, mistakes = [], Counter[str](), 0
    for node, elements in _nodes_and_elements(body):
        right = onnx.NodeProto()
        right.CopyFrom(node)
        number, counts[right.op_type] = counts[right.op_type], counts[right.op_type] + 1
        if right.op_type == "Where":
            node.input[1], node.input[2] = right.input[2], right.input[1]
        elif right.op_type == "Gather" and right.input[1] in elements[:2]:
            node.input[1] = elements[1 - elements.index(right.input[1])]
        elif right.op_type in _MISTAKES:
            node.op_type = _MISTAKES[right.op_type]
        else:
            continue
        mistakes += 1
        try:
            check(new_session(model))
        except (AssertionError, RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            pass
        else:
            unnoticed.append(f"{right.op_type} {number}")
        node.CopyFrom(right)
    assert mistakes > 10, "the body has hardly a node in which a mistake was made"
    return unnoticed


def _nodes_and_elements(
    graph: onnx.GraphProto | onnx.FunctionProto,
) -> Iterator[tuple[onnx.NodeProto, list[str]]]:
    """Yield the nodes of `nodes_within`, each with the names of the inputs of its loop or branch."""
    elements = [value.name for value in graph.input] if isinstance(graph, onnx.GraphProto) else []
    for node in graph.node:
        yield node, elements
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes_and_elements(attribute.g)


def growths_bytes(path: Path, *lengths: int, batch: int = 1, memory: int = 0, padding: int = 0) -> list[int]:
    """Return the growth of a process's peak memory by texts (Linux), for each of the lengths.

    Args:
        path: a model of float32 inputs and a mask of int32 or booleans. The dynamic axes are called ``batch``,
            ``tokens``, ``keys`` (a memory and the text) and ``distances`` (enough for all keys).
        lengths: the tokens of each text.
        batch: the number of texts.
        memory: the tokens that each text remembers.
        padding: the tokens at the beginning of each text that are padding.
    """
    command = [sys.executable, "-c", _MEASURE_PEAK, str(path), *map(str, (batch, memory, padding, *lengths))]
    measured = subprocess.run(command, capture_output=True, text=True)
    assert measured.returncode == 0, measured.stderr
    return [int(line) for line in measured.stdout.split()]


def growth_bytes(path: Path, *, tokens: int, batch: int = 1, memory: int = 0, padding: int = 0) -> int:
    """Return the growth of `growths_bytes` for one length."""
    (growth,) = growths_bytes(path, tokens, batch=batch, memory=memory, padding=padding)
    return growth


def planned_bytes(model: onnx.ModelProto, folder: Path, *longest: int, profiles: int = 3) -> list[int]:
    """Return the bytes of activations that TensorRT-RTX plans for a model with profiles up to each of the lengths.

    A process keeps its first logger, so the builds have a process of their own. A test without TensorRT-RTX skips.

    Args:
        model: a model such as `growths_bytes` reads from a file.
        folder: the folder for the model's file.
        longest: the lengths; two texts of a length, with a memory of 512 tokens, are the largest batch.
        profiles: the number of an engine's profiles, 1 to 3; the first profile is for the longest texts.
    """
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX builds engines without a GPU; not installed")
    path = folder / "model.onnx"
    onnx.save(model, path)
    command = [sys.executable, "-c", _BUILD, str(path), *map(str, (profiles, *longest))]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return [int(line) for line in built.stdout.split()]
