"""A model without a family while it is traced: attention that is provably dense or causal becomes our operator.

The proof has two parts. The mask that transformers' mask interface makes is tagged, if nothing but padding, or padding
and the order of tokens, goes into it. And the module's own attention function is called with numbers of several sizes,
small and large, and compared with the operator: a cap of scores, a sink or a bias shows there. All else is traced as
its own code computes it, with masks of numbers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hdexport.attention.dense.model import DenseMask
from hdexport.attention.model_parts import use_attention

_WATCHED, _DENSE, _CAUSAL = "hdexport-watched", "hdexport-traced-dense", "hdexport-traced-causal"
"""Names under which transformers' attention interface knows us."""

_CAUSAL_OF_MASK = {bidirectional_mask_function: False, causal_mask_function: True}

_TAG = "_hdexport_causal"
"""Attribute of a mask in which nothing is but padding, or padding and the order of tokens: whether that order is."""

_SIZES_OF_QUERIES = (1.0, 40.0)
"""Factors of random queries: scores of about 1, and scores at which a cap shows."""

_TOLERANCE = 1e-4

_LENGTHS = (9, 6)
"""Tokens of the two texts of the watched call."""

_ROWS_AT_ONCE = 1024
"""Queries of which a mask is looked at together."""

_key_mask: ContextVar[torch.Tensor] = ContextVar("key_mask")
"""[batch, tokens], bool, of the call of a model that runs."""


def trace_as_it_is(model: PreTrainedModel, *, max_len: int | None) -> None:
    """Make a loaded model ready for the trace, in place: eager code with masks of numbers, dense attention by nodes.

    Windows that show a text of `max_len` tokens to each of its tokens are none; None where texts have no bound.
    """
    _set_attention(model, "eager")
    for module, causal in _dense_modules(model, max_len).items():
        _use_operator(module, causal=causal)
    model.forward = functools.partial(_forward, model, model.forward)


def keep_nothing(model: PreTrainedModel) -> None:
    """Make a model, in place, keep nothing of its calls for a next token."""
    for config in _configs(model):
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _forward(
    model: PreTrainedModel,
    original: Callable[..., Any],
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    **named: Any,
) -> Any:
    """Run a model's own forward, with the key mask at hand for its dense layers, and the padding's id at padding, by
    which some models find it."""
    model.config._attn_implementation = "eager"
    padding = getattr(model.config, "pad_token_id", None)
    if padding is not None and 0 <= padding < model.config.vocab_size:
        input_ids = torch.where(attention_mask.bool(), input_ids, padding)
    with _of_call(attention_mask):
        return original(input_ids=input_ids, attention_mask=attention_mask, **named)


@contextlib.contextmanager
def _of_call(attention_mask: torch.Tensor) -> Iterator[None]:
    token = _key_mask.set(attention_mask.bool())
    try:
        yield
    finally:
        _key_mask.reset(token)


def _configs(model: torch.nn.Module) -> list[Any]:
    """The configurations that a model's modules read, each once."""
    configs = (vars(module).get("config") for module in model.modules())
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


def _set_attention(model: torch.nn.Module, name: str) -> None:
    for config in _configs(model):
        config._attn_implementation = name


def _use_operator(module: Any, *, causal: bool) -> None:
    """Let a module, whose attention was proved to be dense or causal, call our operator, by a configuration of its own,
    which all modules share that shared the one before."""
    config, name = module.config, _CAUSAL if causal else _DENSE
    shared = vars(config).setdefault("_hdexport_copies", {})
    if name not in shared:
        shared[name] = copy.copy(config)
        # Not by the setter, which sets the parts' as well.
        shared[name]._attn_implementation_internal = name
    ALL_ATTENTION_FUNCTIONS.register(name, functools.partial(_attend, causal=causal))
    module.config = shared[name]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    causal: bool,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (state.transpose(1, 2).to(value.dtype) for state in (query, key, value))
    return DenseMask(_key_mask.get(), causal=causal).attend(module, query, key, value, scale), None


