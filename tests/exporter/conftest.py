"""Bundles of tiny models, each built once for all workers and shared."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnxscript import TracedOnnxFunction

import hdruntime
from hdexport.attention.registry import attention_from_spec
from hdexport.build import BuildOptions, build
from hdexport.checkpoint.trust import Trust
from hdexport.families import family_of
from hdexport.rebuild import RebuildOptions, rebuild
from hdruntime.bundle.manifest import AttentionScale, Manifest, Scheme, Task
from hdruntime.bundle.reader import open_bundle
from support.hugging_face import ALPHA, HuggingFace
from support.made_once import made_once
from support.tiny_models import save_sentence_modules, save_tiny_model
from support.traced import TracedModel

MAX_LEN = 300

# torch.onnx.export reads the source of every operator of onnxscript's library anew for each model.
_function_ir: Any = functools.cached_property(TracedOnnxFunction.function_ir.fget)  # type: ignore[attr-defined]
_function_ir.__set_name__(TracedOnnxFunction, "function_ir")
TracedOnnxFunction.function_ir = _function_ir  # type: ignore[method-assign]


@dataclass(frozen=True)
class TinyBundle:
    """A bundle, the checkpoint it was built from, and what runs either."""

    checkpoint: Path
    path: Path
    manifest: Manifest

    @functools.cached_property
    def session(self) -> hdruntime.Session:
        """The bundle as users run it: the graph lowered for the CPU, in the runtime."""
        return hdruntime.load(self.path, backend="onnxruntime", threads=1)

    @functools.cached_property
    def portable(self) -> Callable[..., dict[str, np.ndarray]]:
        """``model.onnx`` in plain ONNX Runtime."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(self.path / "model.onnx", options)
        outputs = [value.name for value in session.get_outputs()]
        return lambda **feeds: dict(zip(outputs, session.run(outputs, feeds), strict=True))

    @functools.cached_property
    def graph(self) -> ir.Model:
        """``model.onnx``, to be looked at."""
        return ir.load(self.path / "model.onnx")

    @functools.cached_property
    def cpu_graph(self) -> ir.Model:
        """``onnxruntime_cpu.onnx``, to be looked at."""
        return ir.load(self.path / "onnxruntime_cpu.onnx")

    @functools.cached_property
    def hugging_face(self) -> HuggingFace:
        """The checkpoint in transformers, or in the classes that it lacks."""
        family_of(self.manifest.model_type)
        return HuggingFace(self.checkpoint, self.manifest.task, max_len=self.manifest.max_len)


TinyBundles = Callable[..., TinyBundle]
TracedModels = Callable[..., TracedModel]


def save_checkpoint(
    directory: Path,
    model_type: str,
    task: str = "feature-extraction",
    precision: str = "float32",
    max_len: int = MAX_LEN,
    attention: str | None = None,
    max_global: int | None = None,
    last_block: str | None = None,
    scheme: str = "hierarchical",
    attention_scale: AttentionScale = "none",
    rope_factor: float | None = None,
    ffn_chunk: int | None = None,
    recurrence: int | None = None,
    openvino: bool = False,
    **changes: Any,
) -> BuildOptions:
    """Write a tiny checkpoint into a directory; returns the options that build its bundle there, unverified.

    All but the type have defaults: the positions are hierarchical with alpha 0.4, and queries are not scaled.
    ``attention``, ``last_block`` and ``attention_scale`` are what ``--attention``, ``--bigbird-last-block`` and
    ``--attention-scale`` take, ``changes`` are of the configuration.
    """
    checkpoint = directory / "checkpoint"
    model = save_tiny_model(checkpoint, model_type, Task(task), **changes)
    if task == Task.SENTENCE_SIMILARITY:
        width = {"word_embedding_dimension": model.config.hidden_size}
        save_sentence_modules(checkpoint, "Normalize", pooling={"pooling_mode_mean_tokens": True, **width})
    return BuildOptions(
        model=checkpoint,
        output=directory / "bundle",
        max_len=max_len,
        precision=precision,
        scheme=Scheme(scheme),
        alpha=ALPHA,
        attention_scale=attention_scale,
        rope_factor=rope_factor,
        ffn_chunk=ffn_chunk,
        recurrence=recurrence,
        targets=("openvino",) if openvino else (),
        attention=attention_from_spec(attention, {"max_global": max_global, "bigbird_last_block": last_block}),
        verify=None,
    )


