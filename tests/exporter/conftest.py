"""Bundles of tiny models, each built once a worker and shared."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import hdruntime
from hdexport.attention_spec import attention_from_spec
from hdexport.build import BuildOptions, build
from hdexport.tasks import Task
from hdruntime.manifest import Manifest
from hugging_face import HuggingFace
from tiny_models import save_sentence_modules, save_tiny_model

MAX_LEN = 300


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
        """The checkpoint in transformers."""
        return HuggingFace(self.checkpoint, self.manifest.task, max_len=self.manifest.max_len)


@pytest.fixture(scope="session", autouse=True)
def quiet_pytorch() -> None:
    """PyTorch logs every step of a trace for a log file that nobody asked for; pytest would keep and print it."""
    logging.getLogger("torch.__trace").propagate = False


TinyBundles = Callable[..., TinyBundle]


@pytest.fixture(scope="session")
def tiny_bundles(tmp_path_factory: pytest.TempPathFactory) -> TinyBundles:
    """Build ``(model_type, task, precision, max_len, attention, max_global, last_block, **changes)``, unverified.

    All but the first have defaults; ``attention`` and ``last_block`` are what ``--attention`` and
    ``--bigbird-last-block`` take, ``changes`` are of the configuration.

    What was asked for before is not built again.
    """

    @functools.cache
    def build_once(
        model_type: str,
        task: str,
        precision: str,
        max_len: int,
        attention: str | None,
        max_global: int | None,
        last_block: str | None,
        changes: tuple,
    ) -> TinyBundle:
        directory = tmp_path_factory.mktemp(f"{model_type}-{task}-{precision}")
        checkpoint, path = directory / "checkpoint", directory / "bundle"
        save_tiny_model(checkpoint, model_type, Task(task), **dict(changes))
        if task == Task.SENTENCE_SIMILARITY:
            save_sentence_modules(checkpoint, "Normalize", pooling={"pooling_mode_mean_tokens": True})
        options = BuildOptions(
            model=checkpoint,
            output=path,
            max_len=max_len,
            precision=precision,
            attention=None if attention is None else attention_from_spec(attention),
            max_global=max_global,
            last_block=last_block,
            verify=False,
        )
        return TinyBundle(checkpoint, path, build(options))

    def make(
        model_type: str,
        task: str = "feature-extraction",
        precision: str = "float32",
        max_len: int = MAX_LEN,
        attention: str | None = None,
        max_global: int | None = None,
        last_block: str | None = None,
        **changes: Any,
    ) -> TinyBundle:
        options = (task, precision, max_len, attention, max_global, last_block)
        return build_once(model_type, *options, tuple(sorted(changes.items())))

    return make
