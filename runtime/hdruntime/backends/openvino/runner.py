"""A bundle's graphs in OpenVINO."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import shlex
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hdruntime.arrays import Inputs, Outputs
from hdruntime.backends.bundle_runner import chosen_graph, failed, needs_float32, out_of_memory
from hdruntime.backends.cpu_runner import CpuRunner, give_memory_back
from hdruntime.backends.forking import no_fork, start_threads
from hdruntime.backends.openvino import OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING
from hdruntime.backends.openvino.devices import CPU, chosen_device, chosen_precision, new_core
from hdruntime.backends.precision import Precision
from hdruntime.bundle.graph_interface import Found, check_interface
from hdruntime.bundle.manifest import Backend, GraphFile, Manifest, Role
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendError, OutOfMemoryError
from hdruntime.process_limits import chosen_threads, cpu_quota

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = (
    "bad_alloc",
    "Failed to allocate",
    "Could not allocate",
    "can't alloc",
    "out of memory",
    "not enough memory",
)
"""Words of OpenVINO's out-of-memory errors, which have no class of their own."""

_NUMPY_NAME = {"i64": "int64", "f32": "float32"}
"""OpenVINO's name of a type -> NumPy's, for the types of manifests."""


_KEPT_KERNELS = 256
"""OpenVINO compiles kernels for each length, about three, and keeps 5000 by default. The sample model in bfloat16,
random lengths of 1 to 512 tokens (OpenVINO 2026.4.1, two cores of an AMD EPYC): 254 MB after a call of 512; by default
744 after 2000 calls and still growing, with 256 kernels 411 after 960 and 417 after 1200, in 1.02 times the CPU time a
call (through a session no more from 1400 calls on, and 170 more for the second graph once a text has one token), with
128 395 in 1.23 times. With 0 a call takes twice the time, and memory grows all the same. The rest of the growth is
oneDNN's own 1024 kernels, which make the calls cheap whose kernels were dropped here; only a variable of the
environment bounds them (findings/openvino_keeps_kernels_of_every_length.sh)."""

_GROUP_CHANNELS = 128
"""Channels of an activation that share a scale, where OpenVINO quantizes activations while it runs. Larger and smaller
groups are slower (docs/precision.md)."""

_LARGE_RUN_TOKENS = 2048
"""After a run of more tokens memory returns to the system. After 16 x 512 tokens a session of 262 MB keeps 296; else it
keeps 457."""


_STATIC_SHAPE_WORK = 250e9
"""Weights of a layer times tokens of a batch from which a graph is compiled with the batch's static shapes, and without
outputs that nobody asks for. OpenVINO packs values of static shapes into one block of memory; other values share
blocks, each as large as its largest value (findings/openvino_packs_values_of_static_shapes_only.sh). Two layers of
Qwen3-Embedding-0.6B's shape in bfloat16, 4096 tokens: 0.29 GB of memory instead of 0.49, and equal embeddings (OpenVINO
2026.4.1, two shared cores of an AMD EPYC, 2026-11-29). The limit is about 16,000 tokens of that shape: compiling 28
layers takes 4.5 s of CPU time, and a layer of such a text 11 s."""

_STATIC_SHAPE_TOKENS = 4096
"""Tokens of a text from which its graph may have static shapes. Texts of less than 1024 tokens have parts without
tokens, which OpenVINO (2026.4.1) cannot compile with static shapes."""

_STATIC_SHAPE_OPERATORS = frozenset({"DenseAttention"})
"""Operators that have no large constants in a graph with static shapes."""

_GIVE_BACK_MS = 50
"""Milliseconds after which a run of more tokens than all before gives memory back, again and again: the first one lays
out weights, and each one allocates larger blocks and kernels. A session of Qwen3-Embedding-0.6B's shape in int8 keeps
31 MB less after texts of 128 and 512 tokens (OpenVINO 2026.4.1, two shared cores of an AMD EPYC, 2026-11-29)."""

_SHARED_AND_NEVER_WRITTEN = "r--s"
"""Permissions of a mapping whose pages hold the file's content, so that none of them can be lost."""


