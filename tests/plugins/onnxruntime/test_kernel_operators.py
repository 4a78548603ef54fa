"""Compiled kernels as operators of ONNX Runtime: the library in C and its planner, on a stand-in for the driver.

ONNX Runtime's CPU provider runs the operators here, on memory of the process; what the launcher gives the driver starts
the kernels themselves in Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from fakes.simulated_cuda import write_simulated_kernels
from fakes.stand_in_driver import StandInDriver, build_stand_in
from hdexport.graph.targets.onnxruntime.shared_block_indexes import ShareBlockIndexes
from hdplugins import OPERATORS
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.kernels.block_config import BlockConfig
from hdplugins.onnxruntime import operators
from hdplugins.onnxruntime.operators import KernelOperators, LauncherError, launcher_unavailable_reason, library_path
from support.attention_graphs import attention_model, chain_of
from support.attention_layers import Layer, token_kinds
from support.comparators import assert_close, named_case
from support.described_operators import WITH_KERNELS
from support.fork_here import said_in_a_fork
from support.interpreted_kernel import Interpreter
from support.kernel_cases import inputs_of
from support.operators import distance, relative
from support.operators.blocks import Blocks
from support.operators.chunks import Chunks
from support.operators.dense import Dense
from support.operators.distance import Clipped
from support.operators.lsh import Lsh
from support.operators.relative import Relative, key_kinds
from support.operators.window import Window

pytest.importorskip("triton", reason="the kernels are written in Triton, which has no wheel for this platform")
pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler on Linux"),
    pytest.mark.skipif(library_path() is None, reason="the launcher was not built: pip install --editable ."),
]

PROVIDER = "CPUExecutionProvider"
BLOCK_CONFIG = BlockConfig(block_m=16, block_n=16, num_warps=4, num_stages=2, block_d=32)
SOURCE = Path(operators.__file__).with_name("launcher.c")

Feeds = Mapping[str, np.ndarray]


def feeds_of(layer: Layer, kinds: np.ndarray) -> Feeds:
    """The inputs of a node, by the operator's names; those that the node has as constants are among them."""
    if isinstance(layer, Clipped):
        return distance.inputs_of(layer, kinds)
    if isinstance(layer, Relative):
        return relative.inputs_of(layer, key_kinds("left", kinds.shape[1], 5), kinds.shape[1])
    inputs: dict[str, torch.Tensor] = inputs_of(layer, torch.from_numpy(kinds))  # type: ignore[arg-type, assignment]
    return {name: tensor.numpy() for name, tensor in inputs.items()}


CASES: dict[str, tuple[Layer, Sequence[np.ndarray]]] = {
    "windows of grouped heads": (
        Window(left=9, right=5, dilation=(1, 1, 3, 3), heads=4, kv_heads=2, bound=3),
        [token_kinds(padding, 37, globals_="scattered", bound=3, batch=batch)
         for padding, batch in (("left", 1), ("holes", 3), ("all", 1))],
    ),
    "windows, float16": (
        Window(left=9, right=5, bound=1, dtype="float16"), [token_kinds("right", tokens) for tokens in (1, 15, 16, 17)],
    ),
    "blocks": (Blocks(block=16), [np.minimum(token_kinds("holes", 90), 1)]),
    "blocks with a table, float16": (
        Blocks(block=16, listed=(2, 3, 2), dtype="float16"), [np.minimum(token_kinds("right", 70), 1)],
    ),
    "chunks": (Chunks(chunk=16, after=1), [np.minimum(token_kinds("holes", 37), 1)]),
    "hashes": (Lsh(chunk=16), [np.minimum(token_kinds("right", 37), 1)]),
    "distances": (Clipped(reach=16), [np.minimum(token_kinds("left", 37), 1)]),
    "distances with values": (Clipped(by_query=True, values=True, reach=16), [np.minimum(token_kinds("holes", 37), 1)]),
    "dense, grouped heads": (
        Dense(heads=4, kv_heads=2), [np.minimum(token_kinds(padding, 37, batch=batch), 1)
                                     for padding, batch in (("left", 1), ("holes", 3), ("all", 1), ("none", 3))],
    ),
    "dense, causal, float16": (
        Dense(causal=1, dtype="float16"), [token_kinds("right", tokens) for tokens in (1, 15, 16, 17)],
    ),
    "relative": (Relative(), [token_kinds("none", 31)]),
    "relative without segments, float16": (
        Relative(segments=False, causal=1, dtype="float16"), [token_kinds("none", 16, batch=1)],
    ),
}  # fmt: skip
"""A node, and masks of its calls."""

