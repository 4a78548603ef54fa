"""TensorRT plugins: real objects on a simulated driver: what engines store, what is launched, and what is refused."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.simulated_cuda import LaunchedKernel, SimulatedDriver
from fakes.simulated_gpu import plugin_of, tensor_descriptions
from hdplugins import OPERATORS
from hdplugins.attention.plugin_spec import BlockIndexUse, plugin_spec_of
from hdplugins.kernels.aot import KernelError
from hdplugins.kernels.block_config import cubin_architecture
from hdplugins.kernels.cuda_launch import LaunchError
from hdplugins.tensorrt.plugin_class import take_plugin_errors
from support.comparators import named_case
from support.plugin_calls import (
    ADDRESSES,
    ATTRIBUTES,
    BIGBIRD,
    BLOCKS,
    CHUNKS,
    CLIPPED,
    DISTANCES,
    LISTED,
    LSH,
    RELATIVE,
    ROTATED,
    SHAPE,
    STREAM,
    UNLISTED,
    WINDOW,
    WINDOWS,
    WORKSPACE,
    enqueue,
    kernels_for,
    remembered,
    run,
    set_up,
    shapes_of,
    trt,
)

pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")
pytestmark = pytest.mark.usefixtures("no_old_errors", "driver")


def test_an_engine_stores_all_that_makes_the_plugin() -> None:
    far = 2**31 - 1
    for operator, attributes in ATTRIBUTES.items():
        attributes = attributes | ({"right": far, "dilation": (1, 2, 4), "scale": 0.1} if operator == WINDOWS else {})
        plugin = plugin_of(trt, attributes, None, operator=operator)
        kept = {**attributes, "scale": float(np.float32(attributes["scale"]))}
        stored = {field.name: tuple(field.data.tolist()) for field in plugin.get_fields_to_serialize()}
        assert stored == {name: value if isinstance(value, tuple) else (value,) for name, value in kept.items()}
        again = plugin_of(trt, kept, None, operator=operator)
        assert again.attributes == plugin.attributes == again.clone().attributes == kept


def test_fields_that_are_not_the_operators_are_refused() -> None:
    for changes, message in (
        ({"scale": None}, "the fields left, right, dilation, global_bound were given; they must be left, right, dil"),
        ({"window": 3}, "the fields left, right, dilation, global_bound, scale, window were given"),
        ({"left": (1, 2)}, "the field left holds 2 x INT32; it is one value of type int"),
        ({"scale": 1}, "the field scale holds 1 x INT32; it is one value of type float"),
        ({"dilation": ()}, "the field dilation holds 0 x INT32"),
        ({"block_index_use": 3}, "3 is not a valid BlockIndexUse"),
    ):
        with named_case(changes), pytest.raises(ValueError, match=message):
            plugin_of(trt, WINDOW, None, **changes)
        assert message in take_plugin_errors()[0]
        assert take_plugin_errors() == ()


def described(dtype: Any, layout: Any = trt.TensorFormat.LINEAR) -> Any:
    tensor = trt.DynamicPluginTensorDesc()
    inner = tensor.desc
    inner.type, inner.format = dtype, layout
    tensor.desc = inner
    return tensor


OWN_TYPES = {
    **dict.fromkeys((BLOCKS, CHUNKS, WINDOWS), "{0} {0} {0} INT32 {0}"),
    LSH: "{0} {0} INT32 FLOAT {0}",
    RELATIVE: "{0} {0} {0} INT32 {0} {0} {0} {0} {0}",
    CLIPPED: "{0} {0} {0} BOOL {0} {0}",
}
"""Operator -> the types of its inputs and its result, by that of its states."""

OF_A_PLAN = [
    (BlockIndexUse.OUTPUT, "HALF HALF HALF INT32 HALF INT32", 4, True),
    (BlockIndexUse.OUTPUT, "HALF HALF HALF INT32 HALF HALF", 4, False),
    (BlockIndexUse.INPUT, "HALF HALF HALF INT32 INT32 HALF", 5, True),
    (BlockIndexUse.INPUT, "HALF HALF HALF INT32 HALF HALF", 5, False),
]
"""Use of a block index, the types of a window's inputs and outputs, how many are inputs, and whether they fit."""

