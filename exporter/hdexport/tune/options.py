"""Options of tuning: which weights, how long and with which loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdruntime.bundle.manifest import AttentionScale, Scheme, TokenizerSource
from hdruntime.errors import InputError


class Loss(StrEnum):
    """The lesson from texts without labels."""

    DISTILL = "distill"
    """Token states of the whole text are the states that the checkpoint gives in a window of trained positions."""
    CONTRAST = "contrast"
    """A sentence that is taken out of a text finds it among all others (inverse cloze)."""
    MLM = "mlm"
    """Masked tokens are predicted, as in pretraining."""


class Trained(StrEnum):
    """The weights that are trained."""

    POSITIONS = "positions"
    """The rows of the position table after the checkpoint's."""
    ALL = "all"
    """Every weight of the model."""


DEFAULT_MINUTES = 30.0

_DEFAULT_RATES = {Trained.POSITIONS: 5e-3, Trained.ALL: 2e-5}


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of a tuning.

    Attributes:
        model: a checkpoint's directory, or ``organisation/name`` on the Hugging Face hub, which ``@revision`` may
            follow.
        texts: a file or a folder, see `hdexport.support.texts.read_texts`.
        output: the directory to write.
        max_len: positions of the new checkpoint.
        chunk_tokens: maximum length of a text, in tokens; longer texts are split into chunks. None for three times the
            checkpoint's positions. Time grows faster than this; rows past it learn only what all new rows share.
        text_column: column of the texts; None for ``text``.
        loss: the loss to learn by; None chooses by the checkpoint's task.
        train: which weights.
        tokenizer: whose ids texts have, ``library`` or ``file``, as of a build; the written checkpoint has the same.
        scheme: source of the new rows before they are trained.
        alpha: weight of the coarse position in the hierarchical scheme; None chooses, see `choose_positions`.
        attention: attention type and its options, ``windows:512``; None keeps the model's.
        attention_options: options of attention types, by their names in Python.
        attention_scale: factor of the queries; None chooses.
        minutes: training time of all runs of the command together; None where only `steps` counts.
        steps: number of optimizer steps; None where only `minutes` counts. Where neither is given, 30 minutes.
        batch_tokens: about how many tokens a step sees; each text is run alone or with similarly long ones.
        learning_rate: the highest learning rate; None for the default of `train`.
        seed: seed of the order of texts and of all random numbers.
        gradient_checkpointing: compute each layer twice, to keep less in memory.
        device: ``auto``, ``cpu`` or ``cuda``.
        revision: branch, tag or commit on the Hub.
        force: replace a checkpoint at `output`.
        restart: discard the state that an unfinished run has kept.
        trust: which code of the checkpoint may run.
        command: the command line, for the record.
    """

    model: str | Path
    texts: Path
    output: Path
    max_len: int
    chunk_tokens: int | None = None
    text_column: str | None = None
    loss: Loss | None = None
    train: Trained = Trained.POSITIONS
    tokenizer: TokenizerSource = "library"
    scheme: Scheme = Scheme.HIERARCHICAL
    alpha: float | None = None
    attention: str | None = None
    attention_options: Mapping[str, Any] = field(default_factory=dict)
    attention_scale: AttentionScale | None = None
    minutes: float | None = None
    steps: int | None = None
    batch_tokens: int = 8192
    learning_rate: float | None = None
    seed: int = 0
    gradient_checkpointing: bool = False
    device: str = "auto"
    revision: str | None = None
    force: bool = False
    restart: bool = False
    trust: Trust = UNTRUSTED
    command: str = ""

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate of the schedule."""
        return _DEFAULT_RATES[self.train] if self.learning_rate is None else self.learning_rate

    @property
    def seconds(self) -> float | None:
        """Duration of training; None where only steps count."""
        if self.minutes is not None:
            return 60 * self.minutes
        return 60 * DEFAULT_MINUTES if self.steps is None else None

    def longest_chunk(self, base: int) -> int:
        """Tokens of the longest text that is run; `base` is the number of the checkpoint's positions.

        Raises:
            InputError: no new position would be learnt, or texts would be longer than the positions.
        """
        length = min(self.max_len, 3 * base) if self.chunk_tokens is None else self.chunk_tokens
        if not base < length <= self.max_len:
            raise InputError(
                parameter="chunk_tokens",
                value=length,
                accepted=f"{base + 1}, the first position that is learned, to {self.max_len}",
            )
        return length

    def check(self) -> None:
        """Reject numbers that nothing can be trained with.

        Raises:
            InputError: the message says which number.
        """
        for name, value in (("minutes", self.minutes), ("learning_rate", self.learning_rate)):
            if value is not None and not 0 < value < float("inf"):
                raise InputError(parameter=name, value=value, accepted="a finite number above 0")
        if self.steps is not None and self.steps < 1:
            raise InputError(parameter="steps", value=self.steps, accepted="a whole number, 1 or more")
