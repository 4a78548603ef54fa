"""The models of a tuning: the checkpoint's with more positions, and the checkpoint's own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hdexport.attention.attention_type import ConversionContext
from hdexport.attention.query_scale import LogScale
from hdexport.attention.reference_attention import use_query_scale
from hdexport.attention.registry import attention_conversions, attention_from_spec, attention_type_named
from hdexport.checkpoint import Checkpoint
from hdexport.checkpoint.heads import ModuleChain, sentence_vectors
from hdexport.checkpoint.pooling import SENTENCE, Pooling
from hdexport.checkpoint.position_choice import PositionChoice
from hdexport.checkpoint.tokenizer_files import first_special_id
from hdexport.families import convertible_model_types
from hdexport.model.positions import extend_table
from hdexport.model.surgery import extend_positions
from hdexport.support.progress import Progress
from hdexport.tune.options import Trained, TuneOptions
from hdruntime.bundle.manifest import Positions, Task
from hdruntime.errors import InputError, Setting
from hdruntime.text.pooling import PoolingMode


class TrainedEncoder:
    """A model that gives token states and vectors of token ids, on a device. Linear layers compute in bfloat16 where
    the hardware has it, except in families whose attention is transformers' code, which mixes dtypes."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, task: Task, device: torch.device) -> None:
        self.model, self.device = model.to(device), device
        # Fills shorter rows of a batch.
        self._pad_token_id = max(0, checkpoint.config.get("pad_token_id") or 0)
        self._pooling = _pooling(checkpoint, task).to(device)
        self._half = checkpoint.family.native_attention is None and _has_bfloat16(device)
        if self._half:
            _cast_frozen_layers(model)

    def outputs(self, texts: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """The model's outputs for texts of int64 ids, [tokens] each, and the mask [batch, tokens], 1 for
        real tokens."""
        ids = pad_sequence(list(texts), batch_first=True, padding_value=self._pad_token_id)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        inputs = {"input_ids": ids, "attention_mask": mask}
        inputs = {name: values.to(self.device) for name, values in inputs.items()}
        # References of sparse attention make their masks on the default device.
        placed = contextlib.nullcontext() if self.device.type == "cpu" else self.device
        with placed, torch.autocast(self.device.type, torch.bfloat16, enabled=self._half):
            return self.model(**inputs), inputs["attention_mask"]

    def states(self, texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, tokens, width], float32, and the mask [batch, tokens]."""
        outputs, mask = self.outputs(texts)
        return outputs.last_hidden_state.float(), mask

    def vectors(self, texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[batch, width], float32, of length 1."""
        states, mask = self.states(texts)
        return torch.nn.functional.normalize(self._pooling(states, mask)[-1], dim=-1)


class TunedRows(torch.nn.Module):
    """A position table, [rows, width], float32, whose rows from `first` on are trained, or all of them; it replaces the
    embedding.

    A row is its start, plus a shift that all trained rows share, plus a difference of its own. Every long text moves
    the shift, whereas a single row gets a thousandth of a text's gradient, and the last rows are seen by the longest
    texts only.
    """

    def __init__(self, table: torch.Tensor, *, first: int, all_rows: bool = False) -> None:
        super().__init__()
        count, width = len(table) - first, table.shape[1]
        self.first = first
        self.start = torch.nn.Parameter(table.clone(), requires_grad=all_rows)
        self.shift = torch.nn.Parameter(torch.zeros(1, width))
        self.own = torch.nn.Parameter(torch.zeros(count, width))

    def table(self) -> torch.Tensor:
        """[rows, width], float32, as it is now; rows before `first` are the start's, bit for bit, unless trained."""
        return torch.cat([self.start[: self.first], self.start[self.first :] + self.shift + self.own])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Looks up rows: [1 or batch, tokens], int64, gives [1 or batch, tokens, width]."""
        return torch.nn.functional.embedding(rows, self.table())


class Student(TrainedEncoder):
    """The model whose positions are learnt, with its position table and the positions of the new checkpoint."""

    rows: TunedRows
    positions: Positions

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Name -> weight, of the trained weights."""
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def results(self) -> dict[str, torch.Tensor]:
        """Name in the model -> value, on the CPU, of trained weights; the position table among them."""
        (prefix,) = (name for name, module in self.model.named_modules() if module is self.rows)
        others = {name: weight for name, weight in self.trained().items() if not name.startswith(f"{prefix}.")}
        table = self.rows.table()[: self.positions.first_row + self.positions.rows]
        return {name: weight.detach().float().cpu() for name, weight in (others | {f"{prefix}.weight": table}).items()}


def training_device(name: str) -> torch.device:
    """The device by its name; ``auto`` is a GPU that PyTorch can use, else the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(
            Setting("device", "cuda"),
            " needs a GPU; PyTorch finds no GPU here.",
            hint=("Use ", Setting("device", "cpu"), "."),
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def make_student(
    checkpoint: Checkpoint,
    task: Task,
    options: TuneOptions,
    choice: PositionChoice,
    device: torch.device,
    progress: Progress,
) -> Student:
    """The model with more positions, some of its weights to be trained."""
    model, family = checkpoint.load(task, report=progress.result), checkpoint.family
    for weight in model.parameters():
        weight.requires_grad_(options.train is Trained.ALL)
    positions, rows = _tuned_rows(model, checkpoint, options, choice)
    query_scale = LogScale(choice.trained) if choice.attention_scale == "logn" else None
    context = ConversionContext(
        model=model,
        family=family,
        task=task,
        max_len=options.max_len,
        query_scale=query_scale,
        first_special_id=lambda: first_special_id(checkpoint),
        convertible=convertible_model_types,
    )
    conversions = attention_conversions(attention_from_spec(options.attention, options.attention_options), context)
    properties = [
        attention_type_named(name).use_reference(conversion, model, family) for name, conversion in conversions.items()
    ]
    if not any(each.replaced for each in properties):
        family.as_trained(model)
    if query_scale is not None:
        use_query_scale(model, family, query_scale)
    if options.gradient_checkpointing:
        _checkpoint_layers(model)
    student = Student(model, checkpoint, task, device)
    student.rows, student.positions = rows, positions
    return student


def make_teacher(checkpoint: Checkpoint, task: Task, device: torch.device) -> TrainedEncoder:
    """The checkpoint's own model, which learns nothing."""
    model = checkpoint.load(task).requires_grad_(False)
    checkpoint.family.as_trained(model)
    return TrainedEncoder(model, checkpoint, task, device)


def _pooling(checkpoint: Checkpoint, task: Task) -> ModuleChain:
    """The modules that make vectors of token states: the checkpoint's own, else their mean."""
    if task is not Task.SENTENCE_SIMILARITY:
        return ModuleChain([Pooling((PoolingMode.MEAN,))], (SENTENCE,))
    hidden_size = checkpoint.family.token_width(checkpoint.settings())
    return sentence_vectors(checkpoint.path, hidden_size=hidden_size, trust=checkpoint.trust).requires_grad_(False)


def _tuned_rows(
    model: PreTrainedModel, checkpoint: Checkpoint, options: TuneOptions, choice: PositionChoice
) -> tuple[Positions, TunedRows]:
    """Puts the trained table into the model; the first rows are the checkpoint's, in any scheme."""
    family = checkpoint.family
    # By the checkpoint's name, whose beginning an encoder taken from a larger model lacks: some families put the table
    # where it can be replaced only when positions are extended.
    table_name = family.position_table
    before = next(
        weight.detach().clone()
        for name, weight in model.named_parameters()
        if name.endswith(table_name) or table_name.endswith(name)
    )
    # The library pads the texts of some families, and looks up positions for the padding.
    rows = family.padded_tokens(model.config, options.max_len)
    positions = extend_positions(model, family, max_len=rows, scheme=choice.scheme, alpha=choice.alpha, itemsize=0)
    table = torch.from_numpy(
        extend_table(before.numpy(), rows, scheme=choice.scheme, alpha=choice.alpha, first_row=positions.first_row)
    )
    table[: len(before)] = before
    tuned = TunedRows(table, first=len(before), all_rows=options.train is Trained.ALL)
    family.embeddings(model).position_embeddings = tuned
    return dataclasses.replace(positions, rows=options.max_len), tuned


def _has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies matrices in bfloat16, which otherwise is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported()


def _cast_frozen_layers(model: PreTrainedModel) -> None:
    """Keeps frozen matrices in bfloat16, so that autocast need not convert them at every call."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules():
        frozen = isinstance(module, torch.nn.Linear) and not module.weight.requires_grad
        if frozen and id(module.weight) not in looked_up:
            module.to(torch.bfloat16)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # The library asks whether the layer is training; its modules, such as dropout, stay in evaluation mode.
            module.training = module.gradient_checkpointing = True
            module._gradient_checkpointing_func = functools.partial(
                torch.utils.checkpoint.checkpoint, use_reentrant=False
            )
