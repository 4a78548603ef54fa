"""Peers run the same model by other means, and what they get wrong shows."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch._inductor.config

from hdexport.attention.blocks.record import Mode
from hdexport.attention.blocks.setup import bigbird
from hdexport.attention.window.record import Window, WindowAttention
from hdexport.bench.peers import PEERS, openvino, openvino_int8
from hdexport.bench.peers.onnx_plain import export_plainly
from hdexport.bench.peers.torch_model import load_module, open_module
from hdexport.bench.run.opening import open_case, wrong_by
from hdexport.model.tasks import Task
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.writer import write_manifest
from hdruntime.errors import BackendError, BackendUnavailableError, ExportError
from support.attention_records import recorded
from support.colbert_models import made_colbert
from support.comparators import assert_close
from support.grids import nightly_unless
from support.splade_models import made_splade
from support.tiny_models import WINDOWS, save_tiny_model

SHAPES = [(1, 1), (3, 65), (3, 300)]
"""Batch and tokens; the checkpoints have 64 positions, the bundles 300."""

BIGBIRD = bigbird(block_size=4, random_blocks=0)

NEEDS_OPTIMUM = pytest.mark.skipif(
    shutil.which("optimum-cli") is None,
    reason="optimum-cli is not on the PATH: pipx install 'optimum-onnx[onnxruntime]'",
)


@pytest.fixture
def manifest(workshop: Any) -> Manifest:
    """Of the tiny BERT for feature extraction."""
    return open_bundle(workshop("bert").subject.bundle).manifest


@pytest.fixture(scope="module")
def shallow(workshop: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The workshop of a tiny model that has one layer, in half the time; arguments are those of `workshop`.

    The bundle is that of two layers: peers and PyTorch read its manifest, which does not tell how many there are.
    """
    made: dict[str, Any] = {}

    def make(model_type: str) -> Any:
        if model_type not in made:
            folder = tmp_path_factory.mktemp("shallow")
            windows = {"attention_window": [WINDOWS[0]]} if model_type == "longformer" else {}
            save_tiny_model(folder / "source", model_type, Task.FEATURE_EXTRACTION, num_hidden_layers=1, **windows)
            deep = workshop(model_type)
            subject = dataclasses.replace(deep.subject, checkpoint=str(folder / "source"))
            made[model_type] = dataclasses.replace(deep, subject=subject, folder=folder)
        return made[model_type]

    return make


def assert_right(case: Any, peer: str) -> None:
    case.prepare_shapes(SHAPES)
    made = PEERS[peer].prepare(case.subject, case.folder, device="cpu")
    assert made.remark is None
    for batch, tokens in SHAPES:
        found = case.error(peer, batch, tokens, made.artefact)
        assert found.passed, (batch, tokens, found)
        assert found.tolerance == "max abs error <= 0.0001"


@pytest.mark.parametrize(
    ("peer", "of_bundle"),
    [
        ("torch", ("bert",)),
        nightly_unless(False, "torch", ("longformer",)),
        ("torch", ("big_bird",)),
        ("torch", ("bert", "sentence-similarity")),
        pytest.param("torch", ("roberta", "question-answering"), marks=pytest.mark.nightly),
        pytest.param("torch", ("distilbert", "text-classification"), marks=pytest.mark.nightly),
        ("sentence-transformers", ("longformer",)),
        ("sentence-transformers", ("big_bird",)),
        ("sentence-transformers", ("bert", "sentence-similarity")),
        ("openvino", ("bert", "sentence-similarity")),
        pytest.param("openvino", ("roberta", "question-answering"), marks=pytest.mark.nightly),
        pytest.param("onnx-plain", ("roberta", "question-answering"), marks=pytest.mark.nightly),
        pytest.param("optimum", ("bert",), marks=NEEDS_OPTIMUM),
    ],
)
def test_a_peer_is_right_at_every_length(workshop: Any, peer: str, of_bundle: tuple[str, ...]) -> None:
    assert_right(workshop(*of_bundle), peer)


