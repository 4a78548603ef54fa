"""The targets ``tensorrt`` and ``tensorrt-rtx``."""

from __future__ import annotations

import logging

from hdexport.graph.targets.target import Target
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import HdexportError

logger = logging.getLogger(__name__)


class TensorRtTarget(Target):
    """An engine for this machine's GPU."""

    name = "tensorrt"
    help = "tensorrt adds an engine for this machine's GPU"
    backend = variant = Backend.TENSORRT

    def require(self) -> None:
        """Engines that cannot be built are rejected by `EngineBuilder`."""

    def is_possible(self) -> bool:
        from hdexport.graph.targets.tensorrt import packages

        try:
            packages.load_variant(self.variant)
        except HdexportError as error:
            logger.info("no %s engine can be built here. %s", self.variant, error)
            return False
        return True


class TensorRtRtxTarget(TensorRtTarget):
    """An engine for GeForce, RTX and A100; the build needs no GPU."""

    name = "tensorrt-rtx"
    help = "tensorrt-rtx adds one for GeForce, RTX and A100"
    backend = variant = Backend.TENSORRT_RTX


TARGETS = (TensorRtTarget(), TensorRtRtxTarget())
