"""TensorRT plugins: real plugin objects on a simulated driver, held to the operator's definition."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from fakes.simulated_cuda import LaunchedKernel, SimulatedDriver, write_simulated_kernels
from fakes.simulated_gpu import plugin_answers, plugin_of, tensor_descriptions
from hdplugins import OPERATORS, Operator
from hdplugins.kernels.aot import KernelError, KernelSource
from hdplugins.kernels.attention_tiles import Tiles, cubin_architecture
from hdplugins.kernels.cuda_launch import Launch, LaunchError
from hdplugins.operators.plugin_face import FieldType, PluginFace, face_of
from hdplugins.tensorrt.link import provide_library_link
from hdplugins.tensorrt.plugin_class import plugin_class
from hdplugins.tensorrt.plugins import plugin_operators, plugins_with_kernels, take_plugin_errors
from support.clipped_operator import Clipped
from support.clipped_operator import exact_answer as clipped_answer
from support.clipped_operator import inputs_of as clipped_inputs
from support.comparators import assert_close
from support.interpreted_kernel import Inputs, Interpreter
from support.kernel_cases import inputs_of, right_answers
from support.relative_operator import Relative, exact_answer, key_kinds
from support.relative_operator import inputs_of as relative_inputs
from support.sparse_operators import Blocks, Chunks, Lsh, SparseLayer, Window

provide_library_link()
trt = pytest.importorskip(
    "tensorrt_rtx", reason="the plugin's base classes are TensorRT's; TensorRT-RTX is not installed"
)
pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")

WINDOW_LAYER = Window(left=16, right=16, bound=5)
WINDOW = WINDOW_LAYER.node_attributes
BLOCKS, CHUNKS, LSH, WINDOWS = "BlockSparseAttention", "ChunkAttention", "LSHAttention", "SlidingWindowAttention"
RELATIVE, CLIPPED = "RelativeAttention", "ClippedDistanceAttention"
BLOCK_LAYER = Blocks(block=64, repeats=3, by_row=1)
BIGBIRD = BLOCK_LAYER.node_attributes
CHUNK_LAYER, LSH_LAYER = Chunks(chunk=16, multiple=2), Lsh(chunk=16, buckets=(4, 2), by_row=1)
CIRCLE, REFORMER = CHUNK_LAYER.node_attributes, LSH_LAYER.node_attributes
DISTANCES = Relative(reach=40, dtype="float16").node_attributes
CLIPPED_LAYER = Clipped(by_query=True, values=True, reach=20, dtype="float16")
NEZHA = CLIPPED_LAYER.node_attributes
ATTRIBUTES: dict[str, dict[str, Any]] = {
    BLOCKS: BIGBIRD, CHUNKS: CIRCLE, CLIPPED: NEZHA, LSH: REFORMER, RELATIVE: DISTANCES, WINDOWS: WINDOW,
}  # fmt: skip
TILES = {
    WINDOWS: Tiles(block_queries=32, block_keys=16, num_warps=4, num_stages=2, head=32),
    BLOCKS: Tiles(block_queries=64, block_keys=64, num_warps=4, num_stages=2, head=32),
    **dict.fromkeys(
        (CHUNKS, CLIPPED, LSH, RELATIVE), Tiles(block_queries=16, block_keys=16, num_warps=4, num_stages=2, head=32)
    ),
}
SHAPE = (2, 2, 70, 32)
STREAM, WORKSPACE = 0x570, 0x9000
ADDRESSES = [0x1000, 0x2000, 0x3000, 0x4000]
ATOL = {"float32": 2e-6, "float16": 2e-3}
"""Somewhat more than twice what was measured, for values of about 1: 7.6e-7 and 8.3e-4."""


@pytest.fixture(autouse=True)
def no_old_errors() -> None:
    take_plugin_errors()


@pytest.fixture
def launched() -> list[LaunchedKernel]:
    """The launches that the driver received."""
    return []


@pytest.fixture(autouse=True)
def driver(launched: list[LaunchedKernel], monkeypatch: pytest.MonkeyPatch) -> SimulatedDriver:
    """In place of cuda-python's."""
    driver = SimulatedDriver(run=launched.append)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """Kernels of float16 and heads of 32 and 64, for two generations of GPUs."""
    return kernels_for(
        tmp_path, *(shapes_of((1, 1, 1, head_dim)) for head_dim in (32, 64)), architectures=[80, 86, 120]
    )


def kernels_for(
    folder: Path, *shapes: list[Sequence[int]], operator: str = WINDOWS, architectures: Sequence[int]
) -> Path:
    for given in shapes:
        face = face_of(OPERATORS[operator])
        sources = face.kernel_sources(given, ATTRIBUTES[operator], dtype="float16", architectures=architectures)
        write_simulated_kernels(folder / "kernels", operator, sources)
    return folder / "kernels"


def shapes_of(query: Sequence[int], *others: Sequence[int], operator: str = WINDOWS) -> list[Sequence[int]]:
    return [*[query] * OPERATORS[operator].states, (query[0], query[2]), *others]


TABLE = (2, 14, 3)
LISTED, UNLISTED = shapes_of((2, 2, 1000, 64), TABLE), shapes_of((2, 2, 1000, 64))
ROTATED = shapes_of((2, 2, 1000, 32), (2, 32, 2, 3), operator=LSH)