ATOL = {"float32": 2e-6, "float16": 4e-3}
"""For values of about 1, and larger ones in proportion: some roundings of float32; of float16 more than twice what was
measured (1.6e-3)."""


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stand_in(tmp_path_factory.mktemp("driver"))


def write_kernels(folder: Path, layer: Layer, feeds: Feeds, architecture: int = 86) -> Path:
    """A bundle's folder of kernels for a node."""
    spec, count = plugin_spec_of(layer.operator), layer.operator.states + len(layer.inputs)
    shapes = [feeds[name].shape for name in layer.operator.inputs[:count]]
    sources = spec.kernel_sources(
        shapes, layer.node_attributes, dtype=layer.dtype, architectures=[architecture], block_config=BLOCK_CONFIG
    )
    write_simulated_kernels(folder, layer.operator.name, sources)
    return folder


def session_of(
    proto: onnx.ModelProto, kernels: Path | None, node_types: Mapping[str, str]
) -> tuple[onnxruntime.InferenceSession, KernelOperators | None]:
    """By kernels; by the functions of the model where there are none."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    found = None
    if kernels is not None:
        library = library_path()
        assert library is not None
        own = {name: OPERATORS[operator] for name, operator in node_types.items()}
        found = KernelOperators(library, kernels, node_types=own, provider=PROVIDER)
        found.register(options)
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=[PROVIDER]), found


def with_useless_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose functions answer 7 everywhere: what runs a body shows."""
    for function in proto.functions:
        kept = [node for node in function.node if set(node.output) & set(function.output[1:])]
        del function.node[:]
        query = function.input[0]
        function.node.extend(
            [
                helper.make_node("Sub", [query, query], ["nothing"]),
                helper.make_node("Constant", [], ["number"], value_float=7.0),
                helper.make_node("CastLike", ["number", query], ["typed"]),
                helper.make_node("Add", ["nothing", "typed"], list(function.output[:1])),
                *kept,
            ]
        )
    return proto


def answer(
    stand_in: Path, proto: bytes, kernels: Path | None, types: dict[str, str], calls: Sequence[Feeds]
) -> tuple[list[np.ndarray], list[str]]:
    """The answers to some calls, and the kernels that were started; in a process in which Triton interprets."""
    driver = StandInDriver(stand_in)
    session, _ = session_of(onnx.load_from_string(proto), kernels, types)
    names = [value.name for value in session.get_inputs()]
    return [session.run(None, {name: feeds[name] for name in names})[0] for feeds in calls], driver.launches


@pytest.mark.parametrize(("layer", "masks"), CASES.values(), ids=CASES)
def test_kernels_give_the_right_answers_in_the_place_of_functions(
    layer: Layer, masks: Sequence[np.ndarray], stand_in: Path, interpreter: Interpreter, tmp_path: Path
) -> None:
    calls = [feeds_of(layer, kinds) for kinds in masks]
    kernels = write_kernels(tmp_path / "kernels", layer, calls[0])
    proto = with_useless_functions(chain_of((layer,)))
    answers, launches = interpreter.run(
        answer, stand_in, proto.SerializeToString(), kernels, {layer.name: layer.operator.name}, calls
    )
    assert set(launches) <= set(plugin_spec_of(layer.operator).kernels)
    assert launches.count("attend") >= len(calls)
    for feeds, found in zip(calls, answers, strict=True):
        tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
        states = [tensors[name].double().nan_to_num() for name in layer.operator.state_names]
        wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        right = layer.by_definition(states, wide).numpy()
        with named_case(found.shape):
            assert_close(found, right, atol=ATOL[layer.dtype] * max(1.0, np.abs(right).max()))


def test_every_operator_with_kernels_is_tried() -> None:
    assert {layer.operator.name for layer, _ in CASES.values()} == WITH_KERNELS


# Layers that share a block index.

SHARED: dict[str, tuple[Layer, np.ndarray]] = {
    name: (layer, masks[-2:][0])
    for name, (layer, masks) in CASES.items()
    if name in ("windows of grouped heads", "blocks", "blocks with a table, float16")
}


def sharing(layer: Layer) -> onnx.ModelProto:
    """Two layers of which the first gives its block index to the second."""
    model = attention_model(layer, layer)
    assert ShareBlockIndexes()(model).modified
    return ir.serde.serialize_model(model)


