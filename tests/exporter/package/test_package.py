"""Packages: what each system loads gives the bundle's outputs by that system's rules, at every length, or nothing."""

from __future__ import annotations

import ast
import dataclasses
import json
import runpy
import zipfile
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import onnxruntime
import onnxruntime.quantization
import pytest

import hdruntime
from hdexport.package.check import COSINES, cosine
from hdexport.package.graph import GraphOptions, Outputs, _with_standard_operators, write_graph
from hdexport.package.int8 import quantized
from hdexport.package.target import PackageTarget, targets
from hdexport.package.write import PackageOptions, package_bundle
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.bundle.sentence_settings import TemplatePart, TextTemplate, Wording
from hdruntime.errors import ExportError, InputError, OutputExistsError, VerificationError
from hdruntime.optional import is_installed
from support.sample_model import tutorial_bundle

MAX_LEN = 4096
LONGEST = {name: target.longest for name, target in targets().items() if target.longest is not None}
WORD_PIECES = "langchain4j"
TEXT_IN = "text-in"
GRAPHS = sorted(
    {name for name, target in targets().items() if target.run is not None} - {"openvino", WORD_PIECES, TEXT_IN}
)
needs_openvino = pytest.mark.skipif(
    not is_installed("openvino_tokenizers"), reason="openvino-tokenizers is not installed"
)
SCRIPTS = ("deploy.py", "embed.py", "model.py", "save.py", "register.py", "service.py")


@pytest.fixture(scope="module")
def bundle(tiny_bundles: Any) -> Bundle:
    """An embedder of float16 weights for 4096 tokens, whose tokenizer splits at spaces."""
    return open_bundle(tiny_bundles("bert", "sentence-similarity", "float16", MAX_LEN).path)


def packaged(bundle: Bundle, target: str, output: Path, **options: Any) -> Any:
    options.setdefault("max_seq_length", LONGEST.get(target, bundle.manifest.max_len))
    return package_bundle(bundle, PackageOptions(target=target, output=output, **options))


@pytest.mark.parametrize("name", GRAPHS)
def test_a_system_computes_the_bundles_outputs(name: str, bundle: Bundle, tmp_path: Path) -> None:
    found = packaged(bundle, name, tmp_path / "package")
    dtypes = ["float32", "float16", "int8"] if name == "transformers.js" else ["float32"]
    assert [(each.dtype, each.words) for each in found.compared] == list(product(dtypes, [1, 20, 600, 3000]))
    assert all(each.cosine > COSINES[each.dtype] for each in found.compared)
    written = json.loads((tmp_path / "package" / "hdexport_package.json").read_text())
    assert written["target"] == name
    assert written["max_seq_length"] == LONGEST.get(name, MAX_LEN)


