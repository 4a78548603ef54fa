"""Peers run the same model by other means, and what they get wrong shows."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch._inductor.config
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from hdexport.attention.blocks import Mode
from hdexport.attention.blocks.setup import bigbird
from hdexport.attention.window import Window, WindowAttention
from hdexport.bench.peers import PEERS, openvino
from hdexport.bench.peers.peer import Texts
from hdexport.bench.run.worker import open_case
from hdexport.model.graph_module import GraphModule, graph_inputs
from hdexport.support.bundle_writer import write_manifest
from hdexport.verify import single_texts
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendUnavailableError
from hdruntime.optional import require
from support.code_models import save_slopes
from support.comparators import assert_close
from support.tiny_models import SEPARATOR_ID, VOCAB_SIZE, save_tiny_model

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
            save_tiny_model(folder / "source", model_type, Task.FEATURE_EXTRACTION, num_hidden_layers=1)
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
        assert found.tolerance == "abs 0.0001 or 2 ulp"


@pytest.mark.parametrize(
    ("peer", "of_bundle"),
    [
        ("torch", ("bert",)),
        ("torch", ("big_bird",)),
        ("torch", ("bert", "sentence-similarity")),
        ("sentence-transformers", ("longformer",)),
        ("sentence-transformers", ("bert", "sentence-similarity")),
        pytest.param("openvino", ("bert", "sentence-similarity"), marks=pytest.mark.nightly),
        pytest.param("openvino", ("qwen3",), marks=pytest.mark.nightly),
        pytest.param("optimum", ("bert",), marks=NEEDS_OPTIMUM),
    ],
)
def test_a_peer_is_right_at_every_length(workshop: Any, peer: str, of_bundle: tuple[str, ...]) -> None:
    assert_right(workshop(*of_bundle), peer)


def test_a_plain_export_of_dense_attention_is_right(shallow: Any) -> None:
    assert_right(shallow("bert"), "onnx-plain")


def test_openvino_says_what_it_computes_in_and_prints_nothing(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Scales of a few texts serve for so small a model.
    monkeypatch.setattr(openvino, "_TEXTS", 16)
    case = shallow("bert")
    case.prepare_shapes([(3, 65)])
    capfd.readouterr()
    default = Precision(openvino.default_type())
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
        assert (found.tolerance == "abs 0.0001 or 2 ulp") == (computes_in[peer] is Precision.FLOAT32)
        # Float32 would pass for any of them.
        assert (found.size > 1e-4) == (computes_in[peer] is not Precision.FLOAT32)
    assert capfd.readouterr() == ("", "")
    int8 = (case.folder / "openvino-int8" / openvino.MODEL_FILE).read_text()
    assert 'element_type="i8"' in int8
    assert "FakeQuantize" in int8


def test_openvino_s_inputs_have_the_module_s_names(tmp_path: Path) -> None:
    """A model that takes its mask on as it is left the number of a value of the trace in the place of a name."""
    module = GraphModule(save_slopes(tmp_path), Task.FEATURE_EXTRACTION, inputs=graph_inputs(token_types=0)).eval()
    ids = np.ones((1, 37), np.int64)
    openvino._write_converted(module, tmp_path / "model.xml", {"input_ids": ids, "attention_mask": ids})
    model = require("openvino").Core().read_model(tmp_path / "model.xml")
    assert [value.any_name for value in model.inputs] == ["input_ids", "attention_mask"]


def test_openvino_in_float16_as_on_arm_is_compared_as_half_precision(
    shallow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openvino as installed

    monkeypatch.setattr(installed.Core, "get_property", lambda *_: installed.Type.f16)
    case = shallow("bert")
    case.prepare_shapes([(1, 5)])
    made = case.artefact("openvino-default")
    assert made.remark == "computes in float16, its default on this CPU"
    opened = open_case(case.spec("openvino-default", 1, 5, made.artefact))
    assert (opened.half_precision, opened.precision) == (True, Precision.AUTO)


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


def test_peers_of_dense_attention_alone_are_marked_and_differ(
    workshop: Any, manifest: Manifest, tmp_path: Path
) -> None:
    peer, dense = "torch", workshop("bert")
    attention = WindowAttention(layers=(4, 4), converted=Window(tokens=4, global_tokens=1, dilation=(1,)))
    cut = Path(shutil.copytree(dense.subject.bundle, tmp_path / "cut"))
    # PyTorch's answers are those of windows or blocks by what the manifest says, whatever the graphs compute.
    manifest = dataclasses.replace(manifest, attention=(msgspec.to_builtins(attention),))
    write_manifest(cut, manifest)
    folder = tmp_path / "prepared"
    folder.mkdir()
    case = dataclasses.replace(dense, subject=dataclasses.replace(dense.subject, bundle=cut), folder=folder)
    assert (PEERS[peer].remark(manifest) or "").startswith("does not use windows: its attention is dense")
    artefact = case.artefact(peer).artefact
    assert case.error(peer, 1, 1, artefact).passed
    found = case.error(peer, 1, 65, artefact)
    assert (found.passed, (found.max_abs_error or 0) > 0.01) == (False, True)


@pytest.mark.nightly
def test_peers_of_a_bundle_that_remembers_run_texts_alone(workshop: Any) -> None:
    peer, case = "torch", workshop("roberta", attention="window:16,global:0", recurrence=48)
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
        "import hdexport.bench.run.worker, hdexport.bench.run.preparation\n"
        "from hdexport.bench.peers import PEERS; from hdruntime.bundle.reader import open_bundle\n"
        f"manifest = open_bundle(Path({str(workshop('bert').subject.bundle)!r})).manifest\n"
        "[(peer.unavailable(manifest), peer.remark(manifest)) for peer in PEERS.values()]\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'onnxruntime', 'openvino', 'nncf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


CLS = 0
HELP = "\n".join(list(topics.values())[:8])


@pytest.fixture(autouse=True)
def less_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Python's help takes long where every character is a token."""
    monkeypatch.setattr(single_texts, "english_texts", lambda: [HELP])


