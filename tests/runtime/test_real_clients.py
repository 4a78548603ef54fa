"""Clients of other products, each in an environment of its own, receive the bundle's own numbers."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.real_clients import CLIENTS, PROGRAMS, ROOT, TOLERANCE, Served, error, served
from support.tiny_bundle import make_bundle


@pytest.fixture(scope="module")
def servers(sample_bundle: Path, reranker_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("clients")
    classifier = make_bundle(folder / "classifier", task="text-classification")
    with served(sample_bundle, reranker_bundle, classifier, folder) as found:
        yield found


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_client_receives_the_bundles_numbers(name: str, servers: Served) -> None:
    if not (CLIENTS / name / "bin" / "python").exists():
        pytest.skip(f"{CLIENTS / name} is made by make test-all")
    rows = servers.received(name)
    assert rows
    assert [row for row in rows if not row.error <= TOLERANCE] == []


def test_numbers_that_differ_are_found() -> None:
    vectors = np.array([[0.5, -0.25], [1, 0]], np.float32)
    expected = {
        "embeddings": vectors,
        "base64": vectors,
        "int8": [[1, 2]],
        "ids": [[5, 6]],
        "classes": [{"a": 0.5, "b": 0.25}],
    }
    encoded = [base64.b64encode(row.tobytes()).decode() for row in vectors]
    right = {
        "embeddings": vectors.tolist(),
        "base64": encoded,
        "int8": [[1, 2]],
        "ids": [[5, 6]],
        "classes": [{"b": 0.25, "a": 0.5}],
    }
    for name, value in right.items():
        assert error(value, expected, name) == 0
    for name, value, least in (
        ("embeddings", [[0.5, -0.25], [1, 2e-6]], 1.9e-6),
        ("embeddings", vectors.tolist()[:1], np.inf),
        ("embeddings", vectors[:, :1].tolist(), np.inf),
        ("base64", encoded[::-1], 0.25),
        ("int8", [[1, 3]], np.inf),
        ("ids", [[5]], np.inf),
        ("classes", [{"a": 0.5}], np.inf),
        ("classes", [{"a": 0.25, "b": 0.5}], 0.25),
    ):
        assert error(value, expected, name) >= least > TOLERANCE, name


def test_the_page_has_the_versions_that_the_makefile_installs() -> None:
    pins = dict(re.findall(r"^client_(\w+) := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    assert set(pins) == set(PROGRAMS)
    for name, packages in pins.items():
        client, version = re.findall(r"([\w-]+)(?:\[\w+\])?==([\d.]+)", packages)[0]
        assert f"| {client} {version} " in page, f"{name}: run make clients, and python docs/generate_clients.py"
