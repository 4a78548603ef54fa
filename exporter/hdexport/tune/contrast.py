"""The inverse cloze task: a sentence that is taken out of a long text finds it among all texts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hdexport.tune.corpus import Corpus, Document
from hdexport.tune.losses import Objective, text_ids
from hdexport.tune.student import Student

TEMPERATURE = 0.05
"""Temperature of the softmax over texts."""

QUERIES = 8
"""The most sentences that are taken out of a text at once; one run of the text answers all of them."""


MOST_OTHERS = 1024
"""Texts in a softmax beside the texts that were run; with their sentences, 32 MB of scores."""


class Contrast(Objective):
    """Cross entropy of the right text among all that were seen, for each sentence that was taken out of one.

    The vectors of texts and sentences are kept: the softmax is over many of them, and a text that is run is also moved
    away from the sentences of all others. With each long text a short one is run, so that long ones do not attract the
    sentences of short ones; each once where only new positions are trained, which short texts do not use.

    Args:
        corpus: the texts; texts with fewer than two sentences are left out.
        tokenizer: the checkpoint's.
        base: positions of the checkpoint; sentences are cut to them.
        learns_short: whether weights are trained that short texts use.
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
        """The vectors."""
        return {"texts": self._texts, "queries": self._queries, "numbers": self._numbers}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The vectors of another process."""
        self._texts, self._queries, self._numbers = state["texts"], state["queries"], state["numbers"]

    def loss(self, student: Student, indices: Sequence[int], seed: int) -> torch.Tensor:
        """See :class:`Objective`."""
        random = np.random.default_rng(seed)
        short = np.arange(len(self.documents), len(self._all))
        if not self._learns_short:
            short = short[(self._numbers[len(self.documents) :] == 0).numpy()]
        short = random.permutation(short)[: len(indices)].tolist()
        live = [*indices, *short]
        drawn = [self._all[index].drawn_sentences(QUERIES, random) for index in live]
        numbers = torch.tensor([len(spans) for spans in drawn])
        texts = [
            text_ids(self._tokenizer, self._all[index].without(spans)) for index, spans in zip(live, drawn, strict=True)
        ]
        sentences = [
            text_ids(self._tokenizer, self._all[index].text[start:end], most=self._base)
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
            live: indices of the texts that were run, long ones first.
            long: how many are.
            vectors: [live, width].
            queries: [all their queries, width].
            numbers: [live], of queries of each.
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
