"""Options of backends that run on a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Options that :func:`hdruntime.load` passes to the backends on a GPU; the CPU's backend ignores them.

    Attributes:
        device: number of the GPU among those that CUDA offers this process (``CUDA_VISIBLE_DEVICES``).
        memory_limit_bytes: most GPU memory of ``onnxruntime_cuda`` for weights and activations; a batch that needs more
            is halved. Inputs and results of two batches, and CUDA's own libraries, need memory beyond it. None: no
            limit. Engines take no limit: TensorRT plans their memory when they are built.
        graphs: CUDA graphs of engines, which save the time to enqueue a step of a known shape: ``auto`` uses them
            where that time matters, ``on`` always and ``off`` never.
        max_graphs: most shapes with a graph, each of which needs an execution context and buffers for its inputs and
            outputs; the least recently used graph is dropped first.
        kernel_specialization: when TensorRT-RTX compiles kernels for the shapes of batches: ``lazy`` in the background,
            ``eager`` at once, ``none`` never; None is ``lazy``, whose engine stays on the GPU until the process ends.
            Other TensorRT variants reject it.
    """

    device: int = 0
    memory_limit_bytes: int | None = None
    graphs: str = "auto"
    max_graphs: int = 32
    kernel_specialization: str | None = None