@pytest.mark.parametrize("name", [WORD_PIECES, "onnx", "opensearch"])
def test_a_system_computes_the_outputs_of_a_trained_model(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = packaged(open_bundle(tutorial_bundle(tmp_path_factory)), name, tmp_path / "package")
    assert min(each.cosine for each in found.compared) > COSINES["float32"]


@needs_openvino
@pytest.mark.parametrize("task", ["sentence-similarity", "text-classification", "reranking"])
def test_openvino_computes_the_bundles_outputs(task: str, tiny_bundles: Any, tmp_path: Path) -> None:
    of_task = (
        tiny_bundles("distilbert", "text-classification", num_labels=1)
        if task == "reranking"
        else tiny_bundles("distilbert", task)
    )
    found = packaged(open_bundle(of_task.path), "openvino", tmp_path / "package")
    assert min(each.cosine for each in found.compared) > COSINES["float32"]
    assert {"openvino_model.xml", "openvino_tokenizer.xml", "graph.pbtxt"} <= {
        path.name for path in (tmp_path / "package").iterdir()
    }


RUNTIME = sorted(name for name, target in targets().items() if target.run is None)


@pytest.mark.parametrize("name", RUNTIME)
def test_a_package_that_runs_the_bundle_has_it_whole_and_says_so(name: str, bundle: Bundle, tmp_path: Path) -> None:
    found = packaged(bundle, name, tmp_path / "package")
    assert (found.compared, found.not_compared) == ((), "the package runs the bundle itself, in hdexport's runtime")
    (manifest,) = (tmp_path / "package").rglob("manifest.json")
    copy = open_bundle(manifest.parent)
    assert copy.manifest == bundle.manifest


@pytest.mark.parametrize("name", [*GRAPHS, *RUNTIME])
def test_scripts_are_python_and_name_the_package(name: str, bundle: Bundle, tmp_path: Path) -> None:
    directory = packaged(bundle, name, tmp_path / "package", check=False).path
    for script in (directory / name for name in SCRIPTS):
        if script.is_file():
            ast.parse(script.read_text())
            assert "$" not in script.read_text()


def test_another_answer_is_found_and_nothing_is_written(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that takes the first token's own state, where the model's pooling is a mean."""
    right = targets()["spring-ai"]

    def first_token(package: Any, text: str) -> Any:
        plain = dataclasses.replace(package.graph, outputs=Outputs.BUNDLE)
        write_graph(package.bundle, package.directory / "model.onnx", plain)
        return {"sentence_embedding": right.run(package, text)["sentence_embedding"] + 1}

    wrong = dataclasses.replace(right, run=first_token)
    monkeypatch.setattr("hdexport.package.write.target_named", lambda name: wrong)
    with pytest.raises(VerificationError, match=r"1 words: cosine 0\.\d+ \(sentence_embedding\)"):
        packaged(bundle, "spring-ai", tmp_path / "package")
    assert list(tmp_path.iterdir()) == []


def test_a_cosine_says_how_far_arrays_are_apart() -> None:
    array = np.array([[3.0, 4.0]], np.float32)
    assert cosine(array, array[0]) == pytest.approx(1)
    assert cosine(array, -array) == pytest.approx(-1)
    assert cosine(array, array[:, :1]) == 0
    assert cosine(np.array([np.nan, 1], np.float32), array) == 0
    assert cosine(np.zeros(2, np.float32), np.zeros(2, np.float32)) == 1
    assert cosine(np.zeros(2, np.float32), array) == 0
    assert cosine(np.float32([[3]]), np.float32([3])) == pytest.approx(1)
    assert cosine(np.float32([3]), np.float32([3.1])) < COSINES["float32"]


def run(path: Path, tokens: int, **more: Any) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    ids = np.arange(5, 5 + tokens, dtype=np.int64)[None] % 100
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), **more}
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize(("opset", "ir_version"), [(17, 8), (18, 9), (19, 10), (20, 10)])
def test_a_graph_has_standard_operators_of_its_opset(
    bundle: Bundle, tmp_path: Path, opset: int, ir_version: int
) -> None:
    path = tmp_path / "model.onnx"
    write_graph(bundle, path, GraphOptions(opset=opset, ir_version=ir_version, dtype="float32"))
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [(each.domain, each.version) for each in model.opset_import] == [("", opset)]
    assert (model.ir_version, len(model.functions)) == (ir_version, 0)
    assert {node.domain for node in model.graph.node} == {""}
    assert path.stat().st_size <= 1.02 * (bundle.path / "model.onnx.data").stat().st_size + 200_000
    write_graph(bundle, tmp_path / "other.onnx", GraphOptions(opset=20, ir_version=10, dtype="float32"))
    for tokens in (1, 128, 129, 512, 513):
        found, expected = run(path, tokens), run(tmp_path / "other.onnx", tokens)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=2e-6)


def test_float32_means_that_no_product_is_computed_in_float16(bundle: Bundle, tmp_path: Path) -> None:
    half = {}
    for dtype in ("float32", "float16"):
        write_graph(bundle, tmp_path / f"{dtype}.onnx", GraphOptions(dtype=dtype))
        model = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / f"{dtype}.onnx"))
        types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
        half[dtype] = sum(
            types.get(node.output[0]) == onnx.TensorProto.FLOAT16
            for node in model.graph.node
            if node.op_type == "MatMul"
        )
    assert half["float32"] == 0
    assert half["float16"] > 0


def test_what_onnxruntime_loads_may_have_8_bit_weights() -> None:
    found = {name for name, target in targets().items() if "dtype" in target.takes}
    assert found == {*GRAPHS, WORD_PIECES, TEXT_IN}


@pytest.mark.parametrize("name", ["onnx", "spring-ai", "transformers.js"])
def test_a_system_runs_8_bit_weights(name: str, bundle: Bundle, tmp_path: Path) -> None:
    """Also those of a bundle of float16, and nothing else than that graph is written."""
    found = packaged(bundle, name, tmp_path / "package", dtype="int8", max_seq_length=64)
    assert [each.dtype for each in found.compared] == ["int8"] * 4
    (path,) = (tmp_path / "package").rglob("*.onnx")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert ({node.domain for node in model.graph.node}, len(model.functions)) == ({""}, 0)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    products = [
        node.op_type for node in model.graph.node if node.op_type.startswith("MatMul") and node.input[1] in types
    ]
    layers = 2
    assert products == ["MatMulInteger"] * 6 * layers
    assert onnx.TensorProto.FLOAT16 not in types.values()
    if name == "transformers.js":
        assert path.name == "model_quantized.onnx"
        config = json.loads((tmp_path / "package" / "config.json").read_text())
        assert config["transformers.js_config"] == {"dtype": "q8"}


def test_a_head_has_8_bit_weights(tiny_bundles: Any, tmp_path: Path) -> None:
    """Of a Gemm, whose weight onnxruntime transposes."""
    classifier = open_bundle(tiny_bundles("bert", "text-classification").path)
    found = packaged(classifier, "onnx", tmp_path / "package", dtype="int8", max_seq_length=64)
    assert min(each.cosine for each in found.compared) > COSINES["int8"]


def test_8_bit_weights_that_are_too_coarse_are_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trained model is right with a scale for each output, and wrong with one scale for each weight."""
    model = open_bundle(tutorial_bundle(tmp_path_factory))
    found = packaged(model, "onnx", tmp_path / "package", dtype="int8", max_seq_length=64)
    assert min(each.cosine for each in found.compared) > 0.98
    weights = sum(path.stat().st_size for path in model.path.glob("*.onnx.data"))
    assert (tmp_path / "package" / "model.onnx").stat().st_size < 0.35 * weights
    right = onnxruntime.quantization.quantize_dynamic

    def coarse(*files: Any, **options: Any) -> None:
        right(*files, **options | {"per_channel": False})

    monkeypatch.setattr("hdexport.package.int8.quantize_dynamic", coarse)
    with pytest.raises(VerificationError, match=r"int8 graph than the bundle: 1 words: cosine 0\.[789]\d+ ") as error:
        packaged(model, "onnx", tmp_path / "other", dtype="int8", max_seq_length=64)
    assert str(error.value).endswith(
        "At least 0.97 is accepted for int8.\nLeave the 8-bit weights out: dtype='float32'"
    )
    assert not (tmp_path / "other").exists()


def test_a_graph_without_matmuls_of_weights_is_not_made_int8(tmp_path: Path) -> None:
    import onnx_ir as ir

    rows = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 2]))
    node = ir.node("Relu", [rows])
    node.outputs[0].name = "y"
    graph = ir.Graph([rows], node.outputs, nodes=[node], opset_imports={"": 18})
    with pytest.raises(ExportError, match=r"no matmul with a weight, so nothing can be int8\.\nLeave out dtype='int8'"):
        quantized(ir.Model(graph, ir_version=8), tmp_path)


