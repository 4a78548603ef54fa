"""What ONNX Runtime says of itself, on the CPU and on NVIDIA GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdruntime.backends.entry import Asked, BackendEntry, Refusal
from hdruntime.backends.findings import Finding, FindingStatus, Probed
from hdruntime.backends.onnxruntime import CPU_LOWERING, CUDA_LOWERING, CUDA_PROVIDER
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import BackendUnavailableError
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA, installed_version

if TYPE_CHECKING:
    from hdruntime.backends import Runner
    from hdruntime.bundle.reader import Bundle
    from hdruntime.gpu.driver import Gpu

DOUBLING = (
    "080812003a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080112040a02"
    "0801620f0a0179120a0a08080112040a02080142040a00100d"
)
"""A graph in ONNX, x + x of one number."""


class OnnxRuntimeBackend(BackendEntry):
    """ONNX Runtime on the CPU, which every installation has and which runs every bundle."""

    name = Backend.ONNXRUNTIME
    library = "ONNX Runtime"
    rank = 1000
    package = "onnxruntime"
    distributions = ("onnxruntime", "onnxruntime-gpu")
    install = "pip install onnxruntime"
    lowerings = (CPU_LOWERING, PORTABLE_LOWERING)
    precisions = (Precision.FLOAT32, Precision.INT8)
    target = "onnx"

    probe = f"""
import json
import onnxruntime
from hdruntime.backends.onnxruntime import CUDA_PROVIDER
from hdruntime.gpu.driver import gpus
facts = dict(providers=onnxruntime.get_available_providers())
if CUDA_PROVIDER in facts["providers"] and gpus():
    session = onnxruntime.InferenceSession(bytes.fromhex("{DOUBLING}"), providers=[CUDA_PROVIDER])
    # With a line on stderr it runs on the CPU where a library of CUDA is missing.
    facts["opens_cuda"] = CUDA_PROVIDER in session.get_providers()
print(json.dumps(dict(version=onnxruntime.__version__, facts=facts)))
"""
    """Probed, and asked for a session on the GPU: a provider that is listed may lack its libraries."""

    def against(self, bundle: Bundle, asked: Asked) -> Refusal | None:
        """Nothing: the graph is looked for where it is loaded."""
        return None

    def why_unavailable(self, bundle: Bundle, asked: Asked) -> str | None:
        """The bundle has no graph of a precision."""
        from hdruntime.backends.onnxruntime.cpu import graph_on_cpu

        try:
            graph_on_cpu(bundle, asked.precision)
        except BackendUnavailableError as error:
            return str(error)
        return None

    def preference(self, bundle: Bundle, asked: Asked) -> tuple[bool, str]:
        """Always, for the reason why it is no other."""
        return True, ""

    def open(self, bundle: Bundle, asked: Asked) -> Runner:
        """Load the graph for the CPU, or the portable one."""
        from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner

        return OnnxRuntimeRunner(bundle, threads=asked.threads, precision=asked.precision)

    def finding(self, loaded: Probed | None, gpu: Gpu | None) -> Finding:
        """Of both backends: they share a package."""
        if loaded is None:
            return Finding(
                self.library, FindingStatus.BROKEN, "not installed, but hdexport needs it", "pip install onnxruntime"
            )
        if loaded.error is not None:
            return Finding(
                self.library, FindingStatus.BROKEN, loaded.error, "pip install --force-reinstall onnxruntime"
            )
        detail = f"{loaded.version}: {', '.join(loaded.facts['providers'])}"
        on_gpu = CUDA_PROVIDER in loaded.facts["providers"]
        if not on_gpu and all(map(installed_version, self.distributions)):
            return Finding(
                self.library,
                FindingStatus.BROKEN,
                f"{detail}; onnxruntime and onnxruntime-gpu share their files, and the CPU's overwrote the GPU's",
                INSTALL_ONNXRUNTIME_CUDA,
            )
        if gpu is not None and not on_gpu:
            reason = f"{detail}; the backend {Backend.ONNXRUNTIME_CUDA.value} cannot use the GPU"
            return Finding(self.library, FindingStatus.MISSING, reason, INSTALL_ONNXRUNTIME_CUDA)
        if loaded.facts.get("opens_cuda") is False:
            reason = (
                f"{detail}; no session opens on the GPU: libraries of CUDA or cuDNN are missing or of another version"
            )
            return Finding(self.library, FindingStatus.BROKEN, reason, INSTALL_ONNXRUNTIME_CUDA)
        return Finding(self.library, FindingStatus.OK, detail)


class OnnxRuntimeCudaBackend(BackendEntry):
    """ONNX Runtime on an NVIDIA GPU, which runs every bundle, after engines."""

    name = Backend.ONNXRUNTIME_CUDA
    library = "ONNX Runtime"
    rank = 1000
    needs_gpu = True
    package = "onnxruntime"
    install = INSTALL_ONNXRUNTIME_CUDA
    lowerings = (CUDA_LOWERING, PORTABLE_LOWERING)
    target = "onnx"

    def against(self, bundle: Bundle, asked: Asked) -> Refusal | None:
        """There is no GPU, no ONNX Runtime for it, or nothing that calls its driver."""
        if asked.on.gpu is None:
            return Refusal(asked.on.why_no_gpu)
        if self.name not in asked.on.versions:
            return Refusal("no ONNX Runtime that was built with CUDA is installed here")
        if installed_version("cuda-bindings") is None:
            return Refusal(
                "the package cuda-bindings, which sessions on a GPU need, is not installed here",
                advice="pip install cuda-bindings",
            )
        return None

    def open(self, bundle: Bundle, asked: Asked) -> Runner:
        """Load the graph for the GPU, or the portable one."""
        from hdruntime.backends.onnxruntime.cuda import OnnxRuntimeCudaRunner

        return OnnxRuntimeCudaRunner(bundle, gpu=asked.gpu, threads=asked.threads)

    def version(self, *, has_gpu: bool) -> str | None:
        """By the module: the package installed later overwrites the files of the other."""
        if not has_gpu:
            return None
        try:
            import onnxruntime
        except ImportError:
            # Broken or not installed: engines still run.
            return None
        return onnxruntime.__version__ if CUDA_PROVIDER in onnxruntime.get_available_providers() else None


BACKENDS = (OnnxRuntimeBackend(), OnnxRuntimeCudaBackend())
