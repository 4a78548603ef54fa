"""Fixtures for the many exports of one process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def quiet_pytorch() -> None:
    """PyTorch logs every step of a trace for a log file that is not wanted here; pytest would keep and print it."""
    logging.getLogger("torch.__trace").propagate = False


@pytest.fixture(scope="session", autouse=True)
def one_table_of_operators() -> Iterator[None]:
    """Every export reads the sources of 500 functions, a quarter of its time, for a table that is always the same.

    The export also asks PyTorch for all of its operators, 50 times, and which of them to take apart.
    """
    import torch._export.utils
    import torch.export.exported_program
    from torch.onnx._internal.exporter import _decomp
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    make_table = functools.cache(_decomp.create_onnx_friendly_decomposition_table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        for module, name in (
            (torch._export.utils, "_materialize_cpp_cia_ops"),
            (torch.export.exported_program, "_collect_all_valid_cia_ops"),
        ):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        patch.setattr(
            _decomp,
            "create_onnx_friendly_decomposition_table",
            # A caller removes operators from it.
            lambda operators: dict(make_table(frozenset(operators))),
        )
        yield
