"""A graph in bfloat16 that misses the usual tolerance is compared with what PyTorch loses in bfloat16 itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.verify import Check, Grid, Verification, verification, verify_bundle
from hdexport.verify.checks import compare_case
from hdexport.verify.graph_sets import GraphSet
from hdexport.verify.pytorch_reference import Reference, reference_of
from hdruntime.backends.openvino import devices
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, EngineFile, TensorSpec
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.verification import Case
from hdruntime.errors import VerificationError
from support.grids import nightly_unless
from support.made_once import made_once
from support.tampered_bundles import multiplied_by, tampered

pytest.importorskip("openvino")

IN_BFLOAT16 = "openvino.onnx and openvino_unpadded.onnx in bfloat16"
OUTPUT = "last_hidden_state"

has_bfloat16 = devices.chosen_device(devices.new_core(), None).has_bfloat16
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16, reason="this CPU does not compute in bfloat16")


def save_sharp_model(path: Path, sharpness: float) -> None:
    """Save a random Qwen3 whose queries are this much longer: attention picks few tokens, which rounding exchanges."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    model = transformers.Qwen3Model(config)
    for name, parameter in model.named_parameters():
        if "q_norm" in name:
            parameter.data *= sharpness
    model.save_pretrained(path)


def options(checkpoint: Path, output: Path) -> BuildOptions:
    return BuildOptions(
        model=checkpoint, output=output, max_len=128, precision="bfloat16", targets=("openvino",), tokenizer=None
    )


@dataclasses.dataclass(frozen=True)
class Built:
    checkpoint: Path
    path: Path

    @property
    def manifest(self):
        return open_bundle(self.path).manifest

    @property
    def reference(self) -> Reference:
        return reference_of(open_bundle(self.path), find_checkpoint(self.checkpoint))

    def verified(self, path: Path | None = None) -> Verification:
        opened = open_bundle(path or self.path)
        return verify_bundle(opened, self.reference, grid=Grid.QUICK, precisions={Precision.BFLOAT16})


@pytest.fixture(scope="session")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A model that PyTorch's bfloat16 keeps to a cosine of 0.9986; its build has passed."""

    def make(directory: Path) -> None:
        save_sharp_model(directory / "checkpoint", 3)
        build(options(directory / "checkpoint", directory / "bundle"))

    directory = made_once(tmp_path_factory, "sharp-qwen3", make, is_kept=True)
    return Built(directory / "checkpoint", directory / "bundle")


def least_cosine(found: Verification) -> float:
    return min(check.min_cosine for check in found.checks)


@needs_bfloat16
def test_a_model_that_loses_more_in_pytorch_may_lose_more_here(sharp: Built) -> None:
    record = sharp.manifest.verification
    assert record is not None
    graph = record.graphs[IN_BFLOAT16]
    assert graph.tolerance.cosine is not None
    assert graph.min_cosine is not None
    assert 0.995 < graph.tolerance.cosine < graph.min_cosine < 0.999
    (said,) = record.information
    words, _, cosine = said.rpartition(" ")
    assert words == "PyTorch in bfloat16, cases beyond cosine 0.999: 1, smallest cosine"
    assert graph.tolerance.cosine == pytest.approx(1 - 1.5 * (1 - float(cosine)), abs=2e-5)
    # Each case is counted once, and those that hold the usual tolerance keep it.
    found = sharp.verified()
    cases = [check.case for check in found.checks]
    assert len(cases) == len(set(cases)) == graph.checks
    assert sorted({check.tolerance.cosine for check in found.checks})[1:] == [0.999]


@needs_bfloat16
@pytest.mark.parametrize("wrong", ["noise", nightly_unless(False, "scale")])
def test_a_wrong_graph_of_such_a_model_fails(sharp: Built, tmp_path: Path, wrong: str) -> None:
    factors = np.full(64, 1.05, np.float32)
    if wrong == "noise":  # loses about .0035 of the cosine
        factors = (1 + 0.06 * np.random.default_rng(0).standard_normal(64)).astype(np.float32)
    files = ("openvino.onnx", "openvino_unpadded.onnx")
    found = sharp.verified(tampered(sharp, tmp_path / "bundle", multiplied_by(factors), *files))
    assert least_cosine(found) > (0.99 if wrong == "noise" else 0.998)
    # Lengths of one and two tokens may be off by more than 5 % (see `ROUNDING`).
    assert {check.case.tokens for check in found.checks if check.passed} <= ({1, 2} if wrong == "scale" else set())
    assert found.information


