"""The settings of sentence-transformers in a checkpoint; settings that a bundle cannot honour are rejected by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from hdexport.checkpoint.chat_template import MessageFormat, pair_template, text_template
from hdexport.checkpoint.multi_vector import is_late_interaction, late_interaction, multi_vector_settings
from hdexport.checkpoint.sentence_modules import (
    SCORES,
    TOKENS_INSTEAD,
    pooling_settings,
    scored_labels,
    sentence_modules,
    token_modules,
)
from hdexport.model.limits import MAX_POSITIONS
from hdexport.support.json_files import read_object, read_settings, shown
from hdruntime.bundle.checked_json import Size
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.sentence_settings import SentenceSettings, Similarity
from hdruntime.errors import MissingDependencyError, ModelError, Setting, write
from hdruntime.optional import require

if TYPE_CHECKING:
    from hdexport.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_Template = TypeVar("_Template")

SENTENCE_CONFIG = "config_sentence_transformers.json"

_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{model}_config.json"
    for model in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files that hold the settings of the module Transformer; the first that is there counts."""

_FIXED = {
    "encoder": ("feature-extraction", "last_hidden_state", "token_embeddings"),
    "cross-encoder": ("sequence-classification", "logits", "scores"),
    "sparse-encoder": ("fill-mask", "logits", "token_embeddings"),
    "logit-score": ("text-generation", "logits", "causal_logits"),
}
"""Kind of chain -> task, the model's output and the module's, as the module Transformer has to be set."""

_NOT_HEEDED = ("trust_remote_code",)
"""Options that sentence-transformers takes from a caller alone."""

_MODEL_OPTIONS = ("torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", *_NOT_HEEDED)
_TOKENIZER_OPTIONS = ("model_max_length", "padding_side", *_NOT_HEEDED)

_HARMLESS = {
    "model_args": _MODEL_OPTIONS,
    "model_kwargs": _MODEL_OPTIONS,
    "tokenizer_args": _TOKENIZER_OPTIONS,
    "processor_kwargs": _TOKENIZER_OPTIONS,
    "config_args": _NOT_HEEDED,
    "config_kwargs": _NOT_HEEDED,
}
"""Setting of the module Transformer -> its keys that change no result."""

_NOT_CHECKED = ("max_seq_length", "do_lower_case", "unpad_inputs")
"""Settings that are honoured, or make sentence-transformers faster with the same results."""

_ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}

_NEED_TOKENIZER = {
    Task.TOKEN_SIMILARITY: "by which a model of late interaction tells queries from documents",
    Task.HYBRID_SIMILARITY: "whose special tokens have no weight in sparse vectors",
}
"""Task -> why its bundles need the checkpoint's tokenizer."""

_DEFAULT_PROMPTS = ("query", "document")
"""Names of prompts that every model has, empty unless it says otherwise."""


@dataclass(frozen=True, kw_only=True)
class _Config:
    """Keys of ``config_sentence_transformers.json`` that are read; other keys change nothing."""

    model_type: str = "SentenceTransformer"
    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: Similarity | None = None
    truncate_dim: Size | None = None
    max_active_dims: Size | None = None
    activation_fn: str | None = None


@dataclass(frozen=True, kw_only=True)
class _TokensConfig(_Config):
    """The same keys for a model of late interaction, which has vectors of tokens."""

    similarity_fn_name: str | None = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class _TokenizerOptions:
    model_max_length: Size | None = None


@dataclass(frozen=True, kw_only=True)
class _Messages:
    """How texts reach the chat template; ``auto`` lets sentence-transformers look into it."""

    format: MessageFormat | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class _Modalities:
    message: _Messages | None = None


@dataclass(frozen=True, kw_only=True)
class _ProcessingOptions:
    chat_template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _TemplateConfig:
    """Keys of the Transformer's file that are read for texts and pairs in a chat template."""

    modality_config: _Modalities | None = None
    processing_kwargs: _ProcessingOptions | None = None


@dataclass(frozen=True, kw_only=True)
class _TransformerConfig:
    """Keys of ``sentence_bert_config.json`` that are read; `_check_transformer` rejects other keys."""

    max_seq_length: Size | None = None
    do_lower_case: bool | None = None
    tokenizer_args: _TokenizerOptions | None = None
    processor_kwargs: _TokenizerOptions | None = None