def test_a_reader_gets_the_inputs_and_outputs_that_it_wants(bundle: Bundle, tmp_path: Path) -> None:
    plain, more, pooled, tokens = (tmp_path / f"{name}.onnx" for name in ("plain", "more", "pooled", "tokens"))
    write_graph(bundle, plain, GraphOptions(dtype="float32"))
    write_graph(bundle, more, GraphOptions(dtype="float32", token_type_ids=True))
    write_graph(bundle, pooled, GraphOptions(dtype="float32", outputs=Outputs.POOLED))
    write_graph(bundle, tokens, GraphOptions(dtype="float32", outputs=Outputs.POOLED_TOKENS))
    expected = run(plain, 9)
    assert list(expected) == ["last_hidden_state", "sentence_embedding"]
    for kind in (0, 1):
        given = run(more, 9, token_type_ids=np.full((1, 9), kind, np.int64))
        np.testing.assert_array_equal(given["sentence_embedding"], expected["sentence_embedding"])
    assert list(run(pooled, 9)) == ["sentence_embedding"]
    (states,) = run(tokens, 9).values()
    assert states.shape == expected["last_hidden_state"].shape
    np.testing.assert_array_equal(states[0], np.repeat(expected["sentence_embedding"], 9, axis=0))


def test_a_padded_batch_has_the_bundles_outputs(bundle: Bundle, tmp_path: Path) -> None:
    """A batch of 3: padded on the right, on the left, and not at all."""
    mask = np.ones((3, 9), np.int64)
    mask[0, 6:] = mask[1, :4] = 0
    ids = np.arange(27, dtype=np.int64).reshape(3, 9) + 5
    real = mask == 1
    with hdruntime.load(bundle.path, "onnxruntime", threads=1) as session:
        expected = session(input_ids=ids, attention_mask=mask)
    for outputs in Outputs:
        path = tmp_path / f"{outputs.value}.onnx"
        write_graph(bundle, path, GraphOptions(dtype="float32", outputs=outputs))
        graph = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        names = [each.name for each in graph.get_outputs()]
        found = dict(zip(names, graph.run(names, {"input_ids": ids, "attention_mask": mask}), strict=True))
        if outputs is Outputs.POOLED_TOKENS:
            found = {"sentence_embedding": found["last_hidden_state"][:, 0]}
        for name, value in found.items():
            kept = (value[real], expected[name][real]) if value.ndim == 3 else (value, expected[name])
            np.testing.assert_allclose(*kept, atol=1e-5)


