"""TensorRT plugins: real plugin objects on a simulated driver, held to the operator's definition."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fakes.simulated_cuda import LaunchedKernel, SimulatedDriver, write_simulated_kernels
from fakes.simulated_gpu import SimulatedGpu, plugin_of, tensor_descriptions
from hdplugins import OPERATORS, Operator
from hdplugins.kernels.aot import KernelError, KernelSource
from hdplugins.kernels.attention_tiles import Tiles, cubin_architecture
from hdplugins.kernels.cuda_launch import Launch, LaunchError
from hdplugins.operators.plugin_face import FieldType, face_of
from hdplugins.operators.sliding_window_attention.geometry import kernel_sources, workspace_bytes
from hdplugins.operators.sliding_window_attention.reference import sliding_window_attention
from hdplugins.tensorrt.link import provide_library_link
from hdplugins.tensorrt.plugin_class import plugin_class
from hdplugins.tensorrt.plugins import plugin_operators, plugins_with_kernels, take_plugin_errors
from support.comparators import assert_close
from support.interpreted_kernel import Texts

provide_library_link()
trt = pytest.importorskip(
    "tensorrt_rtx", reason="the plugin's base classes are TensorRT's; TensorRT-RTX is not installed"
)
pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")

SMALL = Tiles(block_queries=32, block_keys=16, num_warps=4, num_stages=2, head=32)
WINDOW = {"left": 16, "right": 16, "dilation": (1,), "global_bound": 5, "scale": 0.2}
SHAPE = (2, 2, 70, 32)
STREAM, WORKSPACE = 0x570, 0x9000
ADDRESSES = [0x1000, 0x2000, 0x3000, 0x4000]
ATOL = {torch.float32: 2e-6, torch.float16: 2e-3}
"""Somewhat more than twice what was measured, for values of about 1: 7.6e-7 and 8.3e-4."""


@pytest.fixture(autouse=True)
def no_old_errors() -> None:
    take_plugin_errors()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimulatedDriver:
    """In place of cuda-python's."""
    driver = SimulatedDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """Kernels of float16 and heads of 32 and 64, for two generations of GPUs."""
    folder = tmp_path / "kernels"
    for head_dim in (32, 64):
        sources = kernel_sources(head_dim=head_dim, dtype="float16", architectures=[80, 86, 120])
        write_simulated_kernels(folder, "SlidingWindowAttention", sources)
    return folder


def run(plugin: Any, shape: Sequence[int] = SHAPE, dtype: str = "float16", workspace: int = WORKSPACE) -> Any:
    """One call, as an execution context makes it, and what was attached to the context."""
    attached = plugin.attach_to_context(None)
    described = tensor_descriptions(trt, shape, dtype)
    attached.on_shape_change(described, described[:1])
    attached.enqueue(described, described[:1], ADDRESSES, [0x5000], workspace, STREAM)
    return attached


def texts(token_kind: torch.Tensor, *, heads: int = 2, head_dim: int = 32, dtype: torch.dtype = torch.float32) -> Texts:
    shape = (token_kind.shape[0], heads, token_kind.shape[1], head_dim)
    generator = torch.Generator().manual_seed(shape[2])
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    return Texts(query=query, key=key, value=value, token_kind=token_kind)


def kinds(*rows: str) -> torch.Tensor:
    """Rows of a batch, a letter a token: `.` padding, `l` local, `G` global."""
    return torch.tensor([[".lG".index(letter) for letter in row] for row in rows], dtype=torch.int32)


CASES: dict[str, tuple[list[torch.Tensor], dict[str, Any]]] = {
    "one token": ([kinds("l")], {}),
    "around the window": ([kinds("l" * tokens) for tokens in (15, 16, 17, 33)], {"global_bound": 0}),
    "globals and padding": ([kinds("G" + "l" * 40 + "G" + "l" * 20 + "." * 9, "." * 30 + "l" * 41)], {}),
    "all global": ([kinds("G" * 5)], {}),
    "nothing but padding": ([kinds("." * 37)], {}),
    "another length, and back": ([kinds("Gl" * 2 + "l" * tokens) for tokens in (60, 9, 60)], {}),
    "a dilation a head": ([kinds("G" + "l" * 50)], {"dilation": (1, 3), "left": 4, "right": 2}),
    "one dilation": ([kinds("l" * 50)], {"dilation": (2,), "left": 5, "right": 9}),
    "wider than the text": ([kinds("l" * 40)], {"left": 2**31 - 1, "right": 2**31 - 1}),
}


