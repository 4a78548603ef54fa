"""Transformer-XL as a family: causal relative attention, with a memory of the segments before."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hdexport.attention.relative.attention_type import RelativeAttention, RelativeConversion
from hdexport.attention.relative.model import Distances
from hdexport.families.transfo_xl.config import TransfoXLConfig
from hdexport.families.transfo_xl.model import LAST, STARTED, TransfoXLLMHeadModel, TransfoXLModel
from hdexport.model.family import Family, ModelClasses, NativeAttention, UnsupportedReason
from hdexport.model.memory_cache import MemoryCache, memory_input
from hdruntime.bundle.manifest import InputSpec, Task
from hdruntime.errors import ModelError, Setting


def _adapt(model: PreTrainedModel, conversion: RelativeConversion) -> None:
    base: Any = model.base_model
    distances = Distances(conversion.record, conversion.max_len)
    for layer in base.layers:
        layer.dec_attn.distances = distances
    del base.sinusoids
    base.register_buffer("sinusoids", distances.sinusoids(model.config.d_model), persistent=False)
    if conversion.memory_cache is not None:
        _look_up(model, conversion.memory_cache)


def _remember(model: PreTrainedModel, conversion: RelativeConversion) -> None:
    assert conversion.memory_cache is not None
    model.config.mem_len = conversion.record.memory
    _look_up(model, conversion.memory_cache)


def _look_up(model: Any, memory_cache: MemoryCache) -> None:
    """Make a model take its recurrent states from there, and leave them there."""
    original = model.forward

    def forward(*given: Any, **named: Any) -> Any:
        output = original(*given, **named, mems={part: memory_cache.read(part) for part in memory_cache.parts})
        for part in memory_cache.parts:
            memory_cache.write(part, output.mems[part])
        return output

    model.forward = forward


def _attention(config: Any) -> RelativeAttention:
    """A Transformer-XL's attention; a ModelError says that no token would see any."""
    memory = max(0, config.mem_len)
    if config.same_length and not memory:
        raise ModelError(
            f"config.json has mem_len {config.mem_len} and same_length, by which a token sees mem_len tokens.",
            hint=("Set the size of the memory cache: ", Setting("recurrence", 512)),
        )
    return RelativeAttention(
        layers=config.n_layer,
        memory=memory,
        reach=memory if config.same_length else 0,
        clamp=max(0, config.clamp_len),
        causal=True,
        empty_memory_is_seen=True,
    )


def _memory_inputs(config: Any, task: Task) -> tuple[InputSpec, ...]:
    """The states that the first token of a segment is predicted from."""
    if task is not Task.TEXT_SCORING:
        return ()
    return memory_input(LAST, config.d_model), memory_input(STARTED, 1)


FAMILY = Family(
    known_config_keys=frozenset({"dropatt", "ext_len", "sample_softmax", "tgt_len", "tie_weight"}),
    classes=ModelClasses(
        config=TransfoXLConfig,
        models={Task.FEATURE_EXTRACTION: TransfoXLModel, Task.TEXT_SCORING: TransfoXLLMHeadModel},
    ),
    learned_positions=False,
    is_causal=True,
    relative_positions=True,
    embeddings=lambda model: model.base_model,
    native_attention=NativeAttention(
        attention_type="relative", record=_attention, adapt=_adapt, use_states=_remember, extra_states=_memory_inputs
    ),
    tasks=(Task.FEATURE_EXTRACTION, Task.TEXT_SCORING),
    task_unsupported_reason=UnsupportedReason.NO_HEAD,
    conversion_unsupported_reason=UnsupportedReason.NATIVE_RECURRENCE,
)
