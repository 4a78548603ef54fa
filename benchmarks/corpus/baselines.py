"""The other libraries that embed a corpus, each with its model's folder and its interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hdexport.bench.baselines.baseline import MeasuredModel, checkpoint_folder, not_installed
from hdexport.bench.baselines.onnx_plain import OnnxPlain
from hdruntime.backends.openvino.backend import has_bfloat16
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import ExportError

_INSTALL = "pipx install 'optimum-intel[openvino]' && pipx inject optimum-intel sentence-transformers 'fastembed>=0.9'"
"""optimum-intel needs an older transformers than hdexport, and fastembed an older huggingface-hub."""

_READ_BY_FASTEMBED = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

_DIFFERS = "vectors of texts past the trained positions differ"


@dataclass(frozen=True, kw_only=True)
class CorpusBaseline:
    """A library in one of its backends.

    Attributes:
        backend: as `encode_script` takes it.
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        device: ``cpu`` or ``cuda``.
        is_compiled: whether torch.compile compiles the model's layers, for every shape at once.
        batch_size: the library's default, in texts.
        folder: makes the model's folder, in a folder that all baselines share.
        python: the interpreter that has the library; None for this one.
        unavailable: why the library cannot run here; None if it can.
        remark: how its computation differs from the bundle's.
    """

    name: str
    backend: str
    dtype: str = "float32"
    device: str = "cpu"
    is_compiled: bool = False
    batch_size: int = 32
    folder: Callable[[MeasuredModel, Path], Path] = checkpoint_folder
    python: str | None = None
    unavailable: str | None = None
    remark: str | None = None


def corpus_baselines(manifest: Manifest, *, device: str, compiles: bool) -> Iterator[CorpusBaseline]:
    """Every baseline of a bundle on a device, ``cpu`` or ``cuda``, including baselines that cannot run here.

    Embeddings are compared with those of the first baseline. On a GPU the baselines compute in the bundle's type and in
    float16, with `compiles` by torch.compile too.
    """
    name = "sentence-transformers"
    missing = not_installed("torch", "sentence_transformers", install="pip install 'hdexport[export]'")
    if device == "cuda":
        on_gpu: tuple[str, ...] = (manifest.dtype, "float16")
        for dtype in dict.fromkeys(on_gpu):
            for is_compiled in (False, True) if compiles else (False,):
                yield CorpusBaseline(
                    name=f"{name}, PyTorch, {dtype}{', torch.compile' if is_compiled else ''}",
                    backend="torch",
                    dtype=dtype,
                    device=device,
                    is_compiled=is_compiled,
                    unavailable=missing,
                )
        return
    slow: dict[str, str | None] = {
        "float32": None,
        "bfloat16": None if has_bfloat16() else "this CPU does not compute in it",
    }
    for dtype, reason in slow.items():
        yield CorpusBaseline(
            name=f"{name}, PyTorch, {dtype}", backend="torch", dtype=dtype, unavailable=missing or reason
        )
    python = python_of_optimum("optimum.intel", "sentence_transformers")
    lacks = None if python else f"no environment with optimum-intel is on the PATH: {_INSTALL}"
    is_scaled = manifest.positions.attention_scale != "none" and manifest.max_len > (manifest.positions.trained or 0)
    for dtype, reason in slow.items():
        yield CorpusBaseline(
            name=f"{name}, OpenVINO, {dtype}",
            backend="openvino",
            dtype=dtype,
            python=python,
            unavailable=lacks or reason,
            remark=f"does not scale queries by log n: {_DIFFERS}" if is_scaled else None,
        )
    missing = not_installed("fastembed", install=_INSTALL)
    python = python_of_optimum("fastembed") if missing else None
    pools = "sentence_embedding" in [output.name for output in manifest.result_outputs]
    yield CorpusBaseline(
        name="fastembed, float32",
        backend="fastembed",
        batch_size=256,
        folder=_folder_of_fastembed,
        python=python,
        unavailable=(None if python else missing) or (None if pools else "the model does not pool its tokens' vectors"),
    )


def python_of_optimum(*modules: str) -> str | None:
    """The interpreter of the environment whose ``optimum-cli`` is on the PATH, if it has all the modules."""
    command = shutil.which("optimum-cli")
    if command is None:
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError), open(command, encoding="utf-8") as script:
        python = script.readline().removeprefix("#!").strip()
        asked = f"from importlib.util import find_spec; assert all(map(find_spec, {modules}))"
        if os.path.isfile(python) and subprocess.run([python, "-c", asked], capture_output=True).returncode == 0:
            return python
    return None


def _folder_of_fastembed(subject: MeasuredModel, folder: Path) -> Path:
    """PyTorch's plain export of the model, beside the bundle's tokenizer, which cuts texts where the bundle ends. A
    model that only PyTorch's older exporter takes is refused: that one checks nothing."""
    prepared = OnnxPlain().prepare(subject, folder, device="cpu")
    if prepared.remark is not None:
        raise ExportError(prepared.remark)
    output = prepared.artefact.parent
    for name in _READ_BY_FASTEMBED:
        if (subject.bundle / name).is_file():
            shutil.copy(subject.bundle / name, output)
    settings = output / "tokenizer_config.json"
    max_len = open_bundle(subject.bundle, check_files=False).manifest.max_len
    settings.write_text(json.dumps(json.loads(settings.read_text("utf-8")) | {"model_max_length": max_len}), "utf-8")
    return output