@pytest.mark.parametrize(
    "made", [pytest.param(made_splade, id="sparse"), pytest.param(made_colbert, id="tokens", marks=pytest.mark.nightly)]
)
def test_sentence_transformers_runs_models_of_sparse_and_of_token_vectors(
    made: Callable[[Any, str], Path], tmp_path_factory: pytest.TempPathFactory, workshop_of: Callable[[Path], Any]
) -> None:
    """By its own classes; vectors that are not the bundle's are found."""
    name = "max" if made is made_splade else "classic"
    case = workshop_of(made(tmp_path_factory, name))
    artefact = case.artefact("sentence-transformers").artefact
    for batch, tokens in ((1, 1), (3, 65), (1, 90)):
        found = case.error("sentence-transformers", batch, tokens, artefact)
        assert found.passed, (batch, tokens, found)
        assert found.tolerance == "max abs error <= 0.0001"
    spec = case.spec("sentence-transformers", 3, 65, artefact)
    opened = open_case(spec)
    wrong = {name: 1.001 * values for name, values in opened.call().items()}
    found_wrong = wrong_by(spec, wrong, opened)
    assert found_wrong is not None
    assert not found_wrong.passed


def test_a_plain_export_of_dense_attention_is_right(shallow: Any) -> None:
    assert_right(shallow("bert"), "onnx-plain")


@pytest.mark.nightly
def test_a_plain_export_of_longformer_is_wrong_and_shows_it(shallow: Any) -> None:
    case = shallow("longformer")
    made = case.artefact("onnx-plain")
    assert made.remark is not None
    assert made.remark.startswith("exported by TorchScript (dynamo=False), since dynamo=True failed: Guard")
    assert "\n" not in made.remark
    found = case.error("onnx-plain", 1, 300, made.artefact)
    assert not found.passed
    assert found.max_abs_error is not None
    assert found.max_abs_error > 0.1
    assert found.min_cosine < 0.99
    # For several texts it fails.
    opened = open_case(case.spec("onnx-plain", 3, 300, made.artefact))
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        opened.call()


def dense_tokens_of_bigbird(workshop: Any) -> tuple[Manifest, int]:
    """The manifest of the tiny BigBird, and the longest text to which the model itself attends densely."""
    manifest = open_bundle(workshop("big_bird").subject.bundle).manifest
    record = recorded(manifest, "blocks")
    assert record is not None
    return manifest, record.dense_tokens


def test_a_conversion_of_bigbird_is_marked_as_dense(workshop: Any) -> None:
    manifest, dense_tokens = dense_tokens_of_bigbird(workshop)
    for peer in ("onnx-plain", "openvino"):
        said = f"attends densely at every length, as the model does up to {dense_tokens} tokens"
        assert PEERS[peer].remark(manifest) == said, peer


@pytest.mark.nightly
@pytest.mark.parametrize("peer", ["onnx-plain", "openvino"])
def test_a_conversion_of_bigbird_is_dense_and_shows_it(shallow: Any, peer: str) -> None:
    case = shallow("big_bird")
    _, dense_tokens = dense_tokens_of_bigbird(shallow)
    made = case.artefact(peer)
    assert case.error(peer, 3, dense_tokens, made.artefact).passed
    for tokens in (dense_tokens + 1, 300):
        found = case.error(peer, 3, tokens, made.artefact)
        assert (found.passed, (found.max_abs_error or 0) > 0.01) == (False, True)


