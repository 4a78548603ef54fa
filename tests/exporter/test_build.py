"""The pipeline: what a bundle holds, and that an error in any phase leaves what was there before."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import hdruntime
from hdexport.build import BuildOptions, build
from hdexport.engines.build import EngineOptions
from hdexport.pipeline import run
from hdexport.support.progress import Progress
from hdexport.verify import Check
from hdruntime.bundle.manifest import Backend, Manifest, Task
from hdruntime.bundle.reader import open_bundle, read_config
from hdruntime.errors import BundleCorruptError, ExportError, HdexportError, InputError, VerificationError
from support.comparators import assert_close
from support.grids import nightly_unless
from support.hugging_face import ALPHA
from support.stored_builds import take_stored_graph
from support.tiny_models import LABELS, VOCAB_SIZE, save_tiny_model
from support.verified import Recorder

PHASES = {
    "loading": ("hdexport.checkpoint", "Checkpoint.load"),
    "extending": ("hdexport.model.surgery", "extend_positions"),
    "tracing": ("hdexport.graph.tracing", "trace"),
    "lowering": ("hdexport.graph.targets.onnxruntime.cpu", "lower_for_onnxruntime_cpu"),
}
"""Phase of the pipeline -> module and name of what does it; an error there is caused where it cannot be otherwise.

One of verifying is caused: by a wrong graph.
"""


def fail(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    module_name, name = PHASES[phase]
    owner = importlib.import_module(module_name)
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)

    def failing(*_: object, **__: object) -> None:
        raise ExportError(f"{phase} failed")

    monkeypatch.setattr(owner, name, failing)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("build") / "tiny-bert"
    save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION)
    return path


def options_for(checkpoint: Path, output: Path, **changes) -> BuildOptions:
    return BuildOptions(model=checkpoint, output=output, max_len=100, **changes)


@pytest.fixture(scope="module")
def whole_build(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """A verified bundle of the checkpoint, and the manifest that its build returned. Not to be changed."""
    output = tmp_path_factory.mktemp("whole") / "bundle"
    return output, build(options_for(checkpoint, output, command="hdexport build tiny-bert"))


@pytest.fixture
def stored_graph(whole_build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of the checkpoint take that bundle's graph."""
    take_stored_graph(monkeypatch, whole_build[0])


