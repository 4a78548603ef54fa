"""A checkpoint's model, changed for the trace: more positions, the attention that was asked for, our operators."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hdexport.attention.attention_type import AttentionConversion, ConversionContext
from hdexport.attention.registry import attention_conversions
from hdexport.checkpoint import Checkpoint
from hdexport.checkpoint.extended_files import read_extension
from hdexport.checkpoint.position_choice import PositionChoice
from hdexport.checkpoint.tokenizer_files import first_special_id
from hdexport.families import convertible_model_types
from hdexport.model.memory_cache import counts_tokens
from hdexport.pipeline.options import BuildOptions
from hdexport.support.progress import Progress
from hdruntime.bundle.manifest import Positions, Task
from hdruntime.errors import InputError, Setting, joined

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdexport.attention.query_scale import LogScale
    from hdexport.model.graph_module import GraphModule

logger = logging.getLogger(__package__)


def extended_positions(
    model: PreTrainedModel, checkpoint: Checkpoint, choice: PositionChoice, options: BuildOptions, progress: Progress
) -> Positions:
    """Extend a model's positions, and stretch rotary ones, in place; reports how."""
    import torch

    from hdexport.model.rotary import check_rope_factor, stretch_rotary
    from hdexport.model.surgery import extend_positions

    if checkpoint.family.learned_positions:
        progress.step(f"Extending positions to {options.max_len} ({choice.describe()})")
    if choice.remark:
        progress.result(choice.remark)
    if choice.force:
        progress.result(joined(f"Positions: {choice.describe()} ({choice.reason}); ", choice.force))
    positions = extend_positions(
        model,
        checkpoint.family,
        max_len=options.max_len,
        scheme=choice.scheme,
        alpha=choice.alpha,
        itemsize=getattr(torch, options.precision).itemsize,
    )
    if options.rope_factor is not None:
        model_type = checkpoint.config["model_type"]
        check_rope_factor(options.rope_factor, checkpoint.family, positions, model_type=model_type)
        stretch_rotary(model, options.rope_factor)
    return dataclasses.replace(
        positions,
        attention_scale=choice.attention_scale,
        trained=choice.trained,
        rope_factor=options.rope_factor,
        reason=choice.reason,
    )


def attention_of_model(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    task: Task,
    options: BuildOptions,
    query_scale: LogScale | None,
    progress: Progress,
) -> dict[str, AttentionConversion]:
    """The model's attention, its own or the requested one; reports what the requested one does to the answers."""
    context = ConversionContext(
        model=model,
        family=checkpoint.family,
        task=checkpoint.run_as(task),
        max_len=options.max_len,
        recurrence=options.recurrence,
        query_scale=query_scale,
        asks_for_scale=options.attention_scale is not None,
        first_special_id=lambda: first_special_id(checkpoint),
        convertible=convertible_model_types,
    )
    extension = read_extension(checkpoint.config, checkpoint.path / "config.json")
    if extension is not None and extension.attention is not None and not options.attention:
        logger.warning(
            "The checkpoint's positions were tuned with %s, and this bundle has the model's attention: build with that "
            "option.",
            Setting("attention", extension.attention),
        )
    conversions = attention_conversions(options.attention, context)
    for conversion in conversions.values():
        if conversion.note is not None:
            progress.result(conversion.note)
    return conversions


def graph_module(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    task: Task,
    conversions: Mapping[str, AttentionConversion],
    options: BuildOptions,
    query_scale: LogScale | None,
    *,
    pools_prompts: bool,
    sees_all: bool,
) -> GraphModule:
    """The module to trace: the model, with its final positions and our operators, in its precision, and the task's
    modules.

    Args:
        query_scale: the factor of the queries; None for 1.
        pools_prompts: whether a sentence's vector is pooled of its prompt's tokens, too.
        sees_all: whether tokens attend to all real tokens.
    """
    from hdexport.attention.interface import use_operators
    from hdexport.checkpoint.heads import task_head
    from hdexport.model.experts import use_chosen_experts
    from hdexport.model.graph_module import GraphModule, graph_inputs
    from hdexport.model.half_precision import cast_model
    from hdexport.model.half_weights import UpcastWeights
    from hdexport.model.surgery import (
        continue_positions,
        fold_positions,
        fold_token_types,
        fuse_gelu,
        number_of_token_types,
    )

    family, run_as = checkpoint.family, checkpoint.run_as(task)
    memory_cache = next(
        (conversion.memory_cache for conversion in conversions.values() if conversion.memory_cache is not None), None
    )
    if memory_cache is not None and run_as is not task:
        raise InputError(
            "The model's scores are of a vector that is pooled of all tokens of a pair, and a model with a memory sees "
            "a segment of them.",
            hint=("Leave ", Setting("recurrence"), " out, and set mem_len to null where config.json has it."),
        )
    with UpcastWeights():
        token_types = number_of_token_types(model, family, run_as)
        folded_token_types = not token_types and fold_token_types(model, family)
        if memory_cache is not None and counts_tokens(memory_cache.specs):
            continue_positions(model, family, memory_cache)
        folded_positions = fold_positions(model, family)
    cast_model(model, options.precision)
    use_chosen_experts(model)
    with UpcastWeights() if options.precision == "float32" else contextlib.nullcontext():
        fuse_gelu(model)
        if not any(conversion.is_native for conversion in conversions.values()):
            family.adapt(model)
        for conversion in conversions.values():
            conversion.adapt(model, family)
        use_operators(model, query_scale)
    return GraphModule(
        model,
        task,
        inputs=graph_inputs(
            token_types=token_types,
            token_type_separator_id=(
                model.config.sep_token_id if family.counts_separators and run_as is Task.QUESTION_ANSWERING else None
            ),
            pools_prompts=pools_prompts,
            sees_all=sees_all,
            others=[spec for conversion in conversions.values() for spec in conversion.inputs],
        ),
        folded_token_types=folded_token_types,
        folded_positions=folded_positions,
        head=task_head(checkpoint, task),
        memory_cache=memory_cache,
    ).eval()
