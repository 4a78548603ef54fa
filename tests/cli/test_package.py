"""`hdexport package`, through the installed entry point, of a bundle that was really built."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import hdruntime

Command = Callable[..., subprocess.CompletedProcess[str]]

IDS = np.array([[2, 5, 6, 7, 3], [2, 8, 3, 0, 0]])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.fixture(scope="module")
def repository(installed: Command, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the one model ``encoder``."""
    path = tmp_path_factory.mktemp("triton") / "models"
    done = installed("package", bundle, "--triton", path, "--name", "encoder")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"{path}/encoder: the graph, in ONNX Runtime on a CPU, batches of up to 8; the bundle has no TensorRT engine\n"
        f"Serve it: tritonserver --model-repository {path}\n"
    )
    return path


def test_the_model_directory_is_what_triton_documents(repository: Path) -> None:
    model = repository / "encoder"
    found = {path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()}
    assert found == {"config.pbtxt", "tokenizer.json", "1/model.onnx", "1/model.onnx.data"}
    config = text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert [item.name for item in config.input] == ["input_ids", "attention_mask", "token_type_ids"]
    assert [list(item.dims) for item in config.output] == [[-1, 32]]


def test_the_packaged_model_answers_as_the_bundle_does_whatever_the_padding(repository: Path, bundle: Path) -> None:
    # By path, from nothing but the repository, as Triton's backend does: the weights lie beside the graph.
    packaged = onnxruntime.InferenceSession(str(repository / "encoder" / "1" / "model.onnx"))
    feeds = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": np.zeros_like(IDS)}
    (hidden_states,) = packaged.run(["last_hidden_state"], feeds)
    with hdruntime.load(bundle) as session:
        expected = session(**feeds)["last_hidden_state"]
    # Row by row without padding there, with a mask here: sums of float32 in another order.
    np.testing.assert_allclose(hidden_states[MASK == 1], expected[MASK == 1], rtol=0, atol=2e-6)
    assert np.abs(hidden_states[1, :3] - hidden_states[0, :3]).max() > 0.1


def test_a_model_that_is_there_is_refused(repository: Path, bundle: Path, refused: Callable[..., str]) -> None:
    refused("package", bundle, "--triton", repository, "--name", "encoder", message="Replace it with --force")


def test_an_engine_that_is_not_there_is_refused(tmp_path: Path, bundle: Path, refused: Callable[..., str]) -> None:
    arguments = ("package", bundle, "--triton", tmp_path / "models", "--backend", "tensorrt")
    refused(*arguments, message="hdexport build MODEL --target tensorrt --attention-impl native")
    assert not (tmp_path / "models").exists()
