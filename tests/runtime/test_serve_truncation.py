"""Every route that truncates a text says so: in the header, in the metrics, and in its answer if there is a place."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

import hdruntime
from fakes.recording_runner import RecordingRunner
from hdruntime.bundle.reader import open_bundle
from hdruntime.serve import LoadedModel, ServeOptions, application, application_of_models
from hdruntime.session import Session
from support.bge_m3_models import made_bge_m3
from support.serving import answers_of
from support.tiny_bundle import make_bundle

LONG, SHORT = "long documents are read whole " * 20, "read"
IN_FULL = {"/v1/contextualizedembeddings", "/tokenize", "/decode", "/detokenize"}
"""Routes that truncate nothing."""


def tensor(name: str, *texts: str) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": texts}


INPUTS, TEXTS, INPUT = ({key: [SHORT, LONG]} for key in ("inputs", "texts", "input"))
DOCUMENTS, TEXTS_TO_RANK = ({"query": SHORT, key: [SHORT, LONG]} for key in ("documents", "texts"))
INSTANCES, VERTEX = {"instances": [{"inputs": SHORT}, {"inputs": LONG}]}, ("/vertex", "/v1/models/{model}:predict")
SCORES = {"text_1": SHORT, "text_2": [SHORT, LONG]}

EMBEDDING: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("/", "/embed", "/embed_all", "/invocations"), INPUTS),
    **dict.fromkeys(("/v2/embed", "/v1/embed"), TEXTS),
    **dict.fromkeys(("/v1/embeddings", "/pooling"), INPUT),
    **dict.fromkeys(VERTEX, INSTANCES),
    **dict.fromkeys(("/score", "/v1/score"), SCORES),
    "/similarity": {"inputs": {"source_sentence": SHORT, "sentences": [LONG]}},
    "/v2/models/{model}/infer": {"inputs": [tensor("TEXT", SHORT, LONG)]},
}
RERANKING: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), DOCUMENTS),
    **dict.fromkeys(("/", "/invocations"), TEXTS_TO_RANK),
    **dict.fromkeys(("/pooling", "/classify", "/v1/classify"), INPUT),
    **dict.fromkeys(("/score", "/v1/score"), SCORES),
    **dict.fromkeys(VERTEX, INSTANCES),
    "/predict": INPUTS,
    "/v2/models/{model}/infer": {"inputs": [tensor("TEXT", SHORT, SHORT), tensor("TEXT_PAIR", SHORT, LONG)]},
}


HYBRID = EMBEDDING | {"/embed_sparse": INPUTS, "/v1/multi-vector": INPUT}
"""Sparse embeddings and embeddings of tokens, too; the graphs do not give the states of tokens."""
del HYBRID["/embed_all"]


@pytest.mark.parametrize("kind", ["embedding", "reranking", "hybrid"])
def test_every_route_says_what_was_truncated(
    kind: str, tmp_path: Path, reranker_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    requests, path_of = {
        "embedding": (EMBEDDING, lambda: make_bundle(tmp_path / "bundle")),
        "reranking": (RERANKING, lambda: reranker_bundle),
        "hybrid": (HYBRID, lambda: made_bge_m3(tmp_path_factory) / "bundle"),
    }[kind]
    bundle, is_embedding = open_bundle(path_of()), kind == "embedding"
    load = hdruntime.load if not is_embedding else lambda bundle, *_, **__: Session(bundle, RecordingRunner())
    with load(bundle, "onnxruntime", threads=1) as session:
        app = application(bundle, session, ServeOptions(truncate="end"))
        bodies = {path.replace("{model}", bundle.manifest.name): body for path, body in requests.items()}
        unknown, *answers, metrics = answers_of(app, ("/no/route", {}), *bodies.items(), ("/metrics", None))
    routes = set(re.findall(r"POST ([^,]+?)[,.][ \"]", unknown.text.partition("There are")[2]))
    routes -= IN_FULL | ({"/embed_all"} if kind == "hybrid" else set())
    assert requests.keys() == routes, "a new route that takes texts says what it truncates"
    for (path, declared), answer in zip(zip(bodies, requests, strict=True), answers, strict=True):
        assert answer.status_code == 200, f"{path}: {answer.text}"
        assert answer.headers.get("x-truncated-inputs") == "1", path
        labels = f'{{model="{bundle.manifest.name}",route="{declared}"}}'
        assert f"hdexport_truncated_texts_total{labels} 1.0" in metrics.text
        content = answer.json()
        if isinstance(content, dict) and "usage" in content:
            assert content["usage"]["truncated_inputs"] == 1, path
            rows = content.get("data") or content["results"]
            (row,) = (row for row in rows if row.get("truncated"))
            assert (row["index"], row["tokens_used"]) == (1, session.max_seq_length), path


def test_several_sessions_count_what_one_counts(tmp_path: Path) -> None:
    """Twelve requests at the same time, each of three texts, of which the second is truncated in three of four."""
    bundle = open_bundle(make_bundle(tmp_path / "bundle"))
    bodies = [
        {"input": [SHORT, f"{LONG} {number}" if number % 4 else SHORT, SHORT], "truncate_prompt_tokens": 5 + number % 4}
        for number in range(12)
    ]

    async def told(runners: list[RecordingRunner]) -> tuple[list[Any], list[str]]:
        sessions = [Session(bundle, runner) for runner in runners]
        app = application_of_models([LoadedModel(bundle=bundle, sessions=sessions)], ServeOptions())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:
            found = await asyncio.gather(*(client.post("/v1/embeddings", json=body) for body in bodies))
            metrics = (await client.get("/metrics")).text
        answers = [(each.headers.get("x-truncated-inputs"), each.json()) for each in found]
        return answers, re.findall(r"^hdexport_(?:truncated_texts|tokens|requests)_total.*", metrics, re.MULTILINE)

    expected, counters = asyncio.run(told([RecordingRunner()]))
    usages = [answer["usage"] for _, answer in expected]
    assert [usage.get("truncated_inputs", 0) for usage in usages] == [0, 1, 1, 1] * 3
    assert [usage["prompt_tokens"] for usage in usages] == [9, 12, 13, 14] * 3
    assert [header for header, _ in expected] == [None, "1", "1", "1"] * 3
    truncated = next(line for line in counters if "truncated" in line)
    assert truncated.endswith('{model="tiny",route="/v1/embeddings"} 9.0')
    assert any(line.endswith('hdexport_tokens_total{model="tiny"} 144.0') for line in counters)
    for number in (2, 3):
        # A batch is a text or two, so that each session has some.
        runners = [RecordingRunner(batch_tokens=8) for _ in range(number)]
        assert asyncio.run(told(runners)) == (expected, counters)
        assert all(runner.shapes for runner in runners)
