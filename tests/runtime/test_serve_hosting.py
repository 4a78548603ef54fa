"""What hosting platforms ask of a container: SageMaker, Vertex AI, KServe's protocol, and pipelines of transformers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from huggingface_hub import InferenceClient

import hdruntime
from hdruntime.bundle.reader import open_bundle
from hdruntime.serve import ServeOptions, application, health
from hdruntime.text.entities import Aggregation
from support.job_runs import gather_bundle
from support.serving import answers_of, command
from support.tiny_bundle import HIDDEN_SIZE, MAX_LEN, WORDS, make_bundle

TEXTS = ["long documents", "are read whole"]
LONG = "read " * (2 * MAX_LEN)
V2 = "/v2/models/tiny"
LABELS = ("bad", "fair", "good")
LINES = {"Content-Type": "application/jsonlines"}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx2.Client, Any]]:
    """A client of a server of an embedder of 16 tokens for which Vertex AI's variables are set, and its session."""
    bundle = make_bundle(tmp_path_factory.mktemp("hosted") / "bundle", task="sentence-similarity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIP_PREDICT_ROUTE", "/v1/endpoints/7/deployedModels/8:predict")
        patch.setenv("AIP_HEALTH_ROUTE", "/v1/endpoints/7/deployedModels/8")
        with (
            hdruntime.load(bundle, "onnxruntime", threads=1) as session,
            command(bundle, "--backend", "onnxruntime", "--threads", "1", "--max-texts", "8") as (client, _),
        ):
            yield client, session


@pytest.fixture
def classes(new_bundle: Any) -> Callable[..., list[httpx2.Response]]:
    """Answers of a server of a classifier, whose logits are those of a text's first token."""
    logits = np.random.default_rng(3).normal(0, 2, (len(WORDS), len(LABELS)))
    bundle = open_bundle(gather_bundle(new_bundle(), "text-classification", {"logits": logits}, labels=LABELS))

    def ask(*requests: tuple[str, Any]) -> list[httpx2.Response]:
        with hdruntime.load(bundle, "onnxruntime", threads=1, max_seq_length=MAX_LEN) as session:
            return answers_of(application(bundle, session, ServeOptions()), *requests)

    return ask


