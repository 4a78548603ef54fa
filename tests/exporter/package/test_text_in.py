"""Graphs from strings to embeddings, run by ONNX Runtime with onnxruntime-extensions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import hdruntime
from hdexport.build import BuildOptions, build
from hdexport.package.check import COSINES, sample_texts
from hdexport.package.targets import text_in
from hdexport.package.tokenizer import characters, check
from hdexport.package.write import Packaged, PackageOptions, package_bundle
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import InputError
from hdruntime.optional import is_installed
from support.file_tokenizers import put_tokenizer
from support.made_once import made_once
from support.sample_model import tutorial_bundle
from support.tiny_models import save_sentence_modules, save_tiny_model
from support.trained_tokenizers import CODE_POINTS, trained_tokenizer

pytestmark = pytest.mark.skipif(
    not is_installed("onnxruntime_extensions"), reason="onnxruntime-extensions is not installed"
)
MAX_LEN = 4096
LENGTH = 64


def build_tiny_bundle(directory: Path, model_type: str, name: str, kind: str | None) -> None:
    """Build ``bundle`` of a tiny embedder with a tokenizer of `TOKENIZERS`."""
    tokenizer, checkpoint = trained_tokenizer(name), directory / "checkpoint"
    model = save_tiny_model(checkpoint, model_type, Task.SENTENCE_SIMILARITY, vocab_size=tokenizer.get_vocab_size())
    width = {"word_embedding_dimension": model.config.hidden_size}
    save_sentence_modules(checkpoint, pooling={"pooling_mode_mean_tokens": True, **width})
    names = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    put_tokenizer(checkpoint, tokenizer, kind, **names, mask_token="<mask>")
    build(BuildOptions(model=checkpoint, output=directory / "bundle", max_len=MAX_LEN, verify=None, targets=()))


def compare_few_characters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(characters, "_CODE_POINTS", CODE_POINTS)
    patch.setattr(check, "_characters", lambda: (["a\u00df\u00df"], ["ae\u0308"]))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    def make(directory: Path) -> None:
        build_tiny_bundle(directory, "bert", "BERT", "BertTokenizer")

    return open_bundle(made_once(tmp_path_factory, "text-in", make, is_kept=True) / "bundle")


@pytest.fixture(scope="module")
def packaged(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Packaged:
    """The bundle's package, with few characters compared."""
    output = tmp_path_factory.mktemp("text-in") / "package"
    with pytest.MonkeyPatch.context() as patch:
        compare_few_characters(patch)
        return package_bundle(bundle, PackageOptions(target="text-in", output=output, name="1-encoder"))


def embed(package: Path, texts: list[str]) -> np.ndarray:
    session = text_in._session((package / "model.onnx").read_bytes())
    (found,) = session.run(["embedding"], {"input": np.array(texts, dtype=object)})
    assert isinstance(found, np.ndarray)
    return found


def assert_embeds(package: Path, bundle: Bundle) -> None:
    texts = ["na\u00efve caf\u00e9 </s> x\u2603y", "", "\u0130stanbul  \n x", dict(sample_texts())[600]]
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        expected = session.embed(texts, overflow="truncate")
    found = embed(package, texts)
    assert (found.dtype, found.shape) == (np.float32, expected.shape)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_string_becomes_the_bundles_embedding(packaged: Packaged, bundle: Bundle) -> None:
    assert [each.words for each in packaged.compared] == [1, 20, 600, 3000]
    assert min(each.cosine for each in packaged.compared) > COSINES["float32"]
    assert packaged.notes == ("A text ends at its first NUL (U+0000): onnxruntime-extensions reads strings of C",)
    assert_embeds(packaged.path, bundle)


def test_the_graph_is_one_file_for_old_runtimes(packaged: Packaged) -> None:
    """BigQuery has ONNX Runtime 1.12: opset 17, IR version 8."""
    model = onnx.load(packaged.path / "model.onnx")
    assert {each.domain: each.version for each in model.opset_import} == {"": 17, "ai.onnx.ml": 2, "ai.onnx.contrib": 1}
    assert (model.ir_version, len(model.functions)) == (8, 0)
    assert [(each.name, each.type.tensor_type.elem_type) for each in model.graph.input] == [
        ("input", onnx.TensorProto.STRING)
    ]
    assert [each.name for each in model.graph.output] == ["embedding"]
    assert {node.op_type for node in model.graph.node if node.domain == "ai.onnx.contrib"} == {
        "BertTokenizer",
        "StringJoin",
        "StringMapping",
        "StringRegexReplace",
        "StringRegexSplitWithOffsets",
    }
    assert sorted(path.name for path in packaged.path.iterdir()) == [
        "bigquery.sql",
        "hdexport_package.json",
        "model.onnx",
        "oracle.sql",
    ]


def test_statements_name_the_model_and_the_graphs_input_and_output(packaged: Packaged) -> None:
    oracle, bigquery = ((packaged.path / f"{name}.sql").read_text() for name in ("oracle", "bigquery"))
    assert '{"function": "embedding", "embeddingOutput": "embedding", "input": {"input": ["DATA"]}}' in oracle
    assert "VECTOR_EMBEDDING(m_1_encoder USING" in oracle
    assert "OPTIONS (MODEL_TYPE = 'ONNX', MODEL_PATH = 'gs://BUCKET/1-encoder/model.onnx')" in bigquery
    assert "SELECT text AS input" in bigquery
    assert "$" not in oracle + bigquery


