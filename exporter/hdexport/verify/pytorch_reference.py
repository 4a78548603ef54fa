"""PyTorch's answers, which a bundle's are compared with, and the recurrent states of a check."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdexport.attention.attention_type import ReferenceProperties
from hdexport.attention.registry import attention_of
from hdexport.checkpoint import Checkpoint
from hdexport.families import Family
from hdexport.graph.vocabulary_head import HEAD_INPUT, sampled_head
from hdexport.model.memory_cache import MASK, memory_name, new_memory_name
from hdexport.model.positions import DEFAULT_ALPHA
from hdexport.support.json_files import shown
from hdruntime.arrays import AnyArray, FloatArray, IntArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.graph_interface import state_at_start
from hdruntime.bundle.manifest import InputSpec, Manifest, PositionForm, Positions, Role, Scheme, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.verification import Case
from hdruntime.errors import ModelError, Setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdexport.model.graph_module import GraphModule

_ROWS_APART = 997
"""Tokens between the beginnings of two rows' texts; a prime number, so that they share no rhythm."""

_PAST_ROW = 1000
"""Number of the text before a case's, which leaves the recurrent states; no case has as many rows."""

_SPECIAL_IDS = (0, 1, 2, 3)
"""Ids that no text has, beside the padding's: in most vocabularies they are the special tokens."""


