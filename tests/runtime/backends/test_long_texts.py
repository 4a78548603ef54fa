"""Texts of 32768 tokens: memory of causal models, and outputs that are not fetched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.bundle.reader import open_bundle
from hdruntime.tasks.embedding import Embedding
from support.needs import needs_openvino

_GROWTH = """
import sys
import numpy as np

import hdruntime

def status(key):
    with open("/proc/self/status") as lines:
        return 1024 * int(next(line for line in lines if line.startswith(key + ":")).split()[1])

bundle, backend, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
session = hdruntime.load(bundle, backend, precision="float32", threads=1)
def run(tokens):
    session(input_ids=np.full((1, tokens), 7), attention_mask=np.ones((1, tokens), np.int64))
run(16)
before = status("VmRSS")
run(tokens)
print(status("VmHWM") - before)
"""


def growth_bytes(bundle: Any, backend: str, tokens: int) -> int:
    """Growth of a process's peak memory by one text, as Linux counts it."""
    command = [sys.executable, "-c", _GROWTH, str(bundle.path), backend, str(tokens)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.nightly
def test_memory_of_a_causal_model_is_linear_in_tokens_in_onnx_runtime(tiny_bundles: Callable[..., Any]) -> None:
    bundle = tiny_bundles("qwen3", "sentence-similarity", max_len=32_768, num_hidden_layers=4)
    short, long = (growth_bytes(bundle, "onnxruntime", tokens) for tokens in (8192, 32_768))
    assert long < 4.5 * short, f"{long / short:.1f} times the memory of a fourth of the tokens"


@needs_openvino
@pytest.mark.nightly
def test_openvino_has_no_float_for_each_query_and_key(openvino_bundles: Callable[..., Any]) -> None:
    """Four layers of one head's scores, or of a float mask, would be 1 GiB each."""
    bundle = openvino_bundles("qwen3", "sentence-similarity", max_len=32_768, num_hidden_layers=4)
    tokens = 16_384
    grown = growth_bytes(bundle, "openvino", tokens)
    assert grown < tokens**2, f"{grown / tokens**2:.2f} bytes for each query and key"


def test_the_states_of_tokens_are_not_fetched_beside_an_embedding(tiny_bundles: Callable[..., Any]) -> None:
    opened = open_bundle(tiny_bundles("qwen3", "sentence-similarity").path)
    assert {spec.name for spec in opened.manifest.outputs} == {"last_hidden_state", "sentence_embedding"}
    outputs = Embedding(opened.manifest, None).outputs
    runner, fetched = OnnxRuntimeRunner(opened, threads=1), []
    session = runner._session

    class Watched:
        def run(self, names: Any, inputs: Any, options: Any) -> Any:
            fetched.append(list(names))
            return session.run(names, inputs, options)

    runner._session = Watched()
    ids = np.full((1, 5), 7)
    results = runner.start({"input_ids": ids, "attention_mask": np.ones_like(ids)}, outputs)()
    assert fetched == [["sentence_embedding"]] == [list(results)]