@pytest.mark.parametrize(("layer", "kinds"), SHARED.values(), ids=SHARED)
def test_layers_share_a_block_index_by_which_answers_are_the_same(
    layer: Layer, kinds: np.ndarray, stand_in: Path, interpreter: Interpreter, tmp_path: Path
) -> None:
    calls = [feeds_of(layer, kinds)]
    kernels, types = write_kernels(tmp_path / "kernels", layer, calls[0]), {layer.name: layer.operator.name}
    # Neither texts nor tokens: there is no block index.
    calls += [{name: array[:0] for name, array in calls[0].items()}]
    answers, launches = {}, {}
    for name, proto in (("own", chain_of([layer] * 2)), ("shared", sharing(layer))):
        answers[name], launches[name] = interpreter.run(
            answer, stand_in, with_useless_functions(proto).SerializeToString(), kernels, types, calls
        )
    for own, shared in zip(answers["own"], answers["shared"], strict=True):
        assert np.array_equal(own, shared)
    assert not (answers["shared"][0] == 7).all()
    own, shared = Counter(launches["own"]), Counter(launches["shared"])
    for kernel in plugin_spec_of(layer.operator).block_index_kernels:
        assert (own.pop(kernel), shared.pop(kernel)) == (2, 1)
    assert own == shared


def test_layers_of_two_masks_share_no_block_index() -> None:
    model = attention_model(*[Window(left=4, right=3, bound=2)] * 2)
    second = [node for node in model.graph if node.op_type.startswith("SlidingWindowAttention")][1]
    kinds = second.inputs[3]
    assert kinds is not None
    others = ir.Value(name="others", shape=kinds.shape, type=kinds.type)
    model.graph.inputs.append(others)
    second.replace_input_with(3, others)
    assert not ShareBlockIndexes()(model).modified


# One node, called in all the ways that sessions are.

NODE = Window(left=4, right=3, bound=2)
TYPES = {NODE.name: NODE.operator.name}


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    return write_kernels(tmp_path / "kernels", NODE, feeds_of(NODE, token_kinds("none", 9)))


def model(layer: Layer = NODE) -> bytes:
    return with_useless_functions(chain_of((layer,))).SerializeToString()  # type: ignore[no-any-return]


def layers_sharing_a_block_index() -> bytes:
    return with_useless_functions(sharing(NODE)).SerializeToString()  # type: ignore[no-any-return]


def test_without_the_library_the_functions_run(stand_in: Path, interpreter: Interpreter) -> None:
    """The test above could pass by no other way than kernels."""
    (found,), launches = interpreter.run(
        answer, stand_in, model(), None, TYPES, [feeds_of(NODE, token_kinds("none", 9))]
    )
    assert not launches
    assert (found == 7).all()


def _planning(stand_in: Path, kernels: Path) -> list[tuple[int, int]]:
    driver = StandInDriver(stand_in)
    session, found = session_of(onnx.load_from_string(model()), kernels, TYPES)
    assert found is not None
    planned: list[int] = []
    block_index = found._planned

    def counted(asked: Sequence[int]) -> Iterator[int]:
        planned.append(len(asked))
        return block_index(asked)

    found._planned = counted  # type: ignore[method-assign]
    seen = []
    for context, tokens in ((1, 9), (1, 9), (1, 12), (1, 9), (2, 9), (2, 9), (1, 12)):
        driver.enter(context)
        session.run(None, dict(feeds_of(NODE, token_kinds("none", tokens))))
        seen.append((len(planned), driver.calls.count("cuModuleLoadData")))
    return seen


def test_python_is_entered_once_for_a_shape_and_a_gpu(stand_in: Path, kernels: Path, interpreter: Interpreter) -> None:
    """Kernels are two, and each context has its own."""
    assert interpreter.run(_planning, stand_in, kernels) == [(1, 2), (1, 2), (2, 2), (2, 2), (3, 4), (3, 4), (3, 4)]


def _by_threads(stand_in: Path, proto: bytes, kernels: Path, calls: Sequence[Feeds]) -> list[list[np.ndarray]]:
    StandInDriver(stand_in)
    session, _ = session_of(onnx.load_from_string(proto), kernels, TYPES)
    answers: list[list[np.ndarray]] = [[] for _ in range(6)]

    def work(number: int) -> None:
        for turn in range(len(calls)):
            feeds = calls[(number + turn) % len(calls)]
            answers[number].append(session.run(None, dict(feeds))[0])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("made", [model, layers_sharing_a_block_index])