@pytest.fixture
def bert(tiny_bundles: Any) -> Bundle:
    """A bundle whose tokenizer knows no English word."""
    return open_bundle(tiny_bundles("bert").path)


@pytest.fixture
def longformer(tiny_bundles: Any) -> Bundle:
    """A bundle with global tokens, whose tokenizer knows no English word either."""
    return open_bundle(tiny_bundles("longformer").path)


def spelling(bundle: Bundle, directory: Path) -> tuple[Bundle, Tokenizer]:
    """The bundle with a tokenizer of one token per character, special tokens around the text; and that tokenizer."""
    characters = sorted(set(HELP))[: VOCAB_SIZE - 5]
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *characters]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEPARATOR_ID)],
    )
    path = Path(shutil.copytree(bundle.path, directory / "spelling"))
    tokenizer.save(str(path / "tokenizer.json"))
    return Bundle(path, bundle.manifest), tokenizer


def spelt(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return "".join(tokenizer.id_to_token(token) for token in ids)


@pytest.mark.parametrize("tokens", [1, 2, 65, 300])
def test_texts_are_pythons_help_between_special_tokens(bert: Bundle, tmp_path: Path, tokens: int) -> None:
    bundle, tokenizer = spelling(bert, tmp_path)
    rows = Texts(bundle).batch(3, tokens)["input_ids"]
    assert rows.shape == (3, tokens)
    assert (rows[:, -1] == SEPARATOR_ID).all()
    if tokens > 1:
        assert (rows[:, 0] == CLS).all()
    for row in rows:
        assert spelt(tokenizer, row[1:-1]) in HELP
    if tokens > 64:
        assert len({row.tobytes() for row in rows}) == 3
    np.testing.assert_array_equal(Texts(bundle).batch(3, tokens)["input_ids"], rows)


def test_every_input_of_the_manifest_is_there(bert: Bundle, longformer: Bundle) -> None:
    of_bert, of_longformer = Texts(bert).batch(2, 50), Texts(longformer).batch(2, 50)
    assert list(of_bert) == ["input_ids", "attention_mask", "token_type_ids"]
    assert list(of_longformer) == ["input_ids", "attention_mask", "global_attention_mask"]
    for arrays in (of_bert, of_longformer):
        assert all(values.shape == (2, 50) and values.dtype == np.int64 for values in arrays.values())
        assert arrays["attention_mask"].all()
    assert not of_bert["token_type_ids"].any()
    assert not of_longformer["global_attention_mask"].any(), "as in transformers, where nobody marks a token"


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_ids_are_random_and_no_special_ones_without_a_tokenizer_that_knows_the_words(
    bert: Bundle, has_tokenizer: bool
) -> None:
    manifest = bert.manifest if has_tokenizer else dataclasses.replace(bert.manifest, tokenizer=None)
    for tokens in (1, 2, 300):
        rows, again = (Texts(Bundle(bert.path, manifest)).batch(4, tokens)["input_ids"] for _ in range(2))
        assert rows.shape == (4, tokens)
        assert not set(rows.ravel().tolist()) & {0, 1, 2, 3}
        np.testing.assert_array_equal(rows, again)
    assert len({row.tobytes() for row in rows}) == 4
