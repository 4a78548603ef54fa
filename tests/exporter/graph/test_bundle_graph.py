"""The graphs of a bundle, as the exporter reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hdexport.graph.bundle_graph import read_portable_graph
from hdruntime.bundle.reader import open_bundle
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import BundleCorruptError


def test_a_bundle_without_the_graph_that_others_are_made_from_is_refused(tiny_bundles: Callable[..., Any]) -> None:
    bundle = open_bundle(tiny_bundles("roberta", "text-classification").path)
    graphs = tuple(graph for graph in bundle.manifest.graphs if graph.lowering != PORTABLE_LOWERING)
    lacking = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, graphs=graphs))
    with pytest.raises(BundleCorruptError, match=r"has no portable graph(.|\n)*Build the bundle again"):
        read_portable_graph(lacking)
    assert len(read_portable_graph(bundle).graph) > 0