def test_weights_are_outside_where_that_is_said_or_one_file_is_too_small(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_graph(bundle, tmp_path / "model.onnx", GraphOptions(single_file=False, weights_file="weights"))
    assert (tmp_path / "weights").is_file()
    expected = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in expected.get_inputs()] == ["input_ids", "attention_mask"]
    monkeypatch.setattr("hdexport.package.graph._SINGLE_FILE_BYTES", 1000)
    packaged(bundle, "transformers.js", tmp_path / "package")
    folder = tmp_path / "package"
    assert sorted(path.name for path in (folder / "onnx").iterdir()) == [
        "model.onnx",
        "model.onnx_data",
        "model_fp16.onnx",
        "model_fp16.onnx_data",
        "model_quantized.onnx",
        "model_quantized.onnx_data",
    ]
    config = json.loads((folder / "config.json").read_text())
    outside = dict.fromkeys(("model.onnx", "model_fp16.onnx", "model_quantized.onnx"), 1)
    assert config["transformers.js_config"] == {"use_external_data_format": outside}
    with pytest.raises(InputError, match=r"one file of ONNX holds at most 2 GiB\.\nLeave out single_file\."):
        packaged(bundle, "spring-ai", tmp_path / "other")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("nothing", {}, r"target is 'nothing'; it must be one of bentoml, djl, "),
        ("onnx", {"opset": 21}, r"opset is 21; it must be 17 to 20\."),
        ("onnx", {"ir_version": 7}, r"ir_version is 7; it must be 8 to 10\."),
        ("onnx", {"backend": "openvino"}, r"backend does not change what is written for onnx\.\nLeave out backend\."),
        ("mlflow", {"pooled": True}, r"pooled does not change what is written for mlflow\."),
        ("opensearch", {"name": "../model"}, r"The name '\.\./model' is not valid for a model"),
        (
            "opensearch",
            {"max_seq_length": 4096},
            r"truncates every text to 512 tokens; .* 4096\.\n.*max_seq_length=512",
        ),
        ("kserve", {"name": "Encoder"}, r"'Encoder' is not valid for a model of KServe, where names are \[a-z\]"),
        ("sagemaker", {"name": "a_b"}, r"'a_b' is not valid for a model of Amazon SageMaker, where names are "),
        ("onnx", {"max_seq_length": 5000}, r"max_seq_length is 5000; it must be 1 to 4096 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    target: str, options: dict[str, Any], message: str, bundle: Bundle, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        packaged(bundle, target, tmp_path / "package", **options)
    assert list(tmp_path.iterdir()) == []


@needs_openvino
def test_a_graph_that_a_reader_cannot_feed_is_refused(tiny_bundles: Any, tmp_path: Path) -> None:
    bundle = open_bundle(tiny_bundles("bert", "text-classification").path)
    assert bundle.manifest.tokenizer is not None
    found = packaged(bundle, "openvino", tmp_path / "package")
    assert min(each.cosine for each in found.compared) > COSINES["float32"], "the bundle's own types are all 0"
    types = dataclasses.replace(bundle.manifest.tokenizer, token_types=True)
    with_types = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, tokenizer=types))
    with pytest.raises(InputError, match="makes a tokenizer without token_type_ids, an input of this bundle's graph"):
        packaged(with_types, "openvino", tmp_path / "other")


