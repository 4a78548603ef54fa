"""How sentence-transformers runs a checkpoint, as a bundle's manifest has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hdruntime.bundle.checked_json import Length, Name, Size, TokenId
from hdruntime.errors import InputError

Kind = Literal["encoder", "cross-encoder", "sparse-encoder", "multi-vector-encoder"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


Slot = Literal["prompt", "query", "document", "text"]
"""The texts that a template has a place for."""


@dataclass(frozen=True, kw_only=True)
class TemplatePart:
    """A text's place, and the template's text before it."""

    before: str
    slot: Slot


class Written(NamedTuple):
    """A text or a pair as the template writes it, and the (start, end) of each given text in it, in characters."""

    text: str
    places: Mapping[Slot, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The text of a template.

    Attributes:
        parts: the places in their order, each once.
        after: the template's text after the last place.
    """

    parts: tuple[TemplatePart, ...]
    after: str

    def write(self, texts: Mapping[Slot, str]) -> Written:
        """One text from the texts of every slot; those that have no place are left out."""
        chunks: list[str] = []
        places: dict[Slot, tuple[int, int]] = {}
        size = 0
        for part in self.parts:
            start = size + len(part.before)
            size = start + len(texts[part.slot])
            chunks += part.before, texts[part.slot]
            places[part.slot] = start, size
        return Written("".join((*chunks, self.after)), places)


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """How a pair is written as one text, which the tokenizer reads without special tokens of its own.

    Attributes:
        plain: without a prompt.
        prompted: with a prompt, for which it may have no place: it is then left out, as the template does; None where
            the template rejects prompts.
    """

    plain: Wording
    prompted: Wording | None

    def write(self, query: str, document: str, *, prompt: str = "") -> Written:
        """A pair as one text; a prompt that the template does not take is rejected."""
        wording = self.prompted if prompt else self.plain
        if wording is None:
            raise _prompt_error(prompt, "pairs")
        return wording.write({"prompt": prompt, "query": query, "document": document})


@dataclass(frozen=True, kw_only=True)
class TextTemplate:
    """How a text is written in a chat template, which the tokenizer reads without special tokens of its own.

    Attributes:
        plain, prompted: see `PairTemplate`.
        strips: whether the template leaves out the spaces around a text and around a prompt.
    """

    plain: Wording
    prompted: Wording | None
    strips: bool = False

    def write(self, text: str, *, prompt: str = "") -> Written:
        """A text in the template; a prompt that the template does not take is rejected."""
        wording = self.prompted if prompt else self.plain
        if wording is None:
            raise _prompt_error(prompt, "texts")
        if self.strips:
            text, prompt = text.strip(), prompt.strip()
        return wording.write({"prompt": prompt, "text": text})


def _prompt_error(prompt: str, what: str) -> InputError:
    return InputError(
        f"The prompt is {prompt!r:.60}, and the chat template that this bundle's {what} are written by takes none.",
        hint="Leave it out, or give an empty one.",
    )


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
        expansion: expansion of queries; None for none.
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
        similarity: similarity function of two vectors.
        activation: makes scores of a cross-encoder's logits; None of an encoder.
        multi_vector: settings of a multi-vector encoder; None for other models.
        pair_template: writes a cross-encoder's pair as one text; None where the tokenizer takes two.
        unweighted_ids: tokens without a weight in the sparse vectors of hybrid-similarity, as special tokens.
        text_template: writes the texts of an encoder or a sparse-encoder; None where the tokenizer takes them as they
            are.
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
    unweighted_ids: tuple[TokenId, ...] = ()
    pair_template: PairTemplate | None = None
    text_template: TextTemplate | None = None