def remembered(tokens: int, keys: int) -> list[Sequence[int]]:
    """The shapes of relative attention without segments."""
    state, bias = (2, 2, keys, 32), (2, 32)
    return [(2, 2, tokens, 32), state, state, (2, keys), (2, keys + tokens, 32), bias, bias]


def set_up(attached: Any, shape: Sequence[int] = SHAPE, *tables: Sequence[int], dtype: str = "float16") -> list[Any]:
    """Pass a plugin its shapes, as an execution context does before a call; its tensors' descriptions."""
    name = attached.operator.name
    described = tensor_descriptions(trt, shapes_of(shape, *tables, operator=name), dtype, operator=name)
    attached.on_shape_change(described, described[:1])
    return described


def enqueue(attached: Any, described: list[Any], out: int = 0x5000, workspace: int = WORKSPACE) -> None:
    addresses = ADDRESSES + [0x6000] * (len(described) - 4)
    attached.enqueue(described, described[:1], addresses, [out], workspace, STREAM)


def run(plugin: Any, shape: Sequence[int] = SHAPE, *tables: Sequence[int], dtype: str = "float16") -> Any:
    """One call, as an execution context makes it, and what was attached to the context."""
    attached = plugin.attach_to_context(None)
    enqueue(attached, set_up(attached, shape, *tables, dtype=dtype))
    return attached


def kinds(*rows: str) -> torch.Tensor:
    """Rows of a batch, one letter per token: `.` padding, `l` local, `G` global."""
    return torch.tensor([[".lG".index(letter) for letter in row] for row in rows], dtype=torch.int32)


def mask(tokens: int, *lengths: int) -> torch.Tensor:
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None]).int()


CASES: dict[str, tuple[SparseLayer, list[torch.Tensor]]] = {
    "globals and padding": (WINDOW_LAYER, [kinds("G" + "l" * 40 + "G" + "l" * 20 + "." * 9, "." * 30 + "l" * 41)]),
    "another length, and back": (WINDOW_LAYER, [kinds("Gl" * 2 + "l" * tokens) for tokens in (60, 9, 60)]),
    "around the window, one dilation": (
        replace(WINDOW_LAYER, dilation=(2,), bound=0), [kinds("l" * tokens) for tokens in (1, 15, 16, 17, 33)],
    ),
    "a dilation per head": (replace(WINDOW_LAYER, dilation=(1, 3), left=4, right=2), [kinds("G" + "l" * 50)]),
    "wider than the text": (replace(WINDOW_LAYER, left=2**31 - 1, right=2**31 - 1), [kinds("l" * 40), kinds("." * 37)]),
}  # fmt: skip
PARTS = [mask(1, 1), mask(520, 520, 300), mask(1, 1)]
"""Short, then long enough for parts and their sum, then short again."""


@pytest.mark.parametrize(
    ("layer", "calls"),
    [
        *(
            pytest.param(replace(layer, dtype=dtype), calls, id=f"{name} {dtype}")
            for name, (layer, calls) in CASES.items()
            for dtype in ATOL
        ),
        pytest.param(replace(BLOCK_LAYER, heads=1, dtype="float16"), PARTS, id="blocks without a table"),
        pytest.param(replace(BLOCK_LAYER, listed=(2, 3, 2)), PARTS, id="blocks with a table"),
        *(
            pytest.param(layer, [mask(tokens, tokens, 20) for tokens in (50, 31, 50)], id=str(layer))
            for layer in (replace(CHUNK_LAYER, dtype="float16"), LSH_LAYER, replace(LSH_LAYER, dtype="float16"))
        ),
    ],
)
def test_a_plugin_gives_the_right_answers(
    layer: SparseLayer, calls: list[torch.Tensor], interpreter: Interpreter, tmp_path: Path
) -> None:
    for inputs, answer in zip(*answers_of(layer, calls, interpreter, tmp_path), strict=True):
        assert_close(answer.numpy(), right_answers(layer, inputs).numpy(), atol=ATOL[layer.dtype])
        is_padding = inputs[layer.operator.mask] == 0
        assert (answer.masked_select(is_padding[:, None, :, None]) == 0).all()


def relative_call(node: Relative, memory: int, tokens: int) -> tuple[Inputs, np.ndarray]:
    """The inputs of a call, and its right answer."""
    arrays = relative_inputs(node, key_kinds("right", tokens, memory), tokens)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, exact_answer(node, arrays)


@pytest.mark.parametrize(
    "node", [Relative(reach=40, dtype="float16"), Relative(causal=1, segments=False, dtype="float16")], ids=str
)
def test_a_plugin_gives_the_right_answers_with_memories_of_any_size(
    node: Relative, interpreter: Interpreter, tmp_path: Path
) -> None:
    calls, wanted = zip(*(relative_call(node, *sizes) for sizes in ((16, 30), (7, 30), (0, 9), (16, 30))), strict=True)
    arguments = (RELATIVE, list(calls), tmp_path / "kernels", TILES[RELATIVE], node.node_attributes)
    for answer, right in zip(interpreter.run(plugin_answers, *arguments), wanted, strict=True):
        # Somewhat more than twice what was measured, for values of about 4: 3.3e-3.
        assert_close(answer.numpy(), right, atol=8e-3)