def test_bundles_that_a_system_cannot_run_are_refused(tiny_bundles: Any, tmp_path: Path) -> None:
    classifier = open_bundle(tiny_bundles("bert", "text-classification").path)
    with pytest.raises(
        InputError, match=r"Spring AI runs bundles for sentence-similarity; this bundle's task is text-c"
    ):
        packaged(classifier, "spring-ai", tmp_path / "package")
    questions = open_bundle(tiny_bundles("longformer", "question-answering").path)
    with pytest.raises(InputError, match=r"a question have global attention .*\(global_attention_mask\), at most 64"):
        packaged(questions, "onnx", tmp_path / "package")
    single = open_bundle(tiny_bundles("bert", "sentence-similarity").path)
    with pytest.raises(InputError, match="float16 arithmetic needs a float16 bundle"):
        packaged(single, "onnx", tmp_path / "package", dtype="float16")
    with pytest.raises(InputError, match=r"right for WordPiece alone; this bundle's tokenizer is WordLevel"):
        packaged(single, "langchain4j", tmp_path / "package")
    assert list(tmp_path.iterdir()) == []


def with_settings(bundle: Bundle, **changes: Any) -> Bundle:
    """The bundle with other settings of sentence-transformers."""
    manifest = bundle.manifest
    assert manifest.sentence is not None
    settings = dataclasses.replace(manifest.sentence, **changes)
    return dataclasses.replace(bundle, manifest=dataclasses.replace(manifest, sentence=settings))


E5 = {"query": "query: ", "passage": "passage: "}


def test_a_system_gets_the_prompts_for_which_it_has_a_place(bundle: Bundle, tmp_path: Path) -> None:
    e5 = with_settings(bundle, prompts=E5)
    found = packaged(e5, "vespa", tmp_path / "vespa", check=False)
    component = ElementTree.parse(tmp_path / "vespa" / "services.xml").getroot()
    assert [component.findtext(f"prepend/{name}") for name in ("query", "document")] == [*E5.values()]
    assert found.notes == ()
    packaged(with_settings(bundle, prompts=E5, default_prompt_name="query"), "opensearch", tmp_path / "o", check=False)
    config = json.loads((tmp_path / "o" / "register.json").read_text())["model_config"]
    assert (config["query_prefix"], config["passage_prefix"]) == tuple(E5.values())
    only = with_settings(bundle, prompts={"query": "", "all": "a: "}, default_prompt_name="all")
    packaged(only, "vespa", tmp_path / "only", check=False)
    component = ElementTree.parse(tmp_path / "only" / "services.xml").getroot()
    assert [component.findtext(f"prepend/{name}") for name in ("query", "document")] == ["a: ", "a: "]
    packaged(e5, "vespa", tmp_path / "none", prompts=False, check=False)
    assert "prepend" not in (tmp_path / "none" / "services.xml").read_text()
    packaged(e5, "opensearch", tmp_path / "plain", prompts=False, check=False)
    assert "prefix" not in (tmp_path / "plain" / "register.json").read_text()


def test_a_system_without_a_place_for_prompts_says_so_or_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    e5, default = with_settings(bundle, prompts=E5), with_settings(bundle, prompts=E5, default_prompt_name="passage")
    (note,) = packaged(e5, "onnx", tmp_path / "e5", check=False).notes
    assert "Write the model's prompts before your texts: query: 'query: '; passage: 'passage: '" in note
    assert packaged(bundle, "onnx", tmp_path / "plain", check=False).notes == ()
    template = TextTemplate(plain=Wording(parts=(TemplatePart(before="<user>", slot="text"),), after=""), prompted=None)
    for refused, message in (
        (default, r"prompt 'passage: ' \(passage\) by default; .* has no place for it\.\nWrite .*prompts=False"),
        (with_settings(bundle, text_template=template), r"writes its texts in a chat template, .*\nChoose a target"),
        (with_settings(bundle, prompts=E5, include_prompt=False), r"prompts out of the pooling \(query, passage\)"),
    ):
        with pytest.raises(InputError, match=message):
            packaged(refused, "onnx", tmp_path / "refused")
        assert packaged(refused, "lancedb", tmp_path / "runtime", force=True).notes == ()
    assert packaged(default, "onnx", tmp_path / "written", prompts=False, check=False).notes == ()
    with pytest.raises(InputError, match="prompts=False does not change what is written for lancedb"):
        packaged(bundle, "lancedb", tmp_path / "refused", prompts=False)
    assert not (tmp_path / "refused").exists()