def test_threads_share_a_session(
    made: Callable[[], bytes], stand_in: Path, kernels: Path, interpreter: Interpreter
) -> None:
    calls = [feeds_of(NODE, token_kinds("right", tokens, batch=batch)) for tokens, batch in ((5, 1), (9, 3), (17, 1))]
    one_by_one, _ = interpreter.run(answer, stand_in, made(), kernels, TYPES, calls)
    answers = interpreter.run(_by_threads, stand_in, made(), kernels, calls)
    for number, found in enumerate(answers):
        for turn, array in enumerate(found):
            assert np.array_equal(array, one_by_one[(number + turn) % len(calls)])


def test_a_batch_without_texts_or_tokens_launches_nothing(
    stand_in: Path, kernels: Path, interpreter: Interpreter
) -> None:
    feeds = feeds_of(NODE, token_kinds("none", 9))
    empty = [{name: array[:0] for name, array in feeds.items()}, {name: array[:, :0] for name, array in feeds.items()}]
    answers, launches = interpreter.run(answer, stand_in, model(), kernels, TYPES, empty)
    assert [found.shape for found in answers] == [(0, 9, 2, 32), (3, 0, 2, 32)]
    assert not launches


def _failing(stand_in: Path, kernels: Path, layer: Layer, failing: dict[str, int], context: int) -> str:
    driver = StandInDriver(stand_in, context=context)
    for call, code in failing.items():
        driver.refuse(call, code)
    session, _ = session_of(onnx.load_from_string(model(layer)), kernels, {layer.name: layer.operator.name})
    with pytest.raises(Exception, match="SlidingWindowAttention") as error:
        session.run(None, dict(feeds_of(layer, token_kinds("none", 9))))
    return str(error.value)


def damaged(kernels: Path) -> Path:
    next(kernels.glob("*attend*.cubin")).write_bytes(b"damaged")
    return kernels


def without_files(kernels: Path) -> Path:
    shutil.rmtree(kernels)
    return kernels


def of_another_gpu(kernels: Path) -> Path:
    return write_kernels(without_files(kernels), NODE, feeds_of(NODE, token_kinds("none", 9)), architecture=90)


@pytest.mark.parametrize(
    ("layer", "changed", "failing", "context", "message"),
    [
        (NODE, Path, {"cuLaunchKernel": 719}, 1,
         "CUDA error 719 at launch 0: the reason for 719"),
        (NODE, Path, {"cuCtxGetCurrent": 201}, 1, "CUDA error 201 at cuCtxGetCurrent: the reason for 201"),
        (NODE, Path, {"cuModuleLoadData": 200}, 101,
         r"CUDA error 200 at cuModuleLoadData of .*\.cubin: the reason for 200.\nUpdate NVIDIA's driver"),
        (NODE, Path, {"cuModuleGetFunction": 500}, 102, "CUDA error 500 at cuModuleGetFunction"),
        (NODE, Path, {"cuFuncSetAttribute": 1}, 103, "CUDA error 1 at cuFuncSetAttribute"),
        (NODE, Path, {}, 0, "this thread has no CUDA context"),
        (NODE, damaged, {}, 1, "is not the file that .* describes"),
        (NODE, without_files, {}, 1, "This GPU is an sm_86; in .* hdexport rebuild .* --target onnx --sm 86"),
        (NODE, of_another_gpu, {}, 1, "of these types and sizes is for sm_90"),
        (replace(NODE, head_dim=64), Path, {}, 1, "of these types and sizes is for none"),
        (replace(NODE, left=-1), Path, {}, 1, "left is -1; it must be 0 or more"),
    ],
)  # fmt: skip
def test_what_fails_is_an_error_that_names_the_operator(
    layer: Layer,
    changed: Callable[[Path], Path],
    failing: dict[str, int],
    context: int,
    message: str,
    stand_in: Path,
    kernels: Path,
    interpreter: Interpreter,
) -> None:
    said = interpreter.run(_failing, stand_in, changed(kernels), layer, failing, context)
    with named_case(said):
        assert re.search(rf"SlidingWindowAttention_global2 on \[3, 9, 2, \d+\]: .*{message}", said, re.DOTALL)