@pytest.mark.parametrize("layer", [CLIPPED_LAYER, Clipped(heads=1, dtype="float16")], ids=str)
def test_a_plugin_gives_the_right_answers_by_distance(layer: Clipped, interpreter: Interpreter, tmp_path: Path) -> None:
    arrays = [clipped_inputs(layer, mask(tokens, tokens, 20).numpy()) for tokens in (50, 31, 1, 50)]
    calls = [{name: torch.from_numpy(array) for name, array in inputs.items()} for inputs in arrays]
    arguments = (CLIPPED, calls, tmp_path / "kernels", TILES[CLIPPED], layer.node_attributes)
    for inputs, answer in zip(arrays, interpreter.run(plugin_answers, *arguments), strict=True):
        # Somewhat more than twice what was measured, for values of up to 5: 2.3e-3.
        assert_close(answer.numpy(), clipped_answer(layer, inputs), atol=5e-3)


def answers_of(
    layer: SparseLayer, calls: list[torch.Tensor], interpreter: Interpreter, folder: Path, **changes: Any
) -> tuple[list[Inputs], list[torch.Tensor]]:
    name, given = layer.operator.name, [inputs_of(layer, kinds) for kinds in calls]
    attributes = layer.node_attributes | changes
    return given, interpreter.run(plugin_answers, name, given, folder / "kernels", TILES[name], attributes)


@pytest.mark.parametrize(
    "wrong", [{"left": 15}, {"right": 17}, {"dilation": (2,)}, {"scale": 1.005 * WINDOW["scale"]}], ids=str
)
def test_the_comparison_refuses_other_attributes(
    wrong: dict[str, Any], interpreter: Interpreter, tmp_path: Path
) -> None:
    layer = replace(WINDOW_LAYER, dtype="float16")
    (inputs,), (answer,) = answers_of(layer, [kinds("G" + "l" * 60)], interpreter, tmp_path, **wrong)
    with pytest.raises(AssertionError, match=">"):
        assert_close(answer.numpy(), right_answers(layer, inputs).numpy(), atol=ATOL["float16"])


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [
        (
            WINDOWS,
            {"left": 3, "right": 2**31 - 1, "dilation": (1, 2, 4), "global_bound": 0, "scale": 0.1},
        ),
        (BLOCKS, BIGBIRD | {"window": -1, "first_global": 2**31 - 1}),
        (CHUNKS, CIRCLE),
        (LSH, REFORMER),
        (CLIPPED, NEZHA),
        (RELATIVE, DISTANCES | {"causal": 1, "reach": 2**31 - 1}),
    ],
)
def test_an_engine_stores_all_that_makes_the_plugin(operator: str, attributes: dict[str, Any]) -> None:
    plugin = plugin_of(trt, attributes, None, operator=operator)
    kept = {**attributes, "scale": float(np.float32(attributes["scale"]))}
    stored = {field.name: tuple(field.data.tolist()) for field in plugin.get_fields_to_serialize()}
    assert stored == {name: value if isinstance(value, tuple) else (value,) for name, value in kept.items()}
    again = plugin_of(trt, kept, None, operator=operator)
    assert again.attributes == plugin.attributes == again.clone().attributes == kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scale": None},
            "the fields left, right, dilation, global_bound were given; they must be left, right, dilation",
        ),
        ({"window": 3}, "the fields left, right, dilation, global_bound, scale, window were given"),
        ({"left": (1, 2)}, "the field left holds 2 x INT32; it is one value of type int"),
        ({"left": 1.0}, "the field left holds 1 x FLOAT32"),
        ({"scale": 1}, "the field scale holds 1 x INT32; it is one value of type float"),
        ({"dilation": ()}, "the field dilation holds 0 x INT32"),
    ],
)
def test_fields_that_are_not_the_operators_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugin_of(trt, WINDOW, None, **changes)
    assert message in take_plugin_errors()[0]
    assert take_plugin_errors() == ()


def described(dtype: Any, layout: Any = trt.TensorFormat.LINEAR) -> Any:
    tensor = trt.DynamicPluginTensorDesc()
    inner = tensor.desc
    inner.type, inner.format = dtype, layout
    tensor.desc = inner
    return tensor