class OpenVinoRunner(CpuRunner):
    """A bundle's graphs in OpenVINO, on the CPU or one of its other devices.

    Batches without padding run in a graph without masks where the bundle has one, except batches of one token: OpenVINO
    (2026.4.1) keeps the kernel of attention without a mask that it compiled for one token, and gives wrong results for
    16 and more from then on. Each graph is compiled when a batch needs it, the one for batches without padding at once.

    `threads` are those of one run; None for OpenVINO's choice, or `chosen_threads` where there is a quota. `device` is
    OpenVINO's name; None for the CPU.
    """

    backend = Backend.OPENVINO
    batch_tokens = 1024

    @no_fork()
    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int | None = None,
        precision: Precision = Precision.AUTO,
        device: str | None = None,
    ) -> None:
        super().__init__(bundle)
        core = new_core()
        chosen = chosen_device(core, device)
        self.precision = chosen_precision(chosen, precision, bundle.manifest)
        has_bfloat16 = chosen.has_bfloat16 and not needs_float32(bundle.manifest)
        options = _options(chosen.name, self.precision, threads, has_bfloat16=has_bfloat16)
        int8 = bundle.manifest.int8
        if self.precision is Precision.INT8 and int8 is not None and int8.texts is None and chosen.name == CPU:
            options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = _GROUP_CHANNELS
        lowerings = (OPENVINO_LOWERING,), (OPENVINO_UNPADDED_LOWERING, OPENVINO_LOWERING)
        padded, unpadded = (
            chosen_graph(bundle, names, where="OpenVINO", precision=self.precision) for names in lowerings
        )
        self._padded = _Model(core, bundle, padded, chosen.name, options)
        self._unpadded = self._padded if unpadded == padded else _Model(core, bundle, unpadded, chosen.name, options)
        self._unpadded.compile()
        where = f"{chosen.name} ({chosen.model})" + (f", {chosen_threads(threads)[1]}" if chosen.name == CPU else "")
        logger.info("openvino runs %s in %s on %s", unpadded.file, self.precision, where)

    def close(self) -> None:
        """Free memory as soon as no other thread runs a batch; see :class:`hdruntime.backends.Runner`."""
        self._padded.close()
        self._unpadded.close()

    def _run_as_given(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        model = self._unpadded if is_unpadded(self.manifest, inputs) else self._padded
        return model.run(inputs, outputs, shape=inputs[self.mask].shape)


def is_unpadded(manifest: Manifest, inputs: Inputs) -> bool:
    """Whether a batch is for the graph of batches without padding: texts of two tokens or more that every token sees.

    Tokens that no token attends to are padding to the attention.
    """
    masks = [inputs[spec.name] for spec in manifest.inputs if spec.role in (Role.MASK, Role.ATTENDED)]
    return all(mask.all() and mask.shape[1] > 1 for mask in masks)


class _Model:
    """A graph, compiled when it is first run; one batch at a time, which has all threads. `options` are OpenVINO's
    properties."""

    def __init__(self, core: Any, bundle: Bundle, graph: GraphFile, device: str, options: Mapping[str, Any]) -> None:
        self._core, self._bundle, self._graph = core, bundle, graph
        self._device, self._options = device, dict(options)
        # Arrays of results are a request's own until its next batch, so a batch holds the lock until they are copied.
        self._lock = threading.Lock()
        self._request: Any = None
        self._most_tokens = 0
        """Tokens of the largest batch that has run since the graph was compiled."""
        self._released: tuple[int, int] | None = None
        """Rows and tokens of the batch after which memory returned to the system; None once other sizes have run."""
        self._of_tokens = {spec.name for spec in bundle.manifest.inputs if spec.has_tokens_axis}
        self._is_closed = False
        self._states = self._file_states()
        with self._loading() as path:
            # At once, so that later changes of the file change nothing, though 28 layers of causal attention take 34 MB
            # until they are compiled; by path, so that OpenVINO finds and maps model.onnx.data beside it.
            self._model = core.read_model(os.fspath(path))
        inputs, outputs = _interface(self._model.inputs), _interface(self._model.outputs)
        check_interface(bundle, graph, inputs=inputs, outputs=outputs)

    def compile(self, static: _StaticShapes | None = None) -> None:
        """Make the graph ready to run all batches, or one with static shapes."""
        start_threads(Backend.OPENVINO)
        if self._model is None and self._file_states() != self._states:
            raise BackendError(
                f"Files of {self._bundle.path} have changed since the session read {self._graph.file}, which it needs "
                "again.",
                hint="Load the bundle again.",
            )
        with self._loading() as path:
            model, self._model = self._model or self._core.read_model(os.fspath(path)), None
            if static is not None:
                _make_static(model, static)
            if self._options.get("INFERENCE_PRECISION_HINT") == "bf16":
                _keep_bfloat16_weights(model)
            self._request = self._core.compile_model(model, self._device, self._options).create_infer_request()
        self._most_tokens = 0
        self._give_back()

    def _file_states(self) -> list[tuple[int, ...]]:
        """Inode, bytes and time of change of the graph's file and of the files with weights."""
        names = [name for name in self._bundle.manifest.files if name == self._graph.file or name.endswith(".data")]
        found = [path.stat() for name in names if (path := self._bundle.path / name).is_file()]
        return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in found]

    @contextlib.contextmanager
    def _loading(self) -> Iterator[Path]:
        """Translate OpenVINO's errors in the block."""
        path = self._bundle.file(self._graph.file)
        try:
            yield path
        except (RuntimeError, MemoryError) as error:  # OpenVINO's exceptions are RuntimeErrors
            if _is_out_of_memory(error):
                raise OutOfMemoryError(
                    f"OpenVINO got no memory for {path}: {_message_of(error)}", hint="Free memory."
                ) from error
            hint = "Try a newer one: pip install -U openvino; or another backend."
            if "outside the base directory" in str(error):
                copying = shlex.join(["cp", "-rL", str(self._bundle.path), "BUNDLE"])
                hint = (
                    "It reads no weights behind a link, as in the cache of the Hugging Face Hub. Load files: "
                    f"hf download ORGANISATION/NAME --local-dir BUNDLE, or {copying}"
                )
            version = metadata.version("openvino")
            raise BackendError(
                f"OpenVINO {version} cannot load {path} on {self._device}: {_message_of(error)}", hint=hint
            ) from error

    def run(self, inputs: Inputs, outputs: Sequence[str], *, shape: tuple[int, int]) -> Outputs:
        """Run a batch as given; see `hdruntime.backends.Runner.start`."""
        with self._lock:
            if self._is_closed:
                raise BackendError("The OpenVINO session is closed; load the bundle again.")
            static = self._static_shapes_for(inputs, outputs)
            if static is not None:
                # First, since each compiled graph has its own copy of the weights.
                self._request = self._released = None
            if self._request is None:
                self.compile(static)
            try:
                if self._released is not None:
                    self._infer(self._of_other_sizes(inputs, *self._released), tokens=0)
                    self._released = None
                self._infer(inputs, tokens=math.prod(shape))
                results = {name: np.array(self._request.get_tensor(name).data) for name in outputs}
            except (RuntimeError, MemoryError) as error:
                # Compiled again: nodes that a failed run did not reach may fail in all later ones (OpenVINO 2026.4.1).
                self._request = self._released = None
                give_memory_back()
                raise _run_error(error, *shape) from error
            if static is not None:
                self._request = None
                give_memory_back()
            elif math.prod(shape) > _LARGE_RUN_TOKENS:
                self._released = shape
                self._request.get_compiled_model().release_memory()
                give_memory_back()
        return results

    def _static_shapes_for(self, inputs: Inputs, outputs: Sequence[str]) -> _StaticShapes | None:
        """The static shapes and outputs to compile the graph for; None for the graph that runs all batches."""
        manifest = self._bundle.manifest
        weights = (manifest.parameters - manifest.vocab_size * manifest.hidden_size) / manifest.num_layers
        mask = inputs[manifest.mask]
        is_small = mask.shape[1] < _STATIC_SHAPE_TOKENS or weights * mask.size < _STATIC_SHAPE_WORK
        if is_small or self._device != CPU or not manifest.operator_names <= _STATIC_SHAPE_OPERATORS:
            return None
        return _StaticShapes({name: array.shape for name, array in inputs.items()}, frozenset(outputs))

    def _infer(self, inputs: Inputs, *, tokens: int) -> None:
        """Run a batch; give memory back if it has more tokens than all before."""
        # Shared: the caller's arrays, which do not change until the results are there.
        arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        # Not OpenVINO's `infer`: with one thread it loses errors (2026.4.1), such as one for want of memory. Results
        # that the run did not reach stay those of the batch before, and the failed node's may have another shape.
        self._request.start_async(arrays, share_inputs=True)
        while tokens > self._most_tokens and not self._request.wait_for(_GIVE_BACK_MS):
            self._give_back()
        self._request.wait()
        if tokens > self._most_tokens:
            self._most_tokens = tokens
            self._give_back()

    def _of_other_sizes(self, inputs: Inputs, rows: int, tokens: int) -> Inputs:
        """A smallest batch, of the first row and token, whose rows and tokens are not so many.

        OpenVINO (2026.4.1) allocates released memory again only for nodes that see other sizes than before, or whose
        sizes its own rules infer, of which rotary positions have none. In a batch of the same sizes those find none,
        which was an error, or too little, which ended the process. Neither was seen again on an AMD EPYC with AVX-512
        (2026-11-29). One token is avoided; see `OpenVinoRunner`.
        """
        first_row = {name: array[[0] * (2 if rows == 1 else 1)] for name, array in inputs.items()}
        columns = [0] * (3 if tokens == 2 else 2)
        return {name: array[:, columns] if name in self._of_tokens else array for name, array in first_row.items()}

    def close(self) -> None:
        """Free memory when the batch that runs has ended; repeated calls do nothing."""
        with self._lock:
            self._is_closed = True
            self._request = self._model = None

    def _give_back(self) -> None:
        """Give the pages of weights and freed memory back to the system."""
        release_mapped_files(self._bundle.path / name for name in self._bundle.manifest.files)
        give_memory_back()


