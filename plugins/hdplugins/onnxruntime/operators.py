"""Register a bundle's operators in ONNX Runtime's CUDA provider: `PluginSpec` computes launches, C code starts them.

ONNX Runtime replaces a model's function by a registered operator of its name, and ignores the function body then. So an
operator is registered only if its kernels exist, which `KernelOperators` checks first; other operators run their
function body.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from hdplugins.attention.operator import Operator
from hdplugins.attention.plugin_spec import (
    BLOCK_INDEX,
    Attributes,
    BlockIndexUse,
    FieldType,
    PluginSpec,
    Shapes,
    plugin_spec_of,
    sizes,
)
from hdplugins.kernels.cuda_launch import Launch, LaunchError, LoadedKernel, load_kernels

logger = logging.getLogger(__name__)

_LIBRARY = "_launcher"
"""Name of the launcher, a C library, without the platform's suffix; setuptools builds it if there is a C compiler."""

_INTERFACE = 1
"""As LAUNCHER_INTERFACE of ``interface.h``."""

_TYPES = {"float32": 1, "int32": 6, "bool": 9, "float16": 10, "bfloat16": 16}
"""hdexport's name of a dtype -> ONNX's number."""

_DTYPES = {number: name for name, number in _TYPES.items()}

_BLOCK_INDEX_DTYPE = "int32"

_FIELD_TYPES = {FieldType.INT: 0, FieldType.INTS: 1, FieldType.FLOAT: 2}
_INPUT, _OUTPUT, _SCRATCH, _VALUE = range(4)

_ALIGNMENT = 256
"""Bytes between the scratch buffers of one call."""

_THREADS_OF_WARP = 32

_SCALARS = {"i32": "<ixxxx", "i64": "<q", "fp32": "<fxxxx"}
"""Triton's type of a scalar -> format of its bits in a 64-bit word."""

_PLANNER = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64), ctypes.c_int64,  # the request
    ctypes.POINTER(ctypes.c_int64), ctypes.c_int64,  # the response, and its maximum number of words
    ctypes.c_void_p, ctypes.c_int64,  # an error's message, and its maximum number of bytes
)  # fmt: skip


