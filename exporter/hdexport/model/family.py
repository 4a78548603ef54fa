"""Facts about a model family that the pipeline needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hdexport.model.task import AUTO_CLASS_OF_TASK, model_class, model_task, tasks_with_class
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from hdruntime.bundle.manifest import InputSpec


@dataclass(frozen=True, kw_only=True)
class ModelClasses:
    """A model type's classes: of its configuration, with the ``model_type``, and of the model with each task's head."""

    config: type[PreTrainedConfig]
    models: Mapping[Task, type[PreTrainedModel]]

    def register(self) -> None:
        """Make transformers' Auto classes know them, so that checkpoints load as other types' checkpoints do.

        A ModelError says that transformers has classes for the type.
        """
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        model_type = self.config.model_type
        if model_type in CONFIG_MAPPING_NAMES:
            raise ModelError(
                f"transformers {transformers.__version__} has the model type {model_type}, and this hdexport has "
                "classes of its own for it.",
                hint="Use a newer hdexport: pip install -U hdexport",
            )
        transformers.AutoConfig.register(model_type, self.config, exist_ok=True)
        for task, model in self.models.items():
            getattr(transformers, AUTO_CLASS_OF_TASK[task]).register(self.config, model, exist_ok=True)


def _nothing_to_adapt(model: PreTrainedModel) -> None:
    """The family's attention is reached through the library's attention interface."""


@dataclass(frozen=True, kw_only=True)
class OwnAttention:
    """A family's own attention, of a kind that `hdexport.attention` knows.

    Attributes:
        of_config: the attention of the kind that a checkpoint of that configuration was trained with, in the kind's
            terms; None where this one attends densely.
        adapt: called in place of `Family.adapt`: with the model, and the kind's setup.
        remember: makes the library's own model look at the carried states of the kind's setup, and leave them, in
            place; None where the kind has none.
        carried: for a configuration and a task, other carried states of a model than the kind's, if it has any.
    """

    kind: str
    of_config: Callable[[Any], Any]
    adapt: Callable[[PreTrainedModel, Any], None]
    remember: Callable[[PreTrainedModel, Any], None] | None = None
    carried: Callable[[Any, Task], Sequence[InputSpec]] = field(default=lambda config, task: ())


@dataclass(frozen=True, kw_only=True)
class _OfCheckpoints:
    """How a checkpoint of a family is read.

    Attributes:
        classes: of models that transformers does not know; None where transformers knows them.
        newer_keys: for a ``config.json`` with the keys of other code, which transformers passes over, the values of its
            own keys; empty for others. It may refuse with a `ModelError`.
        keys_of_other_code: keys of ``config.json`` that code reads which the family's checkpoints were published with;
            `newer_keys` reads them, or they change no answer.
        encoder_classes: model type -> class of transformers that loads an encoder alone, for tasks without a head. For
            types whose AutoModel has a decoder as well, which checkpoints of an encoder have no weights for.
        encoder: takes the encoder out of the loaded model and returns it, where that is only a part of it.
        training_weights: begins of the names of weights that checkpoints store for training only.
        shares_layers: whether all layers use the same weights. Such a model is chosen for its size, and each profile
            of an engine repeats the program of every layer (8 MB for 12), so it gets one profile unless asked.
        token_width: width of the encoder's vector for a token, by the configuration.
    """

    classes: ModelClasses | None = None
    newer_keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] = field(default=lambda config: {})
    keys_of_other_code: frozenset[str] = frozenset()
    encoder_classes: Mapping[str, str] = field(default_factory=dict)
    encoder: Callable[[PreTrainedModel], PreTrainedModel] = field(default=lambda model: model)
    training_weights: tuple[str, ...] = ()
    shares_layers: bool = False
    token_width: Callable[[Any], int] = field(default=lambda config: int(config.hidden_size))

    runs_decoders: ClassVar[bool] = False
    """Whether ``is_decoder`` is honoured, by attention to earlier tokens only; else it is refused."""

    def adapters(self, config: Mapping[str, Any]) -> Sequence[str]:
        """The adapters among a checkpoint's own weights, of which a bundle has one, by name.

        Adapters in folders beside the weights are merged in every family.
        """
        return ()

    def choose_adapter(self, model: PreTrainedModel, name: str) -> None:
        """Make a loaded model use one of its `adapters`, in place."""


@dataclass(frozen=True, kw_only=True)
class _OfPositions:
    """Facts about the positions of tokens in a family's models: here a table that counts from row 0.

    Attributes:
        learned_positions: whether there is a table of positions; without one, as with rotary positions, any length is
            computed and nothing is extended.
        padding_row: row of the position table that padding tokens use, or None where positions count from row 0.
            Where there is one, real positions start at the row after it and their ids follow the padding rule
            ``cumsum(is_real) * is_real + padding_row``.
        embeddings: the module of word, position and, for some, token-type embeddings; it holds the table of positions
            as ``position_embeddings``.
        prepare: makes the table of positions of a loaded model a `torch.nn.Embedding`, in place, where it is another
            module.
        positions_key: key of ``config.json`` for the rows of that table.
        position_table: how the table's name ends among the checkpoint's weights.
        padded_tokens: length to which the library's own code pads a text of so many tokens, where the padding needs
            positions.
        stretches_rotary: whether `hdexport.model.rotary` can multiply the base of its rotary positions.
        counts_distances: whether positions are distances, of which a model takes any number without being told how many
            it was trained with.
        why_not_extended: why no positions can be added, as the end of a sentence; None where they can.
        why_not_tuned: why positions are not trained, as half a sentence; None where they are.
        as_trained: makes the library's own model, after its positions were extended, answer every call as a new one
            would, in place. Bundles are compared with it.
    """

    learned_positions: bool = True
    padding_row: Callable[[Any], int | None] = field(default=lambda config: None)
    embeddings: Callable[[PreTrainedModel], Any] = field(default=lambda model: model.base_model.embeddings)
    prepare: Callable[[PreTrainedModel], None] = _nothing_to_adapt
    positions_key: str = "max_position_embeddings"
    position_table: str = "embeddings.position_embeddings.weight"
    padded_tokens: Callable[[Any, int], int] = field(default=lambda config, tokens: tokens)
    stretches_rotary: bool = False
    counts_distances: bool = False
    why_not_extended: str | None = None
    why_not_tuned: str | None = None
    as_trained: Callable[[PreTrainedModel], None] = _nothing_to_adapt

    position_embedding_types: ClassVar[tuple[str, ...]] = ("absolute",)
    """The values of ``position_embedding_type``; the first is the one that its absence means."""

    asks_by_position_ids: ClassVar[bool] = True
    """Whether a verification asks the library's model for shifted positions by their ids, where it takes some; else by
    padding."""

    @property
    def keeps_table(self) -> bool:
        """Whether there is a table of positions though they are not `learned_positions`: it is left as it is."""
        return False

    def stores_table(self, config: Mapping[str, Any]) -> bool:
        """Whether checkpoints of a configuration hold the table of positions, which `hdexport extend` edits."""
        return True

    def first_row(self, config: Any) -> int:
        """Row of the position table that the first real token uses."""
        padding_row = self.padding_row(config)
        return 0 if padding_row is None else padding_row + 1


@dataclass(frozen=True, kw_only=True)
class _OfAttention:
    """How a family's attention becomes ours: here dense, through the library's attention interface.

    Attributes:
        adapt: maps an attention that the library's attention interface does not reach to our operators, in place.
        own: attention of another kind than dense that checkpoints of the family have; None where they have none, or
            where the library's attention interface says all of it.
        is_causal: whether tokens see the tokens before them alone, unless ``is_causal`` of a checkpoint says otherwise.
        query_projections: lists each attention module of a loaded model with its projection of queries, where the
            library's attention interface does not reach the modules, which take the mask as ``attention_mask``. None
            where it does.
        why_not_converted: why no attention can take the place of its own, as half a sentence; None where one can.
        has_native_windows: whether the local layers of transformers' model attend to windows.
    """

    adapt: Callable[[PreTrainedModel], None] = _nothing_to_adapt
    own: OwnAttention | None = None
    is_causal: bool = False
    query_projections: Callable[[PreTrainedModel], Sequence[tuple[torch.nn.Module, torch.nn.Module]]] | None = None
    why_not_converted: str | None = None
    has_native_windows: bool = False

    why_not_scaled: ClassVar[str | None] = None
    """Why queries cannot grow with the keys of their text, as half a sentence; None where they can."""

    def own_attention(self, kind: str, config: Any) -> Any | None:
        """The attention of a kind, by its name, that a checkpoint of this configuration was trained with; None for
        another kind."""
        return None if self.own is None or self.own.kind != kind else self.own.of_config(config)


@dataclass(frozen=True, kw_only=True)
class _OfTasks:
    """The tasks of a family's models, and the tokens for them: here every task of encoders that there is a class for.

    Attributes:
        tasks: the tasks of `AUTO_CLASS_OF_TASK` that the family has models for; None for all of encoders that there is
            a class for.
        why_not_other_tasks: why not the others, as the end of a sentence.
        classifies_first: whether the library's classifier reads the token at index 0, padding or not.
    """

    tasks: tuple[Task, ...] | None = None
    why_not_other_tasks: str = "needs its decoder; encoders are supported"
    classifies_first: bool = True

    token_types: ClassVar[int | None] = None
    """How many there are where models compare them; None where the embeddings' table has a row for each."""

    def token_type_separator_id(self, config: Any, task: Task) -> int | None:
        """The id of the token up to which token types are 0, and 1 after it, by default; None where all are 0."""
        return None