class _StaticShapes(NamedTuple):
    """Static shapes and outputs that a graph is compiled for.

    Attributes:
        shapes: name of an input -> its shape.
        outputs: names of the outputs.
    """

    shapes: Mapping[str, tuple[int, ...]]
    outputs: frozenset[str]


def _make_static(model: Any, static: _StaticShapes) -> None:
    """Give an ``openvino.Model`` static shapes, and remove its other outputs, in place."""
    for result in model.get_results():
        if static.outputs.isdisjoint(result.output(0).get_names()):
            model.remove_result(result)
    model.reshape({name: list(shape) for name, shape in static.shapes.items()})


def _keep_bfloat16_weights(model: Any) -> None:
    """Mark upcasts of bfloat16 weights as decompression, in place; outputs are equal.

    OpenVINO (2026.4.1) folds other upcasts to float32 weights, which a session keeps beside the bfloat16 copies that it
    computes with. Six layers of Qwen3-Embedding-0.6B with its embeddings, 512 tokens: 0.52 GB instead of 0.89 (two
    cores of an AMD EPYC, 2026-11-29). The mark is an attribute of OpenVINO's IR, which has no function in Python.
    """
    for node in model.get_ops():
        if node.get_type_name() != "Convert":
            continue
        source = node.input_value(0).get_node()
        if source.get_type_name() == "Constant" and source.get_element_type().get_type_name() == "bf16":
            node.get_rt_info()["decompression_0"] = ""


