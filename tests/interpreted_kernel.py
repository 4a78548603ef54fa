"""The kernels of sliding-window attention run by Triton's interpreter on the CPU, in a process of its own.

Triton decides at its import whether it interprets, and other tests may have imported it by then.
"""

from __future__ import annotations

__all__ = ["Interpreter", "Texts"]

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import TracebackType

import torch

from hdplugins.sliding_window_attention.geometry import SUMMARY_INTS, Geometry, workspace_bytes

_GUARD = 256
"""Elements before and after every buffer that a kernel writes, which it must leave alone."""

_UNSET_BYTE = 0xFF
"""What the workspace is filled with: NaN as floating-point numbers, -1 as integers."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Inputs of the operator; query, key and value [batch, heads, tokens, head_dim], token_kind [batch, tokens]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    token_kind: torch.Tensor


class Interpreter:
    """Runs the kernels; a context manager that owns the process."""

    def __enter__(self) -> Interpreter:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._pool.shutdown()

    def attention(
        self,
        texts: Texts,
        *,
        geometry: Geometry,
        left: int,
        right: int,
        dilation: Sequence[int] = (1,),
        scale: float,
        global_bound: int,
    ) -> torch.Tensor:
        """The operator's result; output and workspace hold NaN before, and nothing else may be written."""
        attributes = {"left": left, "right": right, "dilation": tuple(dilation), "scale": scale}
        return self._pool.submit(_attention, texts, geometry, {**attributes, "global_bound": global_bound}).result()

    def plan(self, token_kind: torch.Tensor, *, global_bound: int) -> torch.Tensor:
        """What `plan_keys` writes for [batch, tokens]: [batch, SUMMARY_INTS + 2 * tokens + global_bound] int32."""
        return self._pool.submit(_plan, token_kind, global_bound).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _attention(texts: Texts, geometry: Geometry, attributes: dict[str, object]) -> torch.Tensor:
    from hdplugins.sliding_window_attention.triton_kernel import launch

    batch, _, tokens, _ = texts.query.shape
    guarded_out = torch.full((texts.query.numel() + 2 * _GUARD,), torch.nan, dtype=texts.query.dtype)
    out = guarded_out[_GUARD:-_GUARD].view(texts.query.shape)
    size = workspace_bytes(batch, tokens, attributes["global_bound"])
    guarded_workspace = torch.full((size + 2 * _GUARD,), _UNSET_BYTE, dtype=torch.uint8)
    before = [tensor.clone() for tensor in vars(texts).values()]
    launch(**vars(texts), out=out, workspace=guarded_workspace[_GUARD:-_GUARD], geometry=geometry, **attributes)
    for guard in (guarded_out[:_GUARD], guarded_out[-_GUARD:]):
        assert torch.isnan(guard).all(), "the kernel wrote outside its output"
    for guard in (guarded_workspace[:_GUARD], guarded_workspace[-_GUARD:]):
        assert (guard == _UNSET_BYTE).all(), "the kernel wrote outside its workspace"
    for tensor, was in zip(vars(texts).values(), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), was.nan_to_num()), "the kernel wrote to an input"
    return out.clone()


def _plan(token_kind: torch.Tensor, global_bound: int) -> torch.Tensor:
    from hdplugins.sliding_window_attention.triton_kernel import plan_keys

    batch, tokens = token_kind.shape
    plan = torch.full((batch, SUMMARY_INTS + 2 * tokens + global_bound), -7, dtype=torch.int32)
    chunk = 32  # so that a short text has several
    plan_keys[(-(-tokens // chunk), batch, 1)](
        token_kind, plan, tokens, global_bound, summary_ints=SUMMARY_INTS, chunk=chunk
    )
    return plan
