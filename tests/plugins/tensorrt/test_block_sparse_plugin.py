"""Block-sparse attention as a TensorRT plugin: with and without its optional table, on a simulated driver and built."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from fakes.simulated_cuda import LaunchedKernel, SimulatedDriver, write_simulated_kernels
from fakes.simulated_gpu import SimulatedGpu, plugin_of, tensor_descriptions
from hdplugins.kernels.aot import KernelError
from hdplugins.kernels.attention_tiles import Tiles
from hdplugins.operators.block_sparse_attention import tensorrt_plugin as face
from hdplugins.operators.block_sparse_attention.reference import block_sparse_attention
from hdplugins.tensorrt.link import provide_library_link
from hdplugins.tensorrt.plugins import plugins_with_kernels, take_plugin_errors
from support.comparators import assert_close
from support.interpreted_kernel import BlockTexts

provide_library_link()
trt = pytest.importorskip(
    "tensorrt_rtx", reason="the plugin's base classes are TensorRT's; TensorRT-RTX is not installed"
)
pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")

NAME = "BlockSparseAttention"
SMALL = Tiles(block_queries=64, block_keys=64, num_warps=4, num_stages=2, head=32)
BIGBIRD: dict[str, Any] = {
    "block_size": 64, "first_global": 1, "last_global": 1, "window": 1, "first_repeats": 3, "dense_tokens": 0,
    "ends_by_row": 1, "scale": 0.2,
}  # fmt: skip
TABLE = torch.tensor([[[3, 3], [-1, 5], [1, 99]], [[4, 7], [0, 2], [6, 5]]], dtype=torch.int32)
ATOL = {torch.float32: 2e-6, torch.float16: 2e-3}
"""As of the window's plugin, for values of about 1."""

STREAM, WORKSPACE = 0x570, 0x9000
ADDRESSES = [0x1000, 0x2000, 0x3000, 0x4000, 0x6000]


@pytest.fixture(autouse=True)
def no_old_errors() -> None:
    take_plugin_errors()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchedKernel]:
    """What a driver in place of cuda-python's is told to start."""
    launched: list[LaunchedKernel] = []
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", SimulatedDriver(run=launched.append))
    return launched


def texts(*lengths: int, tokens: int, listed_blocks: torch.Tensor | None, dtype: torch.dtype) -> BlockTexts:
    generator = torch.Generator().manual_seed(tokens)
    shape = (len(lengths), 1 if listed_blocks is None else len(listed_blocks), tokens, 32)
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    mask = (torch.arange(tokens) < torch.tensor(lengths)[:, None]).int()
    return BlockTexts(query=query, key=key, value=value, token_mask=mask, listed_blocks=listed_blocks)


def right_answer(call: BlockTexts, attributes: dict[str, Any]) -> np.ndarray:
    tensors = (tensor.double() for tensor in (call.query, call.key, call.value))
    return block_sparse_attention(*tensors, call.token_mask, call.listed_blocks, **attributes).numpy()


@pytest.mark.parametrize(
    ("listed_blocks", "dtype"), [(None, torch.float16), (TABLE, torch.float32)], ids=["no table", "table"]
)
def test_a_plugin_gives_the_right_answers_at_every_length(
    listed_blocks: torch.Tensor | None, dtype: torch.dtype, gpu: SimulatedGpu, tmp_path: Path
) -> None:
    """Short, then long enough for parts and their sum, then short again."""
    lengths = [((1,), 1), ((520, 300), 520), ((1,), 1)]
    calls = [texts(*row, tokens=n, listed_blocks=listed_blocks, dtype=dtype) for row, n in lengths]
    answers = gpu.attention(calls, tmp_path / "kernels", tiles=SMALL, attributes=BIGBIRD)
    for call, answer in zip(calls, answers, strict=True):
        assert_close(answer.numpy(), right_answer(call, BIGBIRD), atol=ATOL[dtype])


