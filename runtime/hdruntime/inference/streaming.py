"""Documents of any length, run segment by segment by bundles with recurrent states."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hdruntime.arrays import FloatArray, IntArray
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.errors import HdexportError, InputError, Setting, joined
from hdruntime.inference.inputs import BUILD_WITH_MEMORY, check_global_questions, inputs_of_texts
from hdruntime.inference.scheduling import BatchResult, Scheduler
from hdruntime.text.checks import SPLIT, check_text_lengths
from hdruntime.text.encoding import Encoding

SEGMENT_TOKENS = 512
"""Default tokens of a segment, if the bundle accepts as many."""

Document = str | Encoding | Sequence[int]
"""A text, its encoding, or its ids with special tokens."""

Columns = Mapping[str, IntArray]
"""A document: name of each input, except recurrent states -> [tokens]."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A segment of a document, and its results.

    Attributes:
        document: number of the document in its call, from 0.
        tokens: range of the segment in the document's tokens.
        is_last: whether the document ends with the segment.
        outputs: output name -> float32 array of the shape in the manifest without the batch axis; its tokens axis is as
            long as the segment. Undefined if there is an error.
        error: why the document has no further results, or None.
    """

    document: int
    tokens: slice
    is_last: bool
    outputs: dict[str, FloatArray]
    error: HdexportError | None = None


def checked_segment(segment: int | None, manifest: Manifest, *, max_len: int) -> int:
    """Tokens of a segment, at most `max_len`; None for the default. Rejects a bundle without recurrent states."""
    if not manifest.recurrent_states:
        raise InputError(
            "This bundle has no recurrent states, so it cannot stream a document.",
            hint=joined(BUILD_WITH_MEMORY, ". Or split the document into independent chunks: ", SPLIT, "."),
        )
    if segment is None:
        return min(SEGMENT_TOKENS, max_len)
    if not 1 <= segment <= max_len:
        larger = ("Build the bundle again with ", Setting("max_len", segment, command="build"), " for longer segments.")
        raise InputError(
            parameter="segment",
            value=segment,
            accepted=f"1 to {max_len} for this bundle",
            hint=larger if segment > max_len else "",
        )
    return segment


def check_document_length(tokens: int, manifest: Manifest) -> None:
    """Reject a document without tokens, or with more tokens than the bundle has positions."""
    most = manifest.document_tokens
    if most is None or tokens < 1:
        check_text_lengths([tokens], sys.maxsize)
    elif tokens > most:
        raise InputError(
            f"The document has {tokens} tokens; this bundle has positions for {most}, counted through all segments.",
            hint=(
                "Build the bundle again with ",
                Setting("max_len", tokens, command="build"),
                ", or split the document into independent chunks: ",
                SPLIT,
                ".",
            ),
        )


class _Slot:
    """A document in a row of the batch; its next segment begins at the token `start`."""

    def __init__(self, document: int, columns: Columns) -> None:
        self.document, self.columns, self.start = document, columns, 0
        self.tokens = len(next(iter(columns.values())))


class BatchSlots:
    """Batch slots for documents: one document per row of the batch. Not thread-safe.

    When a document ends, its slot resets the recurrent states of the row and takes the next document; the other slots
    continue. All batches have one shape: the last segment of a document is padded, and an empty slot is all padding.

    Args:
        scheduler: runs the batches.
        manifest: of the bundle.
        max_len: maximum tokens of a segment.
        segment, rows: as for :meth:`hdruntime.Session.stream_all`.
        documents: number of documents, which limits the default of `rows`.
        outputs: names of the outputs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        manifest: Manifest,
        *,
        max_len: int,
        segment: int | None,
        rows: int | None,
        documents: int,
        outputs: Sequence[str],
    ) -> None:
        segment = checked_segment(segment, manifest, max_len=max_len)
        if rows is None:
            most = min(scheduler.batch_tokens // segment, scheduler.max_rows(segment))
            rows = max(1, min(documents, most))
        if rows < 1:
            raise InputError(f"rows is {rows}; it must be 1 or more, or None for the backend's default.")
        self._scheduler, self._manifest = scheduler, manifest
        self._rows, self._segment, self._outputs = rows, segment, outputs
        self._with_tokens = {spec.name for spec in manifest.outputs if spec.has_tokens_axis}
        self._states = scheduler.runner.open_states(rows)

    def run(self, documents: Iterable[Columns]) -> Iterator[Segment]:
        """Run documents, and take each from the iterable when a slot is free. The segments of a document come in order;
        segments of different documents are interleaved."""
        waiting = enumerate(documents)
        slots: list[_Slot | None] = [None] * self._rows
        while True:
            for row, slot in enumerate(slots):
                if slot is None and (document := next(waiting, None)) is not None:
                    slots[row] = _Slot(*document)
                    self._states.reset([row])
            if not any(slots):
                return
            result = self._scheduler.run_on(self._states, self._batch(slots), outputs=self._outputs)
            for row, slot in enumerate(slots):
                if slot is not None:
                    segment = self._segment_of(slot, row, result)
                    slots[row] = None if segment.is_last else slot
                    yield segment

    def _batch(self, slots: Sequence[_Slot | None]) -> dict[str, IntArray]:
        """The next segment of each slot: int64 [rows, segment] per input."""
        tokenizer, manifest = self._manifest.tokenizer, self._manifest
        fill = {manifest.ids: tokenizer.pad_token_id} if tokenizer else {}
        names = [spec.name for spec in manifest.inputs if spec not in manifest.recurrent_states]
        batch = {name: np.full((len(slots), self._segment), fill.get(name, 0), np.int64) for name in names}
        for row, slot in enumerate(slots):
            if slot is not None:
                for name, array in batch.items():
                    part = slot.columns[name][slot.start : slot.start + self._segment]
                    array[row, : len(part)] = part
        return batch

    def _segment_of(self, slot: _Slot, row: int, result: BatchResult) -> Segment:
        """The result of a slot's segment; moves the slot to its next segment."""
        tokens = slice(slot.start, min(slot.start + self._segment, slot.tokens))
        slot.start = tokens.stop
        # Copies: a caller may keep one row's, and not the batch's.
        outputs = {
            name: (values[row, : tokens.stop - tokens.start] if name in self._with_tokens else values[row]).copy()
            for name, values in result.outputs.items()
        }
        error = result.errors.get(row)
        return Segment(
            document=slot.document,
            tokens=tokens,
            is_last=error is not None or slot.start == slot.tokens,
            outputs=outputs,
            error=error,
        )


class DocumentStream:
    """The segments of one document, made by :meth:`hdruntime.Session.stream`; an iterator and a context manager.

    The recurrent states are freed when the stream is closed or no longer referenced. An error closes the stream.

    Args:
        slots: batch slots of one row.
        document: document to run.
    """

    def __init__(self, slots: BatchSlots, document: Columns) -> None:
        self._segments: Iterator[Segment] | None = slots.run([document])
        self._lock = threading.Lock()

    def __iter__(self) -> DocumentStream:
        return self

    def __next__(self) -> Segment:
        """The next segment, which is computed now.

        Raises:
            StopIteration: the document has ended.
            InputError: the stream was closed.
            NonFiniteOutputError: a result is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        with self._lock:
            if self._segments is None:
                raise InputError(
                    "This stream is closed, and its recurrent states are freed.",
                    hint="Begin again with session.stream(document).",
                )
            try:
                segment = next(self._segments)
                if segment.error is not None:
                    raise segment.error
            except StopIteration:
                raise
            except BaseException:
                self._segments = None
                raise
            return segment

    def close(self) -> None:
        """Free the recurrent states; may be called again."""
        with self._lock:
            self._segments = None

    def __enter__(self) -> DocumentStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def columns_of(document: Encoding | Sequence[int], manifest: Manifest) -> Columns:
    """The inputs of a document; one that is empty, too long, of another type or with an unknown id is refused."""
    if not isinstance(document, Encoding):
        document = Encoding.of_ids(_ids(document))
    check_document_length(len(document), manifest)
    check_global_questions([document], manifest)
    inputs = inputs_of_texts([document], manifest, memory=0)
    return {spec.name: inputs[spec.name][0] for spec in manifest.inputs if spec.role is not Role.RECURRENT_STATE}


def _ids(document: object) -> list[int]:
    ids = None
    if isinstance(document, (Sequence, np.ndarray)):
        with contextlib.suppress(ValueError):  # lists of different lengths
            ids = np.asarray(document) if len(document) else np.zeros(0, np.int64)
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(
            f"A document is a text, an Encoding or a list of token ids; this is a {type(document).__name__}.",
            hint="Give several documents to session.stream_all.",
        )
    return ids.tolist()