def tensor(name: str, values: list[Any], shape: list[int] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": shape or [len(values)], "data": values} | more


def message(found: httpx2.Response, status: int = 400) -> str:
    assert found.status_code == status, found.text
    error = found.json()["error"]
    return error if isinstance(error, str) else error["message"]


# SageMaker


def test_sagemaker_invokes_what_the_root_answers(embedder: Any) -> None:
    client, _ = embedder
    assert client.get("/ping").status_code == 200
    body = {"inputs": TEXTS, "normalize": False}
    expected = client.post("/embed", json=body)
    for kind in ("application/json", "application/octet-stream", "application/json; charset=utf-8"):
        found = client.post("/invocations", content=json.dumps(body), headers={"Content-Type": kind})
        assert (found.status_code, found.content) == (200, expected.content)
    compared = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
    assert client.post("/invocations", json=compared).json() == client.post("/", json=compared).json()
    assert len(client.post("/vertex", json={"instances": [compared]}).json()["predictions"][0]) == len(TEXTS)
    assert client.post("/invocations", json={"inputs": LONG, "truncate": True}).headers["X-Truncated-Inputs"] == "0"
    assert "truncate" in message(client.post("/invocations", json={"inputs": LONG}))
    assert "The content type is text/csv" in message(
        client.post("/invocations", content="inputs\na", headers={"Content-Type": "text/csv"}), 415
    )


def test_batch_transform_gets_a_line_for_each_line(embedder: Any) -> None:
    client, _ = embedder
    bodies = [{"inputs": TEXTS[0]}, {"inputs": LONG, "truncate": True}, {"inputs": TEXTS, "normalize": False}]
    content = "\n".join(map(json.dumps, bodies)) + "\n"
    found = client.post("/invocations", content=content, headers=LINES)
    assert (found.status_code, found.headers["Content-Type"]) == (200, "application/jsonlines")
    expected = [client.post("/embed", json=body).json() for body in bodies]
    for line, one in zip(found.text.splitlines(), expected, strict=True):
        np.testing.assert_allclose(json.loads(line), one, atol=1e-6)
    assert found.headers["X-Truncated-Inputs"] == "1", "the number of a line"
    asked = client.get("/execution-parameters").json()
    assert asked["BatchStrategy"] == "MULTI_RECORD"
    for given, wanted in (
        (f"{content}{json.dumps({'inputs': LONG})}", "line[3]: input[0]: "),
        (f'{content}{{"input": "a"}}', "line[3]: The body has the unknown field `input`"),
        ("{}\n" * 9, "There are 9 texts in the request; 1 to 8 fit"),
        ("", "There are 0 texts"),
        ("[1]", "not valid"),
    ):
        assert wanted in message(client.post("/invocations", content=given, headers=LINES))


def test_a_ranker_ranks_documents_and_scores_pairs(reranker_bundle: Path) -> None:
    documents = ["w7 w8", "w9", "w10"]
    ranking = {"query": "w1 w2", "texts": documents}
    pairs = [["w1 w2", each] for each in documents]
    bundle = open_bundle(reranker_bundle)
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        app = application(bundle, session, ServeOptions())
        ranked, expected, scored, one_by_one, both, again, predictions = answers_of(
            app,
            ("/invocations", ranking),
            ("/rerank", ranking),
            ("/invocations", {"inputs": pairs}),
            ("/predict", {"inputs": pairs}),
            ("/vertex", {"instances": [ranking, {"inputs": pairs[:1]}]}),
            ("/predict", {"inputs": pairs[:1]}),
            ("/vertex", {"instances": pairs, "parameters": {"raw_scores": True}}),
        )
        (raw,) = answers_of(
            application(bundle, session, ServeOptions()), ("/predict", {"inputs": pairs, "raw_scores": True})
        )
        assert ranked.json() == expected.json()
    assert scored.json() == one_by_one.json()
    assert [each["score"] for (each,) in scored.json()] != [each["score"] for (each,) in raw.json()]
    assert both.json() == {"predictions": [expected.json(), again.json()]}
    assert predictions.json() == {"predictions": raw.json()}


# Vertex AI


def test_vertex_gets_a_prediction_for_each_instance(embedder: Any) -> None:
    client, session = embedder
    route = "/v1/endpoints/7/deployedModels/8:predict"
    assert client.get("/v1/endpoints/7/deployedModels/8").status_code == 200
    expected = session.embed(TEXTS)
    for path in (route, "/vertex", "/v1/models/tiny:predict"):
        for instances in (TEXTS, [[text] for text in TEXTS]):
            found = client.post(path, json={"instances": instances, "parameters": {"normalize": False}}).json()
            np.testing.assert_allclose(found["predictions"], expected, atol=1e-6)
    objects = [{"inputs": TEXTS[0]}, {"inputs": TEXTS, "normalize": True}]
    found = client.post(route, json={"instances": objects, "parameters": {"normalize": False}}).json()["predictions"]
    np.testing.assert_allclose(found[0], expected[:1], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found[1], axis=1), 1, atol=1e-6)
    long = client.post(route, json={"instances": [{"inputs": LONG}, *objects], "parameters": {"truncate": True}})
    assert long.headers["X-Truncated-Inputs"] == "0"
    for body, wanted in (
        ({"instances": [*objects, {"inputs": LONG}]}, "instances[2]: input[0]: The text has"),
        ({"instances": [objects[0], "text"]}, "instances[1]: This is no JSON object"),
        ({"instances": [["a", "b", "c"]]}, "neither a text, nor a pair of texts"),
        ({"instances": []}, "There are 0 texts"),
        ({"instances": ["a"] * 9}, "There are 9 texts in the request; 1 to 8 fit"),
        ({"instances": ["a"], "parameters": {"top_p": 1}}, "unknown field `top_p`"),
        ({"inputs": ["a"]}, "unknown field `inputs`"),
    ):
        assert wanted in message(client.post(route, json=body))
    assert "There is no model 'other'" in message(
        client.post("/v1/models/other:predict", json={"instances": ["a"]}), 404
    )


