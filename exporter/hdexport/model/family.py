"""What the pipeline needs to know about a model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hdexport.model.task import AUTO_CLASS_OF_TASK
from hdruntime.bundle.manifest import InputSpec, Task
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


class UnsupportedReason(StrEnum):
    """Why hdexport does not do something with a family's models; each value is a sentence for messages."""

    NO_FAMILY = "No family has been written for this model type (CONTRIBUTING.md, Add a model family)."

    NATIVE_WINDOWS = "Its local layers attend to windows, and its global layers to the whole text."
    NATIVE_SPARSE = "Its attention is sparse already, as its config.json says."
    NATIVE_FEATURES = "Its attention is FAVOR+ already."
    NATIVE_RECURRENCE = "Its attention is relative, with a memory cache of earlier segments."
    RELATIVE_POSITIONS = "Its attention scores have terms of the distance between tokens."
    CAUSAL = "Its tokens attend to earlier tokens only, and other attention to both sides."
    OWN_ATTENTION_CODE = "Transformers' code computes its attention outside of the attention interface."
    NO_STACK_OF_LAYERS = "Transformers has no module of the layers alone, whose attention could be replaced."

    CAUSAL_SCALE = "Its tokens attend to different numbers of keys, and the factor is one per text."
    RELATIVE_SCALE = "Its scores depend on distances, and no trained length says when queries are to grow."

    LSH_TRAINING = "Transformers trains it at multiples of a chunk only, with new hashes in each step."

    NEEDS_DECODER = "The task needs a decoder, and hdexport builds encoders."
    NO_HEAD = "The model has no head for the task."
    NO_CLASS = "Transformers has no class of the model for the task."
    NOT_TRAINED_FOR_TASK = "The model was not trained for the task."
    CAUSAL_TASK = "The task generates text, or needs a model that attends to both sides."
    TWO_STREAMS = "The task needs a second stream of queries, and hdexport builds one."


@dataclass(frozen=True, kw_only=True)
class ModelClasses:
    """The classes of a model type that transformers does not have.

    Attributes:
        config: the class of the configuration, with the ``model_type``.
        models: task -> class of the model with the task's head.
    """

    config: type[PreTrainedConfig]
    models: Mapping[Task, type[PreTrainedModel]]

    def register(self) -> None:
        """Register the classes with transformers' Auto classes, which load checkpoints by them from then on.

        Raises:
            ModelError: transformers has classes for the model type.
        """
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        model_type = self.config.model_type
        if model_type in CONFIG_MAPPING_NAMES:
            raise ModelError(
                f"transformers {transformers.__version__} has the model type {model_type}, for which this hdexport "
                "has classes.",
                hint="Use a newer hdexport: pip install -U hdexport",
            )
        transformers.AutoConfig.register(model_type, self.config, exist_ok=True)
        for task, model in self.models.items():
            getattr(transformers, AUTO_CLASS_OF_TASK[task]).register(self.config, model, exist_ok=True)


@dataclass(frozen=True, kw_only=True)
class NativeAttention:
    """The attention that checkpoints of a family were trained with, if it is not dense.

    Attributes:
        attention_type: name of the `hdexport.attention.attention_type.AttentionType`.
        record: configuration -> the type's record in the manifest; None for a configuration with dense attention.
        adapt: called after `Family.adapt` with the model and the type's conversion.
        use_states: makes transformers' model read and write the conversion's recurrent states, in place; None if the
            type has none.
        extra_states: configuration and task -> recurrent states of the model in addition to the type's.
    """

    attention_type: str
    record: Callable[[Any], Any]
    adapt: Callable[[PreTrainedModel, Any], None]
    use_states: Callable[[PreTrainedModel, Any], None] | None = None
    extra_states: Callable[[Any, Task], Sequence[InputSpec]] = field(default=lambda config, task: ())


@dataclass(frozen=True, kw_only=True)
class NativeAdapters:
    """Adapters among the weights of a checkpoint; a bundle has one. Adapters in other folders are merged in any family.

    Attributes:
        names_key: key of ``config.json`` for the adapters' names.
        default_key: key of ``config.json`` for the name of the adapter in use.
    """

    names_key: str
    default_key: str


