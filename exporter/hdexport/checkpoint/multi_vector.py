"""Models of late interaction, a vector for each token, as sentence-transformers, PyLate and Stanford's ColBERT save
them.

A bundle gives the same vectors as ``sentence_transformers.MultiVectorEncoder`` (6.2) with each format.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hdexport.checkpoint.bge_m3 import reject_head
from hdexport.checkpoint.sentence_modules import TOKENS, SentenceModule, reads_and_writes, sentence_modules
from hdexport.support.json_files import read_object, read_settings, shown
from hdruntime.bundle.checked_json import Size, TokenId
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.sentence_settings import MultiVectorSettings, QueryExpansion
from hdruntime.errors import ModelError, Setting

PROJECTION = "linear.weight"
"""The weight of Stanford's ColBERT that follows BERT: [dimensions, hidden_size], without a bias."""

_CONFIG = "config_sentence_transformers.json"

_STANFORD_CONFIG = "artifact.metadata"

_MODEL_TYPES = ("MultiVectorEncoder", "ColBERT")
"""Names in `_CONFIG` of sentence-transformers and of PyLate."""

STANFORD = "HF_ColBERT"
"""The architecture of Stanford's ColBERT."""

_QUERY_TOKENS = 32
"""Tokens that ColBERT expands queries to, where a checkpoint does not say."""

_DENSE_OF_PYLATE = "pylate.models.Dense.Dense"

_DENSE = "sentence_transformers.models.Dense"


@dataclass(frozen=True, kw_only=True)
class _Expansion:
    strategy: Literal["fixed", "min"]
    length: Size
    attend: bool = False
    token: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Lengths:
    """The module Transformer's settings of queries and documents."""

    query_length: Size | None = None
    document_length: Size | None = None
    query_expansion: _Expansion | None = None


@dataclass(frozen=True, kw_only=True)
class _MarksOfPyLate:
    """Keys of `_CONFIG` that PyLate writes and sentence-transformers does not."""

    query_prefix: str | None = None
    document_prefix: str | None = None
    query_length: Size | None = None
    document_length: Size | None = None
    do_query_expansion: bool | None = None
    attend_to_expansion_tokens: bool | None = None
    attend_to_mask_tokens: bool | None = None
    skiplist_words: tuple[str, ...] | None = None
    query_expansion: _Expansion | None = None


@dataclass(frozen=True, kw_only=True)
class _PyLate(_MarksOfPyLate):
    """Keys that PyLate writes to `_CONFIG`; other keys change nothing here."""

    model_type: str | None = None
    prompts: dict[str, str | None] | None = None
    similarity_fn_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class _StanfordConfig:
    """Keys of `_STANFORD_CONFIG` that are read."""

    query_token_id: str | None = None
    doc_token_id: str | None = None
    query_maxlen: Size | None = None
    doc_maxlen: Size | None = None
    attend_to_mask_tokens: bool | None = None
    mask_punctuation: bool = True


@dataclass(frozen=True, kw_only=True)
class _Mask:
    """The settings of the module MultiVectorMask."""

    skiplist_words: tuple[str, ...] | None = None
    skiplist_tasks: tuple[Literal["query", "document"], ...] | Literal["query", "document"] | None = None
    keep_only_token_ids: tuple[TokenId, ...] | None = None


SENTENCE_KEYS = frozenset(field.name for field in fields(_PyLate))
"""Keys of `_CONFIG` that are read of a model of late interaction."""

MASK_KEYS = frozenset(field.name for field in fields(_Mask))
"""Keys of the module MultiVectorMask that are read."""


