"""What the configuration and the modules of a model without a family say; no weight is loaded."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerationMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hdexport.model.family import Family
from hdexport.model.task import model_class, tasks_with_class
from hdexport.support.json_files import shown
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError

_POSITIONS = re.compile(r"pos(itions?)?(_emb\w*|_encod\w*)?|wpe|position_\w+|embed_positions|pos_\w+")
"""Names of tables of positions."""

_RELATIVE = re.compile(r"relative|distance|bias|bucket")
"""Parts of the names of tables of distances, which bound no length."""

_TOKEN_TYPES = re.compile(r"token_type\w*|segment\w*")
"""Names of tables of token types."""

_READ_OF_ALL = {
    "hidden_size": None,
    "num_hidden_layers": None,
    # Models without attention, or whose attention is no products: one square of tokens, as memory is estimated.
    "num_attention_heads": 1,
    "vocab_size": None,
    "pad_token_id": None,
}
"""What is read of every configuration -> what stands for it where a configuration has it nowhere."""

_OFFSET = "offset"
"""Attribute of transformers' tables whose first rows no position uses."""


@dataclass(frozen=True, kw_only=True)
class InferredModelInfo:
    """What a model's configuration and modules say.

    Attributes:
        tasks: the tasks of `ENCODER_TASKS` that there is a class for.
        values: key of ``config.json`` -> its value, for those that are read of every configuration and that this one
            has in its part for texts, or not at all.
        positions_key: key of ``config.json`` for the most positions; None where none says how many.
        max_positions: value of that key.
        has_table: whether a table of positions, whose rows bound the length, is among the modules.
        follows_padding: whether positions count from the row after the padding's, as in RoBERTa.
        token_types: rows of the table of token types; 0 without a table, with one row, or with several
            tables.
        has_decoder: whether the model has a decoder, which a bundle leaves out.
    """

    tasks: tuple[Task, ...]
    values: Mapping[str, Any]
    positions_key: str | None
    max_positions: int
    has_table: bool
    follows_padding: bool
    token_types: int
    has_decoder: bool


def infer_model_info(config: Mapping[str, Any], family: Family) -> InferredModelInfo:
    """The facts about a checkpoint with such a ``config.json``. A ModelError says that no model can be made of it."""
    model_type = str(config["model_type"])
    try:
        config_class = CONFIG_MAPPING[model_type] if family.classes is None else family.classes.config
        settings = config_class.from_dict(_with_floats(config))
        kind = model_class(settings, family=family, task=Task.FEATURE_EXTRACTION)
        with torch.device("meta"):
            skeleton = kind._from_config(copy.deepcopy(settings), dtype=torch.float32)
    except KeyError:
        raise ModelError(
            f"There is no AutoModel of a {model_type}, so there are no vectors of tokens to build.",
            hint="Choose a model of another type.",
        ) from None
    except MemoryError:
        raise
    except Exception as error:
        # Configurations and classes have checks of their own, and where they lack one, their code fails somewhere.
        raise ModelError(
            f"config.json does not describe a {model_type}: {shown(error)}",
            hint="Correct that value, or download the model's config.json again.",
        ) from error
    _check_position_kind(kind, config)
    has_decoder = bool(settings.is_encoder_decoder)
    encoder = skeleton.get_encoder() if has_decoder else skeleton
    _check_inputs_and_outputs(encoder, model_type)
    tables = _tables_of_positions(encoder)
    part = encoder.config if has_decoder else settings.get_text_config()
    key, most = _most_positions(settings, part, tables)
    padding = getattr(part, "pad_token_id", None)
    return InferredModelInfo(
        tasks=(Task.FEATURE_EXTRACTION,) if has_decoder else tasks_with_class(settings, family=family),
        values=_values(settings, part),
        positions_key=key,
        max_positions=most,
        has_table=bool(tables),
        follows_padding=padding is not None and any(getattr(table, "padding_idx", None) == padding for table in tables),
        token_types=_token_types(encoder),
        has_decoder=has_decoder,
    )


def _with_floats(value: Any) -> Any:
    """A value of ``config.json`` with the floats that JSON has no words for, as transformers writes them there."""
    if isinstance(value, Mapping):
        if list(value) == ["__float__"]:
            return float(value["__float__"])
        return {key: _with_floats(part) for key, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else value


def _tables_of_positions(model: torch.nn.Module) -> list[Any]:
    """The tables that are named after positions, but for those of distances."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor)
        and weight.dim() == 2
        and not isinstance(module, torch.nn.Linear)
        and _POSITIONS.fullmatch(name.rpartition(".")[2])
        and not _RELATIVE.search(name)
    ]


def _values(settings: Any, part: Any) -> dict[str, Any]:
    """The values of `_READ_OF_ALL` that a configuration lacks, from its part for texts."""
    missing = {name: other for name, other in _READ_OF_ALL.items() if getattr(settings, name, None) is None}
    of_part = {name: getattr(part, name, None) for name in missing}
    return {
        str(settings.attribute_map.get(name, name)): other if of_part[name] is None else of_part[name]
        for name, other in missing.items()
    }


def _most_positions(settings: Any, part: Any, tables: list[Any]) -> tuple[str | None, int]:
    """The key of ``config.json`` for the most positions, and its value; None and 0 where nothing says how many."""
    name = "max_position_embeddings"
    most = getattr(settings, name, getattr(part, name, None))
    if type(most) is not int or most < 1:
        return None, min((len(table.weight) - getattr(table, _OFFSET, 0) for table in tables), default=0)
    return str(settings.attribute_map.get(name, name)), most


def _token_types(model: torch.nn.Module) -> int:
    """Rows of the table of token types of a model that takes them."""
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        return 0
    rows = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and _TOKEN_TYPES.fullmatch(name.rpartition(".")[2])
    ]
    # Tokens of several tables have several types each.
    return rows[0] if len(rows) == 1 and rows[0] > 1 else 0


def _check_inputs_and_outputs(model: torch.nn.Module, model_type: str) -> None:
    """Reject a model that reads something else than ids, or that gives scores in the place of vectors."""
    name, inputs = type(model).__name__, list(inspect.signature(model.forward).parameters)
    if "input_ids" not in inputs:
        raise ModelError(
            f"The code of a {model_type} reads no ids of texts: {name} takes {', '.join(inputs)}.",
            hint="Choose a model that reads texts alone.",
        )
    if isinstance(model, GenerationMixin):
        raise ModelError(
            f"The AutoModel of a {model_type} is {name}, which gives scores of the next token, and no vectors.",
            hint="Choose a checkpoint of its text model alone, which has a model_type of its own.",
        )


def _check_position_kind(kind: type, config: Mapping[str, Any]) -> None:
    """Reject positions of a kind that the class's file does not know, which it would silently leave out."""
    key = "position_embedding_type"
    value = config.get(key)
    if value not in (None, "absolute") and key not in inspect.getsource(sys.modules[kind.__module__]):
        raise ModelError(
            f"config.json asks for {shown(value)} positions, and {kind.__name__} has no code for them.",
            hint=f"Choose a model whose {key} its code reads.",
        )
