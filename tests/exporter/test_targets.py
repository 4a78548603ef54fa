"""Targets: what is named is built, and ``auto`` takes what can be built here and says why."""

from __future__ import annotations

import ctypes.util
import importlib.util
import logging

import pytest

from hdexport.targets import TARGETS, flavours_of_targets
from hdruntime.bundle import Backend
from hdruntime.errors import InputError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretend that packages and a driver are here or not."""

    def pretend(*packages: str, driver: bool) -> None:
        find_spec = importlib.util.find_spec

        def found(name: str, package: str | None = None) -> object:
            return name in packages or None if name.startswith("tensorrt") else find_spec(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", found)
        monkeypatch.setattr(ctypes.util, "find_library", lambda name: "libcuda.so.1" if driver else None)

    return pretend


@pytest.mark.parametrize(
    ("targets", "flavours"),
    [
        (["onnx"], ()),
        ([], ()),
        (["tensorrt"], (Backend.TENSORRT,)),
        (["tensorrt-rtx"], (Backend.TENSORRT_RTX,)),
        (["onnx", "tensorrt-rtx", "tensorrt"], (Backend.TENSORRT_RTX, Backend.TENSORRT)),
        (["tensorrt", "tensorrt"], (Backend.TENSORRT,)),
    ],
)
def test_what_is_named_is_asked_for_whatever_is_here(machine, targets: list[str], flavours: tuple) -> None:
    machine(driver=False)
    assert flavours_of_targets(targets) == flavours


@pytest.mark.parametrize(
    ("packages", "driver", "flavours", "reason"),
    [
        ((), False, (), "the package tensorrt is not installed"),
        (("tensorrt",), False, (), "it needs an NVIDIA GPU and there is no driver"),
        (("tensorrt",), True, (Backend.TENSORRT,), "the package and a driver are here"),
        (("tensorrt_rtx",), False, (Backend.TENSORRT_RTX,), "the package is here and needs no GPU"),
        (("tensorrt", "tensorrt_rtx"), True, (Backend.TENSORRT, Backend.TENSORRT_RTX), "needs no GPU to build"),
    ],
)
def test_auto_takes_what_can_be_built_here_and_logs_why(
    machine, caplog, packages: tuple[str, ...], driver: bool, flavours: tuple, reason: str
) -> None:
    machine(*packages, driver=driver)
    with caplog.at_level(logging.INFO):
        assert flavours_of_targets(["auto"]) == flavours
    assert reason in caplog.text


def test_auto_and_a_name_ask_for_a_flavour_once(machine) -> None:
    machine("tensorrt_rtx", driver=False)
    assert flavours_of_targets(["auto", "tensorrt-rtx"]) == (Backend.TENSORRT_RTX,)


@pytest.mark.parametrize("target", ["", "cuda", "tensorrt_rtx", "ONNX"])
def test_a_target_that_is_none_is_refused_with_those_there_are(target: str) -> None:
    with pytest.raises(InputError, match=rf"no target '{target}'.\nChoose from: {', '.join(TARGETS)}"):
        flavours_of_targets([target])