def _refused_at_length(stand_in: Path, kernels: Path) -> str:
    StandInDriver(stand_in)
    session, found = session_of(onnx.load_from_string(model()), kernels, TYPES)
    assert found is not None

    def refusing(asked: Sequence[int]) -> Iterator[int]:
        raise ValueError("\udcff" + "é" * 5000)

    found._planned = refusing  # type: ignore[method-assign]
    with pytest.raises(Exception, match="SlidingWindowAttention") as error:
        session.run(None, dict(feeds_of(NODE, token_kinds("none", 9))))
    return str(error.value)


def test_an_error_of_any_text_is_cut_to_whole_characters(
    stand_in: Path, kernels: Path, interpreter: Interpreter
) -> None:
    said = interpreter.run(_refused_at_length, stand_in, kernels)
    assert re.search(r"SlidingWindowAttention_global2 on \[3, 9, 2, 32\]: \\udcffé{1000,1030}$", said)


def _at_an_odd_address(stand_in: Path, kernels: Path) -> str:
    StandInDriver(stand_in)
    session, _ = session_of(onnx.load_from_string(model()), kernels, TYPES)
    feeds = dict(feeds_of(NODE, token_kinds("none", 9)))
    query = feeds["query"]
    room = np.zeros(query.nbytes + 32, np.uint8)
    begin = -room.ctypes.data % 16 + 4
    feeds["query"] = room[begin : begin + query.nbytes].view(query.dtype).reshape(query.shape)
    with pytest.raises(Exception, match="SlidingWindowAttention") as error:
        session.run(None, feeds)
    return str(error.value)


def test_a_tensor_that_kernels_cannot_load_is_refused(stand_in: Path, kernels: Path, interpreter: Interpreter) -> None:
    """On a GPU a load from such an address would end all work of the process there."""
    said = interpreter.run(_at_an_odd_address, stand_in, kernels)
    assert re.search(r"on \[3, 9, 2, 32\]: a tensor is at the address 0x\w+4; kernels need multiples of 16$", said)


def bucket_of(asked: Sequence[int]) -> int:
    """Where ``launcher.c`` keeps the answer to what is asked."""
    number = 14695981039346656037
    for word in asked:
        number = (number ^ (word % 2**64)) * 1099511628211 % 2**64
        number ^= number >> 31
    return number % 1024


def _of_one_bucket(stand_in: Path, kernels: Path) -> list[bool]:
    StandInDriver(stand_in)
    session, found = session_of(onnx.load_from_string(model()), kernels, TYPES)
    assert found is not None
    block_index, asked = found._planned, list[list[int]]()
    found._planned = lambda words: (asked.append(list(words)), block_index(words))[1]  # type: ignore[method-assign]

    def answers(batch: int, tokens: int) -> np.ndarray:
        return session.run(None, dict(feeds_of(NODE, token_kinds("none", tokens, batch=batch))))[0]  # type: ignore[no-any-return]

    answers(2, 3)
    of_shape: dict[int, list[tuple[int, int]]] = {}
    for batch, tokens in itertools.product(range(1, 40), range(1, 40)):
        words = list(asked[0])
        for place in range(2, len(words) - 1):
            if asked[0][place : place + 2] == [2, 3]:
                words[place : place + 2] = batch, tokens
        of_shape.setdefault(bucket_of(words), []).append((batch, tokens))
    pair = next(shapes[:2] for shapes in of_shape.values() if len(shapes) > 1)
    first = [answers(*shape) for shape in pair]
    assert bucket_of(asked[1]) == bucket_of(asked[2])
    return [np.array_equal(answers(*shape), right) for shape, right in zip(pair, first, strict=True)]


def test_answers_of_one_bucket_are_told_apart(stand_in: Path, kernels: Path, interpreter: Interpreter) -> None:
    assert interpreter.run(_of_one_bucket, stand_in, kernels) == [True, True]


def _without_programs(stand_in: Path, kernels: Path) -> list[str]:
    driver = StandInDriver(stand_in)
    session, found = session_of(onnx.load_from_string(model()), kernels, TYPES)
    assert found is not None
    block_index = found._planned

    def empty(asked: Sequence[int]) -> Iterator[int]:
        scratch_bytes, launches, *words = block_index(asked)
        at = 0
        for _ in range(launches):
            words[at + 1] = 0  # behind the function
            at += 7 + 2 * words[at + 6]
        return iter([scratch_bytes, launches, *words])

    found._planned = empty  # type: ignore[method-assign]
    session.run(None, dict(feeds_of(NODE, token_kinds("none", 9))))
    return driver.launches


def test_a_launch_of_no_programs_is_left_out(stand_in: Path, kernels: Path, interpreter: Interpreter) -> None:
    """CUDA's driver refuses it."""
    assert interpreter.run(_without_programs, stand_in, kernels) == []