SENTENCE_KEYS = frozenset({"__version__", *(field.name for field in fields(_Config))})
"""Keys of `SENTENCE_CONFIG` that are read, and the versions of libraries."""

TRANSFORMER_KEYS = frozenset({
    *("modality_config", "module_output_name", "processing_kwargs", "transformer_task"),
    *("query_length", "document_length", "query_expansion", *_NOT_CHECKED, *_HARMLESS),
})  # fmt: skip
"""Keys of the module Transformer's settings, whose values are honoured or checked."""


def sentence_class(path: Path) -> str | None:
    """Class of sentence-transformers that a checkpoint was saved from; None where it was not saved by it."""
    return _config(path).model_type if (path / "modules.json").is_file() else None


def lowercases(path: Path) -> bool:
    """Whether sentence-transformers lowers the case of texts before the tokenizer sees them."""
    return bool(read_settings(transformer_file(path), _TransformerConfig, missing_ok=True).do_lower_case)


def sentence_settings(checkpoint: Checkpoint, task: Task) -> SentenceSettings | None:
    """How sentence-transformers runs a checkpoint; None for a task that it does not have, and without a tokenizer.
    Token vectors (``feature-extraction``) are given as they are where modules pool them, and take modules that do not.
    """
    read = _SETTINGS_OF_TASK.get(task)
    if checkpoint.tokenizer is None and task in _NEED_TOKENIZER:
        raise ModelError(
            f"{checkpoint.path} has no tokenizer, {_NEED_TOKENIZER[task]}.",
            hint=(
                "Put its tokenizer.json there, or build the token embeddings: ",
                Setting("task", "feature-extraction"),
            ),
        )
    return None if read is None or checkpoint.tokenizer is None else read(checkpoint)


def _of_pairs(checkpoint: Checkpoint) -> SentenceSettings | None:
    path, activation = checkpoint.path, _activation(checkpoint)
    if activation is None:
        return None
    general, modules = _general(checkpoint), sentence_modules(path)
    if modules and modules[0].kind != "Transformer":
        raise ModelError(
            f"{path} is a CrossEncoder that begins with {shown(modules[0].kind)}, and not with sentence-transformers' "
            f"Transformer, which a bundle computes.",
            hint=TOKENS_INSTEAD,
        )
    if checkpoint.logit_score is not None:
        _check_transformer(path, "logit-score")
    elif modules[1:]:
        pooling = pooling_settings(path)
        if scored_labels(path) is None:
            raise ModelError(
                f"{path} is a CrossEncoder, and {modules[-1].kind}, its last module, gives no "
                f"{SCORES}; a Dense whose module_output_name is {SCORES!r} fits.",
                hint=TOKENS_INSTEAD,
            )
        _check_transformer(path, "encoder")
        general |= {"pooling": pooling.names, "include_prompt": pooling.include_prompt}
    else:
        _check_transformer(path, "cross-encoder")
    template = _template(checkpoint, pair_template, general["prompts"].values())
    return SentenceSettings(kind="cross-encoder", activation=activation, pair_template=template, **general)


def _of_tokens(checkpoint: Checkpoint) -> SentenceSettings:
    if token_modules(checkpoint.path):
        _check_transformer(checkpoint.path, "encoder")
    try:
        settings = _of_texts(checkpoint)
    except (ModelError, MissingDependencyError) as error:
        if (checkpoint.path / "modules.json").is_file():
            raise
        # Token vectors are of plain texts, which need no template.
        logger.warning(
            "SentenceEncoder's embeddings will be those of plain texts, and not those of sentence-transformers, which "
            "writes texts in the tokenizer's chat template: %s",
            write(error.problem),
        )
        settings = _general(checkpoint)
    return SentenceSettings(kind="encoder", **settings)


def _of_sparse_vectors(checkpoint: Checkpoint) -> SentenceSettings:
    from hdexport.checkpoint.pooling import splade_pooling

    pooling = splade_pooling(checkpoint.path)
    _check_transformer(checkpoint.path, "sparse-encoder")
    config = _config(checkpoint.path)
    general = _of_texts(checkpoint) | {"similarity": config.similarity_fn_name or "dot", "truncate_dim": None}
    return SentenceSettings(
        kind="sparse-encoder", pooling=(pooling.strategy,), max_active_dims=config.max_active_dims, **general
    )