@dataclass(frozen=True, kw_only=True)
class LateInteraction:
    """A model that gives a vector for each token.

    Attributes:
        layers: the layers after the encoder, for each token: ``Dense`` and ``Normalize``; in Stanford's ColBERT,
            ``Normalize`` alone, after `PROJECTION`.
        is_stanford: whether `PROJECTION` is among the encoder's weights.
        lengths: the lengths of queries and documents, and the expansion of queries.
        prompts: name -> prompt, prefixes of old checkpoints included.
        skipped: words whose tokens are left out of the sides `skipped_in`.
        is_mean: whether MaxSim is divided by the number of the query's tokens.
    """

    layers: tuple[SentenceModule, ...]
    is_stanford: bool
    lengths: _Lengths
    prompts: Mapping[str, str]
    skipped: tuple[str, ...]
    skipped_in: tuple[Literal["query", "document"], ...]
    is_mean: bool


def is_late_interaction(path: Path) -> bool:
    """Whether a checkpoint was saved as a model of late interaction, by its files alone."""
    if not (path / "modules.json").is_file():
        architectures = read_object(path / "config.json", missing_ok=True).get("architectures")
        return isinstance(architectures, list) and STANFORD in architectures
    values = read_object(path / _CONFIG, missing_ok=True)
    if values.get("model_type") in _MODEL_TYPES:
        return True
    return _is_pylate(values) and all(module.kind != "Pooling" for module in sentence_modules(path))


def leaves_tokens_out(path: Path) -> bool:
    """Whether a model of late interaction has vectors for some tokens only, as all but XTR do."""
    if not is_late_interaction(path):
        return False
    native = read_object(path / _CONFIG, missing_ok=True).get("model_type") == "MultiVectorEncoder"
    return not native or any(module.kind == "MultiVectorMask" for module in sentence_modules(path))


def late_interaction(path: Path) -> LateInteraction:
    """How a checkpoint makes vectors of tokens; other checkpoints, and modules or settings that are not supported, are
    rejected."""
    if not is_late_interaction(path):
        reject_head(path, Task.TOKEN_SIMILARITY)
        raise ModelError(
            f"{path} is no model of late interaction: token-similarity needs a checkpoint of MultiVectorEncoder, "
            "PyLate or Stanford's ColBERT.",
            hint=("Build its token embeddings: ", Setting("task", "feature-extraction")),
        )
    if not (path / "modules.json").is_file():
        return _stanford(path)
    return _of_modules(path, sentence_modules(path))


def multi_vector_settings(model: LateInteraction, tokenizer: Any, *, path: Path) -> MultiVectorSettings:
    """A model's settings, with words as ids of the tokenizer in transformers. `path` is the checkpoint's,
    for messages."""
    expansion = model.lengths.query_expansion
    return MultiVectorSettings(
        query_length=model.lengths.query_length,
        document_length=model.lengths.document_length,
        expansion=None if expansion is None else _expansion(expansion, tokenizer, path),
        skipped_ids=tuple(sorted(_ids_of_words(model.skipped, tokenizer))),
        skipped_in=model.skipped_in,
        similarity="meanmaxsim" if model.is_mean else "maxsim",
    )


def register_markers(tokenizer: Any, path: Path) -> None:
    """Make special tokens of prefixes that the tokenizer would split, in place: ``[unused0]`` is in BERT's vocabulary,
    and as text it is ``[``, ``unused``, ``##0``, ``]``. Only checkpoints of PyLate and Stanford's ColBERT have such
    prefixes."""
    from transformers import AddedToken

    if not is_late_interaction(path):
        return
    if (path / "modules.json").is_file():
        saved = read_settings(path / _CONFIG, _PyLate, missing_ok=True)
        markers: tuple[str | None, ...] = (saved.query_prefix, saved.document_prefix)
    else:
        markers = _stanford_markers(read_settings(path / _STANFORD_CONFIG, _StanfordConfig, missing_ok=True))
    known = {*tokenizer.get_vocab(), *tokenizer.added_tokens_encoder}
    added = []
    for marker in filter(None, markers):
        # PyLate's "[Q] " is a token with its space, ColBERT's "[unused0]" one without.
        spellings = [text for text in (marker, *marker.split(None, 1)[:1]) if text in known]
        if spellings and tokenizer.tokenize(spellings[0]) != spellings[:1]:
            added.append(AddedToken(spellings[0], normalized=False, special=True))
    if added:
        tokenizer.add_special_tokens({"additional_special_tokens": added})


