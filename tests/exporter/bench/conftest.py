"""Cases of tiny models, prepared and opened as the processes of a benchmark do it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hdexport.bench.peers import PEERS
from hdexport.bench.peers.peer import CaseSpec, MeasuredModel, Prepared
from hdexport.bench.results.result import OutputError
from hdexport.bench.run.preparation import expected_path, inputs_path, write_expected, write_inputs
from hdexport.bench.run.worker import open_case, wrong_by
from support.tiny_models import change_json


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

    def artefact(self, peer: str) -> Prepared:
        """What a peer's preparation gives."""
        return PEERS[peer].prepare(self.subject, self.folder, device="cpu")

    def spec(self, runner: str, batch: int, tokens: int, artefact: Path | None = None) -> CaseSpec:
        """A case whose inputs and expected outputs are there."""
        self.prepare_shapes([(batch, tokens)])
        inputs, expected = inputs_path(self.folder, batch, tokens), expected_path(self.folder, batch, tokens)
        return CaseSpec(
            runner=runner,
            bundle=self.subject.bundle,
            artefact=artefact,
            inputs=inputs,
            expected=expected,
        )

    def error(self, runner: str, batch: int, tokens: int, artefact: Path | None = None) -> OutputError:
        """Open a case, run it once, and compare."""
        spec = self.spec(runner, batch, tokens, artefact)
        case = open_case(spec)
        assert spec.expected is not None
        found = wrong_by(spec.expected, case.call(), case)
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
