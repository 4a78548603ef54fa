"""ONNX Runtime on the CPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hdruntime.arrays import AnyArray, FloatArray, Inputs, Outputs
from hdruntime.backends.bundle_runner import chosen_graph
from hdruntime.backends.cpu_runner import CpuRunner, give_memory_back
from hdruntime.backends.forking import no_fork
from hdruntime.backends.onnxruntime import CPU_LOWERING
from hdruntime.backends.onnxruntime.bfloat16 import check_bfloat16
from hdruntime.backends.onnxruntime.sessions import kept_upcasts, open_session, run_error, session_options
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, GraphFile, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import BackendError
from hdruntime.process_limits import chosen_threads

logger = logging.getLogger(__name__)

SLOW_FUSIONS = ["BiasGeluFusion", "SkipLayerNormFusion"]
"""Fused kernels that lose to the plain ones on long inputs, which work in place: the sample model at 4096 tokens on two
AMD EPYC cores took 690 ms and grew by 164 MB with both fusions, 660 ms and 136 MB without (ONNX Runtime 1.31.1; see
findings/onnxruntime_fusions_take_more_memory.sh)."""

_LARGE_RUN_TOKENS = 1024
"""After a run of more tokens, and after the next one, arena and C library return the run's memory to the system.

The sample model in float32, ONNX Runtime 1.31.1, two cores of an AMD EPYC, 2026-11-27, MB above a session of 136 at
the peak of four runs, and after 20 runs of 16 tokens: 23 and 23 for 1024 tokens, 84 and 8 for 4096, 330 and 9 for
32 x 512. Without the arena, and with ONNX Runtime's reuse of memory: 39 and 3, 157 and 8, 527 and 8; with the arena
and the reuse a session keeps the memory of its largest batch. CPU time of the first to the second, in turns: 1.00 at
1024 tokens, 0.98 at 2048, 1.01 at 4096."""

_READING_TOKENS = 24
"""Tokens that are computed in the time in which a run reads the model's weights from memory.

all-MiniLM-L6-v2, whose layers have 42 MB of weights: a run takes 1.7 ms and 66 us a token in two threads (ONNX Runtime
1.31.1, two cores of an AMD EPYC, 2026-11-29). Its first layer alone, which stays in the cache: 3 tokens."""

_CACHED_BYTES = 2**25
"""Bytes of weights that stay in a CPU's cache between runs."""

_MAX_PADDED_TOKENS = 128
"""Tokens of the longest row that shares a batch with shorter ones: the attention that takes a mask keeps its scores."""


