"""The states that a model carries from one call to the next: inputs of a graph, and outputs that feed them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hdruntime.bundle.manifest import Default, Fill, InputSpec, Role

if TYPE_CHECKING:
    import torch

MASK = "mask"
"""The carried state that marks the tokens of the others: [batch, memory], 1 for a token that is there, else 0."""

POSITION = "position"
"""The carried state that counts a document's real tokens in earlier calls: [batch, 1], float32."""


def carried_name(part: int | str) -> str:
    """Name of the input that holds a carried state, by the number of its layer or its own name."""
    return f"mems.{part}"


def left_name(part: int | str) -> str:
    """Name of the output that a call leaves for the next one."""
    return f"new_mems.{part}"


def carried_input(part: int | str, *sizes: int | str, bound: int | None = None, fill: Fill = Fill.ZEROS) -> InputSpec:
    """The input of a carried state, [batch, ...]: of the last tokens, [batch, memory, ...], or of one vector, [batch,
    size].

    Args:
        part: number of its layer, or its own name.
        sizes: of the axes after ``batch``.
        bound: the most tokens of an axis ``memory``; of one number that counts tokens, the most tokens with a call's
            own; None for others.
        fill: its value before the first call.
    """
    return InputSpec(
        name=carried_name(part),
        dtype="float32",
        shape=("batch", *sizes),
        role=Role.RECURRENT_STATE,
        default=Default(fill=fill),
        bound=bound,
        fed_from=left_name(part),
    )


def counts_tokens(inputs: Sequence[InputSpec]) -> bool:
    """Whether a graph with these inputs continues its positions from call to call."""
    return any(spec.name == carried_name(POSITION) for spec in inputs)


def text_ends(attention_mask: torch.Tensor) -> torch.Tensor:
    """[batch], int64: tokens of each row of a mask, [batch, tokens], up to its last real one; 0 in a row of padding."""
    import torch

    places = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    return (places * (attention_mask != 0)).amax(1)


def remembered(memory: torch.Tensor, states: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A carried state, [batch, memory, ...], after a call: as many of the last tokens as it had, of it and the call's
    own.

    Padding behind a text is not among them: the state is the one that the text alone would leave. The call's own are
    [batch, tokens, ...], and end at `text_ends`.
    """
    import torch

    rows = torch.arange(memory.shape[0], device=memory.device)
    places = ends[:, None] + torch.arange(memory.shape[1], device=memory.device)
    return torch.cat([memory, states.to(memory.dtype)], dim=1)[rows[:, None], places]


class CallStates:
    """The carried states of the call that is being computed, by the specs of the graph's inputs.

    The model's modules look here for them, and leave the next call's here: heads of transformers hand on no arguments
    that they do not know.
    """

    def __init__(self, specs: Sequence[InputSpec]) -> None:
        self.specs = tuple(specs)
        self._given: dict[str, torch.Tensor] = {}
        self._left: dict[str, torch.Tensor] = {}

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are carried: numbers of layers, and names."""
        return tuple(spec.name.removeprefix(carried_name("")) for spec in self.specs)

    @contextlib.contextmanager
    def of_call(self, given: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """While this holds, modules see these carried states, by the names of their inputs."""
        self._given, self._left = dict(given), {}
        try:
            yield
        finally:
            self._given, self._left = {}, {}

    def given(self, part: int | str) -> torch.Tensor:
        """The carried state of a part, of the shape in its spec."""
        return self._given[carried_name(part)]

    def leave(self, part: int | str, value: torch.Tensor) -> None:
        """Carry something to the next call, of the same shape."""
        self._left[left_name(part)] = value

    def left(self) -> tuple[torch.Tensor, ...]:
        """The carried states that modules left, in the order of the specs."""
        return tuple(self._left[str(spec.fed_from)] for spec in self.specs)
