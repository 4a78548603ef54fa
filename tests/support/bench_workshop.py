"""Cases of tiny models, prepared and opened as in the processes of a benchmark."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines import BASELINES
from hdexport.bench.baselines.baseline import CaseSpec, MeasuredModel, Prepared
from hdexport.bench.results.result import OutputError
from hdexport.bench.run.preparation import expected_path, inputs_path, write_expected, write_inputs
from hdexport.bench.run.worker import open_case, output_error
from hdruntime.bundle.manifest import Task
from support.tiny_models import change_json, save_tiny_model

SHAPES = [(1, 1), (3, 65), (3, 300)]
"""Batch and tokens; the checkpoints have 64 positions, the bundles 300."""


@dataclass(frozen=True)
class Workshop:
    """A subject and the folder that is prepared for it."""

    subject: MeasuredModel
    folder: Path

    def prepare_shapes(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Inputs and expected outputs of (batch, tokens), together, for texts and model take time to load."""
        missing = [shape for shape in shapes if not expected_path(self.folder, *shape).exists()]
        if missing:
            write_inputs(self.subject, self.folder, missing)
            write_expected(self.subject, self.folder, missing)

    def artefact(self, baseline: str) -> Prepared:
        """Artefact of a baseline."""
        return BASELINES[baseline].prepare(self.subject, self.folder, device="cpu")

    def spec(self, runner: str, batch: int, tokens: int, artefact: Path | None = None) -> CaseSpec:
        """A case whose inputs and expected outputs are there."""
        self.prepare_shapes([(batch, tokens)])
        inputs, expected = inputs_path(self.folder, batch, tokens), expected_path(self.folder, batch, tokens)
        baseline = None if artefact is None else BASELINES[runner]
        return CaseSpec(
            bundle=self.subject.bundle,
            backend="" if baseline else runner,
            baseline=baseline,
            artefact=artefact,
            inputs=inputs,
            expected=expected,
        )

    def error(self, runner: str, batch: int, tokens: int, artefact: Path | None = None) -> OutputError:
        """Open a case, run it once, and compare."""
        spec = self.spec(runner, batch, tokens, artefact)
        case = open_case(spec)
        assert spec.expected is not None
        found = output_error(spec.expected, case.call(), case)
        case.close()
        return found


@pytest.fixture(scope="session")
def workshop(tiny_bundles: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Workshop]:
    """The workshop of a tiny model; arguments are those of `tiny_bundles`. One folder a model, kept for the session."""
    folders: dict[Path, Workshop] = {}

    def make(*of_bundle: str, **options: Any) -> Workshop:
        bundle = tiny_bundles(*of_bundle, **options)
        if bundle.path not in folders:
            folder = tmp_path_factory.mktemp("prepared")
            checkpoint = shutil.copytree(bundle.checkpoint, folder / "source")
            pooling = checkpoint / "1_Pooling" / "config.json"
            if pooling.exists():
                # sentence-transformers needs it; hdexport looks at the model.
                change_json(pooling, word_embedding_dimension=bundle.manifest.hidden_size)
            folders[bundle.path] = Workshop(MeasuredModel(bundle=bundle.path, checkpoint=str(checkpoint)), folder)
        return folders[bundle.path]

    return make


@pytest.fixture(scope="module")
def shallow(workshop: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The workshop of a tiny model that has one layer, in half the time; arguments are those of `workshop`.

    The bundle is that of two layers: baselines and PyTorch read its manifest, which does not tell how many there are.
    """
    made: dict[str, Any] = {}

    def make(model_type: str) -> Any:
        if model_type not in made:
            folder = tmp_path_factory.mktemp("shallow")
            save_tiny_model(folder / "source", model_type, Task.FEATURE_EXTRACTION, num_hidden_layers=1)
            deep = workshop(model_type)
            subject = dataclasses.replace(deep.subject, checkpoint=str(folder / "source"))
            made[model_type] = dataclasses.replace(deep, subject=subject, folder=folder)
        return made[model_type]

    return make


def assert_right(case: Any, baseline: str) -> None:
    case.prepare_shapes(SHAPES)
    made = BASELINES[baseline].prepare(case.subject, case.folder, device="cpu")
    assert made.remark is None
    for batch, tokens in SHAPES:
        found = case.error(baseline, batch, tokens, made.artefact)
        assert found.passed, (batch, tokens, found)
        assert found.tolerance == "abs 0.0001 or 2 ulp"
