"""`hdexport serve` as hosting platforms start it: without arguments, with variables and bundles in stores."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest

import hdruntime.serve
from hdexport.cli import main
from hdexport.cli.variables import take_defaults
from hdexport.package.write import PackageOptions, package_bundle
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BundleCorruptError, BundleNotFoundError, InputError, MissingDependencyError
from hdruntime.serve.stores import opened_in_store
from support.pages import ROOT
from support.serving import command
from support.tiny_bundle import make_bundle

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def image(file: Path) -> tuple[list[str], dict[str, str]]:
    """The words that start a container, and its variables for `hdexport serve`."""
    text = file.read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    return json.loads(entry), dict(re.findall(r"\b(HDEXPORT_\w+)=(\S+)", text))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the command gives the server."""

    def ask(*words: str) -> tuple[Any, Any]:
        given: dict[str, Any] = {}
        monkeypatch.setattr(
            hdruntime.serve,
            "serve",
            lambda *bundles, options, on_ready: given.update(bundles=bundles, options=options),
            raising=False,
        )
        assert main(["serve", *words]) == 0
        return given["bundles"], given["options"]

    return ask


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_a_container_that_is_started_with_serve_alone_is_sagemakers(
    file: Path, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, variables = image(file)
    assert entry == ["hdexport"]
    assert "LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true" in file.read_text()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (bundle,), options = asked()
    assert (bundle.bundle, options.host, options.port) == ("/opt/ml/model", "0.0.0.0", 8080)
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "8099")
    assert asked()[1].port == 8099
    (bundle,), options = asked("other", "--port", "9000", "--host", "127.0.0.1")
    assert (bundle.bundle, options.host, options.port) == ("other", "127.0.0.1", 9000)


def test_vertex_ai_names_bundle_and_port(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HDEXPORT_BUNDLE": "/opt/ml/model",
        "HDEXPORT_PORT": "8080",
        "AIP_STORAGE_URI": "gs://bucket/a=b/bundle",
        "AIP_HTTP_PORT": "8081",
    }.items():
        monkeypatch.setenv(name, value)
    (bundle,), options = asked()
    assert (bundle.bundle, bundle.names, options.port) == ("gs://bucket/a=b/bundle", (), 8081)
    monkeypatch.setenv("AIP_STORAGE_URI", "")
    (bundle,), _ = asked()
    assert bundle.bundle == "/opt/ml/model", "an empty variable is none"


def test_every_option_with_a_value_has_a_variable(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HDEXPORT_BUNDLE": "embed=/e rerank=/r",
        "HDEXPORT_TRUNCATE": "end",
        "HDEXPORT_CORS_ORIGIN": "https://a.example https://b.example",
        "HDEXPORT_MAX_SEQ_LENGTH": "embed=4096 512",
        "HDEXPORT_TIMEOUT": "7.5",
    }.items():
        monkeypatch.setenv(name, value)
    bundles, options = asked()
    assert [(each.bundle, each.names, each.max_seq_length) for each in bundles] == [
        ("/e", ("embed",), 4096),
        ("/r", ("rerank",), 512),
    ]
    assert (options.truncate, options.timeout) == ("end", 7.5)
    assert options.cors_origin == ("https://a.example", "https://b.example")
    assert asked("--truncate", "error")[1].truncate == "error"