@needs_bfloat16
def test_pytorchs_bfloat16_is_that_of_transformers(sharp: Built) -> None:
    reference = sharp.reference.in_bfloat16()
    expected = transformers.AutoModel.from_pretrained(sharp.checkpoint, dtype=torch.bfloat16)
    for tokens in (1, 65, 128):
        with torch.inference_mode():
            states = expected(torch.from_numpy(reference.text(0, tokens))[None]).last_hidden_state
        np.testing.assert_array_equal(reference.unpadded(0, tokens)[OUTPUT], states[0].float().numpy())
    assert not np.array_equal(sharp.reference.unpadded(0, 65)[OUTPUT], reference.unpadded(0, 65)[OUTPUT])


@needs_bfloat16
def test_a_model_that_pytorch_does_not_run_in_bfloat16_keeps_the_usual_tolerance(sharp: Built, monkeypatch) -> None:
    def rejects(module: torch.nn.Module) -> None:
        @module.register_forward_pre_hook
        def reject(*_: object) -> None:
            raise RuntimeError("expected mat1 and mat2 to have the same dtype\nand more")

    monkeypatch.setattr("hdexport.model.half_weights.use_bfloat16", rejects)
    found = sharp.verified()
    assert {check.tolerance.cosine for check in found.checks} == {0.999}
    assert found.failed
    assert found.information == (
        "PyTorch does not run this model in bfloat16: expected mat1 and mat2 to have the same dtype",
    )


@needs_bfloat16
@pytest.mark.nightly
def test_bfloat16_that_is_of_no_use_is_refused_with_what_to_do(tmp_path: Path) -> None:
    save_sharp_model(tmp_path / "checkpoint", 6)
    with pytest.raises(
        VerificationError,
        match=r"\nThis model loses too much in bfloat16, in PyTorch as well: compute in float32\. verify=None writes",
    ) as raised:
        build(options(tmp_path / "checkpoint", tmp_path / "bundle"))
    failed = [check for check in raised.value.failed if isinstance(check, Check) and check.graph == IN_BFLOAT16]
    assert {check.tolerance.cosine for check in failed} == {0.995}
    assert not (tmp_path / "bundle").exists()


@needs_bfloat16
@pytest.mark.nightly
def test_a_graph_that_is_wrong_in_float32_is_not_explained_by_bfloat16(tmp_path: Path) -> None:
    built = Built(tmp_path / "checkpoint", tmp_path / "bundle")
    save_sharp_model(built.checkpoint, 6)
    build(dataclasses.replace(options(built.checkpoint, built.path), precision="float32", verify=None))

    def verified(path: Path) -> Verification:
        precisions = {Precision.FLOAT32, Precision.BFLOAT16}
        return verify_bundle(open_bundle(path), built.reference, grid=Grid.QUICK, precisions=precisions)

    found = verified(built.path)
    assert {check.precision for check in found.failed} == {Precision.BFLOAT16}
    assert found.hints
    wrong = tampered(built, tmp_path / "wrong", multiplied_by(np.full(64, 1.05, np.float32)), "openvino.onnx")
    found = verified(wrong)
    assert Precision.FLOAT32 in {check.precision for check in found.failed}
    assert not found.hints


def test_an_engine_in_bfloat16_is_held_to_the_same_tolerance(sharp: Built) -> None:
    engine = EngineFile(
        file="e.engine", metadata="e.json", variant="tensorrt", version="1", precision="bfloat16",
        architectures=("sm90",), profiles=(),
    )  # fmt: skip
    graphs = GraphSet(backend=Backend.TENSORRT, graphs=(), precision=Precision.AUTO, engine=engine)
    manifest = dataclasses.replace(
        sharp.manifest, outputs=(TensorSpec(name=OUTPUT, dtype="float32", shape=("batch", "tokens", 64)),)
    )
    generator = np.random.default_rng(0)
    right, noise = generator.normal(size=(2, 1, 9, 64)).astype(np.float32)

    def passes(part: float, **own_losses: float) -> bool:
        case = Case(tokens=9, lengths=(9,))
        got = {OUTPUT: right + part * noise}
        check = compare_case(graphs, case, manifest, [{OUTPUT: right[0]}], got, None, own_losses=own_losses)
        assert verification._may_be_the_models(graphs, check, manifest) != check.passed
        return check.passed

    # Part p of noise loses p² / 2 of the cosine.
    assert passes(0.03)
    assert not passes(0.06)
    assert passes(0.06, last_hidden_state=0.002)
    assert not passes(0.06, last_hidden_state=0.0005)
    assert not passes(0.15, last_hidden_state=0.1)
