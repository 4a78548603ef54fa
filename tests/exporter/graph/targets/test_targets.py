"""Targets: what is named is asked for, and ``auto`` takes what can be built here and says why not the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

import hdexport.graph.targets.tensorrt.packages
from hdexport.graph.targets.registry import chosen_targets, flavours_of
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import EngineError

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend that these flavours, and no others, load."""

    def pretend(*flavours: Backend) -> None:
        def load(flavour: Backend) -> None:
            if flavour not in flavours:
                raise EngineError(f"{flavour.value} lacks a GPU")

        monkeypatch.setattr(hdexport.graph.targets.tensorrt.packages, "load_flavour", load)

    return pretend


@pytest.mark.parametrize(
    ("targets", "flavours"),
    [
        (["onnx"], ()),
        (["onnx", "tensorrt-rtx", "tensorrt"], (Backend.TENSORRT_RTX, Backend.TENSORRT)),
        (["tensorrt", "tensorrt"], (Backend.TENSORRT,)),
    ],
)
def test_named_targets_are_kept_whatever_is_installed(machine: Machine, targets: list[str], flavours: tuple) -> None:
    machine()
    assert flavours_of(chosen_targets(targets)) == flavours


@pytest.mark.parametrize("flavours", [(), (Backend.TENSORRT,), (Backend.TENSORRT, Backend.TENSORRT_RTX)])
def test_auto_takes_what_can_be_built_here_and_logs_why_not_the_rest(
    machine: Machine, caplog: pytest.LogCaptureFixture, flavours: tuple[Backend, ...]
) -> None:
    machine(*flavours)
    with caplog.at_level(logging.INFO):
        assert flavours_of(chosen_targets(["auto"])) == flavours
    for flavour in (Backend.TENSORRT, Backend.TENSORRT_RTX):
        assert (f"no {flavour.value} engine can be built here" in caplog.text) == (flavour not in flavours)
    assert f"engines to build: {', '.join(flavour.value for flavour in flavours) or 'none'}" in caplog.text
