"""The benchmark's check of a kernel, asked twice: of its answers, and of the same ones against another definition."""

from __future__ import annotations

__all__ = ["complaint_about_another_definition"]

from typing import Any
from unittest import mock


def complaint_about_another_definition(family: str, dtype: str, attribute: str, change: int) -> str:
    """The check's words where the definition's attribute is changed; it says nothing else before.

    For a process in which Triton interprets. That takes seconds, and so is done once.

    Args:
        family: of kernels.
        dtype: to check.
        attribute: of the operator.
        change: added to it.
    """
    import torch

    from benchmarks.gpu import kernels
    from benchmarks.gpu.cases import FAMILIES
    from benchmarks.gpu.job import Job, StepFailedError

    answers: list[Any] = []
    real_call, operator = kernels.attention_call, FAMILIES[family].OPERATOR
    definition, name = operator.face("reference"), operator.package.rpartition(".")[2]
    attention = getattr(definition, name)

    def asked(*given: Any, **rest: Any) -> Any:
        answers.append(real_call(*given, **rest)())
        return lambda: answers[-1]

    def otherwise(*tensors: Any, **attributes: Any) -> Any:
        return attention(*tensors, **attributes | {attribute: attributes[attribute] + change})

    def check() -> None:
        torch.manual_seed(0)
        kernels.check(Job(step="answers", output=None, rehearsal=True), family, dtypes=(dtype,))

    with mock.patch.object(kernels, "attention_call", asked):
        check()
    again = iter(answers)
    with (
        mock.patch.object(kernels, "attention_call", return_value=lambda: next(again)),
        mock.patch.object(definition, name, otherwise),
    ):
        try:
            check()
        except StepFailedError as error:
            return str(error)
    return "nothing"