def _stanford_markers(config: _StanfordConfig) -> tuple[str, str]:
    return f"{config.query_token_id or '[unused0]'} ", f"{config.doc_token_id or '[unused1]'} "


def _stanford(path: Path) -> LateInteraction:
    values = read_settings(path / _STANFORD_CONFIG, _StanfordConfig, missing_ok=True)
    return LateInteraction(
        layers=(SentenceModule(kind="Normalize", folder=""),),
        is_stanford=True,
        lengths=_Lengths(
            document_length=values.doc_maxlen,
            query_expansion=_Expansion(
                strategy="fixed",
                length=values.query_maxlen or _QUERY_TOKENS,
                attend=bool(values.attend_to_mask_tokens),
            ),
        ),
        prompts=dict(zip(("query", "document"), _stanford_markers(values), strict=True)),
        skipped=tuple(string.punctuation) if values.mask_punctuation else (),
        skipped_in=("document",),
        is_mean=False,
    )


def _of_modules(path: Path, chain: tuple[SentenceModule, ...]) -> LateInteraction:
    saved = read_settings(path / _CONFIG, _PyLate, missing_ok=True)
    layers: list[SentenceModule] = []
    masks: list[SentenceModule] = []
    for module in chain[1:]:
        kind = "Dense" if module.kind == _DENSE_OF_PYLATE else module.kind
        if kind == "MultiVectorMask":
            masks.append(module)
        elif kind in ("Dense", "Normalize"):
            _check_vectors(path / module.folder / "config.json", kind)
            reference = _DENSE if kind == "Dense" else module.reference
            layers.append(SentenceModule(kind=kind, folder=module.folder, reference=reference))
    if chain[0].kind != "Transformer" or len(layers) + len(masks) != len(chain) - 1 or len(masks) > 1:
        raise ModelError(
            f"{path} chains the modules {', '.join(module.kind for module in chain)}; for token embeddings, a "
            "Transformer followed by Dense, Normalize and one MultiVectorMask is supported.",
            hint=("Build its Transformer alone: ", Setting("task", "feature-extraction")),
        )
    prefixes = {"query": saved.query_prefix, "document": saved.document_prefix}
    prompts = {name: text or "" for name, text in (saved.prompts or {}).items()}
    for name, prefix in prefixes.items():
        if prefix:
            prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
    is_native = saved.model_type == "MultiVectorEncoder"
    if is_native:
        mask = _mask(path, masks)
    else:
        # PyLate normalises, and leaves punctuation out, without modules for either.
        layers.append(SentenceModule(kind="Normalize", folder=""))
        leaves_out = saved.model_type == "ColBERT" or any(prefix is not None for prefix in prefixes.values())
        words = saved.skiplist_words
        mask = _Mask(skiplist_words=tuple(string.punctuation) if words is None and leaves_out else words)
    lengths = _lengths(path, chain[0], saved)
    if lengths.query_expansion is not None and is_native and not masks:
        raise ModelError(
            f"{path} expands queries (query_expansion), and has no module MultiVectorMask, without which the added "
            "tokens do not count.",
            hint="Add the module after the Transformer, or remove query_expansion.",
        )
    tasks = ("document",) if mask.skiplist_tasks is None else mask.skiplist_tasks
    return LateInteraction(
        layers=tuple(layers),
        is_stanford=False,
        lengths=lengths,
        prompts=prompts,
        skipped=mask.skiplist_words or (),
        skipped_in=(tasks,) if isinstance(tasks, str) else tasks,
        is_mean=saved.similarity_fn_name == "meanmaxsim",
    )


