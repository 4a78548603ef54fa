"""The environments of `make test-oldest`: their versions are the lower bounds, and the runtime's answers texts.

The runtime has one without the exporter, whose libraries raise its bounds. What each library computes is in the other
files that `make test-oldest` runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hdruntime
from support.comparators import assert_close
from support.hub_server import served_hub
from tests.exporter.conftest import TinyBundles

RUNTIME = Path(sys.prefix).with_name("oldest-runtime") / "bin" / "python"

pytestmark = pytest.mark.skipif(
    Path(sys.prefix).name != "oldest", reason="these are not the environments of `make test-oldest`"
)

RUNTIME_EXTRAS = ("", "openvino", "ray", "hub", "serve")
EXPORTER_EXTRAS = ("export", "rtx", "keras", "bench", "dev")

_VERSIONS = """
import importlib.metadata, json
print(json.dumps({package.name: package.version for package in importlib.metadata.distributions()}))
"""

_EMBED = """
import importlib.util, sys
import numpy as np
import hdruntime
assert importlib.util.find_spec("torch") is None
bundle, backend, file, *texts = sys.argv[1:]
with hdruntime.load(bundle, backend, threads=1, max_seq_length="bundle") as session:
    np.save(file, session.embed(texts))
"""


TEXTS = ["w1 w2 w3", " ".join(f"w{number}" for number in range(100)), ""]


def of_the_runtime(program: str, *arguments: object) -> str:
    """What a program prints in the runtime's environment."""
    command = [RUNTIME, "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def bounds(extras: Sequence[str]) -> dict[str, Version]:
    """The lower bounds of these extras; ``""`` are the dependencies of every installation."""
    found = {}
    for requirement in map(Requirement, importlib.metadata.requires("hdexport") or ()):
        marker = requirement.marker
        if "" in extras if marker is None else any(marker.evaluate({"extra": extra}) for extra in extras):
            (bound,) = [each.version for each in requirement.specifier if each.operator == ">="]
            found[canonicalize_name(requirement.name)] = Version(bound)
    return found


def not_at(bounds: dict[str, Version], installed: dict[str, str]) -> dict[str, str]:
    """Packages of a version that does not begin as its bound."""
    versions = {canonicalize_name(name): Version(version) for name, version in installed.items()}
    return {
        name: f"{versions[name]} is installed, the bound is {bound}"
        for name, bound in bounds.items()
        if versions[name].release[: len(bound.release)] != bound.release
    }


def assert_embeds(bundle: Path, vectors: Path) -> None:
    """These are the vectors of `TEXTS` here."""
    with hdruntime.load(bundle, "onnxruntime", threads=1, max_seq_length="bundle") as session:
        assert_close(np.load(vectors), session.embed(TEXTS), atol=1e-5)


def test_the_exporter_and_what_tests_need_are_at_their_lower_bounds() -> None:
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    assert not_at(bounds(EXPORTER_EXTRAS), installed) == {}


def test_the_runtime_is_at_its_lower_bounds() -> None:
    assert not_at(bounds(RUNTIME_EXTRAS), json.loads(of_the_runtime(_VERSIONS))) == {}


def test_a_version_that_is_not_the_bound_is_found() -> None:
    found = not_at({"numpy": Version("2.0"), "rich": Version("13")}, {"NumPy": "2.10.0", "rich": "13.5.2"})
    assert found == {"numpy": "2.10.0 is installed, the bound is 2.0"}


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_the_runtime_embeds_texts(openvino_bundles: TinyBundles, tmp_path: Path, backend: str) -> None:
    bundle = openvino_bundles("roberta", "sentence-similarity").path
    of_the_runtime(_EMBED, bundle, backend, tmp_path / "vectors.npy", *TEXTS)
    assert_embeds(bundle, tmp_path / "vectors.npy")


def test_the_runtime_loads_a_bundle_of_the_hub(
    openvino_bundles: TinyBundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = openvino_bundles("roberta", "sentence-similarity").path
    with served_hub(tmp_path, monkeypatch) as hub:
        hub.push("someone/bundle", bundle)
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        of_the_runtime(_EMBED, "someone/bundle", "onnxruntime", tmp_path / "vectors.npy", *TEXTS)
    assert_embeds(bundle, tmp_path / "vectors.npy")