def test_a_package_is_replaced_on_request_alone(bundle: Bundle, tmp_path: Path) -> None:
    folder = packaged(bundle, "vespa", tmp_path / "package").path
    with pytest.raises(OutputExistsError, match="Replace it with force=True"):
        packaged(bundle, "vespa", tmp_path / "package")
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"mine\.txt"):
        packaged(bundle, "vespa", tmp_path / "package", force=True)
    (folder / "mine.txt").unlink()
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "embed.cpython-311.pyc").write_bytes(b"")
    packaged(bundle, "onnx", tmp_path / "package", force=True)
    assert not (folder / "services.xml").exists()


def test_files_say_what_their_readers_ask_for(bundle: Bundle, tmp_path: Path) -> None:
    for name in ("vespa", "opensearch", "spring-ai", "elasticsearch"):
        packaged(bundle, name, tmp_path / name, **({} if name == "spring-ai" else {"name": "encoder"}))
    component = ElementTree.parse(tmp_path / "vespa" / "services.xml").getroot()
    assert (component.get("id"), component.findtext("max-tokens")) == ("encoder", str(MAX_LEN))
    register = json.loads((tmp_path / "opensearch" / "register.json").read_text())
    with zipfile.ZipFile(tmp_path / "opensearch" / "encoder.zip") as archive:
        assert sorted(archive.namelist()) == ["model.onnx", "tokenizer.json"]
        tokenizer = json.loads(archive.read("tokenizer.json"))
    assert tokenizer["truncation"]["max_length"] == LONGEST["opensearch"]
    assert register["model_config"]["embedding_dimension"] == bundle.manifest.hidden_size
    properties = (tmp_path / "spring-ai" / "application.properties").read_text()
    assert f"tokenizer.options.modelMaxLength={MAX_LEN}\n" in properties
    inference = json.loads((tmp_path / "elasticsearch" / "inference.json").read_text())
    assert inference["service_settings"]["max_input_tokens"] == MAX_LEN


def test_every_target_says_what_it_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, PackageTarget] = targets()
    assert all(target.name == name for name, target in found.items())
    assert all(target.source and target.next_step and target.system for target in found.values())
    assert [name for name in found if found[name].run is None and not found[name].tried] == [
        "bentoml",
        "elasticsearch",
        "snowflake",
        "sql-server",
    ]


def test_the_page_has_a_row_for_each_target() -> None:
    docs = Path(__file__).parents[3] / "docs"
    generated = runpy.run_path(str(docs / "generate_targets.py"))["page"]()
    assert (docs / "targets.md").read_text(encoding="utf-8") == generated, "run: python docs/generate_targets.py"
    assert all(f"| {name} |" in generated for name in targets())


def test_pad_and_split_are_those_of_an_older_opset() -> None:
    """The converter has no way to opset 17 for either, of the graph and of its loops."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 20]>
        g (float[2, 4] x, bool yes) => (float[2, 4] z) {
            around = Constant <value = int64[4] {0, 0, 0, 2}> ()
            padded = Pad (x, around)
            a, b, c = Split <axis = 1, num_outputs = 3> (padded)
            most = ReduceMax (padded)
            z = If (yes) <
                then_branch = left () => (float[2, 4] l) { q = Pad (a, around)  l = Add (q, most) },
                else_branch = right () => (float[2, 4] r) { p = Pad (b, around)  r = Sub (p, most) }>
        }""")
    converted = _with_standard_operators(model, GraphOptions(opset=17))
    onnx.checker.check_model(converted, full_check=True)
    assert [(each.domain, each.version) for each in converted.opset_import] == [("", 17)]
    feeds = {"x": np.arange(8, dtype=np.float32).reshape(2, 4), "yes": np.array(False)}
    (found,), (expected,) = (
        onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
        for each in (converted, model)
    )
    np.testing.assert_array_equal(found, expected)