def with_prompts(bundle: Bundle, *, include_prompt: bool = True) -> Bundle:
    settings = bundle.manifest.sentence
    assert settings is not None
    prompts = {"query": "query: ", "document": "passage: "}
    changed = replace(settings, prompts=prompts, default_prompt_name="document", include_prompt=include_prompt)
    return replace(bundle, manifest=replace(bundle.manifest, sentence=changed))


def test_a_prompt_is_part_of_the_graph(
    bundle: Bundle, packaged: Packaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_few_characters(monkeypatch)
    for name, prompt in (("query", "query: "), (None, "passage: ")):
        options = PackageOptions(target="text-in", output=tmp_path / prompt, prompt_name=name, check=False)
        found = package_bundle(with_prompts(bundle), options)
        expected = embed(packaged.path, [f"{prompt}the river"])
        np.testing.assert_allclose(embed(found.path, ["the river"]), expected, atol=1e-6)
    options = PackageOptions(target="text-in", output=tmp_path / "none", prompts=False, check=False)
    found = package_bundle(with_prompts(bundle, include_prompt=False), options)
    np.testing.assert_allclose(embed(found.path, ["the river"]), embed(packaged.path, ["the river"]), atol=1e-6)
    with pytest.raises(InputError, match="leaves its prompts out of the pooling"):
        package_bundle(with_prompts(bundle, include_prompt=False), replace(options, prompts=True))
    with pytest.raises(InputError, match="A graph has the prompt prompt_name='query', or none"):
        package_bundle(bundle, replace(options, output=tmp_path / "other", prompt_name="query"))


def test_a_tokenizer_that_differs_is_refused_unless_its_kind_is_accepted(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that keeps some accents, as the library's generator makes it."""
    compare_few_characters(monkeypatch)
    monkeypatch.setattr(check, "_mixtures", lambda parts: ["a"])
    read = text_in.tokenizer_graph

    def with_accents(tokenizer: Any) -> Any:
        graph = read(tokenizer)
        kept = {letter: form for letter, form in graph.rules.others.items() if letter not in "\u00e9\u00ef\u00f6"}
        return replace(graph, rules=replace(graph.rules, others=kept))

    monkeypatch.setattr(text_in, "tokenizer_graph", with_accents)
    options = PackageOptions(target="text-in", output=tmp_path / "package", max_seq_length=LENGTH)
    with pytest.raises(InputError) as raised:
        package_bundle(bundle, options)
    message = str(raised.value)
    assert "differ from the bundle's tokenizer: accents (1 of 6 texts, such as 'na\\xefve caf\\xe9': <s> " in message
    assert "accept_differences='accents" in message
    assert "target='onnx'" in message
    with pytest.raises(
        InputError, match=r"accept_differences is 'umlauts'; it must be one of plain, accents, capitals"
    ):
        package_bundle(bundle, replace(options, accept_differences=("umlauts",)))
    assert list(tmp_path.iterdir()) == []
    found = package_bundle(bundle, replace(options, accept_differences=("accents", "long-words", "decomposed")))
    assert found.notes[0].startswith("Ids differ, as accepted, for texts of the kind accents (1 of 6 texts")
    assert json.loads((found.path / "hdexport_package.json").read_text())["notes"] == list(found.notes)


def test_bundles_that_have_no_operators_are_refused(tiny_bundles: Any, bundle: Bundle, tmp_path: Path) -> None:
    words = open_bundle(tiny_bundles("bert", "sentence-similarity").path)
    with pytest.raises(InputError, match="its model is WordLevel; WordPiece, BPE, Unigram have operators"):
        package_bundle(words, PackageOptions(target="text-in", output=tmp_path / "package"))
    with pytest.raises(InputError, match="prompt_name does not change what is written for onnx"):
        package_bundle(bundle, PackageOptions(target="onnx", output=tmp_path / "package", prompt_name="query"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_sample_model_is_packaged_with_every_character(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sample = open_bundle(tutorial_bundle(tmp_path_factory))
    found = package_bundle(sample, PackageOptions(target="text-in", output=tmp_path / "package"))
    assert min(each.cosine for each in found.compared) > COSINES["float32"]
    assert len(found.notes) == 1
    assert_embeds(found.path, sample)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "model_type", "kind", "accepted"),
    [
        ("RoBERTa", "roberta", "RobertaTokenizer", ()),
        ("RoBERTa", "longformer", "LongformerTokenizer", ()),
        ("ModernBERT", "modernbert", None, ("decomposed",)),
        ("XLM-RoBERTa", "xlm-roberta", "XLMRobertaTokenizer", ("decomposed", "repeated-characters", "long-words")),
    ],
)
def test_a_family_is_packaged_with_every_character(
    name: str, model_type: str, kind: str | None, accepted: tuple[str, ...], tmp_path: Path
) -> None:
    build_tiny_bundle(tmp_path, model_type, name, kind)
    bundle = open_bundle(tmp_path / "bundle")
    options = PackageOptions(target="text-in", output=tmp_path / "package", accept_differences=accepted)
    found = package_bundle(bundle, options)
    assert min(each.cosine for each in found.compared) > COSINES["float32"]
    assert_embeds(found.path, bundle)