def test_a_variable_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value, message in (
        ("HDEXPORT_PORT", "x", "The variable HDEXPORT_PORT is 'x': 'x' is not a whole number"),
        ("AIP_HTTP_PORT", "-1", "The variable AIP_HTTP_PORT is '-1': "),
        ("HDEXPORT_TRUNCATE", "start", "HDEXPORT_TRUNCATE is 'start'; it must be one of error, end, split"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert main(["serve", "bundle"]) == 1
            assert message in capsys.readouterr().err
    assert main(["serve"]) == 1
    assert "Set the variable HDEXPORT_BUNDLE, on Vertex AI AIP_STORAGE_URI, or name one" in capsys.readouterr().err


def test_flags_without_a_value_have_no_variable() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--number", type=int, default=1)
    take_defaults(parser, {"HDEXPORT_FAST": "1", "HDEXPORT_NUMBER": "2"}, {})
    assert vars(parser.parse_args([])) == {"fast": False, "number": 2}


@pytest.fixture
def store() -> Any:
    """A store in memory with a bundle, and its URL."""
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture
def stored(store: Any, tmp_path: Path) -> tuple[Path, str]:
    bundle = make_bundle(tmp_path / "bundle", task="sentence-similarity", external_data=True)
    (bundle / "model.safetensors").write_bytes(b"not in the manifest")
    store.put(str(bundle), "/models/bundle", recursive=True)
    return bundle, "memory://models/bundle"


def test_a_bundle_in_a_store_is_copied_once_and_served(
    stored: tuple[Path, str], store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, url = stored
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("AIP_STORAGE_URI", url)
    monkeypatch.setenv("AIP_HTTP_PORT", "0")
    with command([]) as (client, _):
        assert client.post("/invocations", json={"inputs": "read"}).status_code == 200
    (copy,) = (tmp_path / "cache" / "hdexport" / "bundles").iterdir()
    assert open_bundle(copy).manifest == open_bundle(bundle).manifest
    assert not (copy / "model.safetensors").exists()
    monkeypatch.setattr(store, "get_file", lambda *_, **__: pytest.fail("it is there"))
    assert opened_in_store(f"{url}/", cache=copy.parent).path == copy
    (copy / "model.onnx").unlink()
    monkeypatch.setattr(store, "get_file", lambda source, target: Path(target).write_bytes(b"other"))
    with pytest.raises(BundleCorruptError):
        opened_in_store(url, cache=copy.parent)


def test_what_is_no_bundle_in_a_store_is_said(
    stored: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BundleNotFoundError, match=r"no bundle at memory://models: it has no manifest\.json"):
        opened_in_store("memory://models", cache=tmp_path / "cache")
    with pytest.raises(MissingDependencyError, match="needs the package 'gcsfs'"):
        opened_in_store("gs://bucket/bundle", cache=tmp_path / "cache")
    with pytest.raises(InputError, match=r"is not understood: .*\nName a path, or a URL"):
        opened_in_store("nothing://bucket/bundle", cache=tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(fsspec.filesystem("memory"), "cat_file", Mock(side_effect=OSError("The store is away.")))
        with pytest.raises(InputError, match=r"memory://models cannot be read: The store is away\.\nCheck the URL"):
            opened_in_store("memory://models", cache=tmp_path / "cache")


def test_the_services_of_packages_are_those_of_their_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SageMaker puts the bundle into /opt/ml/model, and sets the script's variables; KServe gives the arguments."""
    bundle = open_bundle(make_bundle(tmp_path / "bundle", task="sentence-similarity"))
    for target in ("sagemaker", "kserve"):
        package_bundle(bundle, PackageOptions(target=target, output=tmp_path / target, name="encoder"))
    monkeypatch.setitem(sys.modules, "boto3", ModuleType("boto3"))
    script = runpy.run_path(str(tmp_path / "sagemaker" / "deploy.py"))
    calls: dict[str, Any] = {}
    client = SimpleNamespace(
        **{
            name: lambda name=name, **given: calls.update({name: given})
            for name in ("create_model", "create_endpoint_config", "create_endpoint")
        }
    )
    script["deploy"](client, "image", "role", "s3://bucket/bundle")
    for name, value in calls["create_model"]["PrimaryContainer"]["Environment"].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HDEXPORT_BUNDLE", str(tmp_path / "sagemaker" / "bundle"))
    monkeypatch.setenv("SAGEMAKER_BIND_TO_PORT", "0")
    with command([]) as (server, _):
        assert server.get("/ping").status_code == 200
        assert len(server.post("/invocations", json={"inputs": ["read", "whole"]}).json()) == 2
    service = (tmp_path / "kserve" / "inferenceservice.yaml").read_text()
    (words,) = re.findall(r"args: \[(.*)\]", service)
    (probe,) = re.findall(r"path: (\S+)", service)
    given = [word.strip('"') for word in words.split(", ")]
    assert given[0] == "serve"
    mounted = [word.replace("/mnt/models", str(tmp_path / "kserve" / "bundle")) for word in given[1:]]
    with command(mounted, *("--host", "127.0.0.1")) as (server, _):
        assert server.get(probe).json() == {"name": "encoder", "ready": True}
        tensor = {"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": ["read"]}
        found = server.post("/v2/models/encoder/infer", json={"inputs": [tensor]}).json()
        assert found["outputs"][0]["shape"] == [1, 4]


BOTO3 = """
import json, runpy, sys
import boto3
from botocore.stub import Stubber

script = runpy.run_path("deploy.py")
client = boto3.client("sagemaker", region_name="eu-west-1", aws_access_key_id="a", aws_secret_access_key="b")
arn = "arn:aws:sagemaker:eu-west-1:123456789012:"
with Stubber(client) as stubber:
    stubber.add_response("create_model", {"ModelArn": arn + "model/encoder"})
    stubber.add_response("create_endpoint_config", {"EndpointConfigArn": arn + "endpoint-config/encoder"})
    stubber.add_response("create_endpoint", {"EndpointArn": arn + "endpoint/encoder"})
    role = "arn:aws:iam::123456789012:role/runs"
    script["deploy"](client, "123456789012.dkr.ecr.eu-west-1.amazonaws.com/hdexport:1", role, "s3://bucket/bundle")
    stubber.assert_no_pending_responses()
"""


@pytest.mark.nightly
def test_boto3_accepts_the_endpoint_of_a_package(tmp_path: Path) -> None:
    """Its own checks of the calls' parameters; nothing is asked of AWS."""
    python = ROOT / ".venv" / "readers" / "boto3" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python.parent.parent} is made by make test-all")
    bundle = open_bundle(make_bundle(tmp_path / "bundle", task="sentence-similarity"))
    package_bundle(bundle, PackageOptions(target="sagemaker", output=tmp_path / "package", name="encoder"))

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, "-c", BOTO3], cwd=tmp_path / "package", capture_output=True, text=True)

    done = run()
    assert done.returncode == 0, done.stderr
    script = tmp_path / "package" / "deploy.py"
    script.write_text(script.read_text().replace('"S3DataType"', '"DataType"'))
    assert "ParamValidationError" in run().stderr
