"""PyTorch's answers, which a bundle's are compared with."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdexport.attention.kind import ReferenceFacts
from hdexport.attention.kinds import attention_of
from hdexport.checkpoint import Checkpoint
from hdexport.families import Family
from hdexport.graph.left_out_layers import layers_left_out_of_pytorch
from hdexport.model.positions import DEFAULT_ALPHA
from hdexport.verify.remembered import PastTexts
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.bundle.manifest import Manifest, PositionForm, Role, Scheme
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.state_start import state_at_start
from hdruntime.bundle.task_formats import Task
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdexport.model.graph_module import GraphModule

_ROWS_APART = 997
"""Tokens between the beginnings of two rows' texts; a prime number, so that they share no rhythm."""

_PAST_ROW = 1000
"""Number of the text that is remembered; no case has as many rows."""

_SPECIAL_IDS = (0, 1, 2, 3)
"""Ids that no text has, beside the padding's: of most vocabularies they are the special tokens'."""


class Reference:
    """PyTorch's answers in float32. Nothing is kept: an answer may have gigabytes.

    Args:
        module: the model.
        manifest: of the bundle.
        checkpoint: the checkpoint of the model.
        facts: of its attention.
        positions_shift: whether padding before a text shifts its positions.

    Attributes:
        pad_token_id: of padding on the left.
        is_changed: whether the model answers otherwise than the checkpoint's within the checkpoint's own positions.
        reads_first: whether a classifier reads the token at index 0, padding or not.
        past: the memories of texts.
    """

    def __init__(
        self,
        module: GraphModule,
        manifest: Manifest,
        *,
        checkpoint: Checkpoint,
        facts: ReferenceFacts,
        positions_shift: bool,
    ) -> None:
        self._module, self.checkpoint, self.facts = module, checkpoint, facts
        self.positions_shift = positions_shift
        self.pad_token_id = max(0, checkpoint.config.get("pad_token_id") or 0)
        self.is_changed = (
            facts.replaced
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
        self._left_out: Collection[int] = ()
        self.past = PastTexts(manifest, self._leaves)

    @property
    def model(self) -> PreTrainedModel:
        """The model of transformers, without hdexport's additions."""
        return self._module.model

    @property
    def takes_position_ids(self) -> bool:
        """Whether PyTorch can compute a text as if padding were before it."""
        return "position_ids" in inspect.signature(self._module.model.forward).parameters

    def named(self, of_role: Mapping[Role, IntArray], carried: Mapping[str, FloatArray]) -> dict[str, npt.NDArray[Any]]:
        """The model's inputs by name, from each role's values, 0 where there are none, and the memories."""
        shape = of_role[Role.IDS].shape
        return {
            spec.name: carried[spec.name]
            if spec.role is Role.MEMORY
            else of_role.get(spec.role, np.zeros(shape, np.int64))
            for spec in self._module.inputs
        }

    def _leaves(self, tokens: int, memory: int) -> dict[str, FloatArray]:
        """The memory that a text of so many tokens leaves, of that size, [1, ...] each."""
        carried = [spec for spec in self._module.inputs if spec.role is Role.MEMORY]
        empty = {spec.name: state_at_start(spec, rows=1, memory=memory) for spec in carried}
        left = self.unpadded(_PAST_ROW, tokens, carried=empty)
        return {str(spec.fed_from): left[str(spec.fed_from)][None] for spec in carried}

    def of_text(self, row: int, length: int) -> dict[Role, IntArray]:
        """Role -> [length], the inputs for the row's text in a check.

        The text's second half is another text than its first; the first token, one inside and the last are marked; the
        first third is a prompt, which is not pooled; and others attend to all but the last quarter.
        """
        place = np.arange(length)
        bound = next((spec.bound for spec in self._module.inputs if spec.role is Role.MARKS), None)
        marked = np.zeros(length, np.int64)
        marked[[0, length // 3, length - 1][:bound]] = 1
        return {
            Role.IDS: self.text(row, length),
            Role.MASK: np.ones(length, np.int64),
            Role.TOKEN_TYPES: (place >= (length + 1) // 2).astype(np.int64),
            Role.MARKS: marked,
            Role.POOLED: (place >= length // 3).astype(np.int64),
            Role.ATTENDED: (place < length - length // 4).astype(np.int64),
        }

    def reading(self, written: IntArray) -> Reference:
        """The same model, for checks on written text instead of random ids; each row's text begins elsewhere.

        Args:
            written: [tokens], to cut texts from; every text begins and ends with its first and last token.
        """
        other = copy.copy(self)
        other._written = written
        return other

    def without_layers(self, calls: Collection[int]) -> Reference:
        """The same model, where some calls of layers return the result of the call before.

        Args:
            calls: their numbers, from 0.
        """
        other = copy.copy(self)
        other._left_out = calls
        return other

    def calls_of_layers(self) -> int:
        """How often a call of the model calls a layer."""
        with layers_left_out_of_pytorch(self._module, ()) as calls:
            self.unpadded(0, 1)
            return calls()

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
        carried: Mapping[str, FloatArray] | None = None,
        shift: int = 0,
        samples: IntArray | None = None,
    ) -> dict[str, FloatArray]:
        """The outputs for one row's text alone: name -> array without the batch axis.

        Args:
            row: which text.
            length: its tokens.
            memories: the memories, [1, ...] each; None for a model that remembers nothing.
            shift: padding before it, which shifts the positions of models of BERT's kind.
            samples: as :meth:`batch` takes it.
        """
        of_role = {role: values[None] for role, values in self.of_text(row, length).items()}
        inputs = self.named(of_role, carried or {})
        if shift and self.positions_shift and self.takes_position_ids:
            inputs["position_ids"] = np.arange(shift, shift + length)[None]
        return {name: values[0] for name, values in self.batch(inputs, samples=samples).items()}

    def batch(
        self, inputs: Mapping[str, npt.NDArray[Any]], *, samples: IntArray | None = None
    ) -> dict[str, FloatArray]:
        """The outputs for a batch as it is: name -> array.

        Args:
            inputs: name -> array, all of the model's.
            samples: [samples], the tokens whose logits are computed, where not all of them fit in memory; the outputs
                then hold the head's input for every token, too, by the name `HEAD_INPUT`.
        """
        import torch

        from hdexport.graph.vocabulary_head import HEAD_INPUT, sampled_head

        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        with torch.inference_mode(), layers_left_out_of_pytorch(self._module, self._left_out):
            if samples is None:
                outputs = dict(zip(self._module.outputs, self._module(**tensors), strict=True))
            else:
                with sampled_head(self._module.model, torch.from_numpy(samples)) as given:
                    outputs = dict(zip(self._module.outputs, self._module(**tensors), strict=True))
                outputs[HEAD_INPUT] = given[0]
        return {name: output.numpy() for name, output in outputs.items()}


def reference_of(bundle: Bundle, checkpoint: Checkpoint) -> Reference:
    """PyTorch's model for a bundle, its positions extended as the bundle's were.

    Args:
        bundle: the bundle to be verified.
        checkpoint: the checkpoint that it was built from.

    Raises:
        ModelError: the checkpoint is not the one that the bundle was built from.
    """
    from hdexport.checkpoint.heads import task_head
    from hdexport.model.graph_module import GraphModule
    from hdexport.model.rotary import use_stretched_rotary
    from hdexport.model.surgery import extend_positions

    manifest, task = bundle.manifest, bundle.manifest.task
    if checkpoint.config["model_type"] != manifest.model_type:
        raise ModelError(
            f"The bundle was built from a {manifest.model_type}, and {checkpoint.path} is a "
            f"{checkpoint.config['model_type']}.\nName the checkpoint it was built from with --model."
        )
    model = checkpoint.with_adapter(manifest.adapter).load(task)
    max_len, scheme, alpha = positions_of(manifest, checkpoint.family, model.config.to_dict())
    positions = extend_positions(model, checkpoint.family, max_len=max_len, scheme=scheme, alpha=alpha)
    if positions.base != manifest.positions.base:
        raise ModelError(
            f"The bundle was built from {manifest.positions.base} positions, and {checkpoint.path} has "
            f"{positions.base}.\nName the checkpoint it was built from with --model."
        )
    if manifest.positions.rope_factor is not None:
        use_stretched_rotary(model, manifest.positions.rope_factor)
    facts = _use_attention(model, checkpoint.family, bundle)
    module = GraphModule(
        model,
        task,
        inputs=manifest.inputs,
        head=task_head(checkpoint, task),
        carried=facts.carried,
    ).eval()
    return Reference(
        module,
        manifest,
        checkpoint=checkpoint,
        facts=facts,
        positions_shift=positions.first_row == 0 and positions.form != PositionForm.BY_LENGTH,
    )


def _use_attention(model: PreTrainedModel, family: Family, bundle: Bundle) -> ReferenceFacts:
    """Make the model attend as the bundle's was made to, with nothing of our operators; in place."""
    from hdexport.attention.query_scale import LogScale
    from hdexport.attention.query_scale_reference import use_query_scale

    found = [
        item.kind.use_reference(item.kind.read(item.record, bundle), model, family)
        for item in attention_of(bundle.manifest)
    ]
    replaced = any(facts.replaced for facts in found)
    if not replaced:
        family.as_trained(model)
    query_scale = LogScale.of_positions(bundle.manifest.positions)
    if query_scale is not None:
        use_query_scale(model, family, query_scale)
    return ReferenceFacts(
        replaced=replaced,
        undefined_padding=any(facts.undefined_padding for facts in found),
        counts_from_padding=any(facts.counts_from_padding for facts in found),
        decisions=next((facts.decisions for facts in found if facts.decisions is not None), None),
        information=next((facts.information for facts in found if facts.information is not None), None),
        carried=next((facts.carried for facts in found if facts.carried is not None), None),
    )


def positions_of(manifest: Manifest, family: Family, config: Mapping[str, Any]) -> tuple[int, Scheme, float]:
    """How many positions the library's own model needs for a bundle's answers, their scheme and its alpha.

    Args:
        manifest: of the bundle.
        family: of the model.
        config: content of the checkpoint's ``config.json``.
    """
    # The library may pad a text, and look up positions for the padding; the content of those rows does not matter.
    max_len = family.padded_tokens(SimpleNamespace(**config), manifest.max_len)
    scheme, alpha = manifest.positions.scheme, manifest.positions.alpha
    if scheme is Scheme.NONE and max_len > manifest.max_len:
        scheme = Scheme.TILE
    return max_len, scheme, DEFAULT_ALPHA if alpha is None else alpha