# An error of lowering is that of the next test.
@pytest.mark.parametrize("phase", [nightly_unless(phase != "lowering", phase) for phase in PHASES])
def test_an_error_in_any_phase_leaves_nothing(checkpoint, tmp_path, monkeypatch, phase: str) -> None:
    fail(monkeypatch, phase)
    with pytest.raises(ExportError, match=phase):
        build(options_for(checkpoint, tmp_path / "bundle"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("stored_graph")
def test_the_old_bundle_survives_a_failed_build(checkpoint, tiny_bundles, tmp_path, monkeypatch) -> None:
    output = tmp_path / "bundle"
    shutil.copytree(tiny_bundles("bert").path, output)
    before = open_bundle(output).manifest
    fail(monkeypatch, "lowering")
    with pytest.raises(ExportError, match="lowering"):
        build(options_for(checkpoint, output, force=True))
    assert open_bundle(output).manifest == before
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.usefixtures("stored_graph")
def test_a_bundle_that_differs_from_pytorch_is_not_written(checkpoint, tmp_path, monkeypatch) -> None:
    lowering = importlib.import_module("hdexport.graph.targets.onnxruntime.cpu")
    lower = lowering.lower_for_onnxruntime_cpu

    def lower_wrongly(model):
        for node in model.graph:
            if node.op_type == "LayerNormalization":
                node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.5)
        return lower(model)

    monkeypatch.setattr(lowering, "lower_for_onnxruntime_cpu", lower_wrongly)
    progress = Recorder()
    with pytest.raises(VerificationError, match="verify=None") as raised:
        build(options_for(checkpoint, tmp_path / "bundle"), progress)
    assert list(tmp_path.iterdir()) == []
    failed = [outcome for outcome in progress.outcomes if isinstance(outcome, Check) and not outcome.passed]
    assert failed
    assert list(raised.value.failed) == failed
    # The texts run the graph for CPUs, too.
    assert {check.graph for check in failed} == {"onnxruntime_cpu.onnx", "text: transformers"}


@pytest.mark.usefixtures("stored_graph")
def test_a_bundle_that_nothing_can_open_is_not_published(checkpoint, tmp_path, monkeypatch) -> None:
    seal = run.seal

    def seal_with_an_unreadable_tokenizer(directory: Path, manifest: Manifest) -> Manifest:
        (directory / "tokenizer.json").write_text("{}")
        return seal(directory, manifest)

    monkeypatch.setattr(run, "seal", seal_with_an_unreadable_tokenizer)
    with pytest.raises(BundleCorruptError, match=r"The tokenizer .*tokenizer\.json cannot be read"):
        build(options_for(checkpoint, tmp_path / "bundle", verify=None))
    assert list(tmp_path.iterdir()) == []


def test_a_chunk_of_no_tokens_or_too_many_is_refused_first(checkpoint, tmp_path) -> None:
    for tokens in (0, 2**24 + 1):
        with pytest.raises(InputError, match=f"ffn_chunk is {tokens}; it must be 1 to 16777216 tokens"):
            pytest.fail(f"{tokens} gives {build(options_for(checkpoint, tmp_path / 'bundle', ffn_chunk=tokens))}")
        assert list(tmp_path.iterdir()) == [], tokens


def test_an_unknown_type_of_weights_is_refused_with_the_known_ones(checkpoint, tmp_path) -> None:
    with pytest.raises(InputError, match=r"precision is 'fp16'\.\nChoose from: float32, float16, bfloat16\."):
        build(options_for(checkpoint, tmp_path / "bundle", precision="fp16"))
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_cannot_be_built_here_is_reported_first(checkpoint, tmp_path) -> None:
    steps: list[str] = []
    progress = Progress()
    progress.step = steps.append  # type: ignore[method-assign]
    engines = EngineOptions(variants=(Backend.TENSORRT,))
    with pytest.raises(HdexportError, match=r"hdexport\[tensorrt\]|GPU"):
        build(options_for(checkpoint, tmp_path / "bundle", engines=engines), progress)
    assert steps == []
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_describes_the_bundle(whole_build) -> None:
    path, manifest = whole_build
    assert (manifest.name, manifest.model_type, manifest.task) == ("tiny-bert", "bert", "feature-extraction")
    assert (manifest.max_len, manifest.dtype, manifest.vocab_size) == (100, "float32", VOCAB_SIZE)
    assert (manifest.hidden_size, manifest.num_layers, manifest.num_heads) == (32, 2, 4)
    positions = manifest.positions
    assert (positions.scheme, positions.alpha, positions.attention_scale) == ("hierarchical", 0.05, "logn")
    assert (positions.base, positions.rows, positions.trained) == (64, 100, 64)
    # Other tools cut texts there.
    assert read_config(open_bundle(path))["max_position_embeddings"] == positions.first_row + 100
    assert manifest.operators == {"hdexport::DenseAttention": 2}
    assert [spec.name for spec in manifest.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert [(spec.name, spec.shape) for spec in manifest.outputs] == [("last_hidden_state", ("batch", "tokens", 32))]
    assert manifest.verification is not None
    assert manifest.verification.passed is True
    assert manifest.verification.grid == "quick"
    compared = {"model.onnx", "onnxruntime_cpu.onnx", "text: transformers"}
    assert set(manifest.verification.graphs) == compared
    assert manifest.made_by["command"] == "hdexport build tiny-bert"
    assert manifest.made_by["source"] == "tiny-bert"
    assert set(manifest.files) == {
        "model.onnx",
        "model.onnx.data",
        "onnxruntime_cpu.onnx",
        "onnxruntime_cuda.onnx",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "config.json",
    }
    assert open_bundle(path).manifest == manifest
    assert [each.name for each in path.parent.iterdir()] == ["bundle"]
    assert {each.name for each in path.iterdir()} == {*manifest.files, "manifest.json"}


def test_labels_are_in_the_order_of_the_logits(tiny_bundles) -> None:
    assert tiny_bundles("bert", "text-classification").manifest.labels == LABELS


def test_the_same_build_twice_gives_the_same_graphs_which_run_where_they_are_moved_to(tiny_bundles, tmp_path) -> None:
    first = tiny_bundles("bert", precision="float16")
    second = build(
        BuildOptions(
            model=first.checkpoint,
            output=tmp_path / "b",
            max_len=first.manifest.max_len,
            precision="float16",
            alpha=ALPHA,
            attention_scale="none",
            verify=None,
        )
    )
    for file in ("model.onnx", "model.onnx.data", "onnxruntime_cpu.onnx", "onnxruntime_cuda.onnx"):
        assert first.manifest.files[file] == second.files[file], file
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    with hdruntime.load(tmp_path / "elsewhere") as session:
        assert session(input_ids=[[5, 6, 7]])["last_hidden_state"].shape == (1, 3, 32)


def test_the_weights_are_stored_once(tiny_bundles) -> None:
    bundle = tiny_bundles("albert")
    checkpoint_bytes = (bundle.checkpoint / "model.safetensors").stat().st_size
    config = json.loads((bundle.checkpoint / "config.json").read_text())
    table_bytes = bundle.manifest.max_len * config["embedding_size"] * 4
    assert bundle.manifest.files["model.onnx.data"].size_bytes <= checkpoint_bytes + table_bytes


def test_chunks_of_the_feed_forward_layer_freeze_no_length(tiny_bundles) -> None:
    bundle = tiny_bundles("bert", chunk_size_feed_forward=5)
    generator = np.random.default_rng(0)
    for tokens in (5, 40, 65):  # Hugging Face itself takes multiples of the chunk only
        ids = generator.integers(5, VOCAB_SIZE, (3, tokens))
        want = bundle.hugging_face(ids, np.ones_like(ids))["last_hidden_state"]
        assert_close(bundle.session(input_ids=ids)["last_hidden_state"], want, atol=2e-5)
    assert bundle.session(input_ids=[[5, 6, 7]])["last_hidden_state"].shape == (1, 3, 32)


def test_sparse_vectors_of_a_vocabulary_no_wider_than_the_states_are_built(tmp_path: Path) -> None:
    """Its logits are not pooled in blocks of tokens: they are no wider than the states."""
    save_tiny_model(tmp_path / "model", "bert", Task.FILL_MASK, vocab_size=24)
    options = {"task": Task.SPARSE_SIMILARITY, "max_len": 32, "tokenizer": None}
    manifest = build(BuildOptions(model=tmp_path / "model", output=tmp_path / "bundle", **options))
    assert manifest.outputs[0].shape == ("batch", 24)
    assert manifest.verification is not None
    assert manifest.verification.passed