def test_vertex_may_name_a_route_that_is_there(new_bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/v1/embeddings")
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/health")
    bundle = open_bundle(new_bundle())
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        predicted, health = answers_of(
            application(bundle, session, ServeOptions()), ("/v1/embeddings", {"input": "read"}), ("/health", None)
        )
        assert (predicted.json()["object"], health.status_code) == ("list", 200)
        monkeypatch.setenv("AIP_PREDICT_ROUTE", "predict")
        with pytest.raises(hdruntime.HdexportError, match="AIP_PREDICT_ROUTE or AIP_HEALTH_ROUTE is 'predict'"):
            application(bundle, session, ServeOptions())


def test_parameters_are_keys_of_a_body_or_of_a_pipeline(classes: Any) -> None:
    body = {"instances": TEXTS, "parameters": {"top_k": 1, "raw_scores": True}}
    of_one = {"inputs": TEXTS[0], "parameters": {"function_to_apply": "none"}}
    found, expected, pairs, of_pairs, merged, of_both = classes(
        ("/vertex", body),
        ("/predict", {"inputs": TEXTS, "raw_scores": True, "parameters": {"top_k": 1}}),
        ("/vertex", {"instances": [TEXTS]}),
        ("/predict", {"inputs": [TEXTS]}),
        ("/vertex", {"instances": [of_one], "parameters": {"top_k": 1, "function_to_apply": "softmax"}}),
        ("/predict", of_one | {"parameters": {"function_to_apply": "none", "top_k": 1}}),
    )
    assert merged.json()["predictions"] == [of_both.json()], "the instance's own parameters come first"
    assert [len(each) for each in found.json()["predictions"]] == [1, 1]
    assert found.json()["predictions"] == expected.json()
    assert pairs.json()["predictions"] == of_pairs.json()


# The Open Inference Protocol


def test_the_protocol_says_what_is_served_and_how_it_is(embedder: Any) -> None:
    client, _ = embedder
    server = client.get("/v2").json()
    assert (server["name"], server["version"], server["extensions"]) == ("hdexport", hdruntime.__version__, [])
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models").json() == {"models": ["tiny"]}
    assert client.get(f"{V2}/ready").json() == {"name": "tiny", "ready": True}
    model = client.get(V2).json()
    assert model["inputs"] == [{"name": "TEXT", "datatype": "BYTES", "shape": [-1]}]
    assert model["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, HIDDEN_SIZE]}]
    for path in ("/v2/models/other", "/v2/models/other/ready", "/v2/models/tiny/versions/1"):
        assert "There is no model" in message(client.get(path), 404)


def test_strings_become_rows_of_floats(embedder: Any) -> None:
    client, session = embedder
    expected = session.embed(TEXTS)
    column = tensor("TEXT", [[text] for text in TEXTS], [2, 1])
    for given in (tensor("TEXT", TEXTS), column, tensor("TEXT", TEXTS, [2, 1], parameters={"content_type": "str"})):
        body = {"id": "7", "inputs": [given], "outputs": [{"name": "embedding", "parameters": {"binary_data": False}}]}
        found = client.post(f"{V2}/infer", json=body).json()
        (output,) = found["outputs"]
        assert (found["model_name"], found["id"], output["name"]) == ("tiny", "7", "embedding")
        assert (output["datatype"], output["shape"]) == ("FP32", [2, HIDDEN_SIZE])
        np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), expected, atol=1e-6)
    parameters = {"truncate": "end", "dimensions": 2, "normalize": True}
    found = client.post(f"{V2}/infer", json={"inputs": [tensor("TEXT", [*TEXTS, LONG])], "parameters": parameters})
    assert found.headers["X-Truncated-Inputs"] == found.json()["parameters"]["truncated_inputs"] == "2"
    (output,) = found.json()["outputs"]
    assert output["shape"] == [3, 2]
    np.testing.assert_allclose(np.linalg.norm(np.reshape(output["data"], [3, 2]), axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"inputs": [tensor("text", ["a"])]}, "The inputs are text.\nSend TEXT, and no other than TEXT"),
        ({"inputs": [tensor("TEXT", ["a"]), tensor("TEXT_PAIR", ["a"])]}, "The inputs are TEXT, TEXT_PAIR"),
        ({"inputs": [tensor("TEXT", ["a"])] * 2}, "once each"),
        ({"inputs": []}, "The inputs are none"),
        ({"inputs": [tensor("TEXT", ["a"], [2])]}, "TEXT has the shape [2] and 1 values"),
        ({"inputs": [tensor("TEXT", ["a", "b"], [1, 2])]}, "TEXT has the shape [1, 2] and 2 values"),
        ({"inputs": [tensor("TEXT", [1])]}, "a value that is no string"),
        ({"inputs": [tensor("TEXT", ["a"], datatype="FP32")]}, "TEXT has the datatype FP32"),
        ({"inputs": [tensor("TEXT", ["a"] * 9)]}, "There are 9 texts in the request; 1 to 8 fit"),
        ({"inputs": [tensor("TEXT", [], [0])]}, "There are 0 texts"),
        ({"outputs": [{"name": "scores"}]}, "There is no such output; the model has embedding"),
        ({"parameters": {"binary_data_output": True}}, "binary_data_output asks for the binary extension"),
        ({"parameters": {"overflow": "end"}}, "unknown field `overflow`"),
        (
            {"inputs": [tensor("TEXT", ["a"], parameters={"truncate": "end"})]},
            'The tensor TEXT has the parameter truncate: "end"',
        ),
        ({"outputs": [{"name": "embedding", "parameters": {"classification": 3}}]}, "the parameter classification: 3"),
        ({"parameters": {"prompt_name": "nobody"}}, "prompt_name"),
        ({"model_name": "other"}, "model_name is 'other', and the path names 'tiny'"),
        ({"inputs": [tensor("TEXT", [LONG])]}, 'send "truncate": "end"'),
    ],
)
def test_what_the_protocol_cannot_mean_is_refused_with_its_error(embedder: Any, change: Any, wanted: str) -> None:
    client, _ = embedder
    found = client.post(f"{V2}/infer", json={"inputs": [tensor("TEXT", TEXTS)]} | change)
    assert isinstance(found.json()["error"], str)
    assert wanted in message(found)