def test_openvino_says_what_it_computes_in_and_prints_nothing(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Scales of a few texts serve for so small a model.
    monkeypatch.setattr(openvino_int8, "_TEXTS", 16)
    case = shallow("bert")
    case.prepare_shapes([(3, 65)])
    capfd.readouterr()
    default = openvino.default_precision()
    remarks = {
        "openvino": None,
        "openvino-default": f"computes in {default.value}, its default on this CPU",
        "openvino-int8": f"int8 by NNCF, with scales of 16 texts; the rest computes in {default.value}",
    }
    computes_in = {"openvino": Precision.FLOAT32, "openvino-default": default, "openvino-int8": Precision.INT8}
    for peer, remark in remarks.items():
        made = case.artefact(peer)
        assert made.remark == remark
        assert open_case(case.spec(peer, 3, 65, made.artefact)).precision is computes_in[peer]
        found = case.error(peer, 3, 65, made.artefact)
        assert found.passed, found
        assert (found.tolerance == "max abs error <= 0.0001") == (computes_in[peer] is Precision.FLOAT32)
        # Float32 would pass for any of them.
        assert (found.size > 1e-4) == (computes_in[peer] is not Precision.FLOAT32)
    assert capfd.readouterr() == ("", "")
    int8 = (case.folder / "openvino-int8" / openvino.MODEL_FILE).read_text()
    assert 'element_type="i8"' in int8
    assert "FakeQuantize" in int8


def test_openvino_is_refused_for_a_gpu_and_says_what_it_cannot_convert(workshop: Any, tmp_path: Path) -> None:
    case = workshop("bert")
    for peer in ("openvino", "openvino-int8"):
        with pytest.raises(BackendUnavailableError, match="on no NVIDIA GPU: hdexport bench --device cpu"):
            PEERS[peer].prepare(case.subject, case.folder, device="cuda")
    manifest = open_bundle(case.subject.bundle).manifest
    module = load_module(case.artefact("torch").artefact, manifest, half_precision=False)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("this model cannot be traced\nand that is all")

    module.model.forward = refuse
    ids = np.full((1, 37), 9)
    example = {spec.name: ids for spec in module.inputs}
    with pytest.raises(ExportError, match=r"convert the model: RuntimeError: this model cannot be traced$"):
        openvino.write_converted(module, tmp_path / "model.xml", example)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_no_exporter_takes_is_an_error_and_leaves_nothing(
    workshop: Any, manifest: Manifest, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("this model cannot be traced\nand that is all")

    case = workshop("bert")
    module = load_module(case.artefact("torch").artefact, manifest, half_precision=False)
    module.model.forward = refuse
    ids = np.full((2, 37), 9)
    example = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    with pytest.raises(
        ExportError, match="cannot be traced; with dynamo=False: RuntimeError: this model cannot be tra"
    ):
        export_plainly(module, tmp_path / "model.onnx", example)
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.nightly
def test_compiled_torch_is_right(shallow: Any, manifest: Manifest) -> None:
    reason = PEERS["torch-compile"].unavailable(manifest)
    if reason is not None:
        pytest.skip(reason)
    case = shallow("bert")
    # In this process, for the processes that compile otherwise take as long to start as the kernels to compile.
    with torch._inductor.config.patch({"compile_threads": 1}):
        found = case.error("torch-compile", 3, 65, case.artefact("torch-compile").artefact)
    assert found.passed, found


def through_numpy(input_ids: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
    """As BigBird's code does, which takes a minute to compile."""
    drawn = [np.zeros(2, np.int32), np.ones(2, np.int32)]
    torch._dynamo.graph_break()
    return input_ids + torch.tensor(np.stack(drawn)).sum()


def test_code_that_goes_through_numpy_can_be_compiled(workshop: Any, manifest: Manifest) -> None:
    spec = workshop("bert").spec("torch-compile", 1, 65)
    with np.load(spec.inputs) as file:
        inputs = {name: file[name] for name in file.files}
    run = torch.compile(through_numpy, backend="eager")
    opened = open_module(run, spec, manifest, inputs, lambda result: {"sums": result}, is_compiled=True)
    np.testing.assert_array_equal(opened.call()["sums"], inputs["input_ids"] + 2)


@pytest.mark.nightly
def test_a_compiler_that_fails_is_named(shallow: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = shallow("bert")
    opened = open_case(case.spec("torch-compile", 1, 65, case.artefact("torch-compile").artefact))
    # Nothing that was compiled before may be found again.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/bin/false",), "force_disable_caches": True}),
        pytest.raises(BackendError, match=r"^torch\.compile failed: .*$") as raised,
    ):
        opened.call()
    assert "/bin/false" in str(raised.value) or "InvalidCxxCompiler" in str(raised.value)


@pytest.mark.parametrize(
    ("peer", "attention", "remark"),
    [
        (
            "torch",
            WindowAttention(layers=(4, 4), converted=Window(tokens=4, global_tokens=1, dilation=(1,))),
            "does not use windows: its attention is dense",
        ),
        (
            "sentence-transformers",
            dataclasses.replace(BIGBIRD, converted=True),
            "does not use block-sparse attention: its attention is dense",
        ),
    ],
    ids=["torch-windows", "sentence-transformers-blocks"],
)
def test_peers_of_dense_attention_alone_are_marked_and_differ(
    workshop: Any, manifest: Manifest, tmp_path: Path, peer: str, attention: object, remark: str
) -> None:
    dense = workshop("bert")
    cut = Path(shutil.copytree(dense.subject.bundle, tmp_path / "cut"))
    # PyTorch's answers are those of windows or blocks by what the manifest says, whatever the graphs compute.
    manifest = dataclasses.replace(manifest, attention=(msgspec.to_builtins(attention),))
    write_manifest(cut, manifest)
    folder = tmp_path / "prepared"
    folder.mkdir()
    case = dataclasses.replace(dense, subject=dataclasses.replace(dense.subject, bundle=cut), folder=folder)
    assert (PEERS[peer].remark(manifest) or "").startswith(remark)
    artefact = case.artefact(peer).artefact
    assert case.error(peer, 1, 1, artefact).passed
    found = case.error(peer, 1, 65, artefact)
    assert (found.passed, (found.max_abs_error or 0) > 0.01) == (False, True)


@pytest.mark.parametrize("peer", ["torch", nightly_unless(False, "onnx-plain")])
def test_peers_of_a_bundle_that_remembers_run_texts_alone(workshop: Any, peer: str) -> None:
    case = workshop("roberta", attention="window:16,global:0", recurrence=48)
    made = PEERS[peer].prepare(case.subject, case.folder, device="cpu")
    assert made.remark is None
    # Every token of so short a text sees all others, so that answers are those of dense attention.
    found = case.error(peer, 3, 17, made.artefact)
    assert found.passed
    assert found.tolerance.endswith("; it has no new_mems.0, new_mems.1, new_mems.mask, new_mems.position")


def test_peers_without_a_table_of_random_blocks_are_marked(manifest: Manifest) -> None:
    table = msgspec.to_builtins(dataclasses.replace(BIGBIRD, mode=Mode.TABLE, random_blocks=2))
    manifest = dataclasses.replace(manifest, model_type="big_bird", attention=(table,))
    said = "does not use the table of random blocks: all of its random blocks are block 0"
    assert {name: peer.remark(manifest) for name, peer in PEERS.items()} == dict.fromkeys(PEERS, said)


def test_a_half_precision_bundle_is_compared_with_float32_peers_on_a_cpu(workshop: Any) -> None:
    case = workshop("bert", precision="float16")
    found = case.error("torch", 3, 65, case.artefact("torch").artefact)
    assert found.passed
    assert found.tolerance == "max abs error <= 0.0001"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_cast_and_buffers_are_not(workshop: Any, manifest: Manifest, dtype: str) -> None:
    folder = workshop("bert").artefact("torch").artefact
    module = load_module(folder, dataclasses.replace(manifest, dtype=dtype), half_precision=True)
    assert {parameter.dtype for parameter in module.parameters()} == {getattr(torch, dtype)}
    assert all(buffer.dtype == torch.int64 for buffer in module.buffers())
    ones = {spec.name: torch.ones(1, 9, dtype=torch.long) for spec in module.inputs}
    assert module(**ones)[0].dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch has no CUDA")
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_torch_on_a_gpu_is_right_and_says_what_it_took(workshop: Any, precision: str) -> None:
    case = workshop("bert", precision=precision)
    spec = dataclasses.replace(case.spec("torch", 3, 65, case.artefact("torch").artefact), device="cuda")
    opened = open_case(spec)
    assert opened.half_precision is (precision == "float16")
    expected = open_case(dataclasses.replace(spec, device="cpu")).call()
    for name, values in opened.call().items():
        assert_close(values, expected[name], atol=1e-3 if precision == "float32" else 5e-2)
    taken = opened.allocator_bytes()
    assert taken is not None
    assert taken > 0


def test_onnx_runtime_without_a_gpu_is_refused_for_one(workshop: Any) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime runs on NVIDIA GPUs")
    case = workshop("bert")
    for peer in ("onnx-plain", "optimum"):
        with pytest.raises(
            BackendUnavailableError, match=r"has no CUDAExecutionProvider: .*pip install 'hdexport\[gpu"
        ):
            PEERS[peer].prepare(case.subject, case.folder, device="cuda")


def test_a_missing_peer_comes_with_its_installation(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(PEERS) == [
        "torch", "torch-compile", "openvino", "openvino-default", "openvino-int8", "onnx-plain", "optimum",
        "sentence-transformers",
    ]  # fmt: skip
    assert [peer.name for peer in PEERS.values()] == list(PEERS)
    find_spec = importlib.util.find_spec
    gone = ("torch", "onnx", "openvino", "nncf", "sentence_transformers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find_spec(name))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert {name: peer.unavailable(manifest) for name, peer in PEERS.items()} == {
        "torch": "torch is not installed: pip install 'hdexport[export]'",
        "torch-compile": "torch is not installed: pip install 'hdexport[export]'",
        **dict.fromkeys(
            ["openvino", "openvino-default", "openvino-int8"],
            "openvino, torch are not installed: pip install 'hdexport[export,openvino]'",
        ),
        "onnx-plain": "torch, onnx are not installed: pip install 'hdexport[export]'",
        "optimum": "optimum-cli is not on the PATH: pipx install 'optimum-onnx[onnxruntime]'",
        "sentence-transformers": "sentence_transformers is not installed: pip install sentence-transformers",
    }


def test_quantising_needs_nncf(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nncf" else find_spec(name))
    assert PEERS["openvino-int8"].unavailable(manifest) == "nncf is not installed: pip install nncf"


def test_compiling_needs_a_compiler(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert PEERS["torch-compile"].unavailable(manifest) == (
        "torch.compile needs a C++ compiler, no-such-compiler: apt-get install g++"
    )


def test_sentence_transformers_only_embeds(manifest: Manifest) -> None:
    peer = PEERS["sentence-transformers"]
    assert peer.unavailable(manifest) is None
    fill_mask = dataclasses.replace(manifest, task="fill-mask")
    assert peer.unavailable(fill_mask) == "it embeds texts, and the bundle's task is fill-mask"
    for model_type in ("led", "bigbird_pegasus"):
        refusal = peer.unavailable(dataclasses.replace(manifest, model_type=model_type))
        assert refusal == f"it runs the decoder of a {model_type} as well, and the bundle is the encoder"


def test_asking_the_peers_imports_none_of_them(workshop: Any) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "import hdexport.bench.run.opening, hdexport.bench.run.preparation\n"
        "from hdexport.bench.peers import PEERS; from hdruntime.bundle.reader import open_bundle\n"
        f"manifest = open_bundle(Path({str(workshop('bert').subject.bundle)!r})).manifest\n"
        "[(peer.unavailable(manifest), peer.remark(manifest)) for peer in PEERS.values()]\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'onnxruntime', 'openvino', 'nncf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