@pytest.mark.parametrize(
    ("operator", "types", "takes"),
    [
        *(
            (name, f"{own} {own} {own} INT32 {own}", True)
            for name in (BLOCKS, CHUNKS, WINDOWS)
            for own in ("HALF", "FLOAT", "BF16")
        ),
        *((LSH, f"{own} {own} INT32 FLOAT {own}", True) for own in ("HALF", "FLOAT", "BF16")),
        *((RELATIVE, f"{own} {own} {own} INT32" + 5 * f" {own}", True) for own in ("HALF", "FLOAT", "BF16")),
        (RELATIVE, "HALF HALF HALF INT32 HALF HALF HALF HALF", True),
        *((CLIPPED, f"{own} {own} {own} BOOL {own} {own}", True) for own in ("HALF", "FLOAT", "BF16")),
        (CLIPPED, "HALF HALF HALF BOOL HALF HALF HALF", True),
        (CLIPPED, "HALF HALF HALF INT32 HALF HALF HALF", False),
        (CLIPPED, "HALF HALF HALF BOOL FLOAT HALF HALF", False),
        (CLIPPED, "HALF HALF HALF BOOL HALF FLOAT HALF", False),
        (RELATIVE, "HALF HALF HALF INT32 FLOAT HALF HALF HALF", False),
        (RELATIVE, "HALF HALF HALF INT64 HALF HALF HALF HALF", False),
        (LSH, "HALF HALF INT32 HALF HALF", False),
        (LSH, "HALF FLOAT INT32 FLOAT HALF", False),
        (WINDOWS, "HALF HALF FLOAT INT32 HALF", False),
        (WINDOWS, "HALF HALF HALF INT32 FLOAT", False),
        (WINDOWS, "HALF HALF HALF HALF HALF", False),
        (WINDOWS, "INT32 INT32 INT32 INT32 INT32", False),
        (WINDOWS, "HALF HALF HALF INT64 HALF", False),
        (BLOCKS, "HALF HALF HALF INT32 INT32 HALF", True),
        (BLOCKS, "HALF HALF HALF INT32 INT32", False),
        (BLOCKS, "HALF HALF HALF INT32 HALF HALF", False),
        (BLOCKS, "HALF HALF HALF INT32 INT32 INT32", False),
    ],
)
def test_states_and_result_are_of_one_type_and_other_inputs_of_theirs(operator: str, types: str, takes: bool) -> None:
    plugin = plugin_of(trt, ATTRIBUTES[operator], None, operator=operator)
    tensors = [described(getattr(trt.DataType, name)) for name in types.split()]
    fits = [plugin.supports_format_combination(place, tensors, len(tensors) - 1) for place in range(len(tensors))]
    assert all(fits) == takes
    packed = [described(trt.DataType.HALF, trt.TensorFormat.HWC8), *tensors[1:]]
    assert not plugin.supports_format_combination(0, packed, len(tensors) - 1)
    assert plugin.get_output_data_types([tensor.desc.type for tensor in tensors]) == [tensors[0].desc.type]


def profiled(shapes: Sequence[Sequence[int]]) -> list[Any]:
    tensors = []
    for dims in shapes:
        tensor = trt.DynamicPluginTensorDesc()
        tensor.max = trt.Dims(tuple(dims))
        tensors.append(tensor)
    return tensors


@pytest.mark.parametrize(
    ("operator", "shapes"),
    [(WINDOWS, shapes_of((4, 2, 1000, 32))), (BLOCKS, shapes_of((4, 2, 1000, 64), (2, 14, 9))), (LSH, ROTATED)],
)
def test_the_workspace_suffices_for_the_largest_shape_and_the_table_counts(
    operator: str, shapes: list[Sequence[int]]
) -> None:
    plugin = plugin_of(trt, ATTRIBUTES[operator], None, operator=operator)
    needed = face_of(OPERATORS[operator]).workspace(shapes, ATTRIBUTES[operator])
    size = plugin.get_workspace_size(profiled(shapes), [])
    assert 0 <= size - sum(needed.values()) < len(needed) * 256
    if operator == BLOCKS:
        assert plugin.get_workspace_size(profiled(shapes[:4]), []) < size


@pytest.mark.parametrize(
    ("operator", "shapes", "message"),
    [
        (WINDOWS, shapes_of((1, 2, 64, 48)), "not support head_dim 48; they support 32, 64, 80, 96, 128"),
        (BLOCKS, shapes_of((2, 2, 1000, 64), (3, 14, 3)), r"listed_blocks is \[3, 14, 3\]; for 2 heads"),
        (BLOCKS, [*UNLISTED[:3], (2, 999)], r"token_mask is \[2, 999\]"),
        (
            LSH,
            [*ROTATED[:2], (2, 999), ROTATED[3]],
            r"query_key and value are .* \[2, 999\]; the first two",
        ),
        (LSH, [*ROTATED[:3], (2, 32, 2, 4)], r"rotations is \[2, 32, 2, 4\]; it must be .*, \[2, 32, 2, 3\]"),
        (LSH, ROTATED[:3], "rotations are missing; LSH attention needs them"),
        (RELATIVE, remembered(300, 200), "There are 200 keys for 300 tokens"),
        (RELATIVE, remembered(300, 812)[:6], "RelativeAttention has 7 or 8 inputs, not 6"),
        (CLIPPED, shapes_of(SHAPE, (2, 2, 70, 43), operator=CLIPPED), "has 43 distances; a reach of 20 has 41"),
    ],
)
def test_a_build_without_a_kernel_for_it_stops(operator: str, shapes: list[Sequence[int]], message: str) -> None:
    """All that `check` refuses: tests/plugins/kernels/test_sparse_kernel.py."""
    plugin = plugin_of(trt, ATTRIBUTES[operator], None, operator=operator)
    with pytest.raises(ValueError, match=message):
        plugin.configure_plugin(profiled(shapes), [])
    assert len(take_plugin_errors()) == 1