def right_answer(call: Texts, attributes: dict[str, Any]) -> np.ndarray:
    query, key, value = (tensor.double() for tensor in (call.query, call.key, call.value))
    return sliding_window_attention(query, key, value, call.token_kind, **attributes).numpy()


@pytest.mark.parametrize("dtype", ATOL, ids=str)
@pytest.mark.parametrize(("token_kinds", "changes"), CASES.values(), ids=CASES)
def test_a_plugin_gives_the_right_answers(
    token_kinds: list[torch.Tensor], changes: dict[str, Any], dtype: torch.dtype, gpu: SimulatedGpu, tmp_path: Path
) -> None:
    attributes = WINDOW | changes
    calls = [texts(token_kind, dtype=dtype) for token_kind in token_kinds]
    answers = gpu.attention(calls, tmp_path / "kernels", tiles=SMALL, attributes=attributes)
    for call, answer in zip(calls, answers, strict=True):
        assert_close(answer.numpy(), right_answer(call, attributes), atol=ATOL[dtype])
        assert (answer.masked_select((call.token_kind == 0)[:, None, :, None]) == 0).all()


@pytest.mark.parametrize("wrong", [{"left": 15}, {"right": 17}, {"dilation": (2,)}, {"scale": 0.201}], ids=str)
def test_the_comparison_refuses_other_attributes(wrong: dict[str, Any], gpu: SimulatedGpu, tmp_path: Path) -> None:
    call = texts(kinds("G" + "l" * 60), dtype=torch.float16)
    (answer,) = gpu.attention([call], tmp_path / "kernels", tiles=SMALL, attributes=WINDOW | wrong)
    with pytest.raises(AssertionError, match=">"):
        assert_close(answer.numpy(), right_answer(call, WINDOW), atol=ATOL[torch.float16])


def test_an_engine_stores_all_that_makes_the_plugin() -> None:
    attributes = {"left": 3, "right": 2**31 - 1, "dilation": (1, 2, 4), "global_bound": 0, "scale": 0.1}
    plugin = plugin_of(trt, attributes, None)
    stored = {field.name: tuple(field.data.tolist()) for field in plugin.get_fields_to_serialize()}
    assert stored == {
        "left": (3,), "right": (2**31 - 1,), "dilation": (1, 2, 4), "global_bound": (0,), "scale": (np.float32(0.1),),
    }  # fmt: skip
    again = plugin_of(trt, {name: value if name == "dilation" else value[0] for name, value in stored.items()}, None)
    assert again.attributes == plugin.attributes == {**attributes, "scale": float(np.float32(0.1))}
    assert again.clone().attributes == plugin.attributes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "the fields left, right, dilation, global_bound were given; there are left, right, dilation"),
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


def test_query_key_value_and_result_are_of_one_type_and_kinds_are_int32() -> None:
    plugin = plugin_of(trt, WINDOW, None)
    half, single, bfloat, int32 = (
        described(kind) for kind in (trt.DataType.HALF, trt.DataType.FLOAT, trt.DataType.BF16, trt.DataType.INT32)
    )

    def fits(*tensors: Any) -> bool:
        return all(plugin.supports_format_combination(place, tensors, 4) for place in range(5))

    for own in (half, single, bfloat):
        assert fits(own, own, own, int32, own)
    assert not fits(half, half, single, int32, half)
    assert not fits(half, half, half, int32, single)
    assert not fits(half, half, half, half, half)
    assert not fits(int32, int32, int32, int32, int32)
    assert not fits(half, half, half, described(trt.DataType.INT64), half)
    packed = described(trt.DataType.HALF, trt.TensorFormat.HWC8)
    assert not fits(packed, half, half, int32, half)
    assert plugin.get_output_data_types([trt.DataType.BF16] * 3 + [trt.DataType.INT32]) == [trt.DataType.BF16]


def profiled(shape: Sequence[int]) -> list[Any]:
    tensors = []
    for dims in [tuple(shape)] * 3 + [(shape[0], shape[2])]:
        tensor = trt.DynamicPluginTensorDesc()
        tensor.max = trt.Dims(dims)
        tensors.append(tensor)
    return tensors


