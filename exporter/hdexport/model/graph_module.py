"""The module to trace: a model of one task, with the inputs and outputs that its graph will have."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hdexport.model.memory_cache import MemoryCache
from hdruntime.bundle.manifest import Default, Fill, InputSpec, Role, Task
from hdruntime.bundle.task_formats import format_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Head(torch.nn.Module):
    """Makes a task's outputs of one of the model's.

    Attributes:
        reads: name of the model's output.
    """

    reads = "last_hidden_state"

    def outputs(
        self, states: torch.Tensor, attention_mask: torch.Tensor, pooled_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The task's outputs, float32 each, in the order of `hdruntime.bundle.task_formats`.

        Args:
            states: [batch, tokens, width], the model's output, in its dtype.
            attention_mask: [batch, tokens], int64, 1 for real tokens.
            pooled_mask: the same, 1 for tokens that are pooled; None for all real tokens.
        """
        return (self(states.float(), attention_mask),)


class GraphModule(torch.nn.Module):
    """A model with named tensors in and a tuple of float32 tensors out.

    Args:
        model: the Hugging Face model with the task's head.
        inputs: inputs of the graph; their names are the model's arguments.
        folded_token_types: whether the token-type lookup was folded; the embeddings then ask for ids they ignore.
        folded_positions: whether the position lookup was folded; likewise.
        head: the modules after the model; None where its outputs are the task's.
        memory_cache: the states that the model's modules look at; None for a model that carries none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        task: Task,
        *,
        inputs: Sequence[InputSpec],
        folded_token_types: bool = False,
        folded_positions: bool = False,
        head: Head | None = None,
        memory_cache: MemoryCache | None = None,
    ) -> None:
        super().__init__()
        self.model, self.task, self.head, self.inputs = model, task, head, tuple(inputs)
        self._memory_cache = MemoryCache(()) if memory_cache is None else memory_cache
        self.folded_token_types, self.folded_positions = folded_token_types, folded_positions

    @property
    def outputs(self) -> dict[str, tuple[str | int, ...]]:
        """Name of each output -> its axes; recurrent states, which are inputs of the next call, come last."""
        states = {spec.fed_from: spec.shape for spec in self.inputs if spec.fed_from is not None}
        return {**format_of(self.task).output_axes, **states}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        pooling_mask: torch.Tensor | None = None,
        attended_mask: torch.Tensor | None = None,
        **others: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the model; the results are the `outputs`, in order.

        ``position_ids`` are for asking PyTorch about shifted positions; a graph has no such input.
        """
        extra: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
        if token_type_ids is not None:
            extra["token_type_ids"] = token_type_ids
        elif self.folded_token_types:
            # Never looked at; without ids the embeddings would gather them from a buffer.
            extra["token_type_ids"] = input_ids
        states = {spec.name: others.pop(spec.name) for spec in self._memory_cache.specs}
        extra |= others
        if self.folded_positions:
            # Only its shape is looked at; the model's own ids are a slice that clamps the length to the table.
            extra["position_ids"] = input_ids
        seen = attention_mask if attended_mask is None else attention_mask * attended_mask
        with self._memory_cache.of_call(states):
            outputs = self.model(input_ids=input_ids, attention_mask=seen, **extra)
            left = tuple(value.float() for value in self._memory_cache.written())
        if self.head is not None:
            pooled = None if pooling_mask is None else attention_mask * pooling_mask
            return *self.head.outputs(getattr(outputs, self.head.reads), attention_mask, pooled), *left
        return *(getattr(outputs, name).float() for name in format_of(self.task).output_axes), *left


@contextlib.contextmanager
def named_arguments(module: GraphModule) -> Iterator[None]:
    """Give a module's forward one argument an input, in order: PyTorch's exporters do not understand ``**others``.

    An argument's name is `argument_name` of the input's.
    """
    original, names = module.forward, {argument_name(spec): spec.name for spec in module.inputs}

    def forward(*given: torch.Tensor, **named: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return original(**dict(zip(names.values(), given, strict=False)), **{names[key]: named[key] for key in named})

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    module.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del module.forward


def argument_name(spec: InputSpec) -> str:
    """Name of a function's argument for an input, whose own name may hold dots."""
    return spec.name.replace(".", "_")


def graph_inputs(
    *,
    token_types: int,
    token_type_separator_id: int | None = None,
    pools_prompts: bool = True,
    sees_all: bool = True,
    others: Sequence[InputSpec] = (),
) -> tuple[InputSpec, ...]:
    """The inputs of a graph.

    Args:
        token_types: how many the model has; 0 where there is no choice of several, and no input.
        token_type_separator_id: where a caller gives none, they are 0 up to the first token of that id, 1 after it;
            None: they are 0.
        pools_prompts: whether all real tokens are pooled; else an input is their mask.
        sees_all: whether tokens attend to all real tokens; else an input is their mask.
        others: other inputs, which the model's attention has.
    """
    types = Default(fill=Fill.ZEROS)
    if token_type_separator_id is not None:
        types = Default(fill=Fill.AFTER_TOKEN, token_id=token_type_separator_id)
    inputs = [
        _input("input_ids", Role.IDS, Default(fill=Fill.REQUIRED)),
        _input("attention_mask", Role.MASK, Default(fill=Fill.ONES)),
    ]
    if token_types:
        inputs.append(_input("token_type_ids", Role.TOKEN_TYPES, types, bound=token_types))
    if not pools_prompts:
        inputs.append(_input("pooling_mask", Role.POOLED, Default(fill=Fill.ONES)))
    if not sees_all:
        inputs.append(_input("attended_mask", Role.ATTENDED, Default(fill=Fill.ONES)))
    return (*inputs, *others)


def _input(name: str, role: Role, default: Default, bound: int | None = None) -> InputSpec:
    return InputSpec(name=name, dtype="int64", shape=("batch", "tokens"), role=role, default=default, bound=bound)
