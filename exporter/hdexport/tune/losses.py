"""Losses on the tokens of long texts: a teacher's that reads windows, and masked tokens' losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DataCollatorForLanguageModeling

from hdexport.graph.vocabulary_head import sampled_head
from hdexport.tune.corpus import Document
from hdexport.tune.student import Encoder, Student

MASKED_SHARE = 0.15
"""Share of tokens that are masked, as in BERT's training."""


class Objective(ABC):
    """A loss of documents, which may remember the documents that it has seen.

    Attributes:
        documents: the documents to learn from.
    """

    documents: Sequence[Document]

    @abstractmethod
    def loss(self, student: Student, indices: Sequence[int], seed: int) -> torch.Tensor:
        """The sum of the losses of some documents, a float32 scalar.

        Args:
            student: the model that is trained.
            indices: of the documents.
            seed: of all that is drawn.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """The memory of the loss."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore another process' memory."""
        assert not state


class Distill(Objective):
    """1 - cosine of each token's states in the whole text, and in a window of trained positions, far from its ends.

    Args:
        documents: long ones.
        tokenizer: the checkpoint's.
        teacher: the checkpoint's own model.
        base: its positions.
    """

    def __init__(self, documents: Sequence[Document], tokenizer: Any, teacher: Encoder, *, base: int) -> None:
        self.documents, self._tokenizer, self._teacher, self._base = documents, tokenizer, teacher, base

    def loss(self, student: Student, indices: Sequence[int], seed: int) -> torch.Tensor:
        """See :class:`Objective`."""
        texts = [text_ids(self._tokenizer, self.documents[index].text) for index in indices]
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
            # The second half of the window before is overwritten, but for the part that is nearer to its middle.
            skipped = size // 4 if first else 0
            wanted[first + skipped : first + size] = row[1 + skipped : 1 + min(size, len(inner) - first)]
        return 1 - torch.nn.functional.cosine_similarity(states[1:-1], wanted, dim=-1).mean()


class MaskedTokens(Objective):
    """Cross entropy of masked tokens, BERT's pretraining, in long texts.

    Args:
        documents: long ones.
        tokenizer: the checkpoint's, which knows a mask.
    """

    def __init__(self, documents: Sequence[Document], tokenizer: Any) -> None:
        self.documents, self._tokenizer = documents, tokenizer

    def loss(self, student: Student, indices: Sequence[int], seed: int) -> torch.Tensor:
        """See :class:`Objective`."""
        collator = DataCollatorForLanguageModeling(self._tokenizer, mlm_probability=MASKED_SHARE, seed=seed)
        masked = [collator([text_ids(self._tokenizer, self.documents[index].text)]) for index in indices]
        labels = torch.nn.utils.rnn.pad_sequence([each["labels"][0] for each in masked], True, -100)
        tokens = (labels != -100).any(0).nonzero()[:, 0].to(student.device)  # [samples]
        with sampled_head(student.model, tokens):
            outputs, _ = student.outputs([each["input_ids"][0] for each in masked])
        logits = outputs.logits.float()  # [batch, samples, vocabulary]
        wanted = labels.to(student.device)[:, tokens]  # [batch, samples]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
        return (losses.sum(1) / (wanted != -100).sum(1).clamp(min=1)).sum()


def text_ids(tokenizer: Any, text: str, *, most: int | None = None) -> torch.Tensor:
    """[tokens], int64, special ones included, of a text; at most so many."""
    ids = tokenizer(text, truncation=most is not None, max_length=most, verbose=False)["input_ids"]
    return torch.tensor(ids)
