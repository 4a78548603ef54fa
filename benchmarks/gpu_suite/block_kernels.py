"""The steps about the kernels of block-sparse attention: answers, speed, and what the compiler made of them."""

from __future__ import annotations

__all__ = ["check", "check_shipped", "count_registers", "time_kernels"]

from collections.abc import Sequence

import gpu_block_kernels
import gpu_kernels
from gpu_suite.job import Job
from gpu_suite.kernels import LENGTHS, NO_CEILINGS, TOTAL_TOKENS, check_plugin_kernels, write_answers
from hdexport.bench.measure.ceilings import measured_ceilings
from hdplugins import OPERATORS
from hdplugins.kernels.attention_tiles import Tiles

_SMALL_TILES = Tiles(64, 64, 4, 2, 32)


def check(job: Job, head_dims: Sequence[int]) -> None:
    """The kernels' answers in every dtype, against the operator's definition in float64."""
    for head_dim in (32,) if job.rehearsal else head_dims:
        tiles = _SMALL_TILES if job.rehearsal else None
        write_answers(job, head_dim, gpu_block_kernels.check_answers(job.device, tiles=tiles, head_dims=(head_dim,)))


def time_kernels(job: Job, head_dim: int, dtype: str) -> None:
    """The kernels against SDPA and FlexAttention, at every length."""
    if job.rehearsal:
        rows = gpu_block_kernels.timed_rows((100,), (128,), total_tokens=100, ceilings=NO_CEILINGS, device="cpu")
    else:
        ceilings = measured_ceilings("cuda", dtype)
        rows = gpu_block_kernels.timed_rows(
            LENGTHS, (head_dim,), total_tokens=TOTAL_TOKENS, ceilings=ceilings, device="cuda"
        )
    for row in rows:
        job.write(**row)


def count_registers(job: Job) -> None:
    """Registers and spills of `attend` for this GPU, compiled ahead of time as a build does."""
    architectures = (gpu_kernels.architecture_of(job.device),)
    if job.rehearsal:
        rows = gpu_block_kernels.compiled_rows(
            block_sizes=(64,), architectures=architectures, dtypes=("float16",), head_dims=(32,)
        )
    else:
        rows = gpu_block_kernels.compiled_rows(architectures=architectures)
    for row in rows:
        job.write(**row)


def check_shipped(job: Job) -> None:
    """Kernels as a bundle has them; see `gpu_suite.kernels.check_shipped`."""
    import torch

    from hdplugins.operators.block_sparse_attention.reference import block_sparse_attention

    attributes = {
        "block_size": 64, "first_global": 1, "last_global": 1, "window": 1, "first_repeats": 2, "dense_tokens": 100,
        "ends_by_row": 1, "scale": 0.125,
    }  # fmt: skip
    token_mask = torch.ones((3, 1100), dtype=torch.int32)
    token_mask[0, 777:], token_mask[1, ::90], token_mask[2, 90:] = 0, 0, 0
    table = torch.randint(-1, 20, (3, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    operator = OPERATORS["BlockSparseAttention"]
    check_plugin_kernels(job, operator, (token_mask, table), attributes, block_sparse_attention)