def _of_both_sizes(stand_in: Path, kernels: Path) -> list[int]:
    StandInDriver(stand_in)
    session, found = session_of(onnx.load_from_string(model()), kernels, TYPES)
    assert found is not None
    asked, load = list[list[int]](), found._planned
    found._planned = lambda words: (asked.append(list(words)), load(words))[1]  # type: ignore[method-assign]
    session.run(None, dict(feeds_of(NODE, token_kinds("none", 9))))
    wide = [64 if word == 32 else word for word in asked[0]]
    heads = list[int]()
    for words in (asked[0], wide, asked[0]):
        list(load(words))
        (loaded,) = found._loaded.values()
        constants = loaded["attend"].compiled.constants
        heads.append(constants["BLOCK_D"] + constants.get("REM_D", 0))
    return heads


def test_nodes_of_one_type_have_the_kernels_of_their_sizes(
    stand_in: Path, kernels: Path, interpreter: Interpreter
) -> None:
    write_kernels(kernels, replace(NODE, head_dim=64), feeds_of(replace(NODE, head_dim=64), token_kinds("none", 9)))
    assert interpreter.run(_of_both_sizes, stand_in, kernels) == [32, 64, 32]


def test_two_sessions_of_two_bundles_have_kernels_of_their_own(
    stand_in: Path, kernels: Path, tmp_path: Path, interpreter: Interpreter
) -> None:
    wide = replace(NODE, head_dim=64)
    others = write_kernels(tmp_path / "others", wide, feeds_of(wide, token_kinds("none", 9)))
    assert interpreter.run(_two_sessions, stand_in, kernels, others, wide) == [(3, 9, 2, 32), (3, 9, 2, 64)] * 2


def _two_sessions(stand_in: Path, kernels: Path, others: Path, wide: Layer) -> list[tuple[int, ...]]:
    StandInDriver(stand_in)
    sessions = [
        (session_of(onnx.load_from_string(model(layer)), folder, TYPES), feeds_of(layer, token_kinds("none", 9)))
        for layer, folder in ((NODE, kernels), (wide, others))
    ]
    return [session.run(None, dict(feeds))[0].shape for _ in range(2) for (session, _), feeds in sessions]


def test_two_sessions_on_two_gpus_have_kernels_and_plans_of_their_own(
    stand_in: Path, kernels: Path, interpreter: Interpreter
) -> None:
    calls = [feeds_of(NODE, token_kinds("right", tokens)) for tokens in (9, 12)]
    one_by_one, _ = interpreter.run(answer, stand_in, layers_sharing_a_block_index(), kernels, TYPES, calls)
    answers, loaded, launched = interpreter.run(_on_two_gpus, stand_in, layers_sharing_a_block_index(), kernels, calls)
    for found in answers:
        assert all(map(np.array_equal, found, one_by_one))
    assert loaded == Counter({201: 2, 202: 2})
    # Of two calls each: a block index, and two layers.
    assert launched == Counter({201: 6, 202: 6})


