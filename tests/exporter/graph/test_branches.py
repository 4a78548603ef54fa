"""Lengths at which a model's Python code takes another branch than in the trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hdexport.graph.branches import lengths_of_branches
from hdruntime.errors import ExportError

MAX_LEN = 100


def program_of(condition: Callable[[int, int], bool]) -> torch.export.ExportedProgram:
    class Branching(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            batch, tokens = ids.shape
            return ids * 2 if condition(batch, tokens) else ids * 3

    axes = (torch.export.Dim.AUTO, torch.export.Dim.AUTO)
    example = {"ids": torch.ones(2, 37, dtype=torch.int64)}
    options = {"dynamic_shapes": {"ids": axes}, "prefer_deferred_runtime_asserts_over_guards": True}
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # as `torch.onnx.export` does
        return torch.export.export(Branching(), (), example, **options)


@pytest.mark.parametrize(
    ("condition", "lengths"),
    [
        (lambda batch, tokens: True, ()),
        (lambda batch, tokens: tokens > 60, (61, 100)),
        (lambda batch, tokens: tokens < 20, (2, 19)),
        (lambda batch, tokens: tokens == 1, ()),
        (lambda batch, tokens: tokens == 50, (50,)),
        (lambda batch, tokens: tokens % 16 == 0, (16, 96)),
        (lambda batch, tokens: batch * tokens > 200, (67, 100)),
        (lambda batch, tokens: tokens > 100, ()),
        (lambda batch, tokens: batch == 1, ()),
    ],
)
def test_the_first_and_the_last_length_of_another_way_are_found(
    condition: Callable[[int, int], bool], lengths: tuple[int, ...]
) -> None:
    """The trace has 2 texts of 37 tokens."""
    assert lengths_of_branches(program_of(condition), 0, max_len=MAX_LEN) == lengths


def test_batches_that_no_verification_has_are_refused() -> None:
    program = program_of(lambda batch, tokens: batch > 8)
    with pytest.raises(ExportError, match="another branch for batches of 9 rows"):
        lengths_of_branches(program, 0, max_len=MAX_LEN)