@dataclass(frozen=True, kw_only=True)
class Family(_OfCheckpoints, _OfPositions, _OfAttention, _OfTasks):
    """How the models of a family are read and become ours.

    A family says where its models differ from BERT's, whose facts are the defaults: `_OfCheckpoints`, `_OfPositions`,
    `_OfAttention` and `_OfTasks` name the facts. Those that several families differ in are fields; what a single one
    does otherwise are methods and class attributes, which a class of its own overrides.

    Attributes:
        model_types: the ``model_type`` values of ``config.json`` that belong to the family.
        of_config: the family of checkpoints with such a ``config.json``, where checkpoints differ in a fact; None where
            all are of this one.
    """

    is_written: ClassVar[bool] = True
    """Whether the family was written, and tested, for its model types; else its facts are found in the model."""

    model_types: tuple[str, ...]
    of_config: Callable[[Mapping[str, Any]], Family] | None = None

    @property
    def has_sdpa(self) -> bool:
        """Whether the library's classes compute attention by PyTorch's scaled_dot_product_attention; by their own
        "eager" code otherwise."""
        return bool(model_class(self._default(), family=self, task=Task.FEATURE_EXTRACTION)._supports_sdpa)

    @property
    def all_tasks(self) -> tuple[Task, ...]:
        """The tasks that a model of the family can be built for."""
        own = tasks_with_class(self._default(), family=self) if self.tasks is None else self.tasks
        return tuple(task for task in Task if model_task(task) in own)

    def _default(self) -> PreTrainedConfig:
        """A configuration by which the library tells the classes of the family."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[self.model_types[0]]()
