"""Creators of plugins, operators that are not ours, and engines that TensorRT builds with plugins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fakes.simulated_cuda import LaunchedKernel, SimulatedDriver
from fakes.simulated_gpu import plugin_of
from hdplugins import ONNX_DOMAIN_VERSION, OPERATORS
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.tensorrt.plugin_class import take_plugin_errors
from hdplugins.tensorrt.plugins import plugin_operators, plugins_with_kernels
from support.plugin_calls import (
    ATTRIBUTES,
    RELATIVE,
    WINDOW,
    WINDOWS,
    run,
    trt,
)

pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")
pytestmark = pytest.mark.usefixtures("no_old_errors", "driver")


def test_plugins_keep_the_folder_that_they_were_created_with(kernels: Path) -> None:
    with plugins_with_kernels(trt, kernels):
        other = plugin_of(trt, WINDOW, Path("elsewhere"))
        plugin = plugin_of(trt, WINDOW, kernels)
    run(plugin)
    assert other.kernels == Path.cwd() / "elsewhere"
    assert plugin_of(trt, WINDOW, None).kernels is None


def test_registering_again_makes_no_second_creator() -> None:
    for _ in range(2):
        with plugins_with_kernels(trt, None):
            pass
    ours = [
        creator.name for creator in trt.get_plugin_registry().all_creators if creator.plugin_namespace == "hdexport"
    ]
    assert ours == [operator.name for operator in plugin_operators()]


class Namesake(ModuleType):
    """A module with the name of the real one, and a registry of its own."""

    def __init__(self) -> None:
        super().__init__(trt.__name__)
        self.registered: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(trt, name)

    def get_plugin_registry(self) -> Namesake:
        return self

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.registered.append(creator.name)
        return True


def test_modules_of_one_name_have_creators_of_their_own(kernels: Path) -> None:
    expected = [operator.name for operator in plugin_operators()]
    first, second = Namesake(), Namesake()
    for namesake in (first, second, first):
        with plugins_with_kernels(namesake, kernels):
            creator = trt.get_plugin_registry().get_creator(WINDOWS, str(OPERATORS[WINDOWS].version), "hdexport")
            assert creator is None or creator.kernels is None
    assert first.registered == second.registered == expected
    assert plugin_of(trt, WINDOW, kernels).kernels == kernels


def test_kernels_are_loaded_by_the_driver_that_launches_them(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        launched: list[LaunchedKernel] = []
        driver = SimulatedDriver(context=0x1C0, run=launched.append)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        run(plugin_of(trt, WINDOW, kernels))
        assert "cuModuleLoadData" in driver.calls
        assert launched


def test_every_face_serves_an_operator_of_its_inputs_and_attributes() -> None:
    for operator in plugin_operators():
        spec = plugin_spec_of(operator)
        assert len(spec.INPUT_DTYPES) == len(operator.inputs)
        assert spec.INPUT_DTYPES[0] is None
        assert tuple(spec.FIELDS) == tuple(operator.attributes)


def test_a_machine_that_runs_bundles_needs_nothing_that_builds_them() -> None:
    program = """
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "triton", "onnx", "onnx_ir", "onnxscript", "cuda"]))
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.tensorrt.plugins import plugin_operators, plugins_with_kernels
print(sum(len(plugin_spec_of(operator).kernels) for operator in plugin_operators()))
print([name for name in ("tensorrt", "tensorrt_rtx") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "14\n[]\n"


def relative_graph() -> onnx.ModelProto:
    """Keys are what is remembered and the text, as a model has them; a node with segments, and a causal one without."""
    state = ["batch", "tokens", 2, 64]
    half, bias = TensorProto.FLOAT16, ["content_bias", "position_bias"]
    inputs = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("query", half, state), ("mems", half, ["batch", "memory", 2, 64]),
            ("kind", TensorProto.INT32, ["batch", "tokens"]), ("mems_kind", TensorProto.INT32, ["batch", "memory"]),
        )
    ]  # fmt: skip
    nodes = [
        helper.make_node("Concat", ["mems", "query"], ["key"], axis=1),
        helper.make_node("Concat", ["mems_kind", "kind"], ["key_kind"], axis=1),
        helper.make_node("Shape", ["key_kind"], ["keys"], start=1),
        helper.make_node("Shape", ["kind"], ["tokens"], start=1),
        helper.make_node("Add", ["keys", "tokens"], ["distances"]),
        helper.make_node("Slice", ["table", "zero", "distances", "one"], ["positions"]),
        helper.make_node("ReduceMean", ["query", "last"], ["segments"], keepdims=0),
        plugin_node(RELATIVE, ["query", "key", "key", "key_kind", "positions", *bias, "segments"], "first"),
        plugin_node(RELATIVE, ["first", "key", "key", "key_kind", "positions", *bias], "second", causal=1, reach=0),
    ]
    constants = {
        "table": np.ones((2, 9000, 64), np.float16), **dict.fromkeys(bias, np.ones((2, 64), np.float16)),
        "zero": np.array([0]), "one": np.array([1]), "last": np.array([3]),
    }  # fmt: skip
    return helper.make_model(
        helper.make_graph(
            nodes, "attentions", inputs, [helper.make_tensor_value_info("second", half, state)],
            [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("hdexport", ONNX_DOMAIN_VERSION)],
        ir_version=10,
    )  # fmt: skip


def plugin_node(operator: str, inputs: Sequence[str], output: str, **changes: int) -> onnx.NodeProto:
    """As lowering leaves it."""
    own = {
        **ATTRIBUTES[operator],
        **changes,
        "plugin_namespace": "hdexport",
        "plugin_version": str(OPERATORS[operator].version),
    }
    return helper.make_node(operator, inputs, [output], domain="hdexport", **own)


def test_tensorrt_builds_nodes_for_several_lengths() -> None:
    """Engines of other operators are built of bundles, in tests/exporter/attention/test_sparse_engine.py."""
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    with plugins_with_kernels(trt, None):
        assert parser.parse(relative_graph().SerializeToString()), parser.get_error(0).desc()
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        ours = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
        assert [layer.num_inputs for layer in ours] == [8, 7]
        config = builder.create_builder_config()
        for opt, most in ((97, 500), (1001, 4096)):
            profile = builder.create_optimization_profile()
            bounds = {"batch": (1, 1, 2), "tokens": (1, opt, most), "memory": (1, 331, 371)}
            for index in range(network.num_inputs):
                tensor = network.get_input(index)
                names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
                axes = [bounds.get(name, (size,) * 3) for name, size in zip(names, tensor.shape, strict=True)]
                profile.set_shape(tensor.name, *zip(*axes, strict=True))
            config.add_optimization_profile(profile)
        engine = builder.build_serialized_network(network, config)
    assert engine is not None, take_plugin_errors()
    assert b"reach" in bytes(engine), "the name of a field, by which the plugin is made again"
