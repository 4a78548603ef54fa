"""Documents of any length, run segment by segment by bundles that carry states from one segment to the next."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hdruntime.arrays import FloatArray, IntArray
from hdruntime.bundle.manifest import Manifest, Role
from hdruntime.errors import HdexportError, InputError
from hdruntime.inference.inputs import BUILD_WITH_MEMORY, check_texts_for_marks, inputs_of_texts
from hdruntime.inference.scheduling import BatchResult, Scheduler
from hdruntime.text.checks import check_text_lengths
from hdruntime.text.tokenization import Encoding

SEGMENT_TOKENS = 512
"""Default tokens of a segment, if the bundle accepts as many."""

Document = str | Encoding | Sequence[int]
"""A text, its encoding, or its ids with special tokens."""

Columns = Mapping[str, IntArray]
"""A document: name of each input but the carried states -> [tokens]."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A segment of a document, and its results.

    Attributes:
        document: number of the document in its call, from 0.
        tokens: which of the document's tokens these are.
        is_last: whether the document ends here.
        outputs: output name -> float32 array of the shape in the manifest without the batch axis, its tokens axis as
            long as the segment.
        error: why the document has no further results; its outputs here are undefined then.
    """

    document: int
    tokens: slice
    is_last: bool
    outputs: dict[str, FloatArray]
    error: HdexportError | None = None


def checked_segment(segment: int | None, manifest: Manifest, *, max_len: int) -> int:
    """Tokens of a segment, at most `max_len`; None for the default. A bundle that carries nothing is refused."""
    if not manifest.memories:
        raise InputError(
            "This bundle remembers nothing from one segment to the next, so a document cannot be streamed.",
            hint=f"{BUILD_WITH_MEMORY}. Or run it in independent chunks: --overflow split, session.split",
        )
    if segment is None:
        return min(SEGMENT_TOKENS, max_len)
    if not 1 <= segment <= max_len:
        advice = f", or build the bundle again with --max-len {segment}" if segment > max_len else ""
        raise InputError(
            f"A segment of {segment} tokens does not fit; this bundle accepts 1 to {max_len}.",
            hint=f"Choose another segment{advice}.",
        )
    return segment


def check_document_length(tokens: int, manifest: Manifest) -> None:
    """Refuse a document without tokens, or with more than the bundle has positions for."""
    most = manifest.document_tokens
    if most is None or tokens < 1:
        check_text_lengths([tokens], sys.maxsize)
    elif tokens > most:
        raise InputError(
            f"The document has {tokens} tokens; this bundle has positions for {most}, counted through all segments.",
            hint=f"Build the bundle again with --max-len {tokens}, or run the document in independent chunks: "
            "--overflow split.",
        )


class _Lane:
    """A row with a document in it, whose next segment begins at the token `start`."""

    def __init__(self, document: int, columns: Columns) -> None:
        self.document, self.columns, self.start = document, columns, 0
        self.tokens = len(next(iter(columns.values())))


class Lanes:
    """Rows of a batch, each with a document of its own; used by one thread at a time.

    When a document ends, its row forgets it and begins the next one, while the other rows go on with theirs. All
    batches have one shape; only the last segment of a document is padded, and a row without a document is all padding.
    `segment` and `rows` are those of :meth:`hdruntime.Session.stream_all`; by default there are no more rows than
    `documents`.
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
            most = min(scheduler.batch_tokens // segment, scheduler.most_rows(segment))
            rows = max(1, min(documents, most))
        if rows < 1:
            raise InputError(f"rows is {rows}; it must be 1 or more, or None for the backend's default.")
        self._scheduler, self._manifest = scheduler, manifest
        self._rows, self._segment, self._outputs = rows, segment, outputs
        self._with_tokens = {spec.name for spec in manifest.outputs if spec.has_tokens_axis}
        self._carried = scheduler.runner.open_states(rows)

    def run(self, documents: Iterable[Columns]) -> Iterator[Segment]:
        """Run documents; each is asked for when a row is free for it. Segments of a document come in order, those of
        different documents interleaved."""
        waiting = enumerate(documents)
        lanes: list[_Lane | None] = [None] * self._rows
        while True:
            for row, lane in enumerate(lanes):
                if lane is None and (document := next(waiting, None)) is not None:
                    lanes[row] = _Lane(*document)
                    self._carried.reset([row])
            if not any(lanes):
                return
            result = self._scheduler.run_on(self._carried, self._batch(lanes), outputs=self._outputs)
            for row, lane in enumerate(lanes):
                if lane is not None:
                    segment = self._segment_of(lane, row, result)
                    lanes[row] = None if segment.is_last else lane
                    yield segment

    def _batch(self, lanes: Sequence[_Lane | None]) -> dict[str, IntArray]:
        """The next segment of each lane, int64 [rows, segment] for each input."""
        tokenizer, manifest = self._manifest.tokenizer, self._manifest
        fill = {manifest.ids: tokenizer.pad_token_id} if tokenizer else {}
        names = [spec.name for spec in manifest.inputs if spec not in manifest.memories]
        batch = {name: np.full((len(lanes), self._segment), fill.get(name, 0), np.int64) for name in names}
        for row, lane in enumerate(lanes):
            if lane is not None:
                for name, array in batch.items():
                    part = lane.columns[name][lane.start : lane.start + self._segment]
                    array[row, : len(part)] = part
        return batch

    def _segment_of(self, lane: _Lane, row: int, result: BatchResult) -> Segment:
        """The result of a lane, which goes on to its next segment."""
        tokens = slice(lane.start, min(lane.start + self._segment, lane.tokens))
        lane.start = tokens.stop
        # Copies: a caller may keep one row's, and not the batch's.
        outputs = {
            name: (values[row, : tokens.stop - tokens.start] if name in self._with_tokens else values[row]).copy()
            for name, values in result.outputs.items()
        }
        error = result.errors.get(row)
        return Segment(
            document=lane.document,
            tokens=tokens,
            is_last=error is not None or lane.start == lane.tokens,
            outputs=outputs,
            error=error,
        )


class DocumentStream:
    """The segments of one document, made by :meth:`hdruntime.Session.stream`; an iterator and a context manager.

    The states that it carries are freed when it is closed, or no longer referred to. After an error it is closed.

    Args:
        lanes: of one row.
        document: the document to run.
    """

    def __init__(self, lanes: Lanes, document: Columns) -> None:
        self._segments: Iterator[Segment] | None = lanes.run([document])
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
                    "This is a document whose stream was closed, and its memory is gone.",
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
        """Forget the document and free the states that it carries; may be repeated."""
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
    check_texts_for_marks([document], manifest)
    inputs = inputs_of_texts([document], manifest, memory=0)
    return {spec.name: inputs[spec.name][0] for spec in manifest.inputs if spec.role is not Role.MEMORY}


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
