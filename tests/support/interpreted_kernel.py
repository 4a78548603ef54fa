"""The attention kernels run by Triton's interpreter on the CPU, in a process of its own.

Triton decides at its import whether it interprets, and other tests may have imported it by then.
"""

from __future__ import annotations

__all__ = ["BlockTexts", "Interpreter", "Texts"]

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import TracebackType
from typing import Any

import torch

from hdplugins.kernels.attention_tiles import Tiles
from hdplugins.operators.block_sparse_attention import geometry as block_geometry
from hdplugins.operators.sliding_window_attention.geometry import SUMMARY_INTS, workspace_bytes

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


@dataclass(frozen=True, kw_only=True)
class BlockTexts:
    """Inputs of block-sparse attention; token_mask is [batch, tokens], listed_blocks [1 or heads, rows, listed]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    token_mask: torch.Tensor
    listed_blocks: torch.Tensor | None = None


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
        tiles: Tiles,
        left: int,
        right: int,
        dilation: Sequence[int] = (1,),
        scale: float,
        global_bound: int,
    ) -> torch.Tensor:
        """The operator's result; output and workspace hold NaN before, and nothing else may be written."""
        attributes = {"left": left, "right": right, "dilation": tuple(dilation), "scale": scale}
        return self._pool.submit(_attention, texts, tiles, {**attributes, "global_bound": global_bound}).result()

    def plan(self, token_kind: torch.Tensor, *, global_bound: int) -> torch.Tensor:
        """What `plan_keys` writes for [batch, tokens]: [batch, SUMMARY_INTS + 2 * tokens + global_bound] int32."""
        return self._pool.submit(_plan, token_kind, global_bound).result()

    def block_attention(
        self, texts: BlockTexts, *, tiles: Tiles, **attributes: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of block-sparse attention, and the plan; as `attention` otherwise."""
        return self._pool.submit(_block_attention, texts, tiles, attributes).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _attention(texts: Texts, tiles: Tiles, attributes: dict[str, Any]) -> torch.Tensor:
    from hdplugins.operators.sliding_window_attention.triton_kernel import launch

    batch, _, tokens, _ = texts.query.shape
    size = workspace_bytes(batch, tokens, attributes["global_bound"])

    def run(out: torch.Tensor, workspace: torch.Tensor) -> None:
        launch(**vars(texts), out=out, workspace=workspace, tiles=tiles, **attributes)

    return _guarded(run, texts, {"workspace": size})[0]


def _block_attention(texts: BlockTexts, tiles: Tiles, attributes: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    from hdplugins.operators.block_sparse_attention.triton_kernel import launch

    def run(out: torch.Tensor, **workspaces: torch.Tensor) -> None:
        launch(**vars(texts), out=out, **workspaces, tiles=tiles, **attributes)

    table = None if texts.listed_blocks is None else texts.listed_blocks.shape
    out, workspaces = _guarded(run, texts, block_geometry.workspace_bytes(texts.query.shape, table, **attributes))
    return out, workspaces["plan"].view(torch.int32).view(texts.query.shape[0], -1)


def _guarded(
    run: Callable[..., None], texts: Texts | BlockTexts, sizes: Mapping[str, int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What `run` wrote into an output and workspaces, and that it wrote to nothing else."""
    guarded_out = torch.full((texts.query.numel() + 2 * _GUARD,), torch.nan, dtype=texts.query.dtype)
    out = guarded_out[_GUARD:-_GUARD].view(texts.query.shape)
    guarded = {name: torch.full((size + 2 * _GUARD,), _UNSET_BYTE, dtype=torch.uint8) for name, size in sizes.items()}
    inputs = [tensor for tensor in vars(texts).values() if tensor is not None]
    before = [tensor.clone() for tensor in inputs]
    workspaces = {name: buffer[_GUARD:-_GUARD] for name, buffer in guarded.items()}
    run(out=out, **workspaces)
    for guard in (guarded_out[:_GUARD], guarded_out[-_GUARD:]):
        assert torch.isnan(guard).all(), "the kernel wrote outside its output"
    for buffer in guarded.values():
        for guard in (buffer[:_GUARD], buffer[-_GUARD:]):
            assert (guard == _UNSET_BYTE).all(), "the kernel wrote outside its workspace"
    for tensor, was in zip(inputs, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), was.nan_to_num()), "the kernel wrote to an input"
    return out.clone(), {name: workspace.clone() for name, workspace in workspaces.items()}


def _plan(token_kind: torch.Tensor, global_bound: int) -> torch.Tensor:
    from hdplugins.operators.sliding_window_attention.triton_kernel import plan_keys

    batch, tokens = token_kind.shape
    plan = torch.full((batch, SUMMARY_INTS + 2 * tokens + global_bound), -7, dtype=torch.int32)
    chunk = 32  # so that a short text has several
    plan_keys[(-(-tokens // chunk), batch, 1)](
        token_kind, plan, tokens, global_bound, summary_ints=SUMMARY_INTS, chunk=chunk
    )
    return plan
