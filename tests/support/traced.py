"""The module that a build traces, in PyTorch, where our operators compute their definitions: in a tenth of the time."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hdexport.build import BuildOptions, build
from hdexport.model.graph_module import GraphModule
from hdexport.pipeline import run
from hdruntime.bundle.manifest import Role
from support.hugging_face import HuggingFace


class _IsTracedNext(Exception):  # noqa: N818 not an error
    """Ends a build before its trace, and holds the module."""


def _stop(module: GraphModule, *_: Any, **__: Any) -> None:
    raise _IsTracedNext(module)


class TracedModel:
    """The module that a build would trace; tests ask of it the same as of a `TinyBundle`.

    Args:
        options: of the build, which writes nothing.
    """

    def __init__(self, options: BuildOptions) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "portable_graph", _stop)
            with pytest.raises(_IsTracedNext) as stopped:
                build(options)
        (self._module,) = stopped.value.args
        self.checkpoint = Path(str(options.model))
        carried = tuple(spec for spec in self._module.inputs if spec.role is Role.RECURRENT_STATE)
        self.manifest = SimpleNamespace(
            model_type=self._module.model.config.model_type,
            task=self._module.task,
            inputs=self._module.inputs,
            outputs=[SimpleNamespace(name=name, shape=axes) for name, axes in self._module.outputs.items()],
            recurrent_states=carried,
            max_memory=max((spec.bound or 0 for spec in carried), default=0),
            dtype="float32",
            max_len=options.max_len,
        )

    @torch.inference_mode()
    def traced(self, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs that the graph would have, by name."""
        given = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in feeds.items()}
        return dict(zip(self._module.outputs, (value.numpy() for value in self._module(**given)), strict=True))

    @functools.cached_property
    def hugging_face(self) -> HuggingFace:
        """The checkpoint in transformers, as a bundle has it."""
        return HuggingFace(self.checkpoint, self.manifest.task, max_len=self.manifest.max_len)
