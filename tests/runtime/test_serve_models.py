"""Several models in one server, and several sessions of a model."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient

import hdruntime
from fakes.recording_runner import RecordingRunner, answer
from hdexport.cli import main
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendError, BundleNotFoundError, InputError
from hdruntime.serve import BundleToServe, LoadedModel, ServeOptions, application_of_models, serve
from hdruntime.session import Session
from support.serving import answers_of, command, message_of
from support.tiny_bundle import make_bundle

READ = answer(np.array([2, 7, 3])).mean(0).tolist()
READ_TWICE = (2 * answer(np.array([2, 7, 3]))).mean(0).tolist()


class Doubling(RecordingRunner):
    """Another model."""

    def start(self, inputs: Any, outputs: Any) -> Any:
        results = super().start(inputs, outputs)
        return lambda: {name: 2 * array for name, array in results().items()}


class Held(RecordingRunner):
    """A runner whose batches of more than three tokens wait until others run at the same time."""

    def __init__(self, together: threading.Barrier) -> None:
        # Two texts of as many tokens share no batch.
        super().__init__(batch_tokens=7)
        self.together = together

    def start(self, inputs: Any, outputs: Any) -> Any:
        if inputs["input_ids"].shape[1] > 3:
            self.together.wait(30)
        return super().start(inputs, outputs)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return open_bundle(make_bundle(tmp_path_factory.mktemp("tiny")))


def loaded(bundle: Bundle, *names: str, runner: RecordingRunner | None = None) -> LoadedModel:
    return LoadedModel(bundle=bundle, sessions=[Session(bundle, runner or RecordingRunner())], names=names)


def asked(models: list[LoadedModel], *requests: tuple[str, Any], **options: Any) -> list[tuple[int, Any]]:
    """The statuses and the contents of the answers of a server with these models."""
    found = answers_of(application_of_models(models, ServeOptions(**options)), *requests)
    return [(each.status_code, each.text if "/metrics" in str(each.url) else each.json()) for each in found]


def vector_of(found: tuple[int, Any]) -> Any:
    assert found[0] == 200, found
    return found[1]["data"][0]["embedding"] if isinstance(found[1], dict) else found[1][0]


def test_a_requests_model_chooses_by_any_of_its_names(tiny: Bundle) -> None:
    models = [loaded(tiny, "one", "first"), loaded(tiny, "two", "org/second", runner=Doubling())]
    large = {"input": "read", "model": "two", "user": "x" * 2**19}
    names = ("one", "first", "two", "org/second")
    *found, of_large, unknown, none, wrong = asked(
        models,
        *(("/v1/embeddings", {"input": "read", "model": name}) for name in names),
        ("/v1/embeddings", large),
        ("/v1/embeddings", {"input": "read", "model": "tiny"}),
        ("/v1/embeddings", {"input": "read"}),
        ("/v1/embeddings", {"input": "read", "model": 2}),
    )
    for name, each in zip(names, found, strict=True):
        is_first = name in ("one", "first")
        assert vector_of(each) == pytest.approx(READ if is_first else READ_TWICE)
        assert each[1]["model"] == ("one" if is_first else "two"), "the name that is shown"
    assert vector_of(of_large) == pytest.approx(READ_TWICE), "a body that is read in another thread"
    # Both manifests have the name "tiny".
    assert unknown[0] == 404
    assert unknown[1]["error"]["code"] == "model_not_found"
    assert unknown[1]["error"]["message"] == "There is no model 'tiny'. The server has one, two."
    assert none[0] == 400
    assert none[1]["error"]["message"] == (
        "Several models answer POST /v1/embeddings: one, two.\n"
        'Send "model" with one of these names, or use the path /models/one/v1/embeddings.'
    )
    assert (wrong[0], "model is not a text" in wrong[1]["error"]["message"]) == (400, True)
    (of_other_api,) = asked(models, ("/embed", {"inputs": "read", "model": "tiny"}))
    assert of_other_api[0] == 404
    assert of_other_api[1] == {"error": unknown[1]["error"]["message"], "error_type": of_other_api[1]["error_type"]}


def test_a_route_belongs_to_the_model_whose_task_answers_it(tiny: Bundle, reranker_bundle: Path) -> None:
    pair = {"query": "w1 w2", "documents": ["w7 w8", "w9"]}
    with hdruntime.load(reranker_bundle, "onnxruntime", threads=1) as session:
        scorer = LoadedModel(bundle=open_bundle(reranker_bundle), sessions=[session], names=["rerank"])
        models = [loaded(tiny), scorer]
        alone, own, other, root, no_model, listed, described = asked(
            models,
            ("/v1/embeddings", {"input": "read"}),
            ("/rerank", pair),
            ("/rerank", pair | {"model": "tiny"}),
            ("/", {"inputs": "read"}),
            ("/info", None),
            ("/v1/models", None),
            ("/v1/models/rerank", None),
        )
        expected = session.rank("w1 w2", pair["documents"])
    assert vector_of(alone) == pytest.approx(READ), "no other model has the route"
    assert own[0] == 200
    assert own[1]["model"] == "rerank"
    assert own[1]["results"][0]["relevance_score"] == pytest.approx(expected[0]["score"], abs=1e-6)
    assert other[0] == 404
    assert other[1]["error"]["message"] == "The model tiny does not answer POST /rerank; rerank does."
    for status, said in (root, no_model):
        assert status == 400
        assert "tiny, rerank" in message_of(said)
    assert [each["id"] for each in listed[1]["data"]] == ["tiny", "rerank"]
    assert described[1] == listed[1]["data"][1]
    assert described[1]["task"] == "text-classification"


def test_below_its_own_path_a_model_answers_as_if_it_were_alone(tiny: Bundle) -> None:
    models = [loaded(tiny, "a"), loaded(tiny, "a/b", runner=Doubling())]
    body = {"inputs": "read", "normalize": False}
    one, two, root, embedded, listed, info, ready, unknown, path = asked(
        models,
        ("/models/a/embed", body),
        ("/models/a/b/embed", body),
        ("/models/a/b", body),
        ("/models/a/b/v1/embeddings", {"input": "read", "model": "any"}),
        ("/models/a/v1/models", None),
        ("/models/a/b/info", None),
        ("/models/a/b/ready", None),
        ("/models/c/embed", body),
        ("/models/a/nothing", body),
        max_queue_tokens=1000,
    )
    assert vector_of(one) == pytest.approx(READ)
    for each in (two, root, embedded):
        assert vector_of(each) == pytest.approx(READ_TWICE)
    assert [each["id"] for each in listed[1]["data"]] == ["a"]
    assert (info[1]["model_id"], info[1]["max_concurrent_requests"]) == ("a/b", 500), "half of the queue"
    assert ready == (200, {"status": "ok"})
    assert (unknown[0], unknown[1]["error"]["code"]) == (404, "model_not_found")
    assert "The server has a, a/b" in unknown[1]["error"]["message"]
    assert (path[0], "POST /v1/embeddings" in path[1]["error"]["message"]) == (404, True)
    (wrong_method,) = asked(models, ("/models/a/v1/embeddings", None))
    message = wrong_method[1]["error"]["message"]
    assert (wrong_method[0], message) == (405, "The request is GET /models/a/v1/embeddings; the route takes POST.")
    (without_key,) = asked(models, ("/models/c/embed", body), api_key="secret")
    assert (without_key[0], "a/b" in without_key[1]["error"]["message"]) == (404, False), "names are told with the key"
    (behind,) = asked(models[1:], ("/proxy/models/a/b/embed", body), root_path="/proxy")
    assert vector_of(behind) == pytest.approx(READ_TWICE)


def test_one_model_alone_takes_any_name(tiny: Bundle) -> None:
    found = asked(
        [loaded(tiny, "mine")],
        *(("/v1/embeddings", {"input": "read", "model": name}) for name in ("mine", "any", None, 5)),
        ("/v1/models/any", None),
        ("/models/mine/v1/models", None),
    )
    for each in found[:4]:
        assert vector_of(each) == pytest.approx(READ)
    assert found[4][1]["id"] == "mine"
    assert [each["id"] for each in found[5][1]["data"]] == ["mine"]


def test_metrics_have_the_model_and_an_unknown_name_is_no_label(tiny: Bundle) -> None:
    models = [loaded(tiny, "one"), loaded(tiny, "two")]
    *_, (status, metrics) = asked(
        models,
        ("/v1/embeddings", {"input": "read", "model": "one"}),
        ("/v1/embeddings", {"input": "read", "model": "x" * 50}),
        ("/models/two/embed", {"inputs": ["read", "read"]}),
        ("/models/two/metrics", None),
    )
    assert status == 200
    for line in (
        'hdexport_requests_total{model="one",route="/v1/embeddings",status="200"} 1.0',
        'hdexport_requests_total{model="",route="/v1/embeddings",status="404"} 1.0',
        'hdexport_requests_total{model="two",route="/embed",status="200"} 1.0',
        'hdexport_tokens_total{model="one"} 3.0',
        'hdexport_tokens_total{model="two"} 6.0',
        'hdexport_queue_tokens{model="two"} 0.0',
        'hdexport_padding_ratio{model="two"} 0.0',
    ):
        assert line in metrics
    assert "xxx" not in metrics


def test_health_and_readiness_name_the_model_that_fails(tiny: Bundle) -> None:
    class Broken(RecordingRunner):
        def start(self, inputs: Any, outputs: Any) -> Any:
            raise BackendError("the device is gone")

    models = [loaded(tiny, "good"), loaded(tiny, "bad", runner=Broken())]
    app = application_of_models(models, ServeOptions())
    found = answers_of(
        app,
        ("/ready", None),
        ("/health", None),
        ("/models/good/ready", None),
        ("/models/bad/health", None),
        ("/v1/embeddings", {"input": "read", "model": "good"}),
    )
    ready, health, good, bad, answered = [(each.status_code, each.json()) for each in found]
    for status, said in (ready, health, bad):
        reason = "bad: A text of one token fails; the server's log has the reason."
        assert (status, said["error"]["message"]) == (503, reason)
    assert good == (200, {"status": "ok"})
    assert vector_of(answered) == pytest.approx(READ), "the others are answered"
    models[1].sessions[0].close()
    (said,) = answers_of(app, ("/ready", None))
    assert "bad: The session is closed" in said.json()["error"]["message"]


def test_two_models_of_one_name_are_refused(tiny: Bundle) -> None:
    for names in ([("a",), ("a",)], [(), ()], [("a", "b"), ("c", "b")]):
        with pytest.raises(InputError, match=r"Two models have the name (a|b|tiny)"):
            application_of_models([loaded(tiny, *each) for each in names], ServeOptions())


# Sessions


def test_sessions_of_a_model_run_batches_at_the_same_time_and_share_the_texts_of_one_request(tiny: Bundle) -> None:
    together = threading.Barrier(2)
    sessions = [Session(tiny, Held(together)) for _ in range(2)]
    model = LoadedModel(bundle=tiny, sessions=sessions)
    short, long, split = "read", "long documents are read whole", "long documents are read whole " * 4

    async def story() -> list[Any]:
        app = application_of_models([model], ServeOptions(max_wait_ms=0))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:

            async def embed(*texts: str) -> Any:
                found = await client.post("/v1/embeddings", json={"input": [*texts], "truncate": "split"})
                return [each["embedding"] for each in found.json()["data"]]

            await embed(short)
            return [*await asyncio.gather(embed(long), embed(long)), await embed(split)]

    first, second, whole = asyncio.run(story())
    alone = Session(tiny, RecordingRunner())
    assert first[0] == second[0] == pytest.approx(alone.embed([long])[0])
    assert whole[0] == pytest.approx(alone.embed([split], overflow="split")[0])
    assert all(len(session._scheduler.runner.shapes) > 1 for session in sessions)


def test_a_session_of_several_that_fails_makes_the_model_unready(tiny: Bundle) -> None:
    runners = [RecordingRunner(), RecordingRunner()]
    sessions = [Session(tiny, runner) for runner in runners]
    app = application_of_models([LoadedModel(bundle=tiny, sessions=sessions)], ServeOptions())
    assert [each.status_code for each in answers_of(app, ("/ready", None), ("/health", None))] == [200, 200]
    assert [runner.shapes for runner in runners] == [[(1, 3)], [(1, 3)]], "each session has run a text"
    sessions[1].close()
    assert [each.status_code for each in answers_of(app, ("/ready", None), ("/health", None))] == [503, 503]


# The command


def test_a_bundle_that_cannot_be_loaded_is_named_and_none_is_served(
    tiny: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Session] = []

    def load(bundle: Bundle, *given: Any, **options: Any) -> Session:
        if len(opened) == 3:
            raise BackendError("the device has no room", hint="Free some.")
        opened.append(Session(bundle, RecordingRunner()))
        return opened[-1]

    monkeypatch.setattr("hdruntime.serve.server.load", load)
    good, missing = BundleToServe(bundle=tiny.path, names=["good"], sessions=2), tmp_path / "missing"

    def fails(*bundles: BundleToServe) -> None:
        serve(*bundles, options=ServeOptions(port=0), on_ready=lambda lines: pytest.fail("it is not ready"))

    with pytest.raises(BundleNotFoundError, match=r"^bad cannot be served: .*missing"):
        fails(good, BundleToServe(bundle=missing, names=["bad"]))
    with pytest.raises(InputError, match=r"Two models have the name tiny\.\nGive one"):
        fails(BundleToServe(bundle=tiny.path), BundleToServe(bundle=tiny.path))
    assert not opened, "what can be said without loading is said first"
    with pytest.raises(BackendError, match=r"^bad cannot be served: the device has no room\nFree some."):
        fails(good, BundleToServe(bundle=tiny.path, names=["bad"], sessions=2))
    assert len(opened) == 3
    for session in opened:
        with pytest.raises(BackendError, match=r"The session is closed"):
            _ = session.batch_tokens
    with pytest.raises(BackendError, match=r"^the device has no room"):
        fails(good)


def test_the_commands_options_are_for_all_bundles_or_for_the_one_that_is_named(
    tiny: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[BundleToServe, ...]] = []
    monkeypatch.setattr("hdruntime.serve.server.serve", lambda *bundles, **options: served.append(bundles))
    path = str(tiny.path)
    words = ["serve", f"embed,text-embedding-3-small={path}", path, f"org/b={path}", "--backend", "onnxruntime"]
    per_model = ["--backend", "embed=openvino", "--device", "org/b=cuda:0,cuda:1", "--device", "cpu"]
    more = [
        "--sessions",
        "2",
        "--sessions",
        "org/b=4",
        "--max-seq-length",
        "text-embedding-3-small=bundle",
        "--ranges",
        "embed=r.npy",
    ]
    assert main([*words, *per_model, *more, "--threads", "3"]) == 0
    ((embed, second, third),) = served
    assert embed == BundleToServe(
        bundle=path,
        names=("embed", "text-embedding-3-small"),
        backend="openvino",
        devices=["cpu"],
        sessions=2,
        threads=3,
        max_seq_length="bundle",
        ranges="r.npy",
    )
    assert second == BundleToServe(bundle=path, backend="onnxruntime", devices=["cpu"], sessions=2, threads=3)
    assert (third.names, third.devices, third.sessions) == (("org/b",), ["cuda:0", "cuda:1"], 4)
    for option, value, said in (
        ("--device", "nothing=cpu", "--device is for the bundle nothing, and no bundle has this name."),
        ("--backend", "embed=nothing", "'nothing' is none of auto,"),
        ("--sessions", "embed=0", "is not a whole number, 1 or more"),
    ):
        assert main([*words, option, value]) != 0
        assert said in capsys.readouterr().err


def test_sessions_share_the_threads_and_each_device_has_as_many(tiny: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int | None, str | None]] = []

    def load(*given: Any, threads: int | None, device: str | None, **options: Any) -> None:
        found.append((threads, device))

    monkeypatch.setattr("hdruntime.serve.server.load", load)
    monkeypatch.setattr("hdruntime.serve.server.chosen_threads", lambda asked: (asked or 8, ""))
    for sessions, devices, given in (
        (1, [None], None),
        (4, [None], None),
        (2, ["cuda:0", "cuda:1"], 6),
        (16, [None], None),
    ):
        served = BundleToServe(bundle=tiny.path, sessions=sessions, devices=devices, threads=given)
        assert len([*served.load(tiny)]) == sessions * len(devices)
    on_gpus = [(1, "cuda:0"), (1, "cuda:0"), (1, "cuda:1"), (1, "cuda:1")]
    assert found == [(None, None), *[(2, None)] * 4, *on_gpus, *[(1, None)] * 16]


def test_the_command_serves_an_embedder_and_a_reranker(sample_bundle: Path, reranker_bundle: Path) -> None:
    bundles = [f"embed={sample_bundle}", f"rerank={reranker_bundle}"]
    with command(bundles, "--backend", "onnxruntime", "--sessions", "embed=2") as (client, _):
        theirs = openai.OpenAI(base_url=f"{str(client.base_url).rstrip('/')}/v1", api_key="none")
        assert [model.id for model in theirs.models.list()] == ["embed", "rerank"]
        assert theirs.models.retrieve("rerank").id == "rerank"
        found = theirs.embeddings.create(model="embed", input=["What is read?"])
        with hdruntime.load(sample_bundle, "onnxruntime", threads=1) as session:
            expected = session.embed(["What is read?"])
        np.testing.assert_allclose([each.embedding for each in found.data], expected, atol=1e-6)
        with pytest.raises(openai.NotFoundError, match=r"There is no model 'ada'\. The server has embed, rerank"):
            theirs.embeddings.create(model="ada", input="a")
        below = client.post("/models/rerank/rerank", json={"query": "w1", "texts": ["w7", "w8"]})
        assert sorted(each["index"] for each in below.json()) == [0, 1], "as its clients have no key for a model"
        assert client.get("/ready").status_code == 200
        url = str(client.base_url).rstrip("/")
        vector = InferenceClient(f"{url}/models/embed").feature_extraction("What is read?")
        np.testing.assert_allclose(np.ravel(vector), expected[0], atol=1e-6)
