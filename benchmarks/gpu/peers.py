"""The peers of the kernels: attention of PyTorch, cuDNN and FlashAttention, and a candidate of our own, on the tensors
that the kernels get.

The peer ``definition`` runs the operator's definition in PyTorch, an operation after the other, and holds all scores in
memory, as the library's models do where no fused attention has their scores.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.cases.case import Case
from benchmarks.gpu.job import SkippedError

_MOST_COMPILED_SHAPES = 64

Call = Callable[[], Any]
"""A call that gives [batch, tokens, heads, head_dim]."""


@dataclass(frozen=True)
class Peer:
    """One way to compute a case.

    Attributes:
        package: import path of a package that the peer needs beside PyTorch; "" for none.
        install: how to get the package.
        prepare: (case, the operator's inputs) -> the call.
    """

    package: str
    install: str
    prepare: Callable[[Case, Sequence[Any]], Call]

    def missing(self) -> str | None:
        """The missing package and the command that installs the package; None where the peer can run."""
        for package in itertools.accumulate(self.package.split("."), "{}.{}".format):
            if package and importlib.util.find_spec(package) is None:
                return f"{self.package} is not installed: {self.install}"
        return None


def compile_every_shape() -> None:
    """Let this process compile a function for every shape: from the ninth on PyTorch would run it uncompiled."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = _MOST_COMPILED_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def flex_attention_on(device: str, *, backend: str = "AUTO", max_rows: int = 128) -> Any:
    """PyTorch's `flex_attention`, compiled for every shape.

    A rehearsal does without the compiler, which takes half a minute a shape there.

    Args:
        device: ``cuda`` or ``cpu``.
        backend: PyTorch's name of what computes it.
        max_rows: tokens of a mask's block, which tiles may not be larger than.
    """
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    compile_every_shape()
    if device == "cpu":
        return flex_attention
    options: dict[str, Any] = {"BACKEND": backend}
    if max_rows < 128:  # PyTorch's tiles on every GPU
        options |= {"BLOCK_M": max_rows, "BLOCK_N": max_rows}
    return functools.partial(torch.compile(flex_attention, dynamic=False), kernel_options=options)


def _states(case: Case, tensors: Sequence[Any], *, heads_first: bool = True) -> tuple[Any, Any, Any]:
    """Query, key and value; where the operator has two states, the first is query and key.

    They are [batch, heads, tokens, head_dim], contiguous: made so before the clock runs, for peers that want it.
    """
    query, *_, key, value = (tensors[0], *tensors[: case.OPERATOR.states])
    states = query, key, value
    if heads_first:
        query, key, value = (state.transpose(1, 2).contiguous() for state in states)
    return query, key, value


def _tokens_first(call: Call) -> Call:
    """A call whose answer is a view of another call's, [batch, heads, tokens, head_dim]."""
    return lambda: call().transpose(1, 2)


def _definition(case: Case, tensors: Sequence[Any]) -> Call:
    return functools.partial(case.OPERATOR.definition, *tensors, **case.attributes)


def _flex(case: Case, tensors: Sequence[Any], *, backend: str) -> Call:
    states = _states(case, tensors)
    device = states[0].device.type
    mask = case.flex_mask(device)
    blocks = {} if mask is None else {"max_rows": min(mask.BLOCK_SIZE)}
    flex = flex_attention_on(device, backend=backend, **blocks)
    return _tokens_first(functools.partial(flex, *states, score_mod=case.flex_score(tensors), block_mask=mask))


def _sdpa(case: Case, tensors: Sequence[Any], *, backend: str) -> Call:
    """Dense, by one of PyTorch's backends; on a CPU by its choice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    dense = functools.partial(scaled_dot_product_attention, *_states(case, tensors))
    if tensors[0].device.type == "cpu":
        return _tokens_first(dense)

    def call() -> Any:
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            return dense()

    return _tokens_first(call)


def _flash_attention_4(case: Case, tensors: Sequence[Any]) -> Call:
    from flash_attn.cute import flash_attn_func

    states, window = _states(case, tensors, heads_first=False), _window(case)

    def call() -> Any:
        out = flash_attn_func(*states, softmax_scale=case.head_dim**-0.5, window_size=window)
        return out[0] if isinstance(out, Sequence) else out

    return call


def _cudnn_window(case: Case, tensors: Sequence[Any]) -> Call:
    """cuDNN's graph of attention, with the window as a diagonal band."""
    import cudnn
    import torch

    query, key, value = _states(case, tensors)
    left, right = _window(case)
    dtype = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[case.dtype]
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=dtype, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )  # fmt: skip
    inputs = [graph.tensor_like(tensor) for tensor in (query, key, value)]
    band = {} if left is None else {"diagonal_band_left_bound": left + 1, "diagonal_band_right_bound": right}
    answer, _ = graph.sdpa(
        q=inputs[0], k=inputs[1], v=inputs[2], is_inference=True, attn_scale=case.head_dim**-0.5,
        diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT, **band,
    )  # fmt: skip
    out = torch.empty_like(query)
    answer.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=query.device)
    places = dict(zip((*inputs, answer), (query, key, value, out), strict=True))

    def call() -> Any:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(places, workspace, handle=handle)
        return out

    return _tokens_first(call)


def _candidate(case: Case, tensors: Sequence[Any]) -> Call:
    """Our candidate for Hopper, without globals."""
    from benchmarks.gpu import hopper_window
    from benchmarks.gpu.kernels import architecture_of

    found = architecture_of(tensors[0].device.type)
    if found != hopper_window.ARCHITECTURE:
        raise SkippedError(f"it is for sm_{hopper_window.ARCHITECTURE} alone, and this is sm_{found}")
    left, right = _window(case)
    sides = {"left": case.tokens, "right": case.tokens} if left is None else {"left": left, "right": right}
    return hopper_window.prepare(*_states(case, tensors, heads_first=False), **sides)


def _window(case: Any) -> tuple[int | None, int | None]:
    """Tokens on each side; none where the case's window is as wide as the text."""
    return (None, None) if case.left >= case.tokens else (case.left, case.right)


_FLASH_ATTENTION = ("flash_attn.cute", "pip install --pre flash-attn-4")

PEERS = {
    "definition": Peer("", "", _definition),
    "flex": Peer("", "", functools.partial(_flex, backend="AUTO")),
    "flex flash": Peer(*_FLASH_ATTENTION, functools.partial(_flex, backend="FLASH")),
    "flash 4": Peer(*_FLASH_ATTENTION, _flash_attention_4),
    "candidate": Peer("triton.experimental.gluon", "pip install triton", _candidate),
    "cudnn window": Peer("cudnn", "pip install nvidia-cudnn-frontend", _cudnn_window),
    "sdpa cudnn": Peer("", "", functools.partial(_sdpa, backend="CUDNN_ATTENTION")),
    "sdpa flash": Peer("", "", functools.partial(_sdpa, backend="FLASH_ATTENTION")),
}
"""Name in a case's `timed` -> the peer."""