def library_path() -> Path | None:
    """Return the path of the launcher; None if hdplugins was installed from source without a C compiler."""
    folder = Path(__file__).parent
    candidates = (folder / f"{_LIBRARY}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


class LauncherError(RuntimeError):
    """The launcher cannot launch kernels."""


def launcher_unavailable_reason() -> str | None:
    path = library_path()
    if path is None:
        return "was not built when hdexport was installed"
    try:
        _opened(path)
    except LauncherError as error:
        return str(error)
    return None


class KernelOperators:
    """The operators of one bundle, for sessions of one execution provider.

    Args:
        library: path of the launcher; a LauncherError says that it belongs to another version of hdplugins.
        kernels: the bundle's folder of kernels.
        node_types: type of a node in the graph -> its operator; the type has the name of the node's function.
        provider: ONNX Runtime's name of the provider that runs them.
    """

    def __init__(
        self,
        library: Path,
        kernels: Path,
        *,
        node_types: Mapping[str, Operator],
        provider: str = "CUDAExecutionProvider",
    ) -> None:
        self._path, self._kernels = library, kernels.absolute()
        self._library = _opened(library)
        self._operators: list[tuple[Operator, PluginSpec, BlockIndexUse]] = []
        self._loaded: dict[tuple[int, int], Mapping[str, LoadedKernel]] = {}
        self._lock = threading.Lock()
        # The launcher calls it as long as a session lives, and sessions may outlive this object.
        planner = _PLANNER(self._respond)
        _planners.append(planner)
        self._registry = self._library.hd_new_registry(planner)
        if not self._registry:
            raise MemoryError("There is no memory for the operators of a session.")
        for op_type, operator in node_types.items():
            self._add(op_type, operator, provider)

    def register(self, options: Any) -> None:
        """Let sessions with these ``SessionOptions`` find the operators."""
        # ONNX Runtime calls the launcher in this thread, before it returns.
        self._library.hd_register_next(self._registry)
        options.register_custom_ops_library(str(self._path))

    def _add(self, op_type: str, operator: Operator, provider: str) -> None:
        """Add one ONNX Runtime operator per dtype and use of a block index: its input and output types are fixed."""
        spec = plugin_spec_of(operator)
        names, kinds = list(spec.FIELDS), [_FIELD_TYPES[kind] for kind in spec.FIELDS.values()]
        uses = tuple(BlockIndexUse) if BLOCK_INDEX in spec.SCRATCH else (BlockIndexUse.PRIVATE,)
        for dtype, use in itertools.product(spec.DTYPES, uses):
            # A block index has the type of the optional inputs, and follows the inputs that a node has.
            inputs = [
                _TYPES[kind or dtype]
                for kind in (*spec.INPUT_DTYPES, *[_BLOCK_INDEX_DTYPE] * (use is BlockIndexUse.INPUT))
            ]
            outputs = [_TYPES[kind] for kind in (dtype, *[_BLOCK_INDEX_DTYPE] * (use is BlockIndexUse.OUTPUT))]
            number = self._library.hd_add_operator(
                self._registry, (op_type + use.suffix).encode(), provider.encode(),
                len(inputs), _ints(inputs), len(inputs) - len(operator.optional_inputs), len(outputs), _ints(outputs),
                len(names), (ctypes.c_char_p * len(names))(*(name.encode() for name in names)), _ints(kinds),
            )  # fmt: skip
            if number != len(self._operators):
                raise ValueError(f"The library has no room for {op_type}, with {len(inputs)} inputs and {names}.")
            self._operators.append((operator, spec, use))

    def _respond(self, request: Any, words: int, response: Any, max_words: int, error: int, error_bytes: int) -> int:
        try:
            planned = list(self._planned(request[:words]))
            if len(planned) > max_words:
                raise LaunchError(f"a call takes {len(planned)} words; the launcher accepts at most {max_words}.")
            ctypes.memmove(response, (ctypes.c_int64 * len(planned))(*planned), 8 * len(planned))
        except Exception as problem:  # an exception would end in C, unseen
            logger.debug("a call failed", exc_info=True)
            # Whole characters: ONNX Runtime's message is UTF-8, and a path need not be.
            text = str(problem).encode(errors="backslashreplace")[: error_bytes - 1].decode(errors="ignore")
            message = text.encode() + b"\0"
            ctypes.memmove(error, message, len(message))
            return -1
        return len(planned)

    def _planned(self, request: Sequence[int]) -> Iterator[int]:
        """Yield the words of the response to a request; ``launcher.c`` describes both."""
        words = iter(request)
        number, context = next(words), next(words)
        operator, spec, use = self._operators[number]
        attributes = {name: _value(kind, _counted(words)) for name, kind in spec.FIELDS.items()}
        inputs = [(next(words), tuple(_counted(words))) for _ in range(next(words))]
        while not inputs[-1][0]:  # left out
            inputs.pop()
        shapes, dtype = [shape for _, shape in inputs], _DTYPES[inputs[0][0]]
        block_index = shapes.pop() if use is BlockIndexUse.INPUT else None
        loaded = self._kernels_of(number, context, shapes, attributes, dtype)
        constants = {name: kernel.compiled.constants for name, kernel in loaded.items()}
        launches = spec.launches(shapes, attributes, constants=constants)
        workspace, more_outputs = dict(spec.workspace(shapes, attributes)), list[tuple[int, int]]()
        locations = {name: (_INPUT, index) for index, name in enumerate(operator.inputs[: len(shapes)])}
        locations[spec.OUTPUT] = _OUTPUT, 0
        if use is BlockIndexUse.OUTPUT:
            locations[BLOCK_INDEX] = _OUTPUT, 1
            more_outputs.append(_block_index_shape(workspace.pop(BLOCK_INDEX), shapes))
        if block_index is not None:
            locations[BLOCK_INDEX] = _INPUT, len(shapes)
            _check_block_index(block_index, _block_index_shape(workspace.pop(BLOCK_INDEX), shapes))
            launches = tuple(launch for launch in launches if launch.kernel not in spec.block_index_kernels)
        bytes_of = [-(-max(1, size) // _ALIGNMENT) * _ALIGNMENT for size in workspace.values()]
        offsets = list(itertools.accumulate(bytes_of, initial=0))
        locations |= {name: (_SCRATCH, offset) for name, offset in zip(workspace, offsets, strict=False)}
        yield offsets[-1]
        for shape in more_outputs:
            yield from (len(shape), *shape)
        yield len(launches)
        for launch in launches:
            yield from _described(loaded[launch.kernel], launch, locations)

    def _kernels_of(
        self, number: int, context: int, shapes: Shapes, attributes: Attributes, dtype: str
    ) -> Mapping[str, LoadedKernel]:
        operator, spec, _ = self._operators[number]

        def serves(kernel: Any) -> bool:
            return spec.serves(kernel, shapes, attributes, dtype=dtype)

        with self._lock:
            loaded = self._loaded.get((number, context))
            if loaded is None or not all(serves(kernel.compiled) for kernel in loaded.values()):
                loaded = load_kernels(self._kernels, f"{operator.name}-", spec.kernels, serves=serves)
                self._loaded[number, context] = loaded
        return loaded


_planners: list[Any] = []
"""Functions that the launcher may call until the process ends."""


@functools.cache
def _opened(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LauncherError(f"cannot be opened: {error}") from None
    # A function of another interface would crash the process.
    number = library.hd_interface() if hasattr(library, "hd_interface") else 0
    if number != _INTERFACE:
        raise LauncherError(f"is another version's: {path} has interface {number}; this hdplugins has {_INTERFACE}")
    library.hd_new_registry.restype = ctypes.c_void_p
    library.hd_register_next.argtypes = [ctypes.c_void_p]
    integers = ctypes.POINTER(ctypes.c_int)
    library.hd_add_operator.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p,
        ctypes.c_int, integers, ctypes.c_int, ctypes.c_int, integers,
        ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), integers,
    ]  # fmt: skip
    library.hd_flaw_of.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    library.hd_flaw_of.restype = ctypes.c_char_p
    return library


def _counted(words: Iterator[int]) -> list[int]:
    """Return the values that follow their number."""
    return list(itertools.islice(words, next(words)))


def _value(kind: FieldType, words: list[int]) -> Any:
    if kind is FieldType.INTS:
        return tuple(words)
    return _float(words[0]) if kind is FieldType.FLOAT else words[0]


def _block_index_shape(index_bytes: int, shapes: Shapes) -> tuple[int, int]:
    """[batch, values], int32."""
    batch = sizes(shapes[0]).batch
    return batch, index_bytes // (4 * batch)


def _check_block_index(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    # Kernels would read past the end of a shorter block index.
    if shape != expected:
        raise LaunchError(f"the block index is {list(shape)}; with these states it must be {list(expected)}.")


def _described(kernel: LoadedKernel, launch: Launch, locations: Mapping[str, tuple[int, int]]) -> Iterator[int]:
    """Yield a launch as words."""
    compiled = kernel.compiled
    arguments: list[tuple[int, int]] = []
    for name, kind in compiled.arguments:
        arguments.append(locations[name] if kind[0] == "*" else (_VALUE, _bits(kind, launch.scalars[name])))
    # For buffers of Triton's, which these kernels do not use.
    arguments += [(_VALUE, 0)] * compiled.scratch_pointers
    yield from (int(kernel.function), *launch.grid, compiled.num_warps * _THREADS_OF_WARP, compiled.shared_bytes)
    yield len(arguments)
    yield from itertools.chain.from_iterable(arguments)


def _bits(kind: str, number: float) -> int:
    return int.from_bytes(struct.pack(_SCALARS[kind], number), "little", signed=True)


def _float(bits: int) -> float:
    return float(struct.unpack("<fxxxx", bits.to_bytes(8, "little", signed=True))[0])


def _ints(values: Sequence[int]) -> Any:
    return (ctypes.c_int * len(values))(*values)
