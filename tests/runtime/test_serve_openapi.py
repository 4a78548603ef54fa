"""The server's description of itself, and requests that are made from it: none fails the server."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hdruntime
from fakes.recording_runner import RecordingRunner
from hdexport.support.memory import resident_bytes_of
from hdruntime.bundle.reader import open_bundle
from hdruntime.serve import LoadedModel, ServeOptions, application_of_models
from hdruntime.session import Session
from support.serving import answers_of
from support.tiny_bundle import make_bundle

PAGE = Path(__file__).parents[2] / "docs" / "serve_api.md"

_SECONDS = 600
"""Duration of the nightly run."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, reranker_bundle: Path) -> Iterator[list[LoadedModel]]:
    tiny = open_bundle(make_bundle(tmp_path_factory.mktemp("described")))
    with hdruntime.load(reranker_bundle, "onnxruntime", threads=1) as session:
        embed = LoadedModel(bundle=tiny, sessions=[Session(tiny, RecordingRunner())], names=["embed"])
        yield [embed, LoadedModel(bundle=open_bundle(reranker_bundle), sessions=[session], names=["rerank"])]


def described(models: list[LoadedModel], path: str = "/openapi.json", **options: Any) -> dict[str, Any]:
    (found,) = answers_of(application_of_models(models, ServeOptions(**options)), (path, None))
    assert found.status_code == 200
    found = found.json()
    assert isinstance(found, dict)
    return found


def body_schema(description: dict[str, Any], path: str) -> dict[str, Any]:
    """The schema of a path's body, with the schemas to which it refers."""
    content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return content | {"components": description["components"]}


def routes_of_page() -> set[tuple[str, str]]:
    """Methods and paths in the page's table of routes, where a method counts until the next one."""
    routes = set()
    rows = PAGE.read_text().partition("| route |")[2].partition("\n\n")[0].splitlines()
    for row in rows[2:]:
        method = ""
        for next_method, path in re.findall(r"`(?:(GET|POST) )?(/[^`]*)`", row.split("|")[1]):
            method = next_method or method
            routes.add((method, path.replace("NAME", "{model}")))
    return routes


