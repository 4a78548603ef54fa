"""A bundle in a repository of Triton: the server's Python backend answers as the session does, from texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import hdruntime
from hdexport.package.write import PackageOptions, package_bundle
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError, OutputExistsError
from support.splade_models import made_splade
from support.triton_server import missing_triton, triton_server

TEXTS = ["A text.", "", "Another text, a little longer than the first.", "Grüße, 你好."]

needs_triton = pytest.mark.skipif(missing_triton() is not None, reason=str(missing_triton()))


def packaged(bundle: Path, model: Path, **options: Any) -> Path:
    return package_bundle(open_bundle(bundle), PackageOptions(target="triton", output=model, **options)).path


@pytest.fixture(scope="module")
def classifier(tiny_bundles: Any) -> Path:
    path: Path = tiny_bundles("bert", "text-classification").path
    return path


@pytest.fixture(scope="module")
def server(sample_bundle: Path, classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A client of a server of the models ``embedder``, ``classifier``, and ``earlier``, which lacks an output."""
    models = tmp_path_factory.mktemp("triton") / "models"
    for name, bundle in (("embedder", sample_bundle), ("classifier", classifier), ("earlier", sample_bundle)):
        packaged(bundle, models / name)
    config = models / "earlier" / "config.pbtxt"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if '"truncated"' not in line))
    assert len(config.read_text().splitlines()) == len(lines) - 1
    with triton_server(models, tmp_path_factory.mktemp("server")) as client:
        yield client


def ask(
    client: httpx2.Client, model: str, inputs: dict[str, list[str]], outputs: list[str] | None = None, **parameters: str
) -> httpx2.Response:
    tensors = [
        {"name": name, "shape": [len(texts), 1], "datatype": "BYTES", "data": texts} for name, texts in inputs.items()
    ]
    body = {"inputs": tensors, "parameters": parameters}
    wanted = {} if outputs is None else {"outputs": [{"name": name} for name in outputs]}
    return client.post(f"/v2/models/{model}/infer", json=body | wanted)


def rows(answer: httpx2.Response, truncated: Sequence[bool] | None = None) -> Any:
    """The rows of an answer, whose other tensor says which texts were truncated; None: no text was."""
    assert answer.status_code == 200, answer.text
    outputs = {output["name"]: output for output in answer.json()["outputs"]}
    flags = outputs.pop("truncated")
    ((_, output),) = outputs.items()
    assert (flags["datatype"], flags["shape"]) == ("BOOL", [output["shape"][0], 1])
    assert flags["data"] == list(truncated or [False] * output["shape"][0])
    return np.array(output["data"], np.float32).reshape(output["shape"])


@needs_triton
def test_texts_become_the_sessions_vectors_also_those_of_many_clients(
    server: httpx2.Client, sample_bundle: Path
) -> None:
    long = "What is read, and by whom? " * 200
    with hdruntime.load(sample_bundle) as session:
        expected = session.embed(TEXTS)
        cut, split = (session.embed([long], overflow=overflow) for overflow in ("truncate", "split"))
    np.testing.assert_allclose(rows(ask(server, "embedder", {"TEXT": TEXTS})), expected, atol=1e-6)
    assert np.abs(cut - split).max() > 1e-3
    for truncate, vector in (("end", cut), ("split", split)):
        found = rows(ask(server, "embedder", {"TEXT": ["short", long]}, truncate=truncate), [False, truncate == "end"])
        np.testing.assert_allclose(found[1:], vector, atol=1e-6)
    # Several share a batch; one that fails takes no other with it.
    asked = [[text] for text in TEXTS] * 8 + [[long]]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda texts: ask(server, "embedder", {"TEXT": texts}), asked))
    for number, answer in enumerate(answers[:-1]):
        np.testing.assert_allclose(rows(answer)[0], expected[number % len(TEXTS)], atol=1e-6)
    assert "TEXT[0]: The text has" in answers[-1].json()["error"]


@needs_triton
def test_truncation_is_not_answered_where_the_client_or_the_configuration_lacks_the_output(
    server: httpx2.Client,
) -> None:
    for model, outputs in (("embedder", ["embedding"]), ("earlier", None)):
        answer = ask(server, model, {"TEXT": ["long " * 1000]}, outputs, truncate="end")
        assert [output["name"] for output in answer.json()["outputs"]] == ["embedding"]
    answer = ask(server, "embedder", {"TEXT": ["long " * 1000]}, ["truncated"], truncate="end")
    assert answer.json()["outputs"] == [{"name": "truncated", "datatype": "BOOL", "shape": [1, 1], "data": [True]}]


@needs_triton
def test_texts_and_pairs_become_the_classes_scores(server: httpx2.Client, classifier: Path) -> None:
    with hdruntime.load(classifier) as session:
        for texts, pairs in ((["w1 w2", "w3"], None), (["w1 w2", "w3"], ["w4", "w5 w6"])):
            inputs = {"TEXT": texts} | ({} if pairs is None else {"TEXT_PAIR": pairs})
            logits = np.stack([each["logits"] for each in session.infer(session.tokenize(texts, pairs))])
            shares = np.exp(logits - logits.max(-1, keepdims=True))
            expected = shares / shares.sum(-1, keepdims=True)
            np.testing.assert_allclose(rows(ask(server, "classifier", inputs)), expected, atol=1e-5)


@needs_triton
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"truncate": "begin"}, "truncate is 'begin'; it is error, end or split"),
        ({"overflow": "split"}, "There is no parameter 'overflow'; there are truncate, prompt_name"),
        ({"prompt_name": "none"}, '"prompt_name" is'),
    ],
)
def test_a_parameter_that_means_nothing_is_refused(
    server: httpx2.Client, parameters: dict[str, str], message: str
) -> None:
    answer = ask(server, "embedder", {"TEXT": TEXTS}, **parameters)
    assert answer.status_code != 200
    assert message in answer.json()["error"]


def test_a_model_is_replaced_on_request_alone_and_nothing_else_is(sample_bundle: Path, tmp_path: Path) -> None:
    model = packaged(sample_bundle, tmp_path / "model")
    before = (model / "config.pbtxt").read_text()
    with pytest.raises(OutputExistsError, match="choose another place with output"):
        packaged(sample_bundle, tmp_path / "model")
    packaged(sample_bundle, tmp_path / "model", backend="onnxruntime", force=True)
    assert before != (model / "config.pbtxt").read_text()
    (model / "1" / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"notes\.txt"):
        packaged(sample_bundle, tmp_path / "model", force=True)


def test_what_triton_cannot_serve_is_refused(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(InputError, match="Serve it with: hdexport serve"):
        packaged(made_splade(tmp_path_factory, "max") / "bundle", tmp_path / "model")