def test_launches_carry_addresses_sizes_and_the_stream(kernels: Path, launched: list[LaunchedKernel]) -> None:
    run(plugin_of(trt, WINDOW | {"dilation": (1, 2)}, kernels))
    assert [launch.source["function"] for launch in launched] == ["plan_keys", "attend", "attend"]
    assert {launch.stream for launch in launched} == {STREAM}
    assert launched[0].arguments == {"token_kind": 0x4000, "plan": WORKSPACE, "tokens": 70, "global_bound": 5}
    pointers = {"query": 0x1000, "key": 0x2000, "value": 0x3000, "token_kind": 0x4000, "plan": WORKSPACE, "out": 0x5000}
    assert pointers.items() <= launched[1].arguments.items()
    assert [launch.arguments["dilation"] for launch in launched[1:]] == [1, 2]


@pytest.mark.parametrize("shapes", [LISTED, UNLISTED], ids=["table", "no table"])
def test_launches_carry_the_table_where_there_is_one(
    shapes: list[Sequence[int]], launched: list[LaunchedKernel], tmp_path: Path
) -> None:
    folder = kernels_for(tmp_path, LISTED, UNLISTED, operator=BLOCKS, architectures=[86])
    run(plugin_of(trt, BIGBIRD, folder, operator=BLOCKS), shapes[0], *shapes[4:])
    face = face_of(OPERATORS[BLOCKS])
    assert [launch.source["function"] for launch in launched] == list(face.kernels)
    sizes = list(face.workspace(shapes, BIGBIRD).values())
    partials = WORKSPACE + -(-sizes[0] // 256) * 256
    _, lists, attend, combine = (launch.arguments for launch in launched)
    has_table = len(shapes) > 4
    assert {"listed_blocks": 0x6000}.items() <= lists.items() if has_table else "listed_blocks" not in lists
    assert (lists["plan"], lists["table_listed"]) == (WORKSPACE, 3 if has_table else 0)
    pointers = {"query": 0x1000, "key": 0x2000, "value": 0x3000, "token_mask": 0x4000, "out": 0x5000}
    assert {**pointers, "plan": WORKSPACE, "partials": partials, "splits": 2}.items() <= attend.items()
    assert (combine["partials"], combine["out"]) == (partials, 0x5000)


@pytest.mark.parametrize(
    ("operator", "shapes", "changes", "dtype", "function"),
    [
        (BLOCKS, UNLISTED, {}, "float16", "list_blocks"),
        (BLOCKS, LISTED, {"block_size": 128}, "float16", "count_tokens"),
        (BLOCKS, shapes_of((1, 2, 9, 128), (1, 1, 1)), {}, "float16", "attend"),
        (WINDOWS, [(1, 2, 9, 128)], {}, "float16", "attend"),
        (WINDOWS, [SHAPE], {}, "float32", "attend"),
        (WINDOWS, [SHAPE], {}, "bfloat16", "attend"),
        (LSH, [(1, 2, 9, 64), *[()] * 2, (2, 64, 2, 3)], {}, "float16", "attend"),
        (LSH, [SHAPE, *[()] * 2, (2, 32, 2, 3)], {}, "bfloat16", "hash_tokens"),
    ],
    ids=[
        "no table",
        "another block size",
        "blocks, another head_dim",
        "another head_dim",
        "float32",
        "bfloat16",
        "hashes, another head_dim",
        "hashes of bfloat16",
    ],
)
def test_kernels_of_other_types_or_sizes_are_not_launched(
    operator: str,
    shapes: list[Sequence[int]],
    changes: dict[str, Any],
    dtype: str,
    function: str,
    kernels: Path,
    launched: list[LaunchedKernel],
    tmp_path: Path,
) -> None:
    for name, compiled in ((BLOCKS, LISTED), (LSH, ROTATED)):
        kernels_for(tmp_path, compiled, operator=name, architectures=[86])
    plugin = plugin_of(trt, ATTRIBUTES[operator] | changes, kernels, operator=operator)
    with pytest.raises(KernelError, match=f"the kernel {function} of these types and sizes is for none"):
        run(plugin, shapes[0], *shapes[OPERATORS[operator].states + 1 :], dtype=dtype)
    assert launched == []


def test_kernels_are_loaded_once_and_before_anything_is_enqueued(driver: SimulatedDriver, kernels: Path) -> None:
    plugin = plugin_of(trt, WINDOW, kernels)
    attached = plugin.attach_to_context(None)
    described = set_up(attached)
    assert driver.calls.count("cuModuleLoadData") == 2
    assert driver.calls.count("cuFuncSetAttribute") == 1
    driver.calls.clear()
    driver.launching_only = True
    for _ in range(3):
        enqueue(attached, described)
    assert driver.calls == ["cuLaunchKernel"] * 6
    driver.launching_only = False
    run(plugin, (1, 2, 9, 32))
    assert "cuModuleLoadData" not in driver.calls
    set_up(attached, (1, 2, 9, 64))
    # Heads of another size have kernels of their own, but plan_keys serves both.
    assert driver.calls.count("cuModuleLoadData") == 1


@pytest.mark.parametrize(
    "call",
    [
        "cuInit", "cuCtxGetCurrent", "cuCtxGetDevice", "cuDeviceGetAttribute", "cuModuleLoadData",
        "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel",
    ],
)  # fmt: skip
def test_an_error_of_the_driver_is_reported(call: str, driver: SimulatedDriver, kernels: Path) -> None:
    driver.failing[call] = 700
    with pytest.raises(LaunchError, match=r"CUDA error 700 at .*: the reason for 700"):
        run(plugin_of(trt, WINDOW, kernels))
    assert take_plugin_errors()[0].startswith("SlidingWindowAttention: CUDA error 700")
    driver.failing.clear()
    run(plugin_of(trt, WINDOW, kernels))
    assert take_plugin_errors() == ()


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (SimulatedDriver(context=0), LaunchError, "no CUDA context"),
        (None, KernelError, "pip install cuda-bindings"),
    ],
    ids=["no context", "no cuda-python"],
)
def test_kernels_that_cannot_be_loaded_are_reported(
    module: Any, error: type[Exception], message: str, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
    with pytest.raises(error, match=message):
        run(plugin_of(trt, WINDOW, kernels))


@pytest.mark.parametrize("place", range(6))
def test_a_tensor_that_is_not_aligned_is_refused(place: int, kernels: Path) -> None:
    attached = run(plugin_of(trt, WINDOW, kernels))
    described = tensor_descriptions(trt, shapes_of(SHAPE), "float16")
    addresses = [*ADDRESSES, 0x5000, WORKSPACE]
    addresses[place] += 8
    with pytest.raises(LaunchError, match=r"got the address 0x\d008; it needs multiples of 16"):
        attached.enqueue(described, described[:1], addresses[:4], addresses[4:5], addresses[5], STREAM)


def test_a_call_of_other_shapes_or_after_refused_ones_launches_nothing(kernels: Path) -> None:
    attached = run(plugin_of(trt, WINDOW, kernels))
    longer = tensor_descriptions(trt, shapes_of((2, 2, 71, 32)), "float16")
    with pytest.raises(LaunchError, match=r"set up for shapes \(\(2, 2, 70, 32\), .* but got \(\(2, 2, 71, 32\), "):
        enqueue(attached, longer)
    with pytest.raises(LaunchError, match="no kernels to launch"):
        enqueue(attached.clone(), longer)
    wrong = tensor_descriptions(trt, shapes_of(SHAPE), "float16")
    wrong[3].dims = trt.Dims((2, 69))
    with pytest.raises(ValueError, match=r"token_kind is \[2, 69\]"):
        attached.on_shape_change(wrong, wrong[:1])
    with pytest.raises(LaunchError, match="no kernels to launch"):
        enqueue(attached, wrong)


def test_a_call_with_a_memory_of_another_size_launches_nothing(tmp_path: Path, launched: list[LaunchedKernel]) -> None:
    folder = kernels_for(tmp_path, remembered(1, 1), operator=RELATIVE, architectures=[86])
    attached = plugin_of(trt, DISTANCES, folder, operator=RELATIVE).attach_to_context(None)
    few, many = (
        tensor_descriptions(trt, remembered(70, keys), "float16", operator=RELATIVE) for keys in (70, 99)
    )  # fmt: skip
    attached.on_shape_change(many, many[:1])
    with pytest.raises(LaunchError, match=r"set up for shapes .*\(2, 2, 99, 32\)\), but got .*\(2, 2, 70, 32\)\)\."):
        enqueue(attached, few)
    enqueue(attached, many)
    (launch,) = launched
    assert (launch.arguments["tokens"], launch.arguments["keys"], launch.arguments["distances"]) == (70, 99, 169)


def test_execution_contexts_have_shapes_of_their_own(kernels: Path, launched: list[LaunchedKernel]) -> None:
    plugin = plugin_of(trt, WINDOW, kernels)
    contexts = [plugin.attach_to_context(None) for _ in range(2)]
    described = [set_up(attached, (1, 2, tokens, 32)) for attached, tokens in zip(contexts, (70, 9), strict=True)]
    for attached, tensors in zip(contexts, described, strict=True):
        enqueue(attached, tensors)
    assert [launch.arguments["tokens"] for launch in launched] == [70, 70, 9, 9]


def test_a_plugin_that_is_only_built_needs_no_kernels_and_runs_none(driver: SimulatedDriver) -> None:
    with pytest.raises(LaunchError, match=r"without a bundle's folder of kernels(.|\n)*plugins_with_kernels"):
        run(plugin_of(trt, WINDOW, None))
    assert driver.calls == []


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)] and None


