"""Baselines run the model of a bundle by other means, and wrong outputs of theirs show."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
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
from hdexport.attention.blocks.conversion import bigbird
from hdexport.attention.window import Window, WindowAttention
from hdexport.bench.baselines import BASELINES
from hdexport.bench.baselines.baseline import Texts
from hdexport.bench.results.result import ModelChange
from hdexport.bench.run.worker import open_case
from hdexport.support.bundle_writer import write_manifest
from hdexport.verify import single_texts
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import Bundle, open_bundle
from support.bench_workshop import assert_right
from support.comparators import assert_close
from support.tiny_models import SEPARATOR_ID, VOCAB_SIZE

BIGBIRD = bigbird(block_size=4, random_blocks=0)


@pytest.fixture
def manifest(workshop: Any) -> Manifest:
    """Of the tiny BERT for feature extraction."""
    return open_bundle(workshop("bert").subject.bundle).manifest


@pytest.mark.parametrize(
    ("baseline", "of_bundle"),
    [
        ("torch", ("bert",)),
        ("torch", ("big_bird",)),
        ("torch", ("bert", "sentence-similarity")),
    ],
)
def test_a_baseline_is_right_at_every_length(workshop: Any, baseline: str, of_bundle: tuple[str, ...]) -> None:
    assert_right(workshop(*of_bundle), baseline)


def test_a_plain_export_of_dense_attention_is_right(shallow: Any) -> None:
    assert_right(shallow("bert"), "onnx-plain")


@pytest.mark.nightly
def test_compiled_torch_is_right(shallow: Any, manifest: Manifest) -> None:
    reason = BASELINES["torch-compile"].unavailable(manifest)
    if reason is not None:
        pytest.skip(reason)
    case = shallow("bert")
    # In this process, for the processes that compile otherwise take as long to start as the kernels to compile.
    with torch._inductor.config.patch({"compile_threads": 1}):
        found = case.error("torch-compile", 3, 65, case.artefact("torch-compile").artefact)
    assert found.passed, found


def test_baselines_of_dense_attention_alone_are_marked_and_differ(
    workshop: Any, manifest: Manifest, tmp_path: Path
) -> None:
    baseline, dense = "torch", workshop("bert")
    attention = WindowAttention(layers=(4, 4), converted=Window(tokens=4, global_tokens=1, dilation=(1,)))
    cut = Path(shutil.copytree(dense.subject.bundle, tmp_path / "cut"))
    # PyTorch's answers are those of windows or blocks by what the manifest says, whatever the graphs compute.
    manifest = dataclasses.replace(manifest, attention=(msgspec.to_builtins(attention),))
    write_manifest(cut, manifest)
    folder = tmp_path / "prepared"
    folder.mkdir()
    case = dataclasses.replace(dense, subject=dataclasses.replace(dense.subject, bundle=cut), folder=folder)
    assert (BASELINES[baseline].remark(manifest) or "").startswith("does not use windows: its attention is dense")
    artefact = case.artefact(baseline).artefact
    assert case.error(baseline, 1, 1, artefact).passed
    found = case.error(baseline, 1, 65, artefact)
    assert (found.passed, (found.max_abs_error or 0) > 0.01) == (False, True)
    assert found.missing_changes == (ModelChange.ATTENTION,)


@pytest.mark.nightly
def test_baselines_of_a_bundle_that_remembers_run_texts_alone(workshop: Any) -> None:
    baseline, case = "torch", workshop("roberta", attention="window:16,global:0", recurrence=48)
    made = BASELINES[baseline].prepare(case.subject, case.folder, device="cpu")
    assert made.remark is None
    # Every token of so short a text sees all others, so that answers are those of dense attention.
    found = case.error(baseline, 3, 17, made.artefact)
    assert found.passed
    left_out = [f"not compared: new_mems.{name}" for name in ("0", "1", "mask", "position")]
    assert found.tolerance.split("; ")[1:] == left_out


def test_baselines_without_a_table_of_random_blocks_are_marked(manifest: Manifest) -> None:
    table = msgspec.to_builtins(dataclasses.replace(BIGBIRD, mode=Mode.TABLE, random_blocks=2))
    manifest = dataclasses.replace(manifest, model_type="big_bird", attention=(table,))
    said = "does not use the table of random blocks: all of its random blocks are block 0"
    assert {name: baseline.remark(manifest) for name, baseline in BASELINES.items()} == dict.fromkeys(BASELINES, said)


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


def test_a_missing_baseline_comes_with_its_installation(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    gone = ("torch", "onnx")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find_spec(name))
    assert {name: baseline.unavailable(manifest) for name, baseline in BASELINES.items()} == {
        "torch": "torch is not installed: pip install 'hdexport[export]'",
        "torch-compile": "torch is not installed: pip install 'hdexport[export]'",
        "onnx-plain": "torch, onnx are not installed: pip install 'hdexport[export]'",
    }


def test_asking_the_baselines_imports_none_of_them(workshop: Any) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "import hdexport.bench.run.worker, hdexport.bench.run.preparation\n"
        "from hdexport.bench.baselines import BASELINES; from hdruntime.bundle.reader import open_bundle\n"
        f"manifest = open_bundle(Path({str(workshop('bert').subject.bundle)!r})).manifest\n"
        "[(baseline.unavailable(manifest), baseline.remark(manifest)) for baseline in BASELINES.values()]\n"
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
