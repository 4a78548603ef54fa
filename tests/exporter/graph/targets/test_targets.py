"""Targets: what is named is asked for, and ``auto`` takes what can be built here and says why not the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

import hdexport.graph.targets.tensorrt.packages
from hdexport.graph.targets.registry import chosen_targets, variants_of
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import EngineError

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend that these variants, and no others, load."""

    def pretend(*variants: Backend) -> None:
        def load(variant: Backend) -> None:
            if variant not in variants:
                raise EngineError(f"{variant.value} lacks a GPU")

        monkeypatch.setattr(hdexport.graph.targets.tensorrt.packages, "load_variant", load)

    return pretend


@pytest.mark.parametrize(
    ("targets", "variants"),
    [
        (["onnx"], ()),
        (["onnx", "tensorrt-rtx", "tensorrt"], (Backend.TENSORRT_RTX, Backend.TENSORRT)),
        (["tensorrt", "tensorrt"], (Backend.TENSORRT,)),
    ],
)
def test_named_targets_are_kept_whatever_is_installed(machine: Machine, targets: list[str], variants: tuple) -> None:
    machine()
    assert variants_of(chosen_targets(targets)) == variants


@pytest.mark.parametrize("variants", [(), (Backend.TENSORRT,), (Backend.TENSORRT, Backend.TENSORRT_RTX)])
def test_auto_takes_what_can_be_built_here_and_logs_why_not_the_rest(
    machine: Machine, caplog: pytest.LogCaptureFixture, variants: tuple[Backend, ...]
) -> None:
    machine(*variants)
    with caplog.at_level(logging.INFO):
        assert variants_of(chosen_targets(["auto"])) == variants
    for variant in (Backend.TENSORRT, Backend.TENSORRT_RTX):
        assert (f"no {variant.value} engine can be built here" in caplog.text) == (variant not in variants)
    assert f"engines to build: {', '.join(variant.value for variant in variants) or 'none'}" in caplog.text