def _dense_modules(model: PreTrainedModel, max_len: int | None) -> dict[torch.nn.Module, bool]:
    """The modules whose attention is our dense operator's: whether each is causal."""
    causal_of: dict[torch.nn.Module, bool | None] = {}

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **named: Any,
    ) -> Any:
        own = _own_function(module)
        causal = None if own is None or attention_mask is None or args else getattr(attention_mask, _TAG, None)
        if own is not None and attention_mask is not None and causal is not None:
            plain = functools.partial(own, module)
            causal = causal if _is_dense(plain, query, key, value, attention_mask, named, causal) else None
        causal_of[module] = causal if causal_of.get(module, causal) == causal else None
        return (own or sdpa_attention_forward)(module, query, key, value, attention_mask, *args, **named)

    before = {id(config): config._attn_implementation for config in _configs(model)}
    use_attention(model, _WATCHED, attend, functools.partial(_tagged_mask, max_len=max_len))
    _set_attention(model, _WATCHED)
    tokens = torch.arange(_LENGTHS[0])
    mask = (tokens < torch.tensor(_LENGTHS)[:, None]).long()
    with torch.inference_mode(), _of_call(mask):
        model(input_ids=(tokens + 4).expand(2, -1) % model.config.vocab_size, attention_mask=mask)
    for config in _configs(model):
        config._attn_implementation = before[id(config)]
    return {module: causal for module, causal in causal_of.items() if causal is not None and "config" in vars(module)}


def _tagged_mask(
    *args: Any,
    max_len: int | None,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **named: Any,
) -> torch.Tensor:
    """Transformers' mask of numbers, tagged where it is of this call's padding, and of tokens' order, alone."""
    mask = eager_mask(*args, mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap, **named)
    is_of_call = attention_mask is not None and torch.equal(attention_mask.bool(), _key_mask.get())
    if is_of_call and not use_vmap:
        causal = _CAUSAL_OF_MASK.get(mask_function)
        if causal is None and max_len is not None:
            causal = _causal_of_all_pairs(mask_function, max_len)
        setattr(mask, _TAG, causal)
    return mask


def _causal_of_all_pairs(mask_function: Callable[..., Any], tokens: int) -> bool | None:
    """Whether a mask of texts of up to so many tokens is of their order; None where it is neither that nor of all."""
    key, zero = torch.arange(tokens), torch.zeros(1, 1, dtype=torch.int64)
    is_causal = is_of_all = True
    # The last query comes first: a window shows there.
    for query in ([tokens - 1], *key.split(_ROWS_AT_ONCE)):
        query = torch.as_tensor(query)[:, None]
        seen = mask_function(zero, zero, query, key)
        if not isinstance(seen, torch.Tensor) or seen.shape != (len(query), tokens):
            return None
        is_causal = is_causal and torch.equal(seen, key <= query)
        is_of_all = is_of_all and bool(seen.all())
        if not is_causal and not is_of_all:
            return None
    return is_causal


def _own_function(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The function by which a module's file computes attention where transformers' interface is told "eager"."""
    for kind in type(module).__mro__:
        attend = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if callable(attend):
            return attend
    return None


def _is_dense(
    own: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    named: dict[str, Any],
    causal: bool,
) -> bool:
    """Whether a module's own function computes what `DenseMask` does, of random numbers in the place of the states.

    query: [batch, heads, tokens, head_dim]; key, value: [batch, kv_heads, tokens, head_dim].
    """
    sizes = query.shape[2], *attention_mask.shape[2:]
    if len({*sizes, key.shape[2]}) > 1 or len({query.shape[3], key.shape[3], value.shape[3]}) > 1:
        return False
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        return False
    generator, key_mask = torch.Generator().manual_seed(0), _key_mask.get()
    scale = named.get("scaling")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if isinstance(scale, torch.Tensor):
        return False
    for size in _SIZES_OF_QUERIES:
        states = [torch.randn(state.shape, generator=generator) for state in (query, key, value)]
        states[0] = states[0] * (size / (scale * query.shape[3] ** 0.5))
        theirs = own(*states, attention_mask.float(), **named)[0]
        random_query, random_key, random_value = (state.transpose(1, 2) for state in states)
        dense = DenseMask(key_mask, causal=causal)
        ours = dense.attend(torch.nn.Module(), random_query, random_key, random_value, float(scale))
        if theirs.shape != ours.shape or not torch.allclose(theirs[key_mask], ours[key_mask], atol=_TOLERANCE):
            return False
    return True
