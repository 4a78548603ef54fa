"""How engines are run on a GPU."""

from __future__ import annotations

__all__ = ["GpuOptions"]

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """What :func:`hdruntime.load` passes on to the backends that run on a GPU; that of the CPU has no use for it.

    Attributes:
        device: number of the GPU among those that CUDA offers this process (``CUDA_VISIBLE_DEVICES``).
        memory_limit_bytes: most GPU memory that ``onnxruntime_cuda`` takes for weights, activations and results; a
            batch that needs more is halved. What CUDA's own libraries take comes on top. None: all there is. Engines
            refuse a limit: TensorRT plans their memory when they are built.
        graphs: CUDA graphs of engines, which save the time of enqueueing a step that was run before in the same shape:
            ``auto`` uses them where that time counts, ``on`` and ``off`` always and never.
        most_graphs: shapes that graphs are kept of, each with an execution context and buffers for its inputs and
            outputs; the one that was not used for longest goes first.
        kernel_specialization: when TensorRT-RTX makes kernels for the shapes it meets: ``lazy`` in the background,
            ``eager`` at once, ``none`` never; None leaves it to TensorRT-RTX. Other flavours refuse it.
    """

    device: int = 0
    memory_limit_bytes: int | None = None
    graphs: str = "auto"
    most_graphs: int = 32
    kernel_specialization: str | None = None