def _of_late_interaction(checkpoint: Checkpoint) -> SentenceSettings:
    path = checkpoint.path
    model = late_interaction(path)
    _check_transformer(path, "encoder", honoured=("query_length", "document_length", "query_expansion"))
    return SentenceSettings(
        kind="multi-vector-encoder",
        dense=model.is_stanford or any(module.kind == "Dense" for module in model.layers),
        normalize=model.layers[-1:] != () and model.layers[-1].kind == "Normalize",
        multi_vector=multi_vector_settings(model, checkpoint.tokenizer, path=path),
        **_general(checkpoint) | {"prompts": dict(model.prompts), "truncate_dim": None},
    )


def _of_sentences(checkpoint: Checkpoint) -> SentenceSettings:
    path = checkpoint.path
    pooling = pooling_settings(path)
    _check_transformer(path, "encoder")
    return SentenceSettings(
        kind="encoder",
        pooling=pooling.names,
        include_prompt=pooling.include_prompt,
        dense=any(module.kind != "Normalize" for module in pooling.modules[1:]),
        normalize=pooling.modules[-1].kind == "Normalize",
        **_of_texts(checkpoint),
    )


def _of_hybrid(checkpoint: Checkpoint) -> SentenceSettings:
    from hdexport.checkpoint.hybrid import unweighted_ids

    return replace(_of_sentences(checkpoint), unweighted_ids=unweighted_ids(checkpoint.tokenizer))


_SETTINGS_OF_TASK: dict[Task, Callable[[Checkpoint], SentenceSettings | None]] = {
    Task.FEATURE_EXTRACTION: _of_tokens,
    Task.SENTENCE_SIMILARITY: _of_sentences,
    Task.SPARSE_SIMILARITY: _of_sparse_vectors,
    Task.TOKEN_SIMILARITY: _of_late_interaction,
    Task.HYBRID_SIMILARITY: _of_hybrid,
    Task.TEXT_CLASSIFICATION: _of_pairs,
}


def _general(checkpoint: Checkpoint) -> dict[str, Any]:
    """Settings that all kinds of models share."""
    file = checkpoint.path / SENTENCE_CONFIG
    config = _config(checkpoint.path)
    prompts = {name: text or "" for name, text in (config.prompts or {}).items()}
    names = list(dict.fromkeys((*_DEFAULT_PROMPTS, *prompts)))
    if config.default_prompt_name not in (None, *names):
        raise ModelError(
            f"{file} has default_prompt_name {shown(config.default_prompt_name)}; its prompts are {', '.join(names)}.",
            hint="Set it to one of them, or to null.",
        )
    return {
        "max_seq_length": _max_seq_length(checkpoint),
        "prompts": prompts,
        "default_prompt_name": config.default_prompt_name,
        # MaxSim compares the tokens of two texts; this setting is about two vectors.
        "similarity": config.similarity_fn_name if config.similarity_fn_name in get_args(Similarity) else "cosine",
        "truncate_dim": config.truncate_dim,
    }


