"""What the runtime asks the toy."""

from __future__ import annotations

from hdruntime.backends import Runner
from hdruntime.backends.diagnostics import IMPORT
from hdruntime.backends.entry import BackendEntry, LoadOptions
from hdruntime.bundle.reader import Bundle


class ToyBackend(BackendEntry):
    """Runs graphs by ``onnx.reference``, which is slow: for tests."""

    name = "toy"  # A backend of the product has a member of `Backend`.
    library = "The toy"
    rank = 1
    package = "onnx"
    install = "pip install onnx"
    lowerings = ("toy",)
    probe = IMPORT

    def open(self, bundle: Bundle, options: LoadOptions) -> Runner:
        """Read the graph."""
        from hdruntime.backends.toy.runner import ToyRunner

        return ToyRunner(bundle)


BACKENDS = (ToyBackend(),)