def test_every_route_is_described_and_the_examples_of_its_body_fit(models: list[LoadedModel]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    description = described(models)
    assert description["openapi"] == "3.1.0"
    listed = answers_of(application_of_models(models, ServeOptions()), ("/nothing", None))[0].json()["error"]["message"]
    listed = listed.partition("There are")[2].rstrip(".")
    routes = {tuple(each.split(" ")) for each in re.findall(r"(?:GET|POST) /[^ ,]*", listed)}
    # Requests for the facts of one of several models have no key that chooses it.
    routes -= {("GET", "/info")}
    found = {(method.upper(), path) for path, methods in description["paths"].items() for method in methods}
    assert found == routes
    # The page has those of other tasks, too.
    others = {("POST", "/v1/multi-vector"), ("POST", "/embed_sparse"), ("GET", "/info")}
    assert routes_of_page() == routes | others
    schema = body_schema(description, "/v1/embeddings")
    for body in ({"input": "a"}, {"input": ["a"], "model": "embed", "embedding_type": "base64", "normalize": None}):
        jsonschema.validate(body, schema)
    for wrong in ({}, {"input": "a", "model": "other"}, {"input": "a", "nothing": 1}, {"input": "a", "modality": "b"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    # Both models answer there, with bodies of their own.
    root = body_schema(description, "/tokenize")
    jsonschema.validate({"inputs": "a", "model": "rerank"}, root)
    with pytest.raises(jsonschema.ValidationError, match="'model' is a required property"):
        jsonschema.validate({"inputs": "a"}, root)


def test_a_description_says_the_prefix_the_key_and_of_one_model_that_any_name_fits(models: list[LoadedModel]) -> None:
    below = described(models, "/p/models/rerank/openapi.json", root_path="/p")
    assert below["servers"] == [{"url": "/p/models/rerank"}]
    assert "/rerank" in below["paths"]
    assert "/v1/embeddings" not in below["paths"]
    assert "/info" in below["paths"]
    (model,) = below["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert model["schema"] == {"type": "string"}
    app = application_of_models(models[:1], ServeOptions(api_key="secret"))

    async def ask() -> Any:
        headers = {"Authorization": "Bearer secret"}
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:
            return (await client.get("/openapi.json", headers=headers)).json()

    with_key = asyncio.run(ask())
    assert with_key["paths"]["/embed"]["post"]["security"] == [{"key": []}]
    assert "security" not in with_key["paths"]["/health"]["get"]
    assert with_key["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | FLOATS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
OF_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "string": st.sampled_from(["read", "long documents", ""]) | st.text(max_size=8),
    "integer": st.integers(-1, 20) | st.integers(),
    "number": st.integers(0, 3) | FLOATS,
    "boolean": st.booleans(),
    "null": st.none(),
}


def mostly(fitting: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A strategy's values, and sometimes any others."""
    return st.integers(0, 7).flatmap(lambda number: fitting if number else ANY)


def values_of(schema: dict[str, Any], schemas: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that fit a schema, most of them."""
    if "$ref" in schema:
        return values_of(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema or "allOf" in schema:
        return st.one_of(*(values_of(each, schemas) for each in schema.get("anyOf") or schema["allOf"][:1]))
    kind = schema.get("type")
    if kind == "array":
        return st.lists(values_of(schema.get("items", {}), schemas), max_size=3)
    if kind == "object":
        fields = {key: mostly(values_of(each, schemas)) for key, each in schema.get("properties", {}).items()}
        required = {key: fields.pop(key) for key in schema.get("required", ()) if key in fields}
        few = st.lists(st.sampled_from(sorted(fields)), max_size=2) if fields else st.just([])
        return few.flatmap(lambda keys: st.fixed_dictionaries(required | {key: fields[key] for key in keys}))
    return OF_TYPE.get(str(kind), mostly(OF_TYPE["string"] | st.lists(OF_TYPE["string"], max_size=3)))


def test_no_body_fails_the_server(models: list[LoadedModel]) -> None:
    asked: dict[str, st.SearchStrategy[Any]] = {}
    for name in ("embed", "rerank"):
        description = described(models, f"/models/{name}/openapi.json")
        schemas = description["components"]["schemas"]
        for path in (path for path, methods in description["paths"].items() if "post" in methods):
            full = f"/models/{name}{path.replace('{model}', name)}"
            asked[full] = mostly(values_of(body_schema(description, path), schemas))
    statuses: Counter[int] = Counter()

    @settings(max_examples=60, derandomize=True, suppress_health_check=[*HealthCheck])
    @given(data=st.data())
    def ask(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(asked)))
        app = application_of_models(models, ServeOptions())
        body = data.draw(asked[path])
        (found,) = answers_of(app, (path, [] if body is None else body))
        statuses[found.status_code] += 1
        assert found.status_code in (200, 400, 422), found.text

    ask()
    assert statuses[200] > 5, statuses


@pytest.mark.nightly
def test_ten_minutes_of_schemathesis_find_no_failure_no_hang_and_no_growth(
    sample_bundle: Path, reranker_bundle: Path, tmp_path: Path
) -> None:
    """Requests that fit the description, and requests that do not."""
    schemathesis = shutil.which("schemathesis")
    if schemathesis is None:
        pytest.skip("schemathesis is not on the PATH: pipx install schemathesis")
    program = [Path(sys.executable).with_name("hdexport"), "serve"]
    options = [
        f"embed={sample_bundle}",
        f"rerank={reranker_bundle}",
        "--port",
        "0",
        "--threads",
        "1",
        "--backend",
        "onnxruntime",
        "--sessions",
        "embed=2",
    ]
    with subprocess.Popen([*map(str, program), *options], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = server.stderr.readline().split(": ")[-1].strip()
            memory = 0

            def run(seconds: int, *more: str) -> None:
                command = [schemathesis, "run", f"{url}/openapi.json", "--max-time", str(seconds)]
                # Values that no type describes are refused, such as a list without texts.
                checks = ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--request-timeout", "60"]
                done = subprocess.run([*command, *checks, *more], cwd=tmp_path, capture_output=True, text=True)
                assert done.returncode == 0, done.stdout[-10_000:] + done.stderr

            run(_SECONDS // 10)
            memory = resident_bytes_of([server.pid])
            run(_SECONDS - _SECONDS // 10)
            grown = resident_bytes_of([server.pid]) - memory
            metrics = httpx2.get(f"{url}/metrics", verify=False).text
        finally:
            server.send_signal(signal.SIGTERM)
            said = server.stderr.read()
            server.wait(60)
    assert server.returncode in (0, 143)
    assert "Traceback" not in said, said
    assert 'status="5' not in metrics
    answered = sum(map(float, re.findall(r'_requests_total{.*status="200"} (\S+)', metrics)))
    assert answered > 1000
    assert grown < 100 * 2**20, "bytes of the server's process, after the first minute"