def _of_texts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Settings of all models that read texts, and not pairs."""
    general = _general(checkpoint)
    return general | {"text_template": _template(checkpoint, text_template, general["prompts"].values())}


def _max_seq_length(checkpoint: Checkpoint) -> int:
    """Maximum tokens of a text, at most the checkpoint's positions. Where nothing names a number, sentence-transformers
    takes ``max_position_embeddings`` of ``config.json``, even if the model counts distances and could read more."""
    config = read_settings(transformer_file(checkpoint.path), _TransformerConfig, missing_ok=True)
    options = config.tokenizer_args or config.processor_kwargs or _TokenizerOptions()
    named = options.model_max_length or config.max_seq_length
    positions = getattr(checkpoint.settings(), "max_position_embeddings", None)
    own = named or min(
        checkpoint.tokenizer.model_max_length, positions if positions and positions > 0 else MAX_POSITIONS
    )
    return int(min(own, checkpoint.base_positions))


def _template(checkpoint: Checkpoint, write: Callable[..., _Template], prompts: Iterable[str]) -> _Template | None:
    """What the chat template of a tokenizer writes around texts or pairs; None where sentence-transformers gives the
    tokenizer texts as they are. A model that sentence-transformers has saved says which; without
    ``modules.json`` it takes the template where there is one."""
    file = transformer_file(checkpoint.path)
    config = read_settings(file, _TemplateConfig, missing_ok=True)
    messages = config.modality_config.message if config.modality_config else None
    is_saved = (checkpoint.path / "modules.json").is_file()
    if messages is None and (is_saved or checkpoint.tokenizer.chat_template is None):
        return None
    message_format = messages.format if messages is not None else "auto"
    if message_format == "auto":
        require("sentence_transformers")
        from sentence_transformers.base.modality import InputFormatter

        file = file if is_saved else checkpoint.path / "config.json"
        formatter = InputFormatter(model_type=checkpoint.config["model_type"], processor=checkpoint.tokenizer)
        message_format = formatter.message_format
    options = config.processing_kwargs or _ProcessingOptions()
    return write(
        checkpoint.tokenizer,
        file=file,
        message_format=message_format,
        options=options.chat_template,
        prompts=prompts,
    )


def _check_transformer(path: Path, kind: str, *, honoured: tuple[str, ...] = ()) -> None:
    """Rejects settings of the module Transformer that change its results, and are not honoured elsewhere."""
    file = transformer_file(path)
    task, output, module_output = _FIXED[kind]
    call = {"method": "forward", "method_output_name": output}
    expected = {
        "transformer_task": task,
        "modality_config": {"text": call},
        "module_output_name": module_output,
    }
    values = read_object(file, missing_ok=True)
    if not is_late_interaction(path):
        values = _without_template(values, call)
    for name, value in values.items():
        if value in (None, False, {}, []) or name in (*_NOT_CHECKED, *honoured):
            continue
        if name in _HARMLESS and isinstance(value, dict):
            others = [key for key in value if key not in _HARMLESS[name]]
            if not others:
                continue
            name, value = f"{name}.{others[0]}", value[others[0]]
        elif value == expected.get(name):
            continue
        # Where no module pools, the tokens' vectors come from the same chain.
        instead = (
            () if token_modules(path) else (", or build the token embeddings: ", Setting("task", "feature-extraction"))
        )
        raise ModelError(
            f"{file} has {shown(name)} {shown(value)}, which a bundle cannot honour.",
            hint=("Remove it if the model gives the same embeddings without it", *instead, "."),
        )


def _without_template(values: Mapping[str, Any], call: Mapping[str, str]) -> dict[str, Any]:
    """Settings of the module Transformer, without those that `_template` honours."""
    honoured: dict[str, Callable[[str, Any], bool]] = {
        "modality_config": lambda key, value: (
            key == "message" and isinstance(value, dict) and {**value, "format": ""} == {**call, "format": ""}
        ),
        "processing_kwargs": lambda key, value: key == "chat_template",
    }
    return {
        name: {key: each for key, each in value.items() if not honoured[name](key, each)}
        if name in honoured and isinstance(value, dict)
        else value
        for name, value in values.items()
    }


def _activation(checkpoint: Checkpoint) -> Any:
    """The function of a CrossEncoder's scores; None for a classifier that sentence-transformers did not save."""
    file, config = checkpoint.path / "config.json", checkpoint.config
    of_old = config.get("sentence_transformers")
    named = config.get("sbert_ce_default_activation_function")
    if isinstance(of_old, dict):
        named = of_old.get("activation_fn", named)
    is_new = sentence_class(checkpoint.path) == "CrossEncoder"
    if is_new and (of_new := _config(checkpoint.path).activation_fn):
        file, named = checkpoint.path / SENTENCE_CONFIG, of_new
    if named is None:
        default = "sigmoid" if checkpoint.settings().num_labels == 1 else "identity"
        return default if is_new or isinstance(of_old, dict) or checkpoint.logit_score is not None else None
    activation = _ACTIVATIONS.get(str(named).rpartition(".")[2])
    if activation is None or not str(named).startswith("torch."):
        raise ModelError(
            f"{file} has activation_fn {shown(named)}; supported: "
            f"{', '.join(f'torch.nn.{name}' for name in _ACTIVATIONS)}.",
            hint="Set it to torch.nn.Identity for logits, and apply the function to them.",
        )
    return activation


def _config(path: Path) -> _Config:
    kind = _TokensConfig if token_modules(path) or is_late_interaction(path) else _Config
    return read_settings(path / SENTENCE_CONFIG, kind, missing_ok=True)


def transformer_file(path: Path) -> Path:
    """The file that holds the module Transformer's settings; it may be missing."""
    modules = sentence_modules(path)
    files = [path / modules[0].folder / name for name in _TRANSFORMER_CONFIGS] if modules else []
    return next((file for file in files if file.is_file()), path / "no settings")