def tamper(folder: Path) -> None:
    cubin = next(folder.glob("*attend-sm86*.cubin"))
    cubin.write_bytes(cubin.read_bytes().replace(b"64", b"65"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("*attend-sm86*.cubin"), r"attend-sm86.*does not describe a compiled kernel"),
        (remove("*attend-sm8*"), r"GPU is an sm_86; in .* the kernel attend .* is for sm_120.\n.*--sm 86"),
        (remove("*"), r"the kernel plan_keys .* is for none"),
        (shutil.rmtree, r"the kernel plan_keys .* is for none"),
        (tamper, r"attend-sm86.*is not the file that .*describes"),
    ],
    ids=["missing cubin", "other GPUs", "empty", "no folder", "tampered"],
)
def test_a_kernel_that_is_missing_or_changed_is_named(
    damage: Callable[[Path], None], message: str, kernels: Path
) -> None:
    damage(kernels)
    with pytest.raises(KernelError, match=message):
        run(plugin_of(trt, WINDOW, kernels))


@pytest.mark.parametrize(
    ("gpu_architecture", "compiled_for"),
    [(80, 80), (86, 86), (89, 86), (120, 120), (90, None), (121, None), (75, None)],
)
def test_a_gpu_runs_what_was_compiled_for_it_or_for_an_earlier_gpu_of_its_generation(
    gpu_architecture: int, compiled_for: int | None, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[LaunchedKernel] = []
    driver = SimulatedDriver(architecture=gpu_architecture, run=launched.append)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    if compiled_for is None:
        with pytest.raises(KernelError, match=f"GPU is an sm_{gpu_architecture}"):
            run(plugin_of(trt, WINDOW, kernels))
    else:
        run(plugin_of(trt, WINDOW, kernels))
        assert {launch.source["architecture"] for launch in launched} == {compiled_for}
        assert cubin_architecture(gpu_architecture) == compiled_for


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
            creator = trt.get_plugin_registry().get_creator(WINDOWS, "1", "hdexport")
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
    assert [operator.name for operator in plugin_operators()] == [
        BLOCKS,
        CHUNKS,
        "ClippedDistanceAttention",
        LSH,
        RELATIVE,
        WINDOWS,
    ]
    assert not OPERATORS["DenseAttention"].has_face("tensorrt_plugin")
    for operator in plugin_operators():
        face = face_of(operator)
        assert len(face.INPUT_DTYPES) == len(operator.inputs)
        assert face.INPUT_DTYPES[0] is None
        assert tuple(face.FIELDS) == operator.attributes


class TwoBuffers(PluginFace):
    """All that a second operator adds: two scratch buffers, and one kernel that takes both."""

    FIELDS: ClassVar = {"factor": FieldType.FLOAT}
    DTYPES = ("float32",)
    INPUT_DTYPES = (None,)
    OUTPUT = "result"
    POINTERS: ClassVar = {"scale": ("second", "data", "first", "result")}

    def tiles(self, shapes: Any, attributes: Any, *, dtype: str, architecture: int) -> Tiles:
        raise NotImplementedError

    def constants(self, shapes: Any, attributes: Any, *, dtype: str, tiles: Tiles) -> dict[str, dict[str, int]]:
        raise NotImplementedError

    def serves(self, kernel: Any, shapes: Any, attributes: Any, *, dtype: str) -> bool:
        return dtype == "float32"

    def workspace(self, shapes: Any, attributes: Any) -> dict[str, int]:
        return {"first": 4 * shapes[0][0], "second": 10}

    def launches(self, shapes: Any, attributes: Any, *, constants: Any) -> tuple[Launch, ...]:
        scalars = {"count": shapes[0][0], "factor": attributes["factor"]}
        return (Launch(kernel="scale", grid=(constants["scale"]["block"], 1, 1), scalars=scalars),)


@pytest.fixture
def two_buffers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module = ModuleType("two_buffers.tensorrt_plugin")
    module.FACE = TwoBuffers()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "two_buffers", ModuleType("two_buffers"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    operator = Operator(name="TwoBuffers", version=3, package="two_buffers", inputs=("data",), attributes=("factor",))
    pointers = {"second": "*i8", **dict.fromkeys(("data", "first", "result"), "*fp32")}
    signature = {**pointers, "count": "i32", "factor": "fp32"}
    source = KernelSource(
        module="two_buffers", function="scale", architecture=86, signature=signature, constants={"block": 7}
    )
    write_simulated_kernels(tmp_path / "kernels", "TwoBuffers", [source])
    return plugin_class(trt, operator)({"factor": 0.5}, tmp_path / "kernels")


def one_tensor() -> list[Any]:
    tensor = trt.PluginTensorDesc()
    tensor.dims, tensor.type, tensor.format = trt.Dims((100,)), trt.DataType.FLOAT, trt.TensorFormat.LINEAR
    return [tensor]


def test_a_second_operator_needs_only_its_face(two_buffers: Any, launched: list[LaunchedKernel]) -> None:
    two_buffers.on_shape_change(one_tensor(), one_tensor())
    two_buffers.enqueue(one_tensor(), one_tensor(), [0x1000], [0x2000], 0x3000, STREAM)
    assert launched[0].grid == (7, 1, 1)
    # 400 bytes of the first buffer end at the next multiple of 256.
    assert launched[0].arguments == {
        "second": 0x3000 + 512, "data": 0x1000, "first": 0x3000, "result": 0x2000, "count": 100, "factor": 0.5,
    }  # fmt: skip
    assert (two_buffers.plugin_name, two_buffers.plugin_version) == ("TwoBuffers", "3")


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"count": 2**31, "factor": 1.0}, "2147483648 does not fit"),
        ({"factor": 1.0}, "takes count: i32; the launch has"),
    ],
)
def test_a_launch_that_does_not_fit_its_kernel_is_refused(
    scalars: dict[str, Any], message: str, two_buffers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(kernel="scale", grid=(1, 1, 1), scalars=scalars)
    monkeypatch.setattr(TwoBuffers, "launches", lambda *_, **__: (launch,))
    with pytest.raises(LaunchError, match=message):
        two_buffers.on_shape_change(one_tensor(), one_tensor())


def test_a_machine_that_runs_bundles_needs_nothing_that_builds_them() -> None:
    program = """
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "triton", "onnx", "onnx_ir", "onnxscript", "cuda"]))
from hdplugins.operators.plugin_face import face_of
from hdplugins.tensorrt.plugins import plugin_operators, plugins_with_kernels
print(sum(len(face_of(operator).kernels) for operator in plugin_operators()))
print([name for name in ("tensorrt", "tensorrt_rtx") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "14\n[]\n"


def block_nodes() -> list[onnx.NodeProto]:
    """One with a table, which is an initializer, and one without."""
    return [
        plugin_node(BLOCKS, ["query", "key", "value", "mask", "table"], "first"),
        plugin_node(BLOCKS, ["first", "key", "value", "mask"], "second"),
    ]


def reformer_nodes() -> list[onnx.NodeProto]:
    return [
        plugin_node(CHUNKS, ["query", "key", "value", "mask"], "first"),
        plugin_node(LSH, ["first", "value", "mask", "rotations"], "second"),
    ]


def relative_graph() -> onnx.ModelProto:
    """Keys are what is remembered and the text, as a model has them; a node with segments, and a causal one without."""
    state = ["batch", 2, "tokens", 64]
    half, bias = TensorProto.FLOAT16, ["content_bias", "position_bias"]
    inputs = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("query", half, state), ("mems", half, ["batch", 2, "memory", 64]),
            ("kind", TensorProto.INT32, ["batch", "tokens"]), ("mems_kind", TensorProto.INT32, ["batch", "memory"]),
        )
    ]  # fmt: skip
    nodes = [
        helper.make_node("Concat", ["mems", "query"], ["key"], axis=2),
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
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("hdexport", 1)],
        ir_version=10,
    )  # fmt: skip


def clipped_graph() -> onnx.ModelProto:
    """Scores of each query by a table that is its values, too, as NEZHA has it; and a bias that all queries share."""
    state, half = ["batch", 2, "tokens", 64], TensorProto.FLOAT16
    inputs = [
        helper.make_tensor_value_info("query", half, state),
        helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", "tokens"]),
    ]
    nodes = [
        helper.make_node("MatMul", ["query", "turned"], ["scores"]),
        plugin_node(CLIPPED, ["query", "query", "query", "mask", "scores", "table"], "first"),
        plugin_node(CLIPPED, ["first", "query", "query", "mask", "bias"], "second", reach=128),
    ]
    constants = {"table": (41, 64), "turned": (64, 41), "bias": (1, 2, 1, 257)}
    return helper.make_model(
        helper.make_graph(
            nodes, "attentions", inputs, [helper.make_tensor_value_info("second", half, state)],
            [onnx.numpy_helper.from_array(np.ones(shape, np.float16), name) for name, shape in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("hdexport", 1)],
        ir_version=10,
    )  # fmt: skip


def plugin_node(operator: str, inputs: Sequence[str], output: str, **changes: int) -> onnx.NodeProto:
    """As lowering leaves it."""
    own = {**ATTRIBUTES[operator], **changes, "plugin_namespace": "hdexport", "plugin_version": "1"}
    return helper.make_node(operator, inputs, [output], domain="hdexport", **own)


def plugin_graph(nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    state = ["batch", 2, "tokens", 64]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, state) for name in ("query", "key", "value")]
    inputs.append(helper.make_tensor_value_info("mask", TensorProto.INT32, ["batch", "tokens"]))
    constants = {"table": np.zeros((2, 3, 2), np.int32), "rotations": np.ones((2, 64, 2, 3), np.float32)}
    used = {name for node in nodes for name in node.input}
    return helper.make_model(
        helper.make_graph(
            nodes, "attentions", inputs, [helper.make_tensor_value_info("second", TensorProto.FLOAT16, state)],
            [onnx.numpy_helper.from_array(array, name) for name, array in constants.items() if name in used],
        ),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("hdexport", 1)],
        ir_version=10,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "num_inputs", "field"),
    # The name of a field, which the engine must hold to make the plugin again.
    [
        (plugin_graph(block_nodes()), [5, 4], b"first_repeats"),
        (plugin_graph(reformer_nodes()), [4, 4], b"ends_by_row"),
        (relative_graph(), [8, 7], b"reach"),
        (clipped_graph(), [6, 5], b"reach"),
    ],
    ids=[
        "blocks with and without a table",
        "chunks and hashes",
        "distances with and without segments",
        "clipped distances with and without values",
    ],
)
def test_tensorrt_builds_nodes_for_several_lengths(model: onnx.ModelProto, num_inputs: list[int], field: bytes) -> None:
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    with plugins_with_kernels(trt, None):
        assert parser.parse(model.SerializeToString()), parser.get_error(0).desc()
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        ours = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
        assert [layer.num_inputs for layer in ours] == num_inputs
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
    assert field in bytes(engine)
