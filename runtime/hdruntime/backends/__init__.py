"""Backends: what runs a bundle's graph or engine, one file each, loaded when chosen."""

from __future__ import annotations

__all__ = ["Runner", "open_runner"]

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hdruntime.bundle import Backend, Bundle
from hdruntime.errors import BackendUnavailableError, InputError

logger = logging.getLogger(__name__)

_AUTO = "auto"
_TENSORRT_BACKENDS = (Backend.TENSORRT, Backend.TENSORRT_RTX)


class Runner(Protocol):
    """A graph or engine, loaded and ready. Safe to use from several threads.

    Attributes:
        backend: which one this is.
        prefers_equal_lengths: batches without any padding run faster than padded ones of the same size.
        batch_tokens: tokens of a batch, padding included, beyond which throughput gains nothing.
    """

    backend: Backend
    prefers_equal_lengths: bool
    batch_tokens: int

    def run(
        self, inputs: Mapping[str, npt.NDArray[np.int64]], outputs: Sequence[str]
    ) -> dict[str, npt.NDArray[np.float32]]:
        """Run one batch.

        Args:
            inputs: every input of the manifest, checked, int64 [batch, tokens].
            outputs: names of the outputs wanted.

        Returns:
            name -> float32 array of the shape in the manifest. Padded positions of a tokens axis hold 0.

        Raises:
            BackendError: the backend failed.
        """


def open_runner(bundle: Bundle, backend: Backend | str, *, threads: int | None) -> Runner:
    """Load what ``backend`` runs of the bundle.

    Args:
        bundle: an opened bundle.
        backend: one of :class:`Backend`, which runs or raises, or ``auto``: the first that can run here,
            TensorRT engines first; what was chosen and why is logged.
        threads: CPU threads of one run; None leaves it to the backend.

    Raises:
        InputError: no backend of that name.
        BackendUnavailableError: the backend that was asked for cannot run here.
    """
    if backend == _AUTO:
        chosen = Backend.ONNXRUNTIME
        logger.info("backend auto: chose %s; %s", chosen.value, _why_not_tensorrt(bundle))
    else:
        chosen = _backend_of_name(backend)
    if chosen in _TENSORRT_BACKENDS:
        raise BackendUnavailableError(
            f"The backend {chosen.value} is not in this version of hdexport, which builds engines but does "
            "not run them.\nUse the backend onnxruntime (or auto)."
        )
    from hdruntime.backends.onnxruntime import OnnxRuntimeRunner

    return OnnxRuntimeRunner(bundle, threads=threads)


def _backend_of_name(name: str) -> Backend:
    try:
        return Backend(name)
    except ValueError:
        valid = ", ".join([_AUTO, *(backend.value for backend in Backend)])
        raise InputError(f"Unknown backend {name!r}; valid are {valid}.") from None


def _why_not_tensorrt(bundle: Bundle) -> str:
    if not bundle.manifest.engines:
        return "the bundle has no TensorRT engine"
    return f"not {bundle.manifest.engines[0].flavour}, because this version of hdexport does not run engines"