def _options(device: str, precision: Precision, threads: int | None, *, has_bfloat16: bool) -> dict[str, Any]:
    """OpenVINO's properties for a session."""
    options: dict[str, Any] = {}
    if precision is Precision.FLOAT32:
        options["INFERENCE_PRECISION_HINT"] = "f32"
    elif precision is Precision.BFLOAT16:
        options["INFERENCE_PRECISION_HINT"] = "bf16"
    elif precision.has_graphs and device == CPU:
        # The precision of the graphs' float nodes.
        options["INFERENCE_PRECISION_HINT"] = "bf16" if has_bfloat16 else "f32"
    if device == CPU:
        options["PERFORMANCE_HINT"] = "LATENCY"
        options["CPU_RUNTIME_CACHE_CAPACITY"] = _KEPT_KERNELS
        # Each process pins its first thread to the first core and so on: threads of several processes share cores.
        options["ENABLE_CPU_PINNING"] = False
        # OpenVINO's own choice heeds the CPUs that the process may use, and slow cores, but no quota.
        if threads is not None or cpu_quota() is not None:
            options["INFERENCE_NUM_THREADS"], _ = chosen_threads(threads)
    return options


def _run_error(error: Exception, batch: int, tokens: int) -> BackendError:
    """Our error for a failed run of a batch."""
    if _is_out_of_memory(error):
        return out_of_memory("OpenVINO", _message_of(error), batch, tokens)
    return failed("OpenVINO", _message_of(error), batch, tokens)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)


def _message_of(error: Exception) -> str:
    """OpenVINO's message, without the lines of its own source that it names."""
    lines = [line.strip().removeprefix("Caught exception: ") for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith("Exception from ")]
    return " ".join(kept) or type(error).__name__


def _interface(ports: Sequence[Any]) -> Found:
    specs: dict[str, tuple[str, list[int | None]]] = {}
    for port in ports:
        name = port.element_type.get_type_name()
        axes = [axis.get_length() if axis.is_static else None for axis in port.partial_shape]
        specs[port.any_name] = (_NUMPY_NAME.get(name, name), axes)
    return specs


def release_mapped_files(paths: Iterable[Path]) -> int:
    """Let the system take back the pages of files that this process has mapped to read; returns the bytes of the
    mappings.

    OpenVINO maps a bundle's weights, and goes on with copies in a layout of its own: 96 MB that stay resident for the
    sample model, of which only the rows of embeddings are read again. Pages that are read again come back from the
    system's cache of the file. Nothing happens on systems other than Linux, which do not list a process's mappings.
    """
    if sys.platform != "linux":
        return 0
    released = 0
    for start, size in _mappings({os.path.realpath(path) for path in paths}):
        failed = ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
        released += 0 if failed else size
    return released


def _mappings(files: set[str]) -> Iterator[tuple[int, int]]:
    """Address and bytes of the mappings of these files."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # a system that hides /proc
        return
    for line in lines:
        # address, permissions, offset, device, inode, path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1] == _SHARED_AND_NEVER_WRITTEN and fields[5] in files:
            start, _, end = fields[0].partition("-")
            yield int(start, 16), int(end, 16) - int(start, 16)