def kernels(folder: Path, *shapes_of: Sequence[Sequence[int]], dtype: str = "float16") -> Path:
    for shapes in shapes_of:
        sources = face.kernel_sources(shapes, BIGBIRD, dtype=dtype, architectures=[86])
        write_simulated_kernels(folder, NAME, sources)
    return folder


def shapes(batch: int = 2, tokens: int = 1000, table: Sequence[int] | None = (2, 14, 3)) -> list[Sequence[int]]:
    own = (batch, 2, tokens, 64)
    return [own, own, own, (batch, tokens), *([table] if table else [])]


def run(plugin: Any, given: list[Sequence[int]]) -> Any:
    attached = plugin.attach_to_context(None)
    described = tensor_descriptions(trt, given[0], "float16", *given[4:])
    attached.on_shape_change(described, described[:1])
    attached.enqueue(described, described[:1], ADDRESSES[: len(given)], [0x5000], WORKSPACE, STREAM)
    return attached


@pytest.mark.parametrize("table", [(2, 14, 3), None], ids=["table", "no table"])
def test_launches_carry_the_table_where_there_is_one(
    table: Sequence[int] | None, launched: list[LaunchedKernel], tmp_path: Path
) -> None:
    both = kernels(tmp_path / "kernels", shapes(), shapes(table=None))
    given = shapes(table=table)
    run(plugin_of(trt, BIGBIRD, both, operator=NAME), given)
    assert [launch.source["function"] for launch in launched] == list(face.KERNELS)
    sizes = list(face.workspace(given, BIGBIRD).values())
    partials = WORKSPACE + -(-sizes[0] // 256) * 256
    _, lists, attend, combine = (launch.arguments for launch in launched)
    assert {"listed_blocks": 0x6000}.items() <= lists.items() if table else "listed_blocks" not in lists
    assert (lists["plan"], lists["table_listed"]) == (WORKSPACE, 3 if table else 0)
    pointers = {"query": 0x1000, "key": 0x2000, "value": 0x3000, "token_mask": 0x4000, "out": 0x5000}
    assert {**pointers, "plan": WORKSPACE, "partials": partials, "splits": 2}.items() <= attend.items()
    assert (combine["partials"], combine["out"]) == (partials, 0x5000)


@pytest.mark.parametrize(
    ("given", "changes", "function"),
    [
        (shapes(table=None), {}, "list_blocks"),
        (shapes(), {"block_size": 128}, "count_tokens"),
        ([(1, 2, 9, 128)] * 3 + [(1, 9), (1, 1, 1)], {}, "attend"),
    ],
    ids=["no table", "another block size", "another head_dim"],
)
def test_kernels_of_another_kind_are_not_launched(
    given: list[Sequence[int]], changes: dict[str, Any], function: str, launched: list[LaunchedKernel], tmp_path: Path
) -> None:
    plugin = plugin_of(trt, BIGBIRD | changes, kernels(tmp_path / "kernels", shapes()), operator=NAME)
    with pytest.raises(KernelError, match=f"the kernel {function} of these types and sizes is for none"):
        run(plugin, given)
    assert launched == []


def profiled(given: list[Sequence[int]]) -> list[Any]:
    tensors = []
    for dims in given:
        tensor = trt.DynamicPluginTensorDesc()
        tensor.max = trt.Dims(tuple(dims))
        tensors.append(tensor)
    return tensors


def test_the_types_of_the_inputs_that_a_node_has_are_checked() -> None:
    plugin = plugin_of(trt, BIGBIRD, None, operator=NAME)

    def described(dtype: Any) -> Any:
        tensor = trt.DynamicPluginTensorDesc()
        inner = tensor.desc
        inner.type, inner.format = dtype, trt.TensorFormat.LINEAR
        tensor.desc = inner
        return tensor

    half, whole = described(trt.DataType.HALF), described(trt.DataType.INT32)

    def fits(*tensors: Any) -> bool:
        inputs = len(tensors) - 1
        return all(plugin.supports_format_combination(place, tensors, inputs) for place in range(len(tensors)))

    assert fits(half, half, half, whole, half)
    assert fits(half, half, half, whole, whole, half)
    assert not fits(half, half, half, whole, whole)
    assert not fits(half, half, half, whole, half, half)
    assert not fits(half, half, half, whole, whole, whole)


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        (shapes(table=(3, 14, 3)), {}, r"listed_blocks is \[3, 14, 3\]; for 2 heads it is \[1 or 2, rows, listed\]"),
        (shapes(), {"block_size": 4096}, "block_size is 4096; the kernel has blocks of 1 to 1024 tokens"),
        ([*shapes(table=None)[:3], (2, 999)], {}, r"token_mask is \[2, 999\]"),
        ([(1, 2, 9, 48)] * 3 + [(1, 9)], {}, "no head_dim 48; it has 32, 64, 80, 96, 128"),
    ],
)
def test_a_build_without_a_kernel_for_it_stops(
    given: list[Sequence[int]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plugin_of(trt, BIGBIRD | changes, None, operator=NAME).configure_plugin(profiled(given), [])
    assert len(take_plugin_errors()) == 1


def test_the_workspace_suffices_for_the_largest_shape_and_the_table_counts() -> None:
    plugin = plugin_of(trt, BIGBIRD, None, operator=NAME)
    with_table, without = (
        plugin.get_workspace_size(profiled(shapes(4, 1000, table)), []) for table in ((2, 14, 9), None)
    )
    needed = face.workspace(shapes(4, 1000, (2, 14, 9)), BIGBIRD)
    assert 0 <= with_table - sum(needed.values()) < 2 * 256
    assert without < with_table


def test_an_engine_stores_all_that_makes_the_plugin() -> None:
    attributes = BIGBIRD | {"window": -1, "first_global": 2**31 - 1}
    plugin = plugin_of(trt, attributes, None, operator=NAME)
    stored = {field.name: field.data.tolist()[0] for field in plugin.get_fields_to_serialize()}
    assert stored == {**attributes, "scale": float(np.float32(0.2))}
    assert plugin_of(trt, stored, None, operator=NAME).attributes == stored == plugin.clone().attributes


def plugin_graph() -> onnx.ModelProto:
    """A node with a table, which is an initializer, and one without, as lowering leaves them."""
    state = ["batch", 2, "tokens", 64]
    own = {**BIGBIRD, "plugin_namespace": "hdexport", "plugin_version": "1"}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, state) for name in ("query", "key", "value")]
    inputs.append(helper.make_tensor_value_info("mask", TensorProto.INT32, ["batch", "tokens"]))
    nodes = [
        helper.make_node(NAME, ["query", "key", "value", "mask", "table"], ["first"], domain="hdexport", **own),
        helper.make_node(NAME, ["first", "key", "value", "mask"], ["second"], domain="hdexport", **own),
    ]
    return helper.make_model(
        helper.make_graph(
            nodes, "blocks", inputs, [helper.make_tensor_value_info("second", TensorProto.FLOAT16, state)],
            [onnx.numpy_helper.from_array(TABLE.numpy(), "table")],
        ),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("hdexport", 1)],
        ir_version=10,
    )  # fmt: skip


def test_tensorrt_builds_nodes_with_and_without_a_table_for_several_lengths() -> None:
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    with plugins_with_kernels(trt, None):
        assert parser.parse(plugin_graph().SerializeToString()), parser.get_error(0).desc()
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        ours = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
        assert [layer.num_inputs for layer in ours] == [5, 4]
        config = builder.create_builder_config()
        for opt, most in ((97, 500), (1001, 4096)):
            profile = builder.create_optimization_profile()
            for index in range(network.num_inputs):
                tensor = network.get_input(index)
                dims = [(1, 1), (1, opt), (2, most)]
                profile.set_shape(tensor.name, *((b, 2, n, 64) if len(tensor.shape) == 4 else (b, n) for b, n in dims))
            config.add_optimization_profile(profile)
        engine = builder.build_serialized_network(network, config)
    assert engine is not None, take_plugin_errors()
    # The name of a field, which the engine must hold to make the plugin again.
    assert b"first_repeats" in bytes(engine)
