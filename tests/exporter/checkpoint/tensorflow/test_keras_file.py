"""Keras' HDF5 files are read whole, and what is not one is refused; `test_converted.py` has both layouts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.tensorflow.keras_file import read_keras_file
from hdexport.checkpoint.weight_files import read_weights
from hdruntime.errors import MissingDependencyError, ModelError
from support.tensor_bundles import BERT4KERAS, copied_checkpoint

h5py: Any = pytest.importorskip("h5py", reason="h5py, which reads Keras' files, is not installed")


def test_a_whole_model_and_long_lists_of_names_are_read(tmp_path: Path) -> None:
    """Keras' save() has a group around the weights, and cuts lists of names that HDF5 has no room for."""
    file = tmp_path / "model.h5"
    with h5py.File(BERT4KERAS / "hierarchical" / "best_model.h5") as source, h5py.File(file, "w") as target:
        source.copy(source, target, name="model_weights")
        attributes = target["model_weights"].attrs
        names = attributes.pop("layer_names")
        for part, some in enumerate(np.array_split(names, 3)):
            attributes[f"layer_names{part}"] = some
    expected = read_keras_file(BERT4KERAS / "hierarchical" / "best_model.h5").named
    assert list(read_keras_file(file).named) == list(expected)


def other(file: Path) -> None:
    with h5py.File(file, "w") as opened:
        opened["something"] = np.zeros(3)


def emptied(file: Path) -> None:
    with h5py.File(file, "a") as opened:
        group = opened["Transformer-0-FeedForward"]
        group.attrs["weight_names"] = group.attrs["weight_names"][:3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:5000]), r"best_model.h5 cannot be read as a Keras file"),
        (other, r"is HDF5 that Keras' save_weights\(\) did not write: it holds 'something'"),
        (emptied, r"best_model.h5 lacks 'bert/encoder/layer_0/output/dense/bias', which a BertForMaskedLM needs"),
    ],
)
def test_what_is_not_such_a_file_is_refused(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    directory = copied_checkpoint("hierarchical", tmp_path)
    change(directory / "best_model.h5")
    with pytest.raises(ModelError, match=message):
        find_checkpoint(directory)


def test_without_h5py_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = copied_checkpoint("hierarchical", tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingDependencyError, match=r"package 'h5py'.*\n.*pip install 'hdexport\[keras\]'"):
        find_checkpoint(directory)


ATTENTION = ("q_dense", "k_dense", "v_dense", "o_dense")
LAYERS = {
    "MultiHeadSelfAttention": ("multi_head_attention", ATTENTION),
    "FeedForward": ("feed_forward", ("i0_dense", "o_dense")),
    "Dense": ("dense", ()),
    "Norm": ("layer_normalization", ()),
    "Bias": ("scale_offset", ()),
    "Position": ("position_embedding", ()),
}
"""End of a layer's name in bert4keras -> its class in snake case, and its layers; others are Embedding."""


def write_as_keras_3(directory: Path, own: dict[str, np.ndarray], *, is_nested: bool = False) -> None:
    """Write the weights of a directory anew, as Keras 3.15.1 writes NAME.weights.h5; `own` are layers of a user."""
    layers = read_keras_file(directory / "best_model.h5").named | {
        f"{name}-Dense": [each] for name, each in own.items()
    }
    (directory / "best_model.h5").unlink()
    counts: Counter[str] = Counter()
    with h5py.File(directory / "best_model.weights.h5", "w") as file:
        root = file.create_group("layers/functional/layers" if is_nested else "layers")
        # Last layers first: names tell them apart, and not their order.
        for name, arrays in reversed(layers.items()):
            kind, parts = LAYERS.get(name.rpartition("-")[2], ("embedding", ()))
            group = root.create_group(f"{kind}_{counts[kind]}" if counts[kind] else kind)
            counts[kind] += 1
            group.create_group("vars").attrs["name"] = name
            for number, part in enumerate(parts):
                inner = group.create_group(f"{part}/vars")
                inner.attrs["name"] = f"dense_{number}"
                for index in range(2):
                    inner[str(index)] = arrays[2 * number + index]
            for index, array in enumerate(() if parts else arrays):
                group[f"vars/{index}"] = array
        file.create_group("vars").attrs["name"] = "functional_1"


@pytest.mark.parametrize("is_nested", [False, True])
def test_names_that_keras_3_keeps_are_read(tmp_path: Path, is_nested: bool) -> None:
    directory = copied_checkpoint("hierarchical", tmp_path)
    older = find_checkpoint(BERT4KERAS / "hierarchical")
    expected = read_weights(older.path / "model.safetensors")
    write_as_keras_3(directory, {"Classifier": np.zeros((16, 16))}, is_nested=is_nested)
    checkpoint = find_checkpoint(directory)
    weights = read_weights(checkpoint.path / "model.safetensors")
    assert "bert.pooler.dense.weight" in weights
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.equal(expected[name]), name
    assert "Of best_model.weights.h5, this is left out: 'Classifier-Dense'." in checkpoint.remarks


def test_names_that_keras_made_up_are_not_taken_for_bert4keras(tmp_path: Path) -> None:
    """Such a file has the order of its layers."""
    directory = copied_checkpoint("keras3", tmp_path)
    expected = read_weights(find_checkpoint(directory).path / "model.safetensors")
    with h5py.File(directory / "best_model.weights.h5", "a") as file:
        for number, layer in enumerate(file["layers"].values()):
            layer["vars"].attrs["name"] = f"layer_{number}"
    weights = read_weights(find_checkpoint(directory).path / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(weight.equal(expected[name]) for name, weight in weights.items())


def test_layers_of_a_user_are_left_out_and_said(tmp_path: Path) -> None:
    directory = copied_checkpoint("hierarchical", tmp_path)
    with h5py.File(directory / "best_model.h5", "a") as opened:
        opened.attrs["layer_names"] = [*opened.attrs["layer_names"], "classifier"]
        group = opened.create_group("classifier")
        group["kernel:0"] = np.zeros((16, 2))
        group.attrs["weight_names"] = ["kernel:0"]
    assert "Of best_model.h5, this is left out: 'classifier'." in find_checkpoint(directory).remarks