KSERVE = """
import asyncio, json, sys
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

async def ask(address, texts):
    async with InferenceRESTClient(RESTConfig(protocol="v2", retries=0)) as client:
        states = [await client.is_server_live(address), await client.is_server_ready(address)]
        states += [await client.is_model_ready(address, "tiny"), not await client.is_model_ready(address, "other")]
        given = InferInput("TEXT", [len(texts)], "BYTES", data=texts)
        request = InferRequest("tiny", [given], request_id="7", parameters={"truncate": "end"})
        answer = await client.infer(address, request, model_name="tiny")
        (output,) = answer.outputs
        assert (answer.id, answer.model_name, output.datatype) == ("7", "tiny", "FP32")
        try:
            await client.infer(address, InferRequest("tiny", [given]), model_name="tiny")
        except Exception as error:
            states.append("The text has" in str(error))
        return states, output.as_numpy().tolist()

print(json.dumps(asyncio.run(ask(sys.argv[1], json.load(sys.stdin)))))
"""
TRITONCLIENT = """
import json, sys
import numpy as np
import tritonclient.http as client
from tritonclient.utils import InferenceServerException

texts = json.load(sys.stdin)
server = client.InferenceServerClient(sys.argv[1].removeprefix("http://"))
states = [server.is_server_live(), server.is_server_ready(), server.is_model_ready("tiny")]
(declared,) = server.get_model_metadata("tiny")["inputs"]
given = client.InferInput(declared["name"], [len(texts), 1], declared["datatype"])
given.set_data_from_numpy(np.array([[text] for text in texts], object), binary_data=False)
wanted = [client.InferRequestedOutput("embedding", binary_data=False)]
answer = server.infer("tiny", [given], outputs=wanted, parameters={"truncate": "end"})
for more in ({}, {"outputs": [client.InferRequestedOutput("embedding")]}):
    try:
        server.infer("tiny", [given], **more)
    except InferenceServerException as error:
        states.append("binary extension" in str(error))
print(json.dumps([states, answer.as_numpy("embedding").tolist()]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("program", [KSERVE, TRITONCLIENT], ids=["kserve", "tritonclient"])
def test_clients_of_the_protocol_get_the_bundles_embeddings(embedder: Any, program: str) -> None:
    """KServe's own client and Triton's, in an environment of their own."""
    python = Path(__file__).parents[2] / ".venv" / "readers" / "kserve" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python.parent.parent} is made by make test-all")
    client, session = embedder
    texts = [*TEXTS, LONG]
    done = subprocess.run(
        [python, "-c", program, str(client.base_url).rstrip("/")],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    states, found = json.loads(done.stdout.splitlines()[-1])
    assert states == [True] * 5
    np.testing.assert_allclose(found, session.embed(texts, overflow="truncate"), atol=1e-6)


def test_scores_are_those_of_the_session_with_their_labels(classes: Any) -> None:
    pairs = [tensor("TEXT", TEXTS), tensor("TEXT_PAIR", TEXTS[::-1])]
    scored, raw, model, uneven = classes(
        (f"{V2}/infer", {"inputs": pairs}),
        (f"{V2}/infer", {"inputs": pairs, "parameters": {"raw_scores": True}}),
        (V2, None),
        (f"{V2}/infer", {"inputs": [pairs[0], tensor("TEXT_PAIR", ["a"])]}),
    )
    rows = [np.reshape(each.json()["outputs"][0]["data"], [2, len(LABELS)]) for each in (scored, raw)]
    shares = np.exp(rows[1] - rows[1].max(-1, keepdims=True))
    np.testing.assert_allclose(rows[0], shares / shares.sum(-1, keepdims=True), rtol=1e-5)
    assert json.loads(scored.json()["outputs"][0]["parameters"]["labels"]) == [*LABELS]
    assert [each["name"] for each in model.json()["inputs"]] == ["TEXT", "TEXT_PAIR"]
    assert "TEXT has 2 values and TEXT_PAIR has 1" in message(uneven)


# Every task, and health


@pytest.fixture
def of_task(new_bundle: Any) -> Iterator[Callable[..., Any]]:
    """Serves a model that looks its outputs up by token id: a client, the session, and huggingface_hub's client."""
    with contextlib.ExitStack() as exits:

        def serve(task: str, tables: dict[str, np.ndarray], **more: Any) -> tuple[httpx2.Client, Any, InferenceClient]:
            bundle = gather_bundle(new_bundle(task), task, tables, **more)
            session = exits.enter_context(hdruntime.load(bundle, "onnxruntime", threads=1))
            client, _ = exits.enter_context(command(bundle, "--backend", "onnxruntime", "--threads", "1"))
            return client, session, InferenceClient(str(client.base_url))

        yield serve