def _unchanged(model: PreTrainedModel) -> None:
    """Leave the model as transformers has it."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the models of a family are loaded and adapted; the defaults are BERT's.

    Checkpoints:

    Attributes:
        of_config: ``config.json`` -> the family of checkpoints with it; None if all checkpoints have this family.
        is_generic: whether the family was inferred from a model's configuration and modules, for a model type without
            a file in `hdexport.families`: transformers' code is traced without changes.
        classes: classes that transformers does not have; None if it has them.
        config_overrides: ``config.json`` with the keys of another implementation -> values of the keys that
            transformers reads. It may raise a `ModelError`.
        adapters: keys of adapters among the checkpoint's weights; None without adapters.
        known_config_keys: keys of ``config.json`` that `config_overrides` reads or that change no output.
        training_weights: prefixes of the names of weights that only training uses.
        shares_layers: whether all layers use the same weights. Engines of such models get one profile by default,
            since each profile holds the program of every layer (8 MB for 12 layers).
        token_width: configuration -> width of a token's embedding.
        honors_is_decoder: whether ``is_decoder`` is honoured, by causal attention; otherwise it is rejected.

    Positions:

    Attributes:
        learned_positions: whether positions are a learned table, which builds extend; otherwise any length is computed.
        keeps_table: whether a table of positions that are not `learned_positions` limits the length.
        padding_row: configuration -> row of the position table that padding tokens use; None if positions count from
            row 0. Otherwise real positions start at the next row, and ids are
            ``cumsum(is_real) * is_real + padding_row``.
        embeddings: model -> module of the word, position and token-type embeddings, whose ``position_embeddings`` is
            the table.
        prepare: makes the position table of a loaded model a `torch.nn.Embedding`, in place.
        positions_key: key of ``config.json`` for the rows of the table.
        position_table: suffix of the table's name among the checkpoint's weights.
        stores_table: whether checkpoints have the table, which `hdexport extend` edits.
        padded_tokens: configuration and tokens -> length to which transformers pads such a text, if the padding needs
            positions.
        scales_rope: whether `hdexport.model.rotary` can multiply the base of rotary positions.
        relative_positions: whether positions are distances, without a trained maximum.
        position_embedding_types: accepted values of ``position_embedding_type``, the default first; None for all.
        as_trained: makes transformers' model with extended positions give the same outputs in each call, in place;
            some keep state between calls. Bundles are compared with it.
        tuning_unsupported_reason: why learned positions cannot be trained; None if they can.

    Attention:

    Attributes:
        adapt: replaces attention that transformers' attention interface does not reach by hdexport's operators, in
            place.
        native_attention: attention other than dense attention; None if there is none, or if transformers' attention
            interface expresses it.
        is_causal: whether tokens attend to earlier tokens only, unless ``is_causal`` of a checkpoint is false.
        query_projections: model -> its attention modules, each with its projection of queries, if transformers'
            attention interface does not reach the modules, which take the mask as ``attention_mask``; None otherwise.
        conversion_unsupported_reason: why ``--attention`` cannot replace the native attention; None if it can.

    Tasks:

    Attributes:
        tasks: the supported tasks of `AUTO_CLASS_OF_TASK`; None for every encoder task with a class in transformers.
        task_unsupported_reason: why the other tasks are not supported.
        classifies_first: whether transformers' classifier reads the token at index 0 even if it is padding.
        token_types: number of token types if models compare them; None if the rows of the embedding table say it.
        counts_separators: whether token types in question answering default to 0 up to the first separator and 1
            after it; otherwise to 0.
    """

    of_config: Callable[[Mapping[str, Any]], Family] | None = None
    is_generic: bool = False
    classes: ModelClasses | None = None
    config_overrides: Callable[[Mapping[str, Any]], Mapping[str, Any]] = field(default=lambda config: {})
    known_config_keys: frozenset[str] = frozenset()
    adapters: NativeAdapters | None = None
    training_weights: tuple[str, ...] = ()
    shares_layers: bool = False
    token_width: Callable[[Any], int] = field(default=lambda config: int(config.hidden_size))
    honors_is_decoder: bool = False

    learned_positions: bool = True
    keeps_table: bool = False
    padding_row: Callable[[Any], int | None] = field(default=lambda config: None)
    embeddings: Callable[[PreTrainedModel], Any] = field(default=lambda model: model.base_model.embeddings)
    prepare: Callable[[PreTrainedModel], None] = _unchanged
    positions_key: str = "max_position_embeddings"
    position_table: str = "embeddings.position_embeddings.weight"
    stores_table: bool = True
    padded_tokens: Callable[[Any, int], int] = field(default=lambda config, tokens: tokens)
    scales_rope: bool = False
    relative_positions: bool = False
    position_embedding_types: tuple[str, ...] | None = ("absolute",)
    as_trained: Callable[[PreTrainedModel], None] = _unchanged
    tuning_unsupported_reason: UnsupportedReason | None = None

    adapt: Callable[[PreTrainedModel], None] = _unchanged
    native_attention: NativeAttention | None = None
    is_causal: bool = False
    query_projections: Callable[[PreTrainedModel], Sequence[tuple[torch.nn.Module, torch.nn.Module]]] | None = None
    conversion_unsupported_reason: UnsupportedReason | None = None

    tasks: tuple[Task, ...] | None = None
    task_unsupported_reason: UnsupportedReason = UnsupportedReason.NEEDS_DECODER
    classifies_first: bool = True
    token_types: int | None = None
    counts_separators: bool = False

    def first_row(self, config: Any) -> int:
        """Row of the position table that the first real token uses."""
        padding_row = self.padding_row(config)
        return 0 if padding_row is None else padding_row + 1

    def native_record(self, attention_type: str, config: Any) -> Any | None:
        """The record of an attention type that checkpoints with this configuration were trained with, or None."""
        native = self.native_attention
        return None if native is None or native.attention_type != attention_type else native.record(config)