def _on_two_gpus(
    stand_in: Path, proto: bytes, kernels: Path, calls: Sequence[Feeds]
) -> tuple[list[list[np.ndarray]], Counter[int], Counter[int]]:
    """The answers of a thread on each; contexts -> the kernels that were loaded there, and the launches."""
    driver = StandInDriver(stand_in)
    answers: dict[int, list[np.ndarray]] = {}
    both = threading.Barrier(2)

    def work(context: int) -> None:
        driver.enter(context, of_thread=True)
        session, _ = session_of(onnx.load_from_string(proto), kernels, TYPES)
        both.wait()
        answers[context] = [session.run(None, dict(feeds))[0] for feeds in calls]

    threads = [threading.Thread(target=work, args=(context,)) for context in (201, 202)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(answers.values()), driver.loaded, driver.launched_in


def test_a_block_index_of_other_states_is_refused(stand_in: Path, kernels: Path, interpreter: Interpreter) -> None:
    """Kernels would read behind it. The function of a node that is not registered gives an empty one."""
    proto = onnx.load_from_string(layers_sharing_a_block_index())
    proto.graph.node[0].output[1] = "unread"
    proto.graph.input.append(helper.make_tensor_value_info(proto.graph.node[1].input[4], TensorProto.INT32, None))
    block_index = np.zeros((3, 5), np.int32)
    feeds = {**feeds_of(NODE, token_kinds("none", 9)), proto.graph.input[-1].name: block_index}
    said = interpreter.run(_refused, stand_in, proto.SerializeToString(), kernels, feeds)
    assert (
        "_block_index_input on [3, 9, 2, 32]: the block index is [3, 5]; with these states it must be [3, 24]" in said
    )


def _refused(stand_in: Path, proto: bytes, kernels: Path, feeds: Feeds) -> str:
    StandInDriver(stand_in)
    session, _ = session_of(onnx.load_from_string(proto), kernels, TYPES)
    with pytest.raises(Exception, match="SlidingWindowAttention") as error:
        session.run(None, dict(feeds))
    return str(error.value)


def test_a_session_of_before_a_fork_is_refused_there(stand_in: Path, kernels: Path, interpreter: Interpreter) -> None:
    """Whatever other threads were doing: one was in Python, asked what to launch. Without kernels a fork computes."""
    assert interpreter.run(_forked, stand_in, kernels) == [
        "SlidingWindowAttention_global2 on [3, 9, 2, 32]: CUDA error 3 at cuCtxGetCurrent: the reason for 3",
        "7.0",
        "parent: (3, 9, 2, 32)",
    ]


def _forked(stand_in: Path, kernels: Path) -> list[str]:
    StandInDriver(stand_in)
    feeds = dict(feeds_of(NODE, token_kinds("none", 9)))
    session, found = session_of(onnx.load_from_string(model()), kernels, TYPES)
    assert found is not None
    asked, may_answer, block_index = threading.Event(), threading.Event(), found._planned

    def slowly(words: Sequence[int]) -> Iterator[int]:
        asked.set()
        may_answer.wait()
        return block_index(words)

    found._planned = slowly  # type: ignore[method-assign]
    answers: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: answers.append(session.run(None, feeds)[0]))
    thread.start()
    asked.wait()

    def child() -> Iterator[str]:
        with pytest.raises(Exception, match="SlidingWindowAttention") as error:
            session.run(None, feeds)
        yield str(error.value).partition("Status Message: ")[2]
        without, _ = session_of(onnx.load_from_string(model()), None, TYPES)
        yield str(without.run(None, feeds)[0].max())

    said = said_in_a_fork(child)
    may_answer.set()
    thread.join()
    return [*said, f"parent: {answers[0].shape}"]


# What the library in C takes from a planner.


def flaw_of(words: Sequence[int], inputs: int = 4, outputs: int = 2) -> str | None:
    library = library_path()
    assert library is not None
    given = (ctypes.c_int64 * len(words))(*words)
    found = operators._opened(library).hd_flaw_of(given, len(words), inputs, outputs)
    return None if found is None else found.decode()


LAUNCH = [0xB0, 2, 3, 4, 128, 0, 4, 0, 3, 1, 1, 2, 256, 3, -5]
"""A function, its grid, its threads, and four arguments: an input, the second output, scratch memory and a scalar."""

ANSWER = [512, 2, 3, 24, 2, *LAUNCH, *LAUNCH]
"""Scratch memory, the shape of the second output, and two launches."""


def test_an_answer_that_names_what_is_not_there_is_refused() -> None:
    assert flaw_of(ANSWER) is None
    assert flaw_of([0, 0], outputs=1) is None
    assert flaw_of([0, 0, 0]) is None
    for changes, message in (
        ({0: -1}, "bytes of scratch"),
        ({1: -1}, "shape of an output is cut off"),
        ({1: 17}, "shape of an output is cut off, or too long"),
        ({2: -1}, "size of an output is out of range"),
        ({3: 2**31}, "size of an output is out of range"),
        ({4: 3}, "a launch is cut off"),
        ({4: 1}, "words behind"),
        ({4: -1}, "lacks the launches"),
        ({5: 0}, "no function"),
        ({6: -1}, "out of range"),
        ({9: 0}, "or no threads"),
        ({10: 2**31}, "out of range"),
        ({11: 5}, "none of the call's"),
        ({11: 97}, "cut off, or too many"),
        ({13: 4}, "none of the call's"),
        ({15: 2}, "none of the call's"),
        ({17: 512}, "none of the call's"),
        ({18: 4}, "none of the call's"),
    ):
        wrong = [changes.get(place, word) for place, word in enumerate(ANSWER)]
        with named_case(changes):
            assert message in (flaw_of(wrong) or "")
    assert all(flaw_of(ANSWER[:end]) for end in range(len(ANSWER)))


