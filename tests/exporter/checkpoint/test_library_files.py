"""A bundle's directory as sentence-transformers and transformers read it: the library's own loader, and its answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest
import sentence_transformers
import torch
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import CNN, Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import AutoConfig, AutoTokenizer

import hdruntime
from hdexport.build import BuildOptions, build
from hdruntime.bundle.manifest import Task
from support.comparators import assert_close
from support.stored_builds import take_stored_graph
from support.tiny_models import BASE, change_json, save_tiny_model

LONGEST = 2 * BASE
PROMPTS = {"query": "w30 w31 ", "document": ""}
TEXTS = ["w7 w8 w9 w10", "", "w5 w6 " * 50, "w20 unknown", "w11 " * 300]
SHARE = 1e-6
"""Of the largest number, by which answers may differ: both run the same weights, in graphs whose sums are of another
order."""


class OrtModel:
    """The part of optimum's ORTModel that sentence-transformers calls, on ONNX Runtime alone.

    optimum-onnx 0.1 is not installed here: it needs transformers before 4.58, and sentence-transformers 6 a later one.
    """

    output = "last_hidden_state"

    def __init__(self, path: Path, config: Any) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.config, self.path = config, path

    @classmethod
    def from_pretrained(cls, path: str, *, config: Any, export: bool, file_name: str = "model.onnx", **_: Any) -> Any:
        assert not export, "the library found the graph"
        return cls(Path(path, file_name), config)

    def _save_pretrained(self, folder: Path) -> None:
        raise AssertionError("nothing is saved")

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None, **_: Any) -> Any:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        features = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": types}
        given = {each.name: features[each.name].numpy() for each in self.session.get_inputs()}
        names = [each.name for each in self.session.get_outputs()]
        found = dict(zip(names, self.session.run(None, given), strict=True))
        return {self.output: torch.from_numpy(found[self.output])}

    __call__ = forward


class OrtLogits(OrtModel):
    output = "logits"


@pytest.fixture
def optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sentence-transformers imports optimum, it finds `OrtModel`."""
    found: Any = ModuleType("optimum.onnxruntime")
    found.ONNX_WEIGHTS_NAME = "model.onnx"
    found.ORTModelForFeatureExtraction = OrtModel
    found.ORTModelForMaskedLM = found.ORTModelForSequenceClassification = found.ORTModelForCausalLM = OrtLogits
    monkeypatch.setitem(sys.modules, "optimum", ModuleType("optimum"))
    monkeypatch.setitem(sys.modules, "optimum.onnxruntime", found)


def _mean(encoder: Transformer) -> list[Any]:
    return [encoder, Pooling(32, "mean"), Normalize()]


def _with_layers(encoder: Transformer) -> list[Any]:
    torch.manual_seed(0)
    return [encoder, Pooling(32, ("cls", "max")), Dense(64, 12), Normalize()]


def saved(path: Path, modules: Callable[[Transformer], list[Any]]) -> Path:
    """A model of sentence-transformers with prompts, which cuts texts to 40 tokens."""
    save_tiny_model(path / "base", "bert", Task.FEATURE_EXTRACTION)
    encoder = Transformer(str(path / "base"), max_seq_length=40)
    model = sentence_transformers.SentenceTransformer(modules=modules(encoder), prompts=PROMPTS)
    model.save_pretrained(str(path / "checkpoint"), create_model_card=False)
    return path / "checkpoint"


def built(path: Path, checkpoint: Path, **options: Any) -> Path:
    build(BuildOptions(model=checkpoint, output=path / "bundle", verify=None, **{"max_len": LONGEST} | options))
    return path / "bundle"