@pytest.fixture(scope="session")
def tiny_bundles(tmp_path_factory: pytest.TempPathFactory) -> TinyBundles:
    """Build a bundle; the arguments are those of `save_checkpoint` behind its first.

    What was requested before, by whichever worker or run, is not built again.
    """

    bundles: dict[str, TinyBundle] = {}

    def make(model_type: str, *others: Any, **options: Any) -> TinyBundle:
        arguments = inspect.signature(save_checkpoint).bind(Path(), model_type, *others, **options)
        arguments.apply_defaults()
        given = {**arguments.arguments, **arguments.arguments["changes"]}
        # As strings: a task may be given as a member of the enumeration or by its name.
        values = repr(sorted((name, str(value)) for name, value in given.items() if name != "changes"))
        digest = hashlib.sha256(values.encode()).hexdigest()[:12]
        name = f"{model_type}-{given['task']}-{given['precision']}-{digest}"
        if name not in bundles:
            directory = made_once(
                tmp_path_factory,
                name,
                lambda folder: build(save_checkpoint(folder, model_type, *others, **options)),
                is_kept=True,
            )
            path = directory / "bundle"
            bundles[name] = TinyBundle(directory / "checkpoint", path, open_bundle(path).manifest)
            assert bundles[name].manifest.task == given["task"]
        return bundles[name]

    return make


@pytest.fixture(scope="session")
def traced_models(tmp_path_factory: pytest.TempPathFactory) -> TracedModels:
    """Make what `tiny_bundles` would trace for the same arguments."""

    def make(model_type: str, *others: Any, **options: Any) -> TracedModel:
        return TracedModel(save_checkpoint(tmp_path_factory.mktemp("traced"), model_type, *others, **options))

    return make


@pytest.fixture(scope="session")
def openvino_bundles(tiny_bundles: TinyBundles, tmp_path_factory: pytest.TempPathFactory) -> TinyBundles:
    """Those of `tiny_bundles` with graphs for OpenVINO, which are added: the model is not traced again for them.

    They are those of a build, byte for byte: see test_rebuild_graphs.py.
    """

    def make(*of_bundle: str, **options: Any) -> TinyBundle:
        plain = tiny_bundles(*of_bundle, **options)

        def add(directory: Path) -> None:
            rebuild(RebuildOptions(bundle=plain.path, output=directory / "bundle", targets=("openvino",)))

        path = made_once(tmp_path_factory, f"openvino {plain.path.parent.name}", add, is_kept=True) / "bundle"
        return TinyBundle(plain.checkpoint, path, open_bundle(path).manifest)

    return make


@pytest.fixture(scope="session")
def stored_bundles(tmp_path_factory: pytest.TempPathFactory) -> TinyBundles:
    """Build ``(checkpoint, task, precision, max_len)`` of a directory in tests/data, for 16 tokens, unverified."""

    def make(checkpoint: Path, task: str, precision: str = "float32", max_len: int = 16) -> TinyBundle:
        def built(directory: Path) -> None:
            options = BuildOptions(
                model=checkpoint,
                output=directory / "bundle",
                max_len=max_len,
                precision=precision,
                task=Task(task),
                trust=Trust(allow_pickle=True),
                verify=None,
            )
            build(options)

        name = f"{checkpoint.name}-{task}-{precision}-{max_len}"
        path = made_once(tmp_path_factory, name, built, is_kept=True) / "bundle"
        return TinyBundle(checkpoint, path, open_bundle(path).manifest)

    return make