class Reference:
    """PyTorch's answers in float32. No answer is kept, because one may take gigabytes.

    Attributes:
        positions_shift: whether padding before a text shifts its positions.
        pad_token_id: of padding on the left.
        is_changed: whether the model answers differently from the checkpoint's within the checkpoint's own positions.
        reads_first: whether a classifier reads the token at index 0, padding or not.
        past: the recurrent states of a case's rows.
    """

    def __init__(
        self,
        module: GraphModule,
        manifest: Manifest,
        *,
        checkpoint: Checkpoint,
        properties: ReferenceProperties,
        positions_shift: bool,
        load: Callable[[Precision], GraphModule],
    ) -> None:
        self.checkpoint, self.properties, self._inputs = checkpoint, properties, manifest.inputs
        self.positions_shift = positions_shift
        self._load, self._loaded, self._precision = load, [module], Precision.FLOAT32
        self.pad_token_id = max(0, checkpoint.config.get("pad_token_id") or 0)
        self.is_changed = (
            properties.replaced
            or manifest.adapter is not None
            or manifest.positions.rope_factor is not None
            or manifest.positions.attention_scale != "none"
        )
        # The modules after a model pool real tokens.
        is_classifier = module.task is Task.TEXT_CLASSIFICATION and module.head is None
        self.reads_first = checkpoint.family.classifies_first and is_classifier
        # Ordinary ids only: a padding id in a text would be a padded position to models of RoBERTa's kind.
        self._ids = np.setdiff1d(np.arange(manifest.vocab_size), [self.pad_token_id, *_SPECIAL_IDS])
        self._written: IntArray | None = None
        self.past = PastTexts(manifest, self._leaves)

    @property
    def _module(self) -> GraphModule:
        if not self._loaded:
            self._loaded.append(self._load(self._precision))
        return self._loaded[0]

    def release(self) -> None:
        """Free a large model until it is asked again; the properties of approximate attention keep theirs."""
        from hdexport.model.half_weights import MIN_MODEL_BYTES

        if not self._loaded:
            return
        size = sum(parameter.nbytes for parameter in self._module.parameters())
        if size >= MIN_MODEL_BYTES and self.properties.information is None:
            self._loaded.clear()
            gc.collect()  # the model refers to itself

    @property
    def model(self) -> PreTrainedModel:
        """The model of transformers, without hdexport's additions."""
        return self._module.model

    @property
    def takes_position_ids(self) -> bool:
        """Whether PyTorch can compute a text as if padding were before it."""
        family = self.checkpoint.family
        return not family.is_generic and "position_ids" in inspect.signature(self.model.forward).parameters

    def named(self, of_role: Mapping[Role, IntArray], recurrent: Mapping[str, FloatArray]) -> dict[str, AnyArray]:
        """The model's inputs by name: from each role's values, 0 where there are none, and the recurrent states."""
        shape = of_role[Role.IDS].shape
        return {
            spec.name: recurrent[spec.name]
            if spec.role is Role.RECURRENT_STATE
            else of_role.get(spec.role, np.zeros(shape, np.int64))
            for spec in self._inputs
        }

    def _leaves(self, tokens: int, memory: int) -> dict[str, FloatArray]:
        """The recurrent states, [1, ...] each, that a text of so many tokens leaves, with an axis ``memory`` of that
        size."""
        recurrent = [spec for spec in self._inputs if spec.role is Role.RECURRENT_STATE]
        empty = {spec.name: state_at_start(spec, rows=1, memory=memory) for spec in recurrent}
        left = self.unpadded(_PAST_ROW, tokens, recurrent=empty)
        return {str(spec.fed_from): left[str(spec.fed_from)][None] for spec in recurrent}

    def of_text(self, row: int, length: int) -> dict[Role, IntArray]:
        """Role -> [length], the inputs for the row's text in a check. The text's second half is another text than its
        first; the first token, one inside and the last are marked; the first third is a prompt, which is not pooled;
        and tokens attend to all but the last quarter."""
        place = np.arange(length)
        bound = next((spec.bound for spec in self._inputs if spec.role is Role.GLOBAL_ATTENTION_MASK), None)
        marked = np.zeros(length, np.int64)
        marked[[0, length // 3, length - 1][:bound]] = 1
        return {
            Role.IDS: self.text(row, length),
            Role.MASK: np.ones(length, np.int64),
            Role.TOKEN_TYPES: (place >= (length + 1) // 2).astype(np.int64),
            Role.GLOBAL_ATTENTION_MASK: marked,
            Role.POOLED: (place >= length // 3).astype(np.int64),
            Role.ATTENDED: (place < length - length // 4).astype(np.int64),
        }

    def reading(self, written: IntArray) -> Reference:
        """The same model, for checks on written text, [tokens], instead of random ids. Each row's text is cut from
        another place, and begins and ends with the first and the last token."""
        other = copy.copy(self)
        other._written = written
        return other

    def in_bfloat16(self) -> Reference:
        """The same model with weights and values in bfloat16, as users of PyTorch load it."""
        other = copy.copy(self)
        other._loaded, other._precision = [], Precision.BFLOAT16
        return other

    def text(self, row: int, length: int) -> IntArray:
        """[length], the first tokens of the row's text."""
        if self._written is not None:
            first, inside, last = self._written[:1], self._written[1:-1], self._written[-1:]
            places = (row * _ROWS_APART + np.arange(max(0, length - 2))) % len(inside)
            return np.concatenate([first, inside[places], last])[:length]
        generator = np.random.default_rng(row)
        return self._ids[generator.integers(0, len(self._ids), length)].astype(np.int64)

    def unpadded(
        self,
        row: int,
        length: int,
        *,
        recurrent: Mapping[str, FloatArray] | None = None,
        shift: int = 0,
        samples: IntArray | None = None,
    ) -> dict[str, FloatArray]:
        """The outputs for one row's text alone: name -> array without the batch axis. `recurrent` has the recurrent
        states, [1, ...] each; `shift` is padding before the text, which shifts the positions of models like BERT."""
        of_role = {role: values[None] for role, values in self.of_text(row, length).items()}
        inputs = self.named(of_role, recurrent or {})
        if shift and self.positions_shift and self.takes_position_ids:
            inputs["position_ids"] = np.arange(shift, shift + length)[None]
        return {name: values[0] for name, values in self.batch(inputs, samples=samples).items()}

    def batch(self, inputs: Mapping[str, AnyArray], *, samples: IntArray | None = None) -> dict[str, FloatArray]:
        """The outputs for a batch of all the model's inputs: name -> array. `samples`, [samples], are the tokens whose
        logits are computed where not all of them fit in memory; the outputs then hold the head's input for every token,
        too, by the name `HEAD_INPUT`."""
        import torch

        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        with self._failures(inputs), torch.inference_mode():
            if samples is None:
                outputs = dict(zip(self._module.outputs, self._module(**tensors), strict=True))
            else:
                with sampled_head(self._module.model, torch.from_numpy(samples)) as given:
                    outputs = dict(zip(self._module.outputs, self._module(**tensors), strict=True))
                outputs[HEAD_INPUT] = given[0]
        return {name: output.numpy() for name, output in outputs.items()}

    @contextlib.contextmanager
    def _failures(self, inputs: Mapping[str, AnyArray]) -> Iterator[None]:
        """Turns errors of code that no family was written for into a ModelError: it may fail at some lengths in any
        way."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            if not self.checkpoint.family.is_generic:
                raise
            batch, tokens = inputs["input_ids"].shape
            raise ModelError(
                f"The code of this {self.checkpoint.config['model_type']} fails on {batch} x {tokens} tokens: "
                f"{shown(error)}",
                hint=("Build it for the lengths that it takes, with ", Setting("max_len", command="build"), "."),
            ) from error


def reference_of(bundle: Bundle, checkpoint: Checkpoint) -> Reference:
    """PyTorch's model for a bundle, its positions extended as the bundle's were; a checkpoint that the bundle was not
    built from is rejected."""
    manifest = bundle.manifest
    if checkpoint.config["model_type"] != manifest.model_type:
        raise ModelError(
            f"The bundle was built from a {manifest.model_type}, and {checkpoint.path} is a "
            f"{checkpoint.config['model_type']}.",
            hint=("Name the checkpoint it was built from with ", Setting("model"), "."),
        )
    checkpoint = checkpoint.with_source(None if manifest.tokenizer is None else manifest.tokenizer.source)
    module, properties, positions = _load(bundle, checkpoint)
    return Reference(
        module,
        manifest,
        checkpoint=checkpoint,
        properties=properties,
        positions_shift=positions.first_row == 0 and positions.form != PositionForm.BY_LENGTH,
        load=lambda precision: _load(bundle, checkpoint, precision)[0],
    )


def _load(
    bundle: Bundle, checkpoint: Checkpoint, precision: Precision = Precision.FLOAT32
) -> tuple[GraphModule, ReferenceProperties, Positions]:
    """The module, the properties of its attention, and its positions."""
    from hdexport.checkpoint.heads import task_head
    from hdexport.model.graph_module import GraphModule
    from hdexport.model.half_weights import UpcastWeights, upcast_in_forward, use_bfloat16
    from hdexport.model.rotary import use_stretched_rotary
    from hdexport.model.surgery import extend_positions

    manifest, task = bundle.manifest, bundle.manifest.task
    # A build has rejected code that differs; a verification records it (`with_code`).
    model = checkpoint.with_adapter(manifest.adapter).load(task, runs_code=False, keeps_half=True)
    max_len, scheme, alpha = positions_of(manifest, checkpoint.family, model.config.to_dict())
    if precision is Precision.FLOAT32:
        upcast_in_forward(model)
    with UpcastWeights():
        positions = extend_positions(model, checkpoint.family, max_len=max_len, scheme=scheme, alpha=alpha)
    if positions.base != manifest.positions.base:
        raise ModelError(
            f"The bundle was built from {manifest.positions.base} positions, and {checkpoint.path} has "
            f"{positions.base}.",
            hint=("Name the checkpoint it was built from with ", Setting("model"), "."),
        )
    if manifest.positions.rope_factor is not None:
        use_stretched_rotary(model, manifest.positions.rope_factor)
    with UpcastWeights():
        properties = _use_attention(model, checkpoint.family, bundle)
    if precision is Precision.BFLOAT16:
        use_bfloat16(model)
    module = GraphModule(
        model,
        task,
        inputs=manifest.inputs,
        head=task_head(checkpoint, task),
        memory_cache=properties.memory_cache,
    ).eval()
    return module, properties, positions


def positions_of(manifest: Manifest, family: Family, config: Mapping[str, Any]) -> tuple[int, Scheme, float]:
    """Number of positions that transformers' model needs for a bundle's answers, their scheme and its alpha.
    `config` is the content of the checkpoint's ``config.json``."""
    # The library may pad a text, and look up positions for the padding; the content of those rows does not matter.
    max_len = family.padded_tokens(SimpleNamespace(**config), manifest.max_len)
    scheme, alpha = manifest.positions.scheme, manifest.positions.alpha
    if scheme is Scheme.NONE and max_len > manifest.max_len:
        scheme = Scheme.TILE
    return max_len, scheme, DEFAULT_ALPHA if alpha is None else alpha


Outputs = Mapping[str, FloatArray]


class PastTexts:
    """The recurrent states of the rows of a case. The first row has those of another text, the second those of the
    later half of one, and all others empty ones. With padding on the left they are unseen, because padding would stand
    between them and the text.

    `leaves` makes, from the tokens of a past text and the size of the axis ``memory``, the states that PyTorch leaves
    after it, with a batch axis.
    """

    def __init__(self, manifest: Manifest, leaves: Callable[[int, int], Outputs]) -> None:
        self._manifest, self._leaves = manifest, leaves
        self._found: dict[tuple[int, int], Outputs] = {}

    def of_row(self, case: Case, row: int) -> dict[str, FloatArray]:
        """Name of each recurrent state -> [1, ...]."""
        recurrent, longest, size = self._manifest.recurrent_states, self._manifest.document_tokens, self._size(case)
        states = {spec.name: state_at_start(spec, rows=1, memory=size) for spec in recurrent}
        mask = memory_name(MASK)
        if case.padding == "left":
            if mask in states:
                states[mask] *= 0
            return states
        past = max(size, 1) if longest is None else min(size, longest - case.tokens)
        if row > 1 or past < 1:
            return states
        if (past, size) not in self._found:
            self._found[past, size] = self._leaves(past, size)
        left = self._found[past, size]
        states = {spec.name: left[str(spec.fed_from)] for spec in recurrent}
        if row == 1 and mask in states:
            states[mask] = np.where(np.arange(size) < size // 2, 0, states[mask]).astype(np.float32)
        return states

    def of_case(self, case: Case) -> dict[str, FloatArray]:
        """Name of each recurrent state -> [batch, ...]."""
        rows = [self.of_row(case, row) for row in range(case.batch)]
        return {spec.name: np.concatenate([row[spec.name] for row in rows]) for spec in self._manifest.recurrent_states}

    def _size(self, case: Case) -> int:
        """Size of the axis ``memory`` in a case, in tokens: the most, the least, or half of them, by the
        case's tokens."""
        least, most = self._manifest.min_memory, self._manifest.max_memory
        return (most, max(least, most // 2 + 1), least)[case.tokens % 3] if most else 0


def compared_tokens(spec: InputSpec, expected: Outputs) -> npt.NDArray[np.bool_] | slice:
    """The part of a recurrent state's first axis that is compared: the tokens that the mask has, or all of it.
    `expected` is all that is left in one row, without the batch axis."""
    mask = new_memory_name(MASK)
    if not spec.has_memory_axis or spec.fed_from == mask or mask not in expected:
        return slice(None)
    return expected[mask] == 1


def _use_attention(model: PreTrainedModel, family: Family, bundle: Bundle) -> ReferenceProperties:
    """Makes the model attend as the bundle's was made to, without our operators, in place."""
    from hdexport.attention.query_scale import LogScale
    from hdexport.attention.reference_attention import use_query_scale

    of_attentions = [
        item.type.use_reference(item.type.read(item.record, bundle), model, family)
        for item in attention_of(bundle.manifest)
    ]
    replaced = any(properties.replaced for properties in of_attentions)
    if not replaced:
        family.as_trained(model)
    query_scale = LogScale.of_positions(bundle.manifest.positions)
    if query_scale is not None:
        use_query_scale(model, family, query_scale)
    return ReferenceProperties(
        replaced=replaced,
        undefined_padding=any(properties.undefined_padding for properties in of_attentions),
        counts_from_padding=any(properties.counts_from_padding for properties in of_attentions),
        discrete_outputs=next(
            (properties.discrete_outputs for properties in of_attentions if properties.discrete_outputs is not None),
            None,
        ),
        information=next(
            (properties.information for properties in of_attentions if properties.information is not None), None
        ),
        memory_cache=next(
            (properties.memory_cache for properties in of_attentions if properties.memory_cache is not None), None
        ),
    )