OTHER_TYPES = [
    (RELATIVE, "HALF HALF HALF INT32 HALF HALF HALF HALF", True),
    (RELATIVE, "HALF HALF HALF INT64 HALF HALF HALF HALF", False),
    (CLIPPED, "HALF HALF HALF BOOL HALF HALF HALF", True),
    (CLIPPED, "HALF HALF HALF INT32 HALF HALF HALF", False),
    (CLIPPED, "HALF HALF HALF BOOL FLOAT HALF HALF", False),
    (LSH, "HALF HALF INT32 HALF HALF", False),
    (WINDOWS, "HALF HALF FLOAT INT32 HALF", False),
    (WINDOWS, "HALF HALF HALF INT32 FLOAT", False),
    (WINDOWS, "INT32 INT32 INT32 INT32 INT32", False),
    (BLOCKS, "HALF HALF HALF INT32 INT32 HALF", True),
    (BLOCKS, "HALF HALF HALF INT32 HALF HALF", False),
]
"""Operator, types, and whether they fit."""


def test_states_and_result_are_of_one_type_and_other_inputs_of_theirs() -> None:
    own = [(name, OWN_TYPES[name].format(dtype), True) for name in ATTRIBUTES for dtype in ("HALF", "FLOAT", "BF16")]
    for operator, types, takes in [*own, *OTHER_TYPES]:
        plugin = plugin_of(trt, ATTRIBUTES[operator], None, operator=operator)
        tensors = [described(getattr(trt.DataType, name)) for name in types.split()]
        fits = [plugin.supports_format_combination(place, tensors, len(tensors) - 1) for place in range(len(tensors))]
        assert all(fits) == takes, (operator, types)
        packed = [described(trt.DataType.HALF, trt.TensorFormat.HWC8), *tensors[1:]]
        assert not plugin.supports_format_combination(0, packed, len(tensors) - 1), (operator, types)
        assert plugin.get_output_data_types([tensor.desc.type for tensor in tensors]) == [tensors[0].desc.type]


def test_a_block_index_is_of_whole_numbers() -> None:
    for use, types, inputs, takes in OF_A_PLAN:
        plugin = plugin_of(trt, WINDOW, None, block_index_use=int(use))
        tensors = [described(getattr(trt.DataType, name)) for name in types.split()]
        fits = [plugin.supports_format_combination(place, tensors, inputs) for place in range(len(tensors))]
        assert all(fits) == takes, (use, types)
        outputs = plugin.get_output_data_types([tensor.desc.type for tensor in tensors[:inputs]])
        assert outputs == [trt.DataType.HALF, trt.DataType.INT32][: plugin.num_outputs]


def profiled(shapes: Sequence[Sequence[int]]) -> list[Any]:
    tensors = []
    for dims in shapes:
        tensor = trt.DynamicPluginTensorDesc()
        tensor.max = trt.Dims(tuple(dims))
        tensors.append(tensor)
    return tensors


def test_the_workspace_suffices_for_the_largest_shape_and_the_table_counts() -> None:
    listed = shapes_of((4, 1000, 2, 64), (2, 14, 9))
    sizes = {}
    for operator, shapes in ((WINDOWS, shapes_of((4, 1000, 2, 32))), (LSH, ROTATED), (BLOCKS, listed)):
        plugin = plugin_of(trt, ATTRIBUTES[operator], None, operator=operator)
        needed = plugin_spec_of(OPERATORS[operator]).workspace(shapes, ATTRIBUTES[operator])
        sizes[operator] = plugin.get_workspace_size(profiled(shapes), [])
        assert 0 <= sizes[operator] - sum(needed.values()) < len(needed) * 256
    assert plugin.get_workspace_size(profiled(listed[:4]), []) < sizes[BLOCKS]


def test_a_build_without_a_kernel_for_it_stops() -> None:
    """All that `check` refuses: tests/plugins/kernels."""
    for operator, shapes, message in (
        (WINDOWS, shapes_of((1, 64, 2, 48)), "not support head_dim 48; they support 32, 64, 80, 96, 128"),
        (LSH, ROTATED[:3], "rotations are missing; LSH attention needs them"),
        (RELATIVE, remembered(300, 812)[:6], "RelativeAttention has 7 or 8 inputs, not 6"),
    ):
        plugin = plugin_of(trt, ATTRIBUTES[operator], None, operator=operator)
        with named_case(message), pytest.raises(ValueError, match=message):
            plugin.configure_plugin(profiled(shapes), [])
        assert len(take_plugin_errors()) == 1


