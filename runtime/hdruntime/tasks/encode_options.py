"""Options of encoding texts: batches, and the treatment of long texts."""

from __future__ import annotations

from dataclasses import dataclass

from hdruntime.errors import InputError
from hdruntime.text.checks import checked_choice
from hdruntime.text.encoding import Overflow
from hdruntime.text.lengths import MaxSeqLength
from hdruntime.text.splitting import SplitPooling


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How texts become tokens and batches.

    Attributes:
        max_seq_length: tokens to which texts are truncated, and chunks of split texts; ``"model"`` for the model's own
            length, ``"bundle"`` for the longest that the bundle runs. None: the session's.
        batch_tokens: maximum tokens per batch, padding included; a longer text runs alone. None: the backend's default.
        batch_size: maximum texts per batch; None: any number.
        overflow: the treatment of a text with too many tokens. A row of ids is truncated as a text is, if it has
            the special tokens of a text, and else at its end; it cannot be split. With ``recur`` every text is
            streamed, see :meth:`hdruntime.Session.stream_all`.
        segment: tokens of a segment of a streamed text; None: as of :meth:`hdruntime.Session.stream`.
        stride: tokens that each chunk of a split text repeats from the previous chunk.
        split_pooling: how the chunks' vectors are combined, or their logits if a text has one row of logits. None: the
            largest score of a pair, where pairs have one score (rerankers), the largest weights of sparse vectors, or
            their sums, as the model pools; else the mean.
    """

    max_seq_length: int | MaxSeqLength | None = None
    batch_tokens: int | None = None
    batch_size: int | None = None
    overflow: Overflow = Overflow.ERROR
    segment: int | None = None
    stride: int = 0
    split_pooling: SplitPooling | None = None

    @classmethod
    def of(
        cls,
        *,
        overflow: Overflow | str,
        stride: int = 0,
        split_pooling: SplitPooling | str | None = None,
        segment: int | None = None,
        max_seq_length: int | MaxSeqLength | None = None,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
    ) -> EncodeOptions:
        """The options from the arguments of a method; unknown choices, and arguments that contradict each other, are
        rejected."""
        overflow = checked_choice(Overflow, overflow, option="overflow")
        if split_pooling is not None:
            split_pooling = checked_choice(SplitPooling, split_pooling, option="split_pooling")
        if stride and overflow is not Overflow.SPLIT:
            raise InputError(f"stride is {stride}, but only overflow='split' has a stride.", hint="Leave it out.")
        if segment is not None and overflow is not Overflow.RECUR:
            raise InputError(f"segment is {segment}, but only overflow='recur' has segments.", hint="Leave it out.")
        return cls(
            overflow=overflow,
            stride=stride,
            split_pooling=split_pooling,
            segment=segment,
            max_seq_length=max_seq_length,
            batch_tokens=batch_tokens,
            batch_size=batch_size,
        )