@pytest.mark.parametrize("modules", [_mean, _with_layers])
@pytest.mark.usefixtures("optimum")
def test_sentence_transformers_gives_the_vectors_of_a_bundle(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With positions past the checkpoint's, the library's own modules, prompts and cuts."""
    checkpoint = saved(tmp_path, modules)
    for text_length in (LONGEST, None):
        bundle = built(tmp_path / str(text_length), checkpoint, text_length=text_length)
        assert_the_same_vectors(bundle, text_length)
        take_stored_graph(monkeypatch, bundle)  # cuts of texts are not in it


def assert_the_same_vectors(bundle: Path, text_length: int | None) -> None:
    theirs = sentence_transformers.SentenceTransformer(str(bundle), backend="onnx", device="cpu")
    assert isinstance(theirs[0].model, OrtModel)
    assert theirs[0].model.path.name == "model.onnx"
    with hdruntime.SentenceEncoder(bundle) as ours:
        assert theirs.max_seq_length == ours.max_seq_length == (text_length or 40)
        assert theirs.prompts == ours.prompts == PROMPTS
        for method in ("encode", "encode_query"):
            found, expected = (getattr(each, method)(TEXTS, batch_size=2) for each in (theirs, ours))
            assert_close(found, expected, atol=SHARE * float(np.abs(expected).max()))
        with pytest.raises(AssertionError):
            assert_close(theirs.encode(TEXTS[::-1]), ours.encode(TEXTS), atol=0.01)


@pytest.mark.usefixtures("optimum")
def test_a_cross_encoder_and_a_sparse_encoder_load_their_bundles(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "pairs" / "checkpoint", "bert", Task.TEXT_CLASSIFICATION)
    sentence_transformers.CrossEncoder(str(tmp_path / "pairs" / "checkpoint")).save_pretrained(
        str(tmp_path / "pairs" / "saved"), create_model_card=False
    )
    bundle = built(tmp_path / "pairs", tmp_path / "pairs" / "saved")
    pairs = [("w7 w8", text) for text in TEXTS[:4]]
    with hdruntime.CrossEncoder(bundle) as ours:
        theirs = sentence_transformers.CrossEncoder(str(bundle), backend="onnx", device="cpu")
        assert_close(theirs.predict(pairs), ours.predict(pairs), atol=1e-5)
    save_tiny_model(tmp_path / "sparse" / "base", "bert", Task.FILL_MASK)
    encoder = Transformer(str(tmp_path / "sparse" / "base"), transformer_task="fill-mask")
    splade = sentence_transformers.SparseEncoder(modules=[encoder, SpladePooling()])
    splade.save_pretrained(str(tmp_path / "sparse" / "checkpoint"), create_model_card=False)
    expected = splade.encode(TEXTS[:4]).to_dense().numpy()
    # The graph of its logits: what the library pools.
    logits = built(tmp_path / "sparse", tmp_path / "sparse" / "checkpoint", task=Task.FILL_MASK, max_len=BASE)
    theirs = sentence_transformers.SparseEncoder(str(logits), backend="onnx", device="cpu")
    assert_close(theirs.encode(TEXTS[:4]).to_dense().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "modules",
    [
        lambda encoder: [encoder, CNN(32, 16), Pooling(48)],
        lambda encoder: [encoder, Pooling(32, include_prompt=False)],
    ],
    ids=["modules before the pooling", "an input that the library does not know"],
)
def test_a_graph_that_the_library_would_run_wrongly_has_none_of_its_files(modules: Any, tmp_path: Path) -> None:
    bundle = built(tmp_path, saved(tmp_path, modules))
    names = {path.name for path in bundle.iterdir()}
    assert names.isdisjoint({"modules.json", "1_Pooling", "config_sentence_transformers.json"})
    assert {"config.json", "tokenizer_config.json"} <= names


def test_transformers_reads_the_limits_of_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved(tmp_path, _mean)
    (checkpoint / "LICENSE").write_text("Apache-2.0\n")
    (checkpoint / "trainer_state.json").write_text("{}")
    change_json(checkpoint / "tokenizer_config.json", model_max_length=BASE)
    bundle = built(tmp_path, checkpoint, text_length=LONGEST)
    assert AutoConfig.from_pretrained(bundle).max_position_embeddings == LONGEST
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    assert tokenizer.model_max_length == LONGEST
    assert tokenizer(TEXTS, truncation=True)["input_ids"] == [
        encoding.input_ids for encoding in hdruntime.load(bundle).tokenize(TEXTS, overflow="truncate")
    ]
    special = json.loads((bundle / "special_tokens_map.json").read_text())
    assert (special["pad_token"], special["cls_token"]) == (tokenizer.pad_token, tokenizer.cls_token)
    assert (bundle / "LICENSE").read_text() == "Apache-2.0\n"
    assert not (bundle / "trainer_state.json").exists()
    assert not [path for path in bundle.rglob("*") if path.suffix in (".safetensors", ".bin")], "no weights twice"
    take_stored_graph(monkeypatch, bundle)
    without = built(tmp_path / "ids", checkpoint, tokenizer=None)
    assert not (without / "tokenizer_config.json").exists()
    assert not (without / "modules.json").exists()


@pytest.mark.usefixtures("optimum")
def test_a_bundle_shorter_than_its_checkpoint_cuts_texts_where_its_graph_ends(tmp_path: Path) -> None:
    """Also where no file of sentence-transformers has a length."""
    checkpoint = saved(tmp_path, _mean)
    (checkpoint / "sentence_bert_config.json").unlink()
    bundle = built(tmp_path, checkpoint, max_len=BASE // 2)
    assert AutoConfig.from_pretrained(bundle).max_position_embeddings == BASE // 2
    theirs = sentence_transformers.SentenceTransformer(str(bundle), backend="onnx", device="cpu")
    assert theirs.max_seq_length == BASE // 2
    with hdruntime.SentenceEncoder(bundle) as ours:
        assert_close(theirs.encode(TEXTS), ours.encode(TEXTS), atol=1e-6)


LIBRARY = """
import json, sys
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], backend="onnx", device="cpu")
print(json.dumps([type(model[0].auto_model).__name__, model.encode(json.loads(sys.argv[2])).tolist()]))
"""


def test_optimum_itself_runs_a_bundle(tmp_path: Path) -> None:
    """In an environment of its own, to which ``pipx inject optimum-onnx sentence-transformers`` adds the library."""
    command = shutil.which("optimum-cli")
    if command is None:
        pytest.skip("optimum-cli is not on the PATH")
    bundle = built(tmp_path, saved(tmp_path, _mean), text_length=LONGEST)
    python = Path(command).resolve().with_name("python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-c", LIBRARY, bundle, json.dumps(TEXTS)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    kind, vectors = json.loads(done.stdout.splitlines()[-1])
    assert kind == "ORTModelForFeatureExtraction"
    with hdruntime.SentenceEncoder(bundle) as ours:
        assert_close(np.array(vectors), ours.encode(TEXTS), atol=SHARE)
