"""How the attention kernels are compiled and started, whichever operator they are of.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

__all__ = ["attention_source", "start_kernels"]

from collections.abc import Iterable, Mapping
from typing import Any

from hdplugins.kernels.aot import Constant, KernelSource
from hdplugins.kernels.attention_tiles import INNER_LOOP, Tiles
from hdplugins.kernels.cuda_launch import Launch


def attention_source(
    module: str, function: str, architecture: int, signature: Mapping[str, str], constants: Any, tiles: Tiles
) -> KernelSource:
    """What is compiled for one GPU; the tiles decide the warps and stages of `attend`, other kernels are small."""
    is_attend = function == "attend"
    return KernelSource(
        module=module,
        called_modules=(INNER_LOOP,),
        function=function,
        architecture=architecture,
        signature=signature,
        constants=constants,
        # Every head_dim is a multiple of 16, and so are the strides that it divides.
        aligned=tuple(name for name, kind in signature.items() if kind[0] == "*" or name[:6] == "stride"),
        num_warps=tiles.num_warps if is_attend else 4,
        num_stages=tiles.num_stages if is_attend else 1,
    )


def start_kernels(
    kernels: Iterable[Any],
    launches: Iterable[Launch],
    tensors: Mapping[str, Any],
    constants: Mapping[str, Mapping[str, Constant]],
    tiles: Tiles,
) -> None:
    """Start Triton's functions in the order of the launches, each with those of the tensors that it takes."""
    by_name = {kernel.__name__: kernel for kernel in kernels}
    for launch in launches:
        kernel = by_name[launch.kernel]
        warps = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages} if launch.kernel == "attend" else {}
        given = {name: tensor for name, tensor in tensors.items() if name in kernel.arg_names}
        kernel[launch.grid](**given, **launch.scalars, **constants[launch.kernel], **warps)
