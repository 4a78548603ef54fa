"""Every error that hdexport raises on purpose.

::

    HdexportError
    ├── BundleError                 a bundle cannot be used
    │   ├── BundleNotFoundError     there is no bundle at that path
    │   ├── BundleCorruptError      a file is missing, changed, or lies outside the bundle
    │   └── BundleVersionError      the bundle has the format of another version of hdexport
    ├── InputError                  the caller's ids, masks, texts, rows or options do not fit
    │   └── InputChangedError       a job's input changed after the job began
    ├── OutputExistsError           the output already exists
    ├── DamagedJobError             the kept rows of an unfinished job cannot be continued
    ├── BackendError                a backend cannot run a bundle or a batch
    │   ├── BackendUnavailableError the backend, its package or its hardware is not available
    │   ├── NonFiniteOutputError    a result holds NaN or infinity
    │   └── OutOfMemoryError        the batch is too large for the free memory
    ├── MissingDependencyError      an optional package is not installed
    ├── ModelError                  a checkpoint cannot be read, or its family is not supported
    ├── ExportError                 a checkpoint cannot be exported as a graph
    ├── EngineError                 an engine could not be built
    └── VerificationError           a bundle's outputs differ from PyTorch's

A message says what arrived, what fits, and what to type next. The command line prints it and exits with 1.
"""

__all__ = [
    "BackendError",
    "BackendUnavailableError",
    "BundleCorruptError",
    "BundleError",
    "BundleNotFoundError",
    "BundleVersionError",
    "DamagedJobError",
    "EngineError",
    "ExportError",
    "HdexportError",
    "InputChangedError",
    "InputError",
    "MissingDependencyError",
    "ModelError",
    "NonFiniteOutputError",
    "OutOfMemoryError",
    "OutputExistsError",
    "VerificationError",
]


class HdexportError(Exception):
    """Base of every error raised on purpose."""


class BundleError(HdexportError):
    """A bundle cannot be used."""


class BundleNotFoundError(BundleError):
    """There is no bundle at that path."""


class BundleCorruptError(BundleError):
    """A file of the bundle is missing, changed, or lies outside it."""


class BundleVersionError(BundleError):
    """The bundle has the format of another version of hdexport."""


class InputError(HdexportError, ValueError):
    """The caller's ids, masks, texts, rows or options do not fit."""


class InputChangedError(InputError):
    """A job's input changed after the job began."""


class OutputExistsError(HdexportError):
    """The output already exists."""


class DamagedJobError(HdexportError):
    """The kept rows of an unfinished job cannot be continued."""


class BackendError(HdexportError):
    """A backend cannot run a bundle or a batch."""


class BackendUnavailableError(BackendError):
    """The backend, its package or its hardware is not available."""


class NonFiniteOutputError(BackendError):
    """A result holds NaN or infinity."""


class OutOfMemoryError(BackendError):
    """The batch is too large for the free memory; a smaller one may run."""


class MissingDependencyError(HdexportError, ImportError):
    """An optional package is not installed."""


class ModelError(HdexportError):
    """A checkpoint cannot be read, or its family is not supported."""


class ExportError(HdexportError):
    """A checkpoint cannot be exported as a graph."""


class EngineError(HdexportError):
    """An engine could not be built."""


class VerificationError(HdexportError):
    """A bundle's outputs differ from PyTorch's.

    Attributes:
        failed: the checks that failed, `hdexport.verify.Check` each.
    """

    def __init__(self, message: str, *, failed: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.failed = failed