class OnnxRuntimeRunner(CpuRunner):
    """A bundle's graph for the CPU, else its portable one, in a session on the CPU, also where the package has GPU
    providers.

    The fast attention of ONNX Runtime on the CPU, whose memory is linear in tokens, takes no mask.

    Args:
        threads: threads of one run; None for `chosen_threads`.
        spinning: whether waiting threads keep their cores busy: faster, unless others need the cores.
        precision: ``float32``, which is also ``auto``, ``bfloat16`` where `check_bfloat16` accepts it, or ``int8`` of a
            bundle with that graph.
        copies_bytes: bytes that float32 copies of half-precision weights may take; see `kept_upcasts`.
    """

    backend = Backend.ONNXRUNTIME
    batch_tokens = _LARGE_RUN_TOKENS
    """The sample model embeds short texts in batches of 4096 tokens in 0.97 of the time, and in 80 MB more."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int | None = None,
        spinning: bool = True,
        precision: Precision = Precision.AUTO,
        copies_bytes: int | None = None,
    ) -> None:
        graph = graph_on_cpu(bundle, precision)
        self.precision = Precision.FLOAT32 if precision is Precision.AUTO else precision
        options = session_options(threads, spinning=spinning, precision=self.precision)
        # A value that takes the place of another waits for it: a layer's widest values would stay during attention
        # (findings/onnxruntime_reuse_of_memory_takes_more.sh).
        options.enable_mem_reuse = False
        with no_fork():
            session = open_session(
                bundle,
                graph,
                options,
                providers=[("CPUExecutionProvider", {})],
                disabled_optimizers=[*SLOW_FUSIONS, *kept_upcasts(bundle, copies_bytes)],
            )
        super().__init__(bundle)
        self._session: Any = session
        self._padding = _READING_TOKENS if _layer_bytes(bundle.manifest, self.precision) > _CACHED_BYTES else 0
        self._shrinking, self._was_large = _shrinking_options(), False
        logger.info("onnxruntime runs %s on the CPU, %s", graph.file, chosen_threads(threads)[1])

    def max_padding(self, tokens: int) -> int:
        """As many tokens as take the time of another run; see :class:`hdruntime.backends.Runner`."""
        return self._padding if tokens <= _MAX_PADDED_TOKENS and self.manifest.padding is None else 0

    def _run_as_given(self, inputs: Inputs, outputs: Sequence[str]) -> Outputs:
        with self._open_session(inputs) as session:
            options = self._shrinking if self._gives_back(inputs) else None
            arrays: list[FloatArray] = session.run(outputs, dict(inputs), options)
            return dict(zip(outputs, arrays, strict=False))  # without names, a session gives all

    def run_bound(
        self, inputs: Inputs, outputs: Sequence[str], states: Mapping[str, Any], next_states: Mapping[str, Any]
    ) -> Outputs:
        """Run a batch as given, on recurrent states that are arrays, which ONNX Runtime reads and writes in place."""
        with self._open_session(inputs) as session:
            binding = session.io_binding()
            # Referred to until the run has ended: values share the memory of arrays.
            input_values = {name: _value(array) for name, array in (*inputs.items(), *states.items())}
            written = {name: _value(array) for name, array in next_states.items()}
            for name, value in input_values.items():
                binding.bind_ortvalue_input(name, value)
            unbound = [name for name in outputs if name not in next_states]
            for name in unbound:
                binding.bind_output(name)
            for name, value in written.items():
                binding.bind_ortvalue_output(name, value)
            session.run_with_iobinding(binding)
            results = dict(zip(unbound, (value.numpy() for value in binding.get_outputs()), strict=False))
            # The next call overwrites these.
            return results | {name: next_states[name].copy() for name in outputs if name in next_states}

    def close(self) -> None:
        """Free memory as soon as no other thread runs a batch; see :class:`hdruntime.backends.Runner`."""
        self._session = None

    @contextlib.contextmanager
    def _open_session(self, inputs: Inputs) -> Iterator[Any]:
        """The session, for one run, whose errors are translated."""
        session, mask = self._session, inputs[self.mask]
        if session is None:
            raise BackendError("The ONNX Runtime session is closed; load the bundle again.")
        with no_fork():
            try:
                yield session
            except Exception as error:  # ONNX Runtime's exceptions have no base class of their own
                raise run_error(error, *mask.shape) from error
        if self._gives_back(inputs):
            give_memory_back()
        self._was_large = _is_large(mask)

    def _gives_back(self, inputs: Inputs) -> bool:
        # The outputs of a large run are in the arena when the run ends, and keep the memory around them.
        return self._was_large or _is_large(inputs[self.mask])


def _layer_bytes(manifest: Manifest, precision: Precision) -> int:
    """Bytes of the weights that every run reads: those of the layers, without tables of embeddings."""
    tables = (manifest.vocab_size + manifest.max_len) * manifest.hidden_size
    bytes_of = {Precision.BFLOAT16: 2, Precision.INT8: 1}
    return bytes_of.get(precision, 4) * (manifest.parameters - tables)


def graph_on_cpu(bundle: Bundle, precision: Precision) -> GraphFile:
    """The bundle's graph for the CPU in this precision; BackendUnavailableError if the bundle has no such
    graph, or if ONNX Runtime does not compute in the precision here."""
    if precision is Precision.BFLOAT16:
        check_bfloat16(bundle.manifest)
    if precision.has_graphs:
        return chosen_graph(bundle, (CPU_LOWERING,), where="ONNX Runtime on the CPU", precision=precision)
    return chosen_graph(bundle, (CPU_LOWERING, PORTABLE_LOWERING), where="the CPU")


def _value(array: AnyArray) -> Any:
    """ONNX Runtime's ``OrtValue`` of an array, in place."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _is_large(mask: AnyArray) -> bool:
    return mask.size > _LARGE_RUN_TOKENS


def _shrinking_options() -> Any:
    """ONNX Runtime's ``RunOptions`` of a run after which the arena frees what nothing uses."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options
