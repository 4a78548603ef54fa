"""The backends of ONNX Runtime on the CPU and on NVIDIA GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdruntime.backends import Runner
from hdruntime.backends.diagnostics import DiagnosticResult, DiagnosticStatus, ProbeResult
from hdruntime.backends.entry import BackendEntry, LoadOptions, Preference, UnavailableReason
from hdruntime.backends.onnxruntime import CPU_LOWERING, CUDA_LOWERING, CUDA_PROVIDER, HAS_FAST_MATH
from hdruntime.backends.precision import Precision
from hdruntime.backends.rebuilding import gpu_hint
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import BackendUnavailableError
from hdruntime.optional import INSTALL_ONNXRUNTIME_CUDA, installed_version

if TYPE_CHECKING:
    from hdruntime.gpu.driver import Gpu

DOUBLING = (
    "080812003a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080112040a02"
    "0801620f0a0179120a0a08080112040a02080142040a00100d"
)
"""An ONNX graph that computes x + x of one number."""


class OnnxRuntimeBackend(BackendEntry):
    """ONNX Runtime on the CPU, which every installation has and which runs every bundle."""

    name = Backend.ONNXRUNTIME
    library = "ONNX Runtime"
    rank = 1000
    package = "onnxruntime"
    distributions = ("onnxruntime", "onnxruntime-gpu")
    install = "pip install onnxruntime"
    lowerings = (CPU_LOWERING, PORTABLE_LOWERING)
    precisions = (Precision.FLOAT32, *((Precision.BFLOAT16,) if HAS_FAST_MATH else ()), Precision.INT8)
    target = "onnx"

    probe = f"""
import json
import onnxruntime
from hdruntime.backends.onnxruntime import CUDA_PROVIDER
from hdruntime.gpu.driver import gpus
details = dict(providers=onnxruntime.get_available_providers())
if CUDA_PROVIDER in details["providers"] and gpus():
    session = onnxruntime.InferenceSession(bytes.fromhex("{DOUBLING}"), providers=[CUDA_PROVIDER])
    # With a line on stderr it runs on the CPU where a library of CUDA is missing.
    details["opens_cuda"] = CUDA_PROVIDER in session.get_providers()
print(json.dumps(dict(version=onnxruntime.__version__, details=details)))
"""
    """ProbeResult, and asked for a session on the GPU: a provider that is listed may lack its libraries."""

    def unavailable_reason(self, bundle: Bundle, options: LoadOptions) -> UnavailableReason | None:
        """The bundle has no graph in the precision, or ONNX Runtime does not compute in it here."""
        from hdruntime.backends.onnxruntime.cpu import graph_on_cpu

        try:
            graph_on_cpu(bundle, options.precision)
        except BackendUnavailableError as error:
            return UnavailableReason.from_error(error)
        return None

    def preference(self, bundle: Bundle, options: LoadOptions) -> Preference:
        """Always preferred; the reason is why no other backend is."""
        return Preference(True, "")

    def open(self, bundle: Bundle, options: LoadOptions) -> Runner:
        from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner

        return OnnxRuntimeRunner(bundle, threads=options.threads, precision=options.precision)

    def diagnose(self, probe: ProbeResult | None, gpu: Gpu | None) -> DiagnosticResult:
        """One line for both backends: they share a package."""
        if probe is None:
            return DiagnosticResult(
                self.library, DiagnosticStatus.BROKEN, "not installed; hdexport needs it", "pip install onnxruntime"
            )
        if probe.error is not None:
            return DiagnosticResult(
                self.library, DiagnosticStatus.BROKEN, probe.error, "pip install --force-reinstall onnxruntime"
            )
        detail = f"{probe.version}: {', '.join(probe.details['providers'])}"
        on_gpu = CUDA_PROVIDER in probe.details["providers"]
        if not on_gpu and all(map(installed_version, self.distributions)):
            return DiagnosticResult(
                self.library,
                DiagnosticStatus.BROKEN,
                f"{detail}; onnxruntime was installed after onnxruntime-gpu and replaced its files",
                INSTALL_ONNXRUNTIME_CUDA,
            )
        if gpu is not None and not on_gpu:
            reason = f"{detail}; the backend {Backend.ONNXRUNTIME_CUDA} cannot use the GPU"
            return DiagnosticResult(self.library, DiagnosticStatus.MISSING, reason, INSTALL_ONNXRUNTIME_CUDA)
        if probe.details.get("opens_cuda") is False:
            reason = (
                f"{detail}; no session opens on the GPU: libraries of CUDA or cuDNN are missing or of another version"
            )
            return DiagnosticResult(self.library, DiagnosticStatus.BROKEN, reason, INSTALL_ONNXRUNTIME_CUDA)
        return DiagnosticResult(self.library, DiagnosticStatus.OK, detail)


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

    def unavailable_reason(self, bundle: Bundle, options: LoadOptions) -> UnavailableReason | None:
        """There is no GPU, no ONNX Runtime for GPUs, or no package for the driver."""
        machine = options.gpu_machine
        if machine.gpu is None:
            return UnavailableReason(reason=machine.no_gpu_reason, hint=gpu_hint(self, bundle, machine))
        if self.name not in machine.versions:
            return UnavailableReason(
                reason="No ONNX Runtime that was built with CUDA is installed.", hint=gpu_hint(self, bundle, machine)
            )
        if installed_version("cuda-bindings") is None:
            return UnavailableReason(
                reason="The package cuda-bindings, which sessions on a GPU need, is not installed.",
                hint="Install it with: pip install cuda-bindings",
            )
        return None

    def open(self, bundle: Bundle, options: LoadOptions) -> Runner:
        from hdruntime.backends.onnxruntime.cuda import OnnxRuntimeCudaRunner

        return OnnxRuntimeCudaRunner(bundle, gpu=options.gpu, threads=options.threads)

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