def test_the_workspace_suffices_for_the_largest_shape() -> None:
    plugin = plugin_of(trt, WINDOW, None)
    size = plugin.get_workspace_size(profiled((4, 2, 1000, 32)), [])
    assert 0 <= size - workspace_bytes(4, 1000, WINDOW["global_bound"]) < 256


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((1, 2, 64, 48), {}, "no head_dim 48; it has 32, 64, 80, 96, 128"),
        ((1, 2, 64, 32), {"dilation": (1, 2, 3)}, r"dilation is \[1, 2, 3\]; it has 1 value or 2"),
        ((1, 2, 64, 32), {"left": -1}, "left is -1; it is 0 or more"),
    ],
)
def test_a_build_without_a_kernel_for_it_stops(shape: Sequence[int], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugin_of(trt, WINDOW | changes, None).configure_plugin(profiled(shape), [])
    assert len(take_plugin_errors()) == 1


def test_launches_carry_addresses_sizes_and_the_stream(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[LaunchedKernel] = []
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", SimulatedDriver(run=launched.append))
    run(plugin_of(trt, WINDOW | {"dilation": (1, 2)}, kernels))
    assert [launch.source["function"] for launch in launched] == ["plan_keys", "attend", "attend"]
    assert {launch.stream for launch in launched} == {STREAM}
    assert launched[0].arguments == {"token_kind": 0x4000, "plan": WORKSPACE, "tokens": 70, "global_bound": 5}
    pointers = {"query": 0x1000, "key": 0x2000, "value": 0x3000, "token_kind": 0x4000, "plan": WORKSPACE, "out": 0x5000}
    assert pointers.items() <= launched[1].arguments.items()
    assert [launch.arguments["dilation"] for launch in launched[1:]] == [1, 2]


def test_kernels_are_loaded_once_and_before_anything_is_enqueued(driver: SimulatedDriver, kernels: Path) -> None:
    plugin = plugin_of(trt, WINDOW, kernels)
    attached = plugin.attach_to_context(None)
    described = tensor_descriptions(trt, SHAPE, "float16")
    attached.on_shape_change(described, described[:1])
    assert driver.calls.count("cuModuleLoadData") == 2
    assert driver.calls.count("cuFuncSetAttribute") == 1
    driver.calls.clear()
    driver.launching_only = True
    for _ in range(3):
        attached.enqueue(described, described[:1], ADDRESSES, [0x5000], WORKSPACE, STREAM)
    assert driver.calls == ["cuLaunchKernel"] * 6
    driver.launching_only = False
    run(plugin, (1, 2, 9, 32))
    assert "cuModuleLoadData" not in driver.calls


def test_heads_of_another_size_get_kernels_of_their_own(driver: SimulatedDriver, kernels: Path) -> None:
    attached = run(plugin_of(trt, WINDOW, kernels))
    described = tensor_descriptions(trt, (1, 2, 9, 64), "float16")
    attached.on_shape_change(described, described[:1])
    # plan_keys serves both.
    assert driver.calls.count("cuModuleLoadData") == 3


@pytest.mark.parametrize(
    "call",
    [
        "cuInit", "cuCtxGetCurrent", "cuCtxGetDevice", "cuDeviceGetAttribute", "cuModuleLoadData",
        "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel",
    ],
)  # fmt: skip
def test_an_error_of_the_driver_is_told_and_not_swallowed(call: str, driver: SimulatedDriver, kernels: Path) -> None:
    driver.failing[call] = 700
    with pytest.raises(LaunchError, match=r"CUDA error 700 at .*: the reason for 700"):
        run(plugin_of(trt, WINDOW, kernels))
    assert take_plugin_errors()[0].startswith("SlidingWindowAttention: CUDA error 700")
    driver.failing.clear()
    run(plugin_of(trt, WINDOW, kernels))
    assert take_plugin_errors() == ()


def test_a_thread_without_a_cuda_context_is_told(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", SimulatedDriver(context=0))
    with pytest.raises(LaunchError, match="no CUDA context"):
        run(plugin_of(trt, WINDOW, kernels))


@pytest.mark.parametrize("place", range(6))
def test_a_tensor_that_is_not_aligned_is_refused(place: int, driver: SimulatedDriver, kernels: Path) -> None:
    attached = run(plugin_of(trt, WINDOW, kernels))
    described = tensor_descriptions(trt, SHAPE, "float16")
    addresses = [*ADDRESSES, 0x5000, WORKSPACE]
    addresses[place] += 8
    with pytest.raises(LaunchError, match=r"got the address 0x\d008; it needs multiples of 16"):
        attached.enqueue(described, described[:1], addresses[:4], addresses[4:5], addresses[5], STREAM)


def test_a_call_whose_shapes_were_not_told_is_refused(driver: SimulatedDriver, kernels: Path) -> None:
    attached = run(plugin_of(trt, WINDOW, kernels))
    longer = tensor_descriptions(trt, (2, 2, 71, 32), "float16")
    with pytest.raises(LaunchError, match=r"shapes of \(2, 2, 70, 32\) were told, and \(2, 2, 71, 32\) came"):
        attached.enqueue(longer, longer[:1], ADDRESSES, [0x5000], WORKSPACE, STREAM)
    with pytest.raises(LaunchError, match="no kernels to launch"):
        attached.clone().enqueue(longer, longer[:1], ADDRESSES, [0x5000], WORKSPACE, STREAM)


def test_execution_contexts_have_shapes_of_their_own(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[LaunchedKernel] = []
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", SimulatedDriver(run=launched.append))
    plugin = plugin_of(trt, WINDOW, kernels)
    contexts = [(plugin.attach_to_context(None), tensor_descriptions(trt, (1, 2, n, 32), "float16")) for n in (70, 9)]
    for attached, described in contexts:
        attached.on_shape_change(described, described[:1])
    for attached, described in contexts:
        attached.enqueue(described, described[:1], ADDRESSES, [0x5000], WORKSPACE, STREAM)
    assert [launch.arguments["tokens"] for launch in launched] == [70, 70, 9, 9]


def test_shapes_that_were_refused_leave_nothing_to_launch(driver: SimulatedDriver, kernels: Path) -> None:
    attached = run(plugin_of(trt, WINDOW, kernels))
    wrong = tensor_descriptions(trt, SHAPE, "float16")
    wrong[3].dims = trt.Dims((2, 69))
    with pytest.raises(ValueError, match=r"token_kind is \[2, 69\]"):
        attached.on_shape_change(wrong, wrong[:1])
    with pytest.raises(LaunchError, match="no kernels to launch"):
        attached.enqueue(wrong, wrong[:1], ADDRESSES, [0x5000], WORKSPACE, STREAM)


def test_a_plugin_that_is_only_built_needs_no_kernels_and_runs_none(driver: SimulatedDriver) -> None:
    with pytest.raises(LaunchError, match=r"without a bundle's folder of kernels(.|\n)*plugins_with_kernels"):
        run(plugin_of(trt, WINDOW, None))
    assert driver.calls == []


def test_without_cuda_python_the_error_names_the_package(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(KernelError, match="pip install cuda-bindings"):
        run(plugin_of(trt, WINDOW, kernels))


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
    damage: Callable[[Path], None], message: str, driver: SimulatedDriver, kernels: Path
) -> None:
    damage(kernels)
    with pytest.raises(KernelError, match=message):
        run(plugin_of(trt, WINDOW, kernels))


@pytest.mark.parametrize(("shape", "dtype"), [((1, 2, 9, 128), "float16"), (SHAPE, "float32"), (SHAPE, "bfloat16")])
def test_a_type_or_size_that_was_not_compiled_is_refused(
    shape: Sequence[int], dtype: str, driver: SimulatedDriver, kernels: Path
) -> None:
    with pytest.raises(KernelError, match=r"the kernel attend of these types and sizes is for none"):
        run(plugin_of(trt, WINDOW, kernels), shape, dtype)


@pytest.mark.parametrize(
    ("gpu_architecture", "compiled_for"),
    [(80, 80), (86, 86), (89, 86), (120, 120), (90, None), (121, None), (75, None)],
)
def test_a_gpu_runs_what_was_compiled_for_it_or_for_its_elder_of_one_generation(
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


def test_plugins_keep_the_folder_that_they_were_created_with(driver: SimulatedDriver, kernels: Path) -> None:
    with plugins_with_kernels(trt, kernels):
        other = plugin_of(trt, WINDOW, Path("elsewhere"))
        plugin = plugin_of(trt, WINDOW, kernels)
    run(plugin)
    assert other.kernels == Path.cwd() / "elsewhere"
    assert plugin_of(trt, WINDOW, None).kernels is None


def test_registering_again_is_no_error_and_makes_no_second_creator() -> None:
    for _ in range(2):
        with plugins_with_kernels(trt, None):
            pass
    ours = [
        creator.name for creator in trt.get_plugin_registry().all_creators if creator.plugin_namespace == "hdexport"
    ]
    assert ours == [operator.name for operator in plugin_operators()]


class Namesake(ModuleType):
    """Another module that is called as the real one, with a registry of its own."""

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
            creator = trt.get_plugin_registry().get_creator("SlidingWindowAttention", "1", "hdexport")
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
    assert [operator.name for operator in plugin_operators()] == ["BlockSparseAttention", "SlidingWindowAttention"]
    for operator in plugin_operators():
        face = face_of(operator)
        assert len(face.INPUT_DTYPES) == len(operator.inputs)
        assert face.INPUT_DTYPES[0] is None
        assert tuple(face.FIELDS) == operator.attributes


class TwoBuffers(ModuleType):
    """All that a second operator adds: two scratch buffers, and one kernel that takes both."""

    FIELDS = MappingProxyType({"factor": FieldType.FLOAT})
    DTYPES = ("float32",)
    INPUT_DTYPES = (None,)
    OUTPUT = "result"
    KERNELS = ("scale",)

    @staticmethod
    def check(shapes: Any, attributes: Any) -> None: ...

    @staticmethod
    def serves(kernel: Any, shapes: Any, attributes: Any, *, dtype: str) -> bool:
        return dtype == "float32"

    @staticmethod
    def workspace(shapes: Any, attributes: Any) -> dict[str, int]:
        return {"first": 4 * shapes[0][0], "second": 10}

    @staticmethod
    def launches(shapes: Any, attributes: Any, *, constants: Any) -> tuple[Launch, ...]:
        scalars = {"count": shapes[0][0], "factor": attributes["factor"]}
        return (Launch(kernel="scale", grid=(constants["scale"]["block"], 1, 1), scalars=scalars),)


@pytest.fixture
def two_buffers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setitem(sys.modules, "two_buffers", ModuleType("two_buffers"))
    monkeypatch.setitem(sys.modules, "two_buffers.tensorrt_plugin", TwoBuffers("two_buffers.tensorrt_plugin"))
    operator = Operator(name="TwoBuffers", version=3, package="two_buffers", inputs=("data",), attributes=("factor",))
    signature = {
        "second": "*i8",
        "data": "*fp32",
        "first": "*fp32",
        "result": "*fp32",
        "count": "i32",
        "factor": "fp32",
    }
    source = KernelSource(
        module="two_buffers", function="scale", architecture=86, signature=signature, constants={"block": 7}
    )
    write_simulated_kernels(tmp_path / "kernels", "TwoBuffers", [source])
    return plugin_class(trt, operator)({"factor": 0.5}, tmp_path / "kernels")


def test_a_second_operator_needs_only_its_geometry(two_buffers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[LaunchedKernel] = []
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", SimulatedDriver(run=launched.append))
    tensor = trt.PluginTensorDesc()
    tensor.dims, tensor.type, tensor.format = trt.Dims((100,)), trt.DataType.FLOAT, trt.TensorFormat.LINEAR
    two_buffers.on_shape_change([tensor], [tensor])
    two_buffers.enqueue([tensor], [tensor], [0x1000], [0x2000], 0x3000, STREAM)
    assert launched[0].grid == (7, 1, 1)
    # 400 bytes of the first buffer end at the next multiple of 256.
    assert launched[0].arguments == {
        "second": 0x3000 + 512, "data": 0x1000, "first": 0x3000, "result": 0x2000, "count": 100, "factor": 0.5,
    }  # fmt: skip
    assert (two_buffers.plugin_name, two_buffers.plugin_version) == ("TwoBuffers", "3")


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch(kernel="scale", grid=(1, 1, 1), scalars={"count": 2**31, "factor": 1.0}), "2147483648 does not fit"),
        (Launch(kernel="scale", grid=(1, 1, 1), scalars={"factor": 1.0}), "takes count: i32; the launch has"),
    ],
)
def test_a_launch_that_does_not_fit_its_kernel_is_refused(
    launch: Launch, message: str, two_buffers: Any, driver: SimulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoBuffers, "launches", lambda *_, **__: (launch,))
    tensor = trt.PluginTensorDesc()
    tensor.dims, tensor.type, tensor.format = trt.Dims((100,)), trt.DataType.FLOAT, trt.TensorFormat.LINEAR
    with pytest.raises(LaunchError, match=message):
        two_buffers.on_shape_change([tensor], [tensor])


def test_a_machine_that_runs_bundles_needs_nothing_that_builds_them() -> None:
    program = """
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "triton", "onnx", "onnx_ir", "onnxscript", "cuda"]))
from hdplugins.operators.plugin_face import face_of
from hdplugins.tensorrt.plugins import plugin_operators, plugins_with_kernels
print([face_of(operator).KERNELS for operator in plugin_operators()])
print([name for name in ("tensorrt", "tensorrt_rtx") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[('count_tokens', 'list_blocks', 'attend', 'combine'), ('plan_keys', 'attend')]\n[]\n"


def test_an_operator_without_a_plugin_has_none() -> None:
    assert not OPERATORS["DenseAttention"].has_face("tensorrt_plugin")
