"""Keras' HDF5 files are read whole, and what is not one is refused; `test_converted.py` has both layouts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.foreign.keras_file import read_keras_file
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


def test_layers_of_a_user_are_left_out_and_said(tmp_path: Path) -> None:
    directory = copied_checkpoint("hierarchical", tmp_path)
    with h5py.File(directory / "best_model.h5", "a") as opened:
        opened.attrs["layer_names"] = [*opened.attrs["layer_names"], "classifier"]
        group = opened.create_group("classifier")
        group["kernel:0"] = np.zeros((16, 2))
        group.attrs["weight_names"] = ["kernel:0"]
    assert "Of best_model.h5, this is left out: 'classifier'." in find_checkpoint(directory).remarks