def _check_vectors(file: Path, kind: str) -> None:
    """Rejects a layer that does not read and write the tokens' vectors, which are a Dense's default."""
    default = TOKENS if kind == "Dense" else "sentence_embedding"
    if (found := reads_and_writes(file, default=default)) != (TOKENS, TOKENS):
        raise ModelError(
            f"{file} reads and writes {', '.join(sorted({*map(shown, found)}))}; of a model of late interaction, only "
            f"{TOKENS} is supported.",
            hint=("Build its Transformer alone: ", Setting("task", "feature-extraction")),
        )


def _mask(path: Path, modules: list[SentenceModule]) -> _Mask:
    if not modules:
        return _Mask()
    file = path / modules[0].folder / "config.json"
    mask = read_settings(file, _Mask, missing_ok=True)
    if mask.keep_only_token_ids:
        raise ModelError(
            f"{file} has keep_only_token_ids, which are for images; texts are supported.",
            hint="Remove it if the model embeds texts.",
        )
    return mask


def _lengths(path: Path, transformer: SentenceModule, saved: _PyLate) -> _Lengths:
    """The settings of the Transformer's file, else PyLate's."""
    file = path / transformer.folder / "sentence_bert_config.json"
    own, values = read_object(file, missing_ok=True), read_object(path / _CONFIG, missing_ok=True)
    query_length, expansion = saved.query_length, saved.query_expansion
    if "query_expansion" not in values and _is_pylate(values) and saved.do_query_expansion is not False:
        attend = saved.attend_to_expansion_tokens
        attend = bool(saved.attend_to_mask_tokens if attend is None else attend)
        # PyLate expands a query to its length.
        expansion = _Expansion(strategy="fixed", length=query_length or _QUERY_TOKENS, attend=attend)
        query_length = None
    lengths = _Lengths(query_length=query_length, document_length=saved.document_length, query_expansion=expansion)
    named = vars(read_settings(file, _Lengths, missing_ok=True))
    lengths = replace(lengths, **{name: value for name, value in named.items() if name in own})
    expansion = lengths.query_expansion
    if expansion is not None and lengths.query_length is not None and lengths.query_length < expansion.length:
        raise ModelError(
            f"{file} cuts queries to {lengths.query_length} tokens (query_length), and expands them to "
            f"{expansion.length} (query_expansion).",
            hint=f"Remove query_length, or set it to {expansion.length} or more.",
        )
    return lengths


def _is_pylate(values: Mapping[str, Any]) -> bool:
    return any(field.name in values for field in fields(_MarksOfPyLate))


def _expansion(expansion: _Expansion, tokenizer: Any, path: Path) -> QueryExpansion:
    if expansion.token is not None:
        (token_id,) = _ids_of_words((expansion.token,), tokenizer) or (None,)
    else:
        token_id = tokenizer.eos_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    if token_id is None:
        raise ModelError(
            f"{path} expands queries with the token {shown(expansion.token or '[MASK]')}, which its tokenizer does not "
            "know.",
            hint="Name one of its tokens in query_expansion (sentence_bert_config.json).",
        )
    if tokenizer.padding_side == "left":
        raise ModelError(
            f"{path} expands queries, and its tokenizer pads on the left: the added tokens would be before the text, "
            "which is not supported.",
            hint="Set padding_side to right in tokenizer_config.json if it was trained so.",
        )
    return QueryExpansion(
        strategy=expansion.strategy, length=expansion.length, attend=expansion.attend, token_id=int(token_id)
    )


def _ids_of_words(words: tuple[str, ...], tokenizer: Any) -> set[int]:
    """Ids of the words that are one token."""
    id_of_word = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    unknown = tokenizer.unk_token_id
    return {
        token_id
        for word, token_id in id_of_word.items()
        if token_id is not None and (token_id != unknown or word == tokenizer.unk_token)
    }
