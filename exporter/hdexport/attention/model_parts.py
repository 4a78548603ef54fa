"""What the models of all attention types share: a model's attentions and its stack of layers, found by running it,
and the nodes of our operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hdplugins import ONNX_DOMAIN, ONNX_DOMAIN_VERSION, OPERATORS

Layers = Callable[[torch.Tensor, Any], torch.Tensor]
"""(hidden states, the mask for every attention) -> hidden states."""

_RECORDING = "hdexport-recording"
"""Name under which transformers' attention interface knows the recorder."""


def use_attention(
    model: PreTrainedModel,
    name: str,
    attend: Callable[..., Any],
    mask: Callable[..., Any] = lambda *_, attention_mask, **__: attention_mask,
) -> None:
    """Make every attention of a model, which transformers' attention interface reaches, call a function, in place.

    A name means the same functions for all models of the process. `mask` makes what each attention is given for a mask;
    by default it is the model's own, [batch, tokens].
    """
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    model.config._attn_implementation = name


def attention_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that call transformers' attention interface, in the order in which they do, without repeats.

    A model that uses the same layer several times has one.
    """
    return list(dict.fromkeys(attention_calls(model)))


def attention_calls(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The module of each call of transformers' attention interface, in order."""
    modules: list[torch.nn.Module] = []

    def attend(module: torch.nn.Module, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        modules.append(module)
        return query.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    use_attention(model, _RECORDING, attend, lambda *_, **__: None)
    try:
        run_text(model, torch.zeros(1, 2, dtype=torch.int64))
    finally:
        model.config._attn_implementation = before
    return modules


def layer_stack(model: PreTrainedModel) -> torch.nn.Module:
    """The module that runs all layers: between the embeddings and the head."""
    base = model.base_model
    return base.transformer if hasattr(base, "transformer") else base.encoder  # DistilBERT's name


def states_before_layers(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """The layers' input for a text of ids, [tokens], int64: [tokens, width]. The model is in evaluation mode."""
    seen: list[torch.Tensor] = []

    def look(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(named["hidden_states"] if "hidden_states" in named else arguments[0])

    handle = layer_stack(model).register_forward_pre_hook(look, with_kwargs=True)
    try:
        run_text(model, input_ids.unsqueeze(0))
    finally:
        handle.remove()
    return seen[0][0]


def wrap_layers(model: PreTrainedModel, around: Callable[[torch.Tensor, torch.Tensor, Layers], torch.Tensor]) -> None:
    """Put something around the stack of layers of a model that transformers' attention interface reaches, in place.

    Args:
        around: (hidden states [batch, tokens, width], mask [batch, tokens], bool, the layers) -> hidden states [batch,
            tokens, hidden_size]. The layers take hidden states and the mask for every attention.
    """
    stack = layer_stack(model)
    stack.forward = functools.partial(_forward, stack.forward, around)


def give_masks(model: PreTrainedModel, made: Callable[[torch.Tensor], Any]) -> None:
    """Give the layers of a model what is made of the mask, [batch, tokens], bool, in its place; see `wrap_layers`."""
    wrap_layers(model, lambda states, mask, layers: layers(states, made(mask)))


def _forward(
    original: Callable[..., Any],
    around: Callable[[torch.Tensor, torch.Tensor, Layers], torch.Tensor],
    hidden_states: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    output = None
    # Transformers' own model has a tensor; a model with our operators has the object that its dense layers would share.
    key_mask = attention_mask if isinstance(attention_mask, torch.Tensor) else attention_mask.key_mask

    def layers(states: torch.Tensor, mask: Any) -> torch.Tensor:
        nonlocal output
        # X-MOD's mask is not the second argument.
        output = original(states, mask, *args, **kwargs) if args else original(states, attention_mask=mask, **kwargs)
        return output.last_hidden_state

    states = around(hidden_states, key_mask, layers)
    assert output is not None
    output.last_hidden_state = states
    return output


def run_text(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Run a model for what its layers do with a text, [1, tokens]."""
    with torch.inference_mode():
        model.base_model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))


def operator_node(name: str, inputs: Sequence[torch.Tensor], attributes: Mapping[str, Any]) -> torch.Tensor:
    """One node of the operator of that name while a graph is exported, the operator's definition otherwise.

    The result has the shape and type of the first input.
    """
    if not torch.compiler.is_exporting():
        return OPERATORS[name].definition(*inputs, **attributes)
    return torch.onnx.ops.symbolic(
        f"{ONNX_DOMAIN}::{name}",
        inputs,
        attrs=dict(attributes),
        dtype=inputs[0].dtype,
        shape=inputs[0].shape,
        version=ONNX_DOMAIN_VERSION,
    )