def is_well_formed(words: Sequence[int], inputs: int = 4, outputs: int = 2) -> bool:
    """The same check, in Python."""
    left = list(words)
    if not left or left[0] < 0:
        return False
    scratch, *left = left
    for _ in range(outputs - 1):
        if not left or not 0 <= left[0] <= min(16, len(left) - 1):
            return False
        (axes, *left) = left
        shape, left = left[:axes], left[axes:]
        if any(not 0 <= size < 2**31 for size in shape):
            return False
    if not left or left[0] < 0:
        return False
    launches, *left = left
    for _ in range(launches):
        if len(left) < 7:
            return False
        (function, *sizes, count), left = left[:7], left[7:]
        if not function or not sizes[3] or any(not 0 <= size < 2**31 for size in sizes):
            return False
        if not 0 <= count <= 96 or len(left) < 2 * count:
            return False
        arguments, left = left[: 2 * count], left[2 * count :]
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        limits = {0: inputs, 1: outputs, 2: scratch}
        if any(kind != 3 and not (kind in limits and 0 <= value < limits[kind]) for kind, value in pairs):
            return False
    return not left


@settings(derandomize=True, max_examples=300)
@given(
    places=st.lists(
        st.tuples(
            st.integers(0, len(ANSWER) - 1),
            st.integers(-1, 8) | st.sampled_from([2**31, -(2**63), 2**63 - 1, 17, 97, 512]),
        ),
        max_size=4,
    ),
    end=st.none() | st.integers(0, len(ANSWER)),
    outputs=st.integers(1, 3),
)
def test_any_answer_is_either_well_formed_or_refused(
    places: list[tuple[int, int]], end: int | None, outputs: int
) -> None:
    words = list(ANSWER)
    for place, word in places:
        words[place] = word
    assert (flaw_of(words[:end], outputs=outputs) is None) == is_well_formed(words[:end], outputs=outputs)


def of_another_interface(folder: Path) -> Path:
    header = SOURCE.with_name("interface.h").read_text()
    changed, count = re.subn(r"(LAUNCHER_INTERFACE = )\d+", r"\g<1>99", header)
    assert count == 1
    (folder / "interface.h").write_text(changed)
    return compiled(Path(shutil.copy(SOURCE, folder)))


def of_before_interfaces(folder: Path) -> Path:
    source = folder / "old.c"
    source.write_text("void *hd_new_registry(void *planner) { return planner; }")
    return compiled(source)


def damaged_library(folder: Path) -> Path:
    library = folder / "launcher.so"
    library.write_bytes(b"damaged")
    return library


def compiled(source: Path) -> Path:
    library = source.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"], check=True)
    return library


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (of_another_interface, r"is another version's: .*launcher.so has interface 99; this hdplugins has \d+"),
        (of_before_interfaces, r"is another version's: .*old.so has interface 0; this hdplugins has \d+"),
        (damaged_library, r"cannot be opened: .*launcher.so: file too short"),
    ],
)
def test_the_library_of_another_version_is_not_used(
    made: Callable[[Path], Path], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launcher_unavailable_reason() is None
    library = made(tmp_path)
    monkeypatch.setattr(operators, "library_path", lambda: library)
    assert re.fullmatch(message, launcher_unavailable_reason() or "")
    with pytest.raises(LauncherError, match=message):
        KernelOperators(library, tmp_path, node_types={})


def test_exceptions_of_onnx_runtime_pass_through_the_library() -> None:
    """They need its table of frames: ONNX Runtime throws where there is no memory for a scratch buffer."""
    library = library_path()
    assert library is not None
    shown = subprocess.run(["readelf", "--debug-dump=frames", str(library)], capture_output=True, text=True, check=True)
    assert shown.stdout.count(" FDE ") > 10


def test_the_library_compiles_without_a_warning(tmp_path: Path) -> None:
    strict = "-std=c11 -O2 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -shared -fPIC -fvisibility=hidden"
    library = tmp_path / "launcher.so"
    subprocess.run(["cc", *strict.split(), "-o", str(library), str(SOURCE), "-ldl", "-lpthread"], check=True)
    shown = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    assert sorted(line.split()[-1] for line in shown.stdout.splitlines()) == [
        "RegisterCustomOps", "hd_add_operator", "hd_flaw_of", "hd_interface", "hd_new_registry", "hd_register_next",
    ]  # fmt: skip
    assert math.ceil(library.stat().st_size / 1024) < 64