def test_launches_carry_addresses_sizes_and_the_stream(kernels: Path, launched: list[LaunchedKernel]) -> None:
    run(plugin_of(trt, WINDOW | {"dilation": (1, 2)}, kernels))
    assert [launch.source["function"] for launch in launched] == ["index_keys", "attend", "attend"]
    assert {launch.stream for launch in launched} == {STREAM}
    assert launched[0].arguments == {"token_kind": 0x4000, "block_index": WORKSPACE, "tokens": 70, "global_bound": 5}
    pointers = {
        "query": 0x1000,
        "key": 0x2000,
        "value": 0x3000,
        "token_kind": 0x4000,
        "block_index": WORKSPACE,
        "out": 0x5000,
    }
    assert pointers.items() <= launched[1].arguments.items()
    assert [launch.arguments["dilation"] for launch in launched[1:]] == [1, 2]


def test_a_block_index_is_made_by_the_plugin_that_gives_it_and_read_by_those_that_take_it(
    kernels: Path, launched: list[LaunchedKernel]
) -> None:
    block_index, described = 0x7000, tensor_descriptions(trt, shapes_of(SHAPE), "float16")
    uses = (int(BlockIndexUse.OUTPUT), int(BlockIndexUse.INPUT))
    gives, takes = (plugin_of(trt, WINDOW, kernels, block_index_use=use).attach_to_context(None) for use in uses)
    assert (gives.num_outputs, takes.num_outputs) == (2, 1)
    for attached in (gives, takes):
        assert attached.get_workspace_size(profiled(shapes_of(SHAPE)), []) == 0
        (stored,) = (field.data for field in attached.get_fields_to_serialize() if field.name == "block_index_use")
        assert stored == attached.block_index_use
    gives.on_shape_change(described, described[:1])
    gives.enqueue(described, described[:1], ADDRESSES, [0x5000, block_index], 0, STREAM)
    described = tensor_descriptions(trt, [*shapes_of(SHAPE), (2, 149)], "float16")
    takes.on_shape_change(described, described[:1])
    takes.enqueue(described, described[:1], [*ADDRESSES, block_index], [0x6000], 0, STREAM)
    assert [launch.source["function"] for launch in launched] == ["index_keys", "attend", "attend"]
    assert {launch.arguments["block_index"] for launch in launched} == {block_index}
    assert [launch.arguments["out"] for launch in launched[1:]] == [0x5000, 0x6000]


