"""Recurrent states of a model, such as transformers' ``mems``: inputs of a graph, and outputs that feed them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hdruntime.bundle.manifest import Default, Fill, InputSpec, Role

if TYPE_CHECKING:
    import torch

MASK = "mask"
"""The recurrent state that is the mask of the memory: [batch, memory], 1 for a token of an earlier call, else 0."""

POSITION = "position"
"""The recurrent state that counts a document's real tokens in earlier calls: [batch, 1], float32."""


def memory_name(part: int | str) -> str:
    """Name of the input that holds a recurrent state, by the number of its layer or its own name."""
    return f"mems.{part}"


def new_memory_name(part: int | str) -> str:
    """Name of the output that feeds the recurrent state of the next call."""
    return f"new_mems.{part}"


def memory_input(part: int | str, *sizes: int | str, bound: int | None = None, fill: Fill = Fill.ZEROS) -> InputSpec:
    """The input of a recurrent state, [batch, ...]: of the last tokens, [batch, memory, ...], or of one vector, [batch,
    size].

    Args:
        part: number of the state's layer, or the state's name.
        sizes: sizes of the axes after ``batch``.
        bound: maximum tokens of an axis ``memory``; for a state that counts tokens, the maximum count with the call's
            tokens; None for other states.
        fill: value of the state before the first call.
    """
    return InputSpec(
        name=memory_name(part),
        dtype="float32",
        shape=("batch", *sizes),
        role=Role.RECURRENT_STATE,
        default=Default(fill=fill),
        bound=bound,
        fed_from=new_memory_name(part),
    )


def counts_tokens(inputs: Sequence[InputSpec]) -> bool:
    """Whether a graph with these inputs continues its positions from call to call."""
    return any(spec.name == memory_name(POSITION) for spec in inputs)


def text_ends(attention_mask: torch.Tensor) -> torch.Tensor:
    """[batch], int64: tokens of each row of a mask, [batch, tokens], up to its last real one; 0 in a row of padding."""
    import torch

    places = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    return (places * (attention_mask != 0)).amax(1)


def updated_memory(memory: torch.Tensor, states: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A recurrent state, [batch, memory, ...], after a call: the last ``memory`` tokens of the state and the call.

    Padding after a text does not enter the state. `states`, [batch, tokens, ...], are the call's; a row has `ends`
    tokens, see `text_ends`.
    """
    import torch

    rows = torch.arange(memory.shape[0], device=memory.device)
    places = ends[:, None] + torch.arange(memory.shape[1], device=memory.device)
    return torch.cat([memory, states.to(memory.dtype)], dim=1)[rows[:, None], places]


class MemoryCache:
    """The recurrent states of one call, transformers' ``mems``, by the specs of the graph's inputs.

    Modules of the model read and write them here, because heads of transformers drop arguments that they do not know.
    """

    def __init__(self, specs: Sequence[InputSpec]) -> None:
        self.specs = tuple(specs)
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that have a state: numbers of layers, and names."""
        return tuple(spec.name.removeprefix(memory_name("")) for spec in self.specs)

    @contextlib.contextmanager
    def of_call(self, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Hold the states of a call, by the names of its inputs, while the call is computed."""
        self._inputs, self._outputs = dict(inputs), {}
        try:
            yield
        finally:
            self._inputs, self._outputs = {}, {}

    def read(self, part: int | str) -> torch.Tensor:
        """The state of a part before the call, of the shape in its spec."""
        return self._inputs[memory_name(part)]

    def write(self, part: int | str, value: torch.Tensor) -> None:
        """Set the state of a part after the call, of the same shape."""
        self._outputs[new_memory_name(part)] = value

    def written(self) -> tuple[torch.Tensor, ...]:
        """The states after the call, in the order of the specs."""
        return tuple(self._outputs[str(spec.fed_from)] for spec in self.specs)
