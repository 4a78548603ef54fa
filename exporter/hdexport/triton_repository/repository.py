"""A bundle as a model of a Triton Inference Server repository: its engine or its graph, and how it is served."""

from __future__ import annotations

__all__ = ["TritonModel", "package_for_triton"]

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from hdexport.triton_repository.config import most_rows, triton_config
from hdexport.triton_repository.protobuf_text import protobuf_text
from hdruntime.bundle.manifest import Backend, EngineFile
from hdruntime.bundle.passport import read_passport
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.staging import DirectoryKind, staged_directory
from hdruntime.constants import CPU_LOWERING
from hdruntime.errors import BackendUnavailableError, BundleCorruptError, InputError

_AUTO = "auto"

_CONFIG_FILE = "config.pbtxt"
_ENGINE_FILE = "model.plan"
_GRAPH_FILE = "model.onnx"
_TOKENIZER_FILE = "tokenizer.json"
_WEIGHTS_ENDING = ".onnx.data"
_VERSION = "1"

_HEADER = "# Written by hdexport package; with --force it replaces this file, too.\n"
"""The line that makes a directory one of ours; the configuration's format has such comments."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names that are a plain directory and need no escapes in a URL."""


@dataclass(frozen=True, kw_only=True)
class TritonModel:
    """The written repository.

    Attributes:
        path: the model's directory in the repository.
        reason: why the engine or the graph was taken.
        max_batch_size: most rows of a batch.
        engine: the TensorRT engine that is served; None for the graph, in ONNX Runtime on a CPU.
    """

    path: Path
    reason: str
    max_batch_size: int
    engine: EngineFile | None


def package_for_triton(
    bundle: Bundle, repository: Path, *, name: str | None = None, backend: str = _AUTO, force: bool = False
) -> TritonModel:
    """Write a model directory, whole or not at all: ``config.pbtxt``, ``1/model.plan`` or ``1/model.onnx``, tokenizer.

    The graph is the one for ONNX Runtime on a CPU, and is served there: the verified graph, where it was verified.

    Args:
        bundle: an opened bundle.
        repository: directory of models; created if it is missing, other models in it stay.
        name: of the model's directory, which clients use; default the bundle's.
        backend: ``tensorrt``, ``onnxruntime``, or ``auto``: a TensorRT engine that Triton can serve, else the graph.
        force: replace a model that this function wrote.

    Raises:
        InputError: the name or the backend is not valid.
        BackendUnavailableError: the bundle has no engine that Triton can serve.
        BundleCorruptError: the bundle lacks its graph, or contradicts itself.
        OutputExistsError: a model of that name is there and may not be replaced.
        HdexportError: the directory cannot be written.
    """
    name = _checked_name(bundle.manifest.name if name is None else name, given=name is not None)
    engine, reason = _choice(bundle, backend)
    file = _GRAPH_FILE if engine is None else _ENGINE_FILE
    config = triton_config(bundle, engine, name=name, file=file)
    path = Path(repository) / name
    with staged_directory(path, _MODEL_DIRECTORY, force=force) as directory:
        (directory / _VERSION).mkdir()
        if engine is None:
            _copy_graph(bundle, directory / _VERSION / file)
        else:
            shutil.copyfile(bundle.file(engine.file), directory / _VERSION / file)
        if bundle.manifest.tokenizer is not None:
            shutil.copyfile(bundle.file(bundle.manifest.tokenizer.file), directory / _TOKENIZER_FILE)
        (directory / _CONFIG_FILE).write_text(_HEADER + protobuf_text(config), encoding="utf-8")
    return TritonModel(path=path, reason=reason, max_batch_size=most_rows(engine), engine=engine)


def _checked_name(name: str, *, given: bool) -> str:
    if _NAME.fullmatch(name):
        return name
    raise InputError(
        f"The {'name' if given else 'name of the bundle,'} {name!r} is not valid for a model: use letters, digits, "
        "'.', '_' and '-', beginning with a letter or digit.\nGive one with --name, for example --name encoder."
    )


def _choice(bundle: Bundle, backend: str) -> tuple[EngineFile | None, str]:
    """The engine to serve, None for the graph; and why."""
    if backend not in (_AUTO, Backend.TENSORRT.value, Backend.ONNXRUNTIME.value):
        raise InputError(f"Triton models are not made for --backend {backend}.\nUse auto, tensorrt or onnxruntime.")
    if backend == Backend.ONNXRUNTIME.value:
        return None, "it was asked for"
    engine, why_not = _servable_engine(bundle)
    if engine is None and backend == Backend.TENSORRT.value:
        raise BackendUnavailableError(
            f"Triton cannot serve an engine of {bundle.path}: {why_not}.\n"
            "Build one on the GPU that will run it: hdexport build MODEL --target tensorrt --attention-impl native\n"
            "Or package the graph for CPUs: --backend onnxruntime"
        )
    return engine, why_not or "the bundle has an engine that Triton can serve"


def _servable_engine(bundle: Bundle) -> tuple[EngineFile | None, str]:
    """The bundle's engine for Triton; or None, and why not."""
    engines = {engine.flavour: engine for engine in bundle.manifest.engines}
    if not engines:
        return None, "the bundle has no TensorRT engine"
    engine = engines.get(Backend.TENSORRT.value)
    if engine is None:
        return (
            None,
            f"its engine is for {', '.join(engines)}, and Triton's tensorrt backend loads engines of TensorRT only",
        )
    plugins = read_passport(bundle, engine).plugins
    if plugins:
        named = ", ".join(f"{name} in {layers} layers" for name, layers in sorted(plugins.items()))
        return None, f"its engine needs our plugins ({named}), which are in Python, but Triton runs TensorRT from C++"
    if most_rows(engine) == 0:
        return None, "at some length no profile takes a single row, but Triton may get just one request"
    return engine, ""


def _copy_graph(bundle: Bundle, destination: Path) -> None:
    graphs = [graph.file for graph in bundle.manifest.graphs if graph.lowering == CPU_LOWERING]
    if not graphs:
        raise BundleCorruptError(f"The bundle {bundle.path} has no ONNX graph for a CPU.\nRebuild it.")
    shutil.copyfile(bundle.file(graphs[0]), destination)
    for file in bundle.manifest.files:
        # The graph refers to its weights by their name in the bundle.
        if file.endswith(_WEIGHTS_ENDING):
            shutil.copyfile(bundle.file(file), destination.parent / Path(file).name)


def _is_ours(directory: Path) -> bool:
    try:
        with (directory / _CONFIG_FILE).open(encoding="utf-8") as file:
            return file.readline() == _HEADER
    except (OSError, UnicodeDecodeError):
        return False


def _foreign_files(directory: Path) -> list[str]:
    known = {_CONFIG_FILE, _TOKENIZER_FILE, f"{_VERSION}/{_ENGINE_FILE}", f"{_VERSION}/{_GRAPH_FILE}"}
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    return sorted(path for path in found if path not in known and not path.endswith(_WEIGHTS_ENDING))


_MODEL_DIRECTORY = DirectoryKind(
    name="Triton model of hdexport",
    marker=_CONFIG_FILE,
    is_one=_is_ours,
    foreign_files=_foreign_files,
    elsewhere="choose another name with --name",
)