def test_launches_carry_the_table_where_there_is_one(launched: list[LaunchedKernel], tmp_path: Path) -> None:
    folder = kernels_for(tmp_path, LISTED, UNLISTED, operator=BLOCKS, architectures=[86])
    spec = plugin_spec_of(OPERATORS[BLOCKS])
    for shapes in (LISTED, UNLISTED):
        launched.clear()
        run(plugin_of(trt, BIGBIRD, folder, operator=BLOCKS), shapes[0], *shapes[4:])
        assert [launch.source["function"] for launch in launched] == list(spec.kernels)
        sizes = list(spec.workspace(shapes, BIGBIRD).values())
        split_results = WORKSPACE + -(-sizes[0] // 256) * 256
        _, lists, attend, combine = (launch.arguments for launch in launched)
        has_table = len(shapes) > 4
        assert {"listed_blocks": 0x6000}.items() <= lists.items() if has_table else "listed_blocks" not in lists
        assert (lists["block_index"], lists["table_listed"]) == (WORKSPACE, 3 if has_table else 0)
        assert (attend["split_results"], combine["split_results"], combine["out"]) == (
            split_results,
            split_results,
            0x5000,
        )


def test_kernels_of_other_types_or_sizes_are_not_launched(
    kernels: Path, launched: list[LaunchedKernel], tmp_path: Path
) -> None:
    for name, compiled in ((BLOCKS, LISTED), (LSH, ROTATED)):
        kernels_for(tmp_path, compiled, operator=name, architectures=[86])
    for operator, shapes, changes, dtype, function in (
        (BLOCKS, UNLISTED, {}, "float16", "list_blocks"),
        (BLOCKS, LISTED, {"block_size": 128}, "float16", "count_tokens"),
        (WINDOWS, [(1, 9, 2, 128)], {}, "float16", "attend"),
        (WINDOWS, [SHAPE], {}, "bfloat16", "attend"),
        (LSH, [SHAPE, *[()] * 2, (2, 32, 2, 3)], {}, "bfloat16", "hash_tokens"),
    ):
        plugin = plugin_of(trt, ATTRIBUTES[operator] | changes, kernels, operator=operator)
        message = f"the kernel {function} of these types and sizes is for none"
        with named_case(operator, changes, dtype), pytest.raises(KernelError, match=message):
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
    run(plugin, (1, 9, 2, 32))
    assert "cuModuleLoadData" not in driver.calls
    set_up(attached, (1, 9, 2, 64))
    # Heads of another size have kernels of their own, but index_keys serves both.
    assert driver.calls.count("cuModuleLoadData") == 1


def test_an_error_of_the_driver_is_reported(driver: SimulatedDriver, kernels: Path) -> None:
    for call in (
        "cuInit", "cuCtxGetCurrent", "cuCtxGetDevice", "cuDeviceGetAttribute", "cuModuleLoadData",
        "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel",
    ):  # fmt: skip
        driver.failing[call] = 700
        with named_case(call), pytest.raises(LaunchError, match=r"CUDA error 700 at .*: the reason for 700"):
            run(plugin_of(trt, WINDOW, kernels))
        assert take_plugin_errors()[0].startswith("SlidingWindowAttention: CUDA error 700")
        driver.failing.clear()
    run(plugin_of(trt, WINDOW, kernels))
    assert take_plugin_errors() == ()


def test_kernels_that_cannot_be_loaded_are_reported(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, error, message in (
        (SimulatedDriver(context=0), LaunchError, "no CUDA context"),
        (None, KernelError, "pip install cuda-bindings"),
    ):
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
        with pytest.raises(error, match=message):
            run(plugin_of(trt, WINDOW, kernels))


def test_a_tensor_that_is_not_aligned_is_refused(kernels: Path) -> None:
    attached = run(plugin_of(trt, WINDOW, kernels))
    described = tensor_descriptions(trt, shapes_of(SHAPE), "float16")
    for place in range(6):
        addresses = [*ADDRESSES, 0x5000, WORKSPACE]
        addresses[place] += 8
        message = r"got the address 0x\d008; it needs multiples of 16"
        with named_case(place), pytest.raises(LaunchError, match=message):
            attached.enqueue(described, described[:1], addresses[:4], addresses[4:5], addresses[5], STREAM)


def test_a_call_of_other_shapes_or_after_refused_ones_launches_nothing(kernels: Path) -> None:
    attached = run(plugin_of(trt, WINDOW, kernels))
    longer = tensor_descriptions(trt, shapes_of((2, 71, 2, 32)), "float16")
    with pytest.raises(LaunchError, match=r"set up for shapes \(\(2, 70, 2, 32\), .* but got \(\(2, 71, 2, 32\), "):
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
    with pytest.raises(LaunchError, match=r"set up for shapes .*\(2, 99, 2, 32\)\), but got .*\(2, 70, 2, 32\)\)\."):
        enqueue(attached, few)
    enqueue(attached, many)
    (launch,) = launched
    assert (launch.arguments["tokens"], launch.arguments["keys"], launch.arguments["distances"]) == (70, 99, 169)


def test_execution_contexts_have_shapes_of_their_own(kernels: Path, launched: list[LaunchedKernel]) -> None:
    plugin = plugin_of(trt, WINDOW, kernels)
    contexts = [plugin.attach_to_context(None) for _ in range(2)]
    described = [set_up(attached, (1, tokens, 2, 32)) for attached, tokens in zip(contexts, (70, 9), strict=True)]
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


def test_a_kernel_that_is_missing_or_changed_is_named(kernels: Path, tmp_path: Path) -> None:
    for damage, message in (
        (remove("*attend-sm86*.cubin"), r"attend-sm86.*does not describe a compiled kernel"),
        (remove("*attend-sm8*"), r"GPU is an sm_86; in .* the kernel attend .* is for sm_120.\n.*--sm 86"),
        (remove("*"), r"the kernel index_keys .* is for none"),
        (shutil.rmtree, r"the kernel index_keys .* is for none"),
        (tamper, r"attend-sm86.*is not the file that .*describes"),
    ):
        damaged = Path(shutil.copytree(kernels, tmp_path / "damaged"))
        damage(damaged)
        with named_case(message), pytest.raises(KernelError, match=message):
            run(plugin_of(trt, WINDOW, damaged))
        shutil.rmtree(damaged, ignore_errors=True)


def test_a_gpu_runs_what_was_compiled_for_it_or_for_an_earlier_gpu_of_its_generation(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpu, compiled_for in ((80, 80), (89, 86), (120, 120), (90, None), (121, None), (75, None)):
        launched: list[LaunchedKernel] = []
        driver = SimulatedDriver(architecture=gpu, run=launched.append)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        if compiled_for is None:
            with named_case(gpu), pytest.raises(KernelError, match=f"GPU is an sm_{gpu}"):
                run(plugin_of(trt, WINDOW, kernels))
        else:
            run(plugin_of(trt, WINDOW, kernels))
            assert {launch.source["architecture"] for launch in launched} == {compiled_for}
            assert cubin_architecture(gpu) == compiled_for