def assert_answered_at_every_path(client: httpx2.Client, texts: list[Any]) -> list[Any]:
    """The answers to texts, which are equal at every path: in the protocol each is a string of JSON."""
    expected = client.post("/", json={"inputs": texts}).json()
    assert client.post("/invocations", json={"inputs": texts}).json() == expected
    assert client.post("/vertex", json={"instances": texts}).json() == {"predictions": expected}
    inputs = [tensor("TEXT", texts)]
    if isinstance(texts[0], list):
        inputs = [tensor(name, [pair[each] for pair in texts]) for each, name in enumerate(("TEXT", "TEXT_PAIR"))]
    (output,) = client.post(f"{V2}/infer", json={"inputs": inputs}).json()["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("answer", "BYTES", [len(texts)])
    assert [json.loads(each) for each in output["data"]] == expected
    assert client.get(V2).json()["outputs"] == [{"name": "answer", "datatype": "BYTES", "shape": [-1]}]
    assert isinstance(expected, list)
    return expected


def test_entities_are_the_sessions(of_task: Any) -> None:
    logits = np.zeros((len(WORDS), 3))
    logits[[WORDS.index("long"), WORDS.index("documents"), WORDS.index("read")], [1, 2, 1]] = 9
    client, session, theirs = of_task("token-classification", {"logits": logits}, labels=("O", "B-A", "I-A"))
    texts = ["are long documents read", "whole"]
    found = assert_answered_at_every_path(client, texts)
    assert [(each["entity"], each["word"], each["start"]) for each in found[0]] == [
        ("B-A", "long", 4), ("I-A", "documents", 9), ("B-A", "read", 19)
    ]  # fmt: skip
    assert found[1] == []
    for aggregation in Aggregation:
        (expected,) = session.entities(texts[:1], aggregation=aggregation)
        given = theirs.token_classification(texts[0], aggregation_strategy=aggregation.value)
        label = "entity" if aggregation is Aggregation.NONE else "entity_group"
        assert [(getattr(each, label), each.word, each.start, each.end) for each in given] == [
            (each.label, each.text, each.start, each.end) for each in expected
        ]
    kept = theirs.token_classification(texts[0], ignore_labels=["O", "I-A"])
    assert [each.entity for each in kept] == ["B-A", "B-A"]
    for parameters, wanted in (
        ({"ignore_labels": []}, "ignore_labels has no 'O'"),
        ({"aggregation_strategy": "last"}, "Invalid enum value 'last'"),
        ({"stride": 2}, "unknown field `stride`"),
    ):
        assert wanted in message(client.post("/", json={"inputs": texts[0], "parameters": parameters}))


def test_masks_are_filled(of_task: Any) -> None:
    mask = WORDS.index("whole")
    logits = np.zeros((len(WORDS), len(WORDS)))
    logits[mask, [WORDS.index("read"), WORDS.index("long")]] = 9, 7
    client, _, theirs = of_task("fill-mask", {"logits": logits}, mask_token_id=mask)
    one, two = assert_answered_at_every_path(client, ["are whole documents", "whole are whole"])
    assert [len(one), *map(len, two)] == [5, 5, 5]
    assert [each[0]["sequence"] for each in two] == ["read are whole", "whole are read"]
    best = theirs.fill_mask("are whole documents", top_k=2)
    assert [(each.token_str, each.token, each.sequence) for each in best] == [
        ("read", WORDS.index("read"), "are read documents"),
        ("long", WORDS.index("long"), "are long documents"),
    ]
    assert best[0].score == pytest.approx(one[0]["score"])
    assert [len(each) for each in client.post("/", json={"inputs": ["whole"], "parameters": {"top_k": 1}}).json()] == [
        1
    ]
    assert "it must be 1 to 5" in message(client.post("/", json={"inputs": "whole", "parameters": {"top_k": 6}}))
    assert "no mask to fill" in message(client.post("/invocations", json={"inputs": "long"}))


def test_questions_are_answered(of_task: Any) -> None:
    tables = {name: np.arange(len(WORDS)) for name in ("start_logits", "end_logits")}
    client, session, theirs = of_task("question-answering", tables)
    question, context = "are documents whole", "long documents are read"
    ((best,),) = session.answers([question], [context])
    found = assert_answered_at_every_path(client, [[question, context]])
    assert found == [vars(best)]
    assert vars(theirs.question_answering(question=question, context=context)) == vars(best)
    (three,) = session.answers([question], [context], top_k=3, max_answer_tokens=2)
    given = theirs.question_answering(question=question, context=context, top_k=3, max_answer_len=2)
    assert list(map(vars, given)) == list(map(vars, three))
    for body in ({"question": question, "context": context}, {"inputs": {"question": question, "context": context}}):
        assert client.post("/invocations", json=body).json() == found[0]
        assert client.post("/vertex", json={"instances": [body]}).json()["predictions"] == found
    for body, wanted in (
        ({"inputs": {"question": question}}, "not valid"),
        ({"question": question}, "no question with its context"),
        ({"inputs": [[question, context]], "question": question}, "or several"),
        ({"inputs": [[question, context]], "parameters": {"top_k": 0}}, "it must be 1 or more"),
        ({"inputs": [[question, context]], "parameters": {"doc_stride": 1}}, "unknown field `doc_stride`"),
    ):
        assert wanted in message(client.post("/", json=body))


def test_texts_are_scored(of_task: Any) -> None:
    table = np.full(len(WORDS), -np.log(2))
    table[WORDS.index("[CLS]")] = 0
    client, _, _ = of_task("text-scoring", {"log_probabilities": table})
    found = assert_answered_at_every_path(client, ["long documents"])
    assert found[0]["perplexity"] == pytest.approx(2)
    error = message(client.post("/invocations", json={"inputs": LONG}))
    assert "accepts 1 to 16." in error
    assert "split" not in error
    split = client.post("/invocations", json={"inputs": "long", "truncate": "split"})
    assert "text-scoring, whose texts are not split" in message(split)
    cut = client.post("/invocations", json={"inputs": LONG, "truncate_prompt_tokens": 5})
    assert (len(cut.json()["log_probabilities"]), cut.headers["X-Truncated-Inputs"]) == (5, "0")


def test_probes_need_no_key_and_invocations_do(new_bundle: Any) -> None:
    bundle = open_bundle(new_bundle())
    probes = ["/ping", "/health", "/ready", "/v2/health/live", "/v2/health/ready", f"{V2}/ready"]
    asked = [("/invocations", {"inputs": "read"}), ("/vertex", {"instances": ["read"]}), (V2, None), ("/metrics", None)]
    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        app = application(bundle, session, ServeOptions(api_key="secret"))
        statuses = [each.status_code for each in answers_of(app, *((path, None) for path in probes), *asked)]
    assert statuses == [200] * len(probes) + [401] * len(asked)


def test_probes_are_answered_at_once_while_a_text_of_one_token_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), health.SessionHealth._run_text
    monkeypatch.setattr("hdruntime.serve.model_registry._READY_SECONDS", 0.01)
    monkeypatch.setattr(health.SessionHealth, "_run_text", lambda self, session: (go.wait(60), real(self, session)))
    bundle = open_bundle(make_bundle(tmp_path / "bundle"))

    async def ask(app: Any) -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:
            for path in ("/ping", "/v2/health/ready"):
                assert message(await client.get(path), 503) == "A text of one token is running."
            go.set()
            while (await client.get("/ping")).status_code != 200:
                await asyncio.sleep(0.001)
            assert (await client.get("/v2/health/ready")).json() == {"ready": True}

    with hdruntime.load(bundle, "onnxruntime", threads=1) as session:
        asyncio.run(ask(application(bundle, session, ServeOptions())))
