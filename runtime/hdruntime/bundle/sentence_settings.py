"""How sentence-transformers runs a checkpoint, as a bundle's manifest has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hdruntime.bundle.pair_template import PairTemplate
from hdruntime.bundle.value_types import Length, Name, Size, TokenId

Kind = Literal["encoder", "cross-encoder", "sparse-encoder", "multi-vector-encoder"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


@dataclass(frozen=True, kw_only=True)
class QueryExpansion:
    """How queries of a model of late interaction are made longer; the added tokens have vectors, too.

    Attributes:
        strategy: ``fixed`` cuts queries to the length as well, ``min`` does not.
        length: tokens that a shorter query is brought to, special tokens and prompt included.
        token_id: the added token, usually the mask.
        attend: whether tokens attend to the added ones.
    """

    strategy: Literal["fixed", "min"]
    length: Length
    token_id: TokenId
    attend: bool


@dataclass(frozen=True, kw_only=True)
class MultiVectorSettings:
    """The settings that make a model of late interaction of an encoder with a vector for each token.

    Attributes:
        query_length: tokens that queries are cut to, where they are not expanded; None for `max_seq_length`.
        document_length: tokens that the model cuts documents to; a bundle may serve more. None for `max_seq_length`.
        expansion: of queries; None for none.
        skipped_ids: tokens whose vectors are left out, for example punctuation's.
        skipped_in: the texts in which they are.
        similarity: MaxSim, or MaxSim divided by the vectors of the query.
    """

    query_length: Length | None = None
    document_length: Length | None = None
    expansion: QueryExpansion | None = None
    skipped_ids: tuple[TokenId, ...] = ()
    skipped_in: tuple[Literal["query", "document"], ...] = ()
    similarity: Literal["maxsim", "meanmaxsim"] = "maxsim"


@dataclass(frozen=True, kw_only=True)
class SentenceSettings:
    """How sentence-transformers runs the checkpoint, which `hdruntime.SentenceEncoder` does by default.

    Attributes:
        kind: ``encoder`` of texts, ``cross-encoder`` of pairs of texts, ``sparse-encoder`` or
            ``multi-vector-encoder``.
        max_seq_length: tokens that its texts are cut to, special tokens included; a bundle may serve more.
        prompts: name -> prompt before a text, or before the first text of a pair.
        default_prompt_name: the prompt of texts that none is named for; None for no prompt.
        include_prompt: whether the vector of a sentence or pair is pooled of its prompt's tokens, too.
        pooling: modes, whose vectors are concatenated, of an encoder or before a cross-encoder's logits; ``()`` where
            the bundle gives token vectors, or the model's own head gives logits.
        dense: whether an encoder's pooled vector goes through layers with weights, as Dense.
        normalize: whether the bundle's vectors have length 1.
        truncate_dim: dimensions of a vector that are kept; None for all.
        max_active_dims: values of a sparse vector that are kept, the largest; None for all.
        similarity: of two vectors.
        activation: makes scores of a cross-encoder's logits; None of an encoder.
        multi_vector: of a multi-vector-encoder; None of others.
        pair_template: writes a cross-encoder's pair as one text; None where the tokenizer takes two.
    """

    kind: Kind
    max_seq_length: Length
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    include_prompt: bool = True
    pooling: tuple[Name, ...] = ()
    dense: bool = False
    normalize: bool = False
    truncate_dim: Size | None = None
    max_active_dims: Size | None = None
    similarity: Similarity = "cosine"
    activation: Literal["sigmoid", "softmax", "identity"] | None = None
    multi_vector: MultiVectorSettings | None = None
    pair_template: PairTemplate | None = None
