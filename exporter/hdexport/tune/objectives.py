"""Losses on unlabelled texts: of a teacher that reads windows, of masked tokens, of sentences that find their text."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling

from hdexport.graph.vocabulary_head import sampled_head
from hdexport.tune.corpus import Corpus, Document
from hdexport.tune.student import Student, TrainedEncoder

MASKED_SHARE = 0.15
"""Share of tokens that are masked, as in BERT's training."""

TEMPERATURE = 0.05
"""Temperature of the softmax over texts."""

QUERIES = 8
"""Most sentences that are taken out of a text at once; one run of the text answers all of them."""

MOST_OTHERS = 1024
"""Texts in a softmax beside the texts that were run; with their sentences, 32 MB of scores."""


class Objective(ABC):
    """A loss of documents, which may keep vectors of those it has seen."""

    documents: Sequence[Document]

    @abstractmethod
    def loss(self, student: Student, indices: Sequence[int], seed: int) -> torch.Tensor:
        """The sum of the losses of some documents, a float32 scalar; the seed is that of all random choices."""

    def state(self) -> dict[str, torch.Tensor]:
        """What the loss keeps."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores what another process kept."""
        assert not state


class Distill(Objective):
    """1 - cosine of each token's states in the whole text, and in a window of trained positions, far from its ends. The
    teacher, which reads the windows, is the checkpoint's own model of `base` positions."""

    def __init__(self, documents: Sequence[Document], tokenizer: Any, teacher: TrainedEncoder, *, base: int) -> None:
        self.documents, self._tokenizer, self._teacher, self._base = documents, tokenizer, teacher, base

    def loss(self, student: Student, indices: Sequence[int], seed: int) -> torch.Tensor:
        texts = [_text_ids(self._tokenizer, self.documents[index].text) for index in indices]
        states, _ = student.states(texts)
        return torch.stack(
            [self._of_text(row[: len(text)], text) for row, text in zip(states, texts, strict=True)]
        ).sum()

    def _of_text(self, states: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        # The text's first and last tokens, which are special, begin and end each window.
        inner, size = text[1:-1], self._base - 2
        last = max(0, len(inner) - size)
        firsts = sorted({min(first, last) for first in range(0, last + size // 2, size // 2)})
        windows = [torch.cat([text[:1], inner[first : first + size], text[-1:]]) for first in firsts]
        with torch.no_grad():
            taught, _ = self._teacher.states(windows)
        wanted = torch.empty_like(states[1:-1])
        for first, row in zip(firsts, taught, strict=True):
            # This overwrites the second half of the window before, except for the part nearer to that one's middle.
            skipped = size // 4 if first else 0
            wanted[first + skipped : first + size] = row[1 + skipped : 1 + min(size, len(inner) - first)]
        return 1 - torch.nn.functional.cosine_similarity(states[1:-1], wanted, dim=-1).mean()


class MaskedTokens(Objective):
    """Cross entropy of masked tokens, BERT's pretraining, in long texts. The tokenizer must know a mask."""

    def __init__(self, documents: Sequence[Document], tokenizer: Any) -> None:
        self.documents, self._tokenizer = documents, tokenizer

    def loss(self, student: Student, indices: Sequence[int], seed: int) -> torch.Tensor:
        collator = DataCollatorForLanguageModeling(self._tokenizer, mlm_probability=MASKED_SHARE, seed=seed)
        masked = [collator([_text_ids(self._tokenizer, self.documents[index].text)]) for index in indices]
        labels = torch.nn.utils.rnn.pad_sequence([each["labels"][0] for each in masked], True, -100)
        tokens = (labels != -100).any(0).nonzero()[:, 0].to(student.device)  # [samples]
        with sampled_head(student.model, tokens):
            outputs, _ = student.outputs([each["input_ids"][0] for each in masked])
        logits = outputs.logits.float()  # [batch, samples, vocabulary]
        wanted = labels.to(student.device)[:, tokens]  # [batch, samples]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
        return (losses.sum(1) / (wanted != -100).sum(1).clamp(min=1)).sum()


class Contrast(Objective):
    """The inverse cloze task: cross entropy of the right text among all that were seen, for each sentence that was
    taken out of one. Texts with fewer than two sentences are left out; sentences are cut to the checkpoint's `base`
    positions.

    The vectors of texts and sentences are kept: the softmax is over many of them, and a text that is run is also moved
    away from the sentences of all others. With each long text a short one is run, so that long ones do not attract the
    sentences of short ones; only once each unless `learns_short`, because short texts do not use new positions.
    """

    def __init__(self, corpus: Corpus, tokenizer: Any, *, base: int, learns_short: bool) -> None:
        self.documents = [document for document in corpus.long if len(document.sentences) > 1]
        short = [document for document in corpus.short if len(document.sentences) > 1]
        self._all: list[Document] = [*self.documents, *short]
        self._tokenizer, self._base, self._learns_short = tokenizer, base, learns_short
        self._texts = torch.zeros(len(self._all), 0)
        self._queries = torch.zeros(len(self._all), QUERIES, 0)
        self._numbers = torch.zeros(len(self._all), dtype=torch.int64)
        """Number of queries of each text; 0 for texts that were not seen."""

    def state(self) -> dict[str, torch.Tensor]:
        return {"texts": self._texts, "queries": self._queries, "numbers": self._numbers}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._texts, self._queries, self._numbers = state["texts"], state["queries"], state["numbers"]

    def loss(self, student: Student, indices: Sequence[int], seed: int) -> torch.Tensor:
        random = np.random.default_rng(seed)
        short = np.arange(len(self.documents), len(self._all))
        if not self._learns_short:
            short = short[(self._numbers[len(self.documents) :] == 0).numpy()]
        short = random.permutation(short)[: len(indices)].tolist()
        live = [*indices, *short]
        drawn = [self._all[index].drawn_sentences(QUERIES, random) for index in live]
        numbers = torch.tensor([len(spans) for spans in drawn])
        texts = [
            _text_ids(self._tokenizer, self._all[index].without(spans))
            for index, spans in zip(live, drawn, strict=True)
        ]
        sentences = [
            _text_ids(self._tokenizer, self._all[index].text[start:end], max_tokens=self._base)
            for index, spans in zip(live, drawn, strict=True)
            for start, end in spans
        ]
        with contextlib.nullcontext() if self._learns_short else torch.no_grad():
            queries = student.vectors(sentences).cpu()
            of_short = [student.vectors(texts[len(indices) :]).cpu()] if short else []
        vectors = torch.cat([student.vectors(texts[: len(indices)]).cpu(), *of_short])
        return self._cross_entropy(live, len(indices), vectors, queries, numbers, random)

    def _cross_entropy(
        self,
        live: list[int],
        long: int,
        vectors: torch.Tensor,
        queries: torch.Tensor,
        numbers: torch.Tensor,
        random: np.random.Generator,
    ) -> torch.Tensor:
        """The loss of the long texts; other texts add to the gradient with the value 0.

        Args:
            live: indices of the texts that were run, the first `long` of which are long.
            vectors: [live, width].
            queries: [all their queries, width].
            numbers: [live], number of queries of each.
            random: draws the other texts.
        """
        if not self._texts.shape[-1]:
            self._texts = torch.zeros(*self._texts.shape[:-1], vectors.shape[-1])
            self._queries = torch.zeros(*self._queries.shape[:-1], vectors.shape[-1])
        owner = torch.tensor(live).repeat_interleave(numbers)
        place = torch.cat([torch.arange(number) for number in numbers.tolist()])
        all_texts = self._texts.index_put((torch.tensor(live),), vectors)
        all_queries = self._queries.index_put((owner, place), queries)
        self._numbers[live] = numbers
        self._texts, self._queries = all_texts.detach(), all_queries.detach()
        seen = self._drawn(live, random)
        has_query = torch.arange(QUERIES) < self._numbers[seen, None]  # [seen, queries]
        right = torch.arange(len(seen))[:, None].expand_as(has_query)[has_query]
        scores = all_queries[seen][has_query] @ all_texts[seen].T / TEMPERATURE  # [all queries, seen]
        # Seen texts stand for unseen ones, so that losses of all steps can be compared.
        stand_for = math.log((len(self._all) - 1) / max(1, len(seen) - 1))
        scores = scores + torch.where(torch.arange(len(seen)) == right[:, None], 0.0, stand_for)
        losses = torch.nn.functional.cross_entropy(scores, right, reduction="none")
        # Each text counts the same, however many sentences it has.
        losses = losses / self._numbers[seen][right]
        is_own = torch.isin(seen[right], torch.tensor(live[:long]))
        others = losses[~is_own].sum()
        return losses[is_own].sum() + (others - others.detach())

    def _drawn(self, live: list[int], random: np.random.Generator) -> torch.Tensor:
        """[texts], indices of the texts of a softmax: the texts that were run, and of the others as many as fit."""
        others = self._numbers.clone()
        others[live] = 0
        drawn = torch.from_numpy(random.permutation(others.nonzero()[:, 0].numpy())[:MOST_OTHERS])
        return torch.cat([torch.tensor(live), drawn])


def _text_ids(tokenizer: Any, text: str, *, max_tokens: int | None = None) -> torch.Tensor:
    """[tokens], int64, of a text with special tokens, at most `max_tokens` of them."""
    ids = tokenizer(text, truncation=max_tokens is not None, max_length=max_tokens, verbose=False)["input_ids"]
    return torch.tensor(ids)
