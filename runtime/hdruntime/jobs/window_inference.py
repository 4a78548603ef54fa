"""Windows run in this process: rows are tokenised, run with a session, and get their task's values."""

from __future__ import annotations

__all__ = ["LocalPool", "WindowInference", "checked_streaming"]

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import BackendError, HdexportError, InputError, NonFiniteOutputError, OutOfMemoryError
from hdruntime.inference.scheduling import BatchResult, PaddingCount
from hdruntime.inference.streaming import checked_segment
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.row_encoding import RowEncoder
from hdruntime.jobs.rows import ErrorKind, Row
from hdruntime.jobs.task_results import Outputs, TaskResults
from hdruntime.jobs.windows import Window, WindowOptions, WindowResult
from hdruntime.session import Session
from hdruntime.text.chunking import LateChunks, TextChunks, overlap_of
from hdruntime.text.splitting import SplitEncoding, merged
from hdruntime.text.streamed import StreamedOutputs
from hdruntime.text.tokenization import Encoding, Overflow

_CHARACTERS_PER_TOKEN = 4
"""Characters of a token in English; only the size of windows depends on it."""

_WINDOW_BATCHES = 8
"""Batches per window: enough for full batches of rows of similar length."""

_LANE_CHARACTERS = 2**16
"""Characters of a window per streamed row that runs at a time: about 16384 tokens, so that lanes are seldom empty."""

_MOST_CHARACTERS = 2**22
"""Upper bound on window size; each token uses about 200 bytes."""

_OUTPUT_BYTES = 128 * 2**20
"""Outputs held at a time. For fill-mask these are few tokens: each has logits for the whole vocabulary."""


class LocalPool:
    """Runs windows in this process, one after another.

    Args:
        session: that runs them.
        task: whose results are computed.
        options: default `WindowOptions()`.
    """

    def __init__(self, session: Session, task: TaskResults, *, options: WindowOptions | None = None) -> None:
        options = options or WindowOptions()
        batch_tokens = options.batch_tokens or session.batch_tokens
        self._infer = WindowInference(session, task, options=options)
        characters = _WINDOW_BATCHES * batch_tokens * _CHARACTERS_PER_TOKEN
        self.window_characters = min(max(characters, self._infer.lanes * _LANE_CHARACTERS), _MOST_CHARACTERS)

    def map(self, windows: Iterator[Window]) -> Iterator[tuple[Window, WindowResult]]:
        """Run every window; see `WindowPool`."""
        for window in windows:
            yield window, self._infer(window.rows)


@dataclass(kw_only=True)
class _Item:
    """A row in progress: it gets an encoding, its pieces' outputs, and values or chunks, or an error at any step."""

    row: Row
    encoding: SplitEncoding | None = None
    outputs: dict[int, Outputs] = field(default_factory=dict)
    values: Mapping[str, object] | None = None
    chunks: LateChunks | None = None
    error: str | None = None
    error_kind: ErrorKind = ErrorKind.INPUT

    def fail(self, error: HdexportError) -> None:
        """Record why the row has no values."""
        self.error = str(error)
        self.error_kind = ErrorKind.INPUT
        if isinstance(error, NonFiniteOutputError):
            self.error_kind = ErrorKind.NOT_FINITE
        elif isinstance(error, BackendError):
            self.error_kind = ErrorKind.BACKEND


@dataclass(frozen=True)
class _Piece:
    item: _Item
    number: int
    encoding: Encoding


class WindowInference:
    """Runs windows with a session, and remembers whether the session has ever worked.

    Args:
        session: that runs them.
        task: whose results are computed.
        options: default `WindowOptions()`. Batches are smaller if their outputs would fill the memory.

    Attributes:
        lanes: rows that are streamed at a time; 0 if rows are not streamed.

    Raises:
        InputError: rows are to be streamed, and the bundle or its task does not allow it.
    """

    def __init__(self, session: Session, task: TaskResults, *, options: WindowOptions | None = None) -> None:
        options = options or WindowOptions()
        self._session = session
        self._task = task
        self._pooling = options.split_pooling
        self._prompt = options.chosen_prompt(session.manifest, task)
        overflow, stride = options.overflow, options.stride
        if task.chunks is not None:
            overflow, stride = Overflow.SPLIT, overlap_of(options.overlap, session.max_len)
        self._encoder = RowEncoder(session, overflow=overflow, stride=stride, prompt=self._prompt, encode=task.encode)
        batch_tokens = options.batch_tokens or session.batch_tokens
        self._batch_size = options.batch_size
        self._streamed, self._segment, self.lanes = None, 0, 0
        outputs: Sequence[str] = task.outputs
        if overflow is Overflow.RECUR:
            self._streamed = checked_streaming(session.manifest, task)
            outputs = self._streamed.needed
        self._batch_tokens = min(batch_tokens, _tokens_that_fit(session.manifest, outputs))
        if overflow is Overflow.RECUR:
            self._segment = checked_segment(options.segment, session.manifest, max_len=session.max_len)
            lanes = min(self._batch_tokens // self._segment, session.most_rows(self._segment))
            self.lanes = max(1, min(lanes, options.batch_size or lanes))
        self._with_tokens = {spec.name for spec in session.manifest.outputs if spec.shape[1:2] == ("tokens",)}
        self._known_good: Encoding | None = None

    def __call__(self, rows: Sequence[Row]) -> WindowResult:
        """Tokenise rows, run them, and compute the task's values.

        Raises:
            BackendError: every row failed, and so does one that ran before: the session is broken.
        """
        before = self._session.padding
        items = [_Item(row=row, error=row.error, error_kind=row.error_kind) for row in rows]
        self._encode([item for item in items if item.error is None])
        run = self._infer if self._streamed is None else self._stream
        run([item for item in items if item.encoding is not None])
        counts = _counts(items, before, self._session.padding)
        return WindowResult(results=[result for item in items for result in self._results(item)], counts=counts)

    def _encode(self, items: list[_Item]) -> None:
        for item, encoded in zip(items, self._encoder.encode([item.row for item in items]), strict=True):
            if isinstance(encoded, InputError):
                item.fail(encoded)
                continue
            try:
                item.chunks = self._task.chunks and self._task.chunks(encoded, item.row, self._prompt)
                item.encoding = encoded
            except InputError as error:
                item.fail(error)

    def _infer(self, items: list[_Item]) -> None:
        pieces = [
            _Piece(item, number, piece)
            for item in items
            if item.encoding is not None
            for number, piece in enumerate(item.encoding.pieces)
        ]
        failure: BackendError | None = None
        has_worked = False
        for batch in self._run([piece.encoding for piece in pieces]):
            for index, number in enumerate(batch.rows):
                piece, error = pieces[number], batch.errors.get(number)
                if error is None:
                    self._known_good = piece.encoding
                    self._take(piece, self._outputs_of_row(batch, index, len(piece.encoding)))
                else:
                    piece.item.fail(error)
                if not isinstance(error, BackendError) or isinstance(error, NonFiniteOutputError):
                    has_worked = True
                else:
                    failure = failure or error
        if failure is not None and not has_worked:
            self._require_working_session(failure)

    def _stream(self, items: list[_Item]) -> None:
        """Stream rows, some at a time. Those of a batch that failed begin again, with fewer rows or alone."""
        lanes, failure, has_worked = self.lanes, None, False
        while items:
            lanes = min(lanes, len(items))
            try:
                for _ in self._streamed_items(items, lanes):
                    has_worked = True
                break
            except BackendError as error:
                items = [item for item in items if item.values is None and item.error is None]
                if lanes == 1:
                    items.pop(0).fail(error)
                    failure = failure or error
                elif isinstance(error, OutOfMemoryError):
                    lanes = self.lanes = lanes // 2
                else:
                    lanes = 1
        if failure is not None and not has_worked:
            self._require_working_session(failure)

    def _streamed_items(self, items: list[_Item], lanes: int) -> Iterator[_Item]:
        """Yields each row when it has its values or its error."""
        assert self._streamed is not None
        begun = {}
        encodings = [item.encoding.whole for item in items if item.encoding is not None]
        for part in self._session.stream_all(
            encodings, segment=self._segment, rows=min(lanes, len(items)), outputs=self._streamed.needed
        ):
            item, encoding = items[part.document], encodings[part.document]
            if part.document not in begun:
                begun[part.document] = self._streamed.begin(encoding)
            if part.error is not None:
                item.fail(part.error)
            else:
                begun[part.document].add(part.tokens.start, part.outputs)
            if not part.is_last:
                continue
            document = begun.pop(part.document)
            if part.error is None:
                self._known_good = Encoding.of_ids(encoding.input_ids[: self._segment])
                self._finish(item, [document.finished()])
            yield item

    def _finish(self, item: _Item, outputs: Sequence[Outputs]) -> None:
        """Compute a row's values from the outputs of its pieces."""
        task, split = self._task, item.encoding
        assert split is not None
        try:
            if task.values_of_pieces is not None:
                item.values = task.values_of_pieces(split, outputs, item.row)
                return
            assert task.values is not None, "without chunks there are values"
            is_pair = item.row.text_pair is not None
            pooling = self._pooling or (task.pair_pooling if is_pair else task.split_pooling)
            whole = merged(split, outputs, specs=self._session.manifest.outputs, pooling=pooling)
            item.values = task.values(whole, split.whole, item.row)
        except InputError as error:
            item.fail(error)

    def _run(self, encodings: list[Encoding]) -> Iterator[BatchResult]:
        return self._session.run_batches(
            encodings, batch_tokens=self._batch_tokens, batch_size=self._batch_size, outputs=self._task.outputs
        )

    def _outputs_of_row(self, batch: BatchResult, index: int, tokens: int) -> Outputs:
        """A row's outputs without batch axis and padding."""
        return {
            name: values[index, :tokens] if name in self._with_tokens else values[index]
            for name, values in batch.outputs.items()
        }

    def _take(self, piece: _Piece, outputs: Outputs) -> None:
        """Keep the needed part of a piece's outputs; the last piece completes the row's values."""
        item = piece.item
        assert item.encoding is not None, "what has pieces has an encoding"
        if item.chunks is not None:
            item.chunks.add(piece.number, outputs[self._task.outputs[0]])
            return
        item.outputs[piece.number] = self._task.of_piece(outputs)
        if len(item.outputs) < len(item.encoding.pieces):
            return
        in_order = [item.outputs[number] for number in range(len(item.outputs))]
        item.outputs = {}
        self._finish(item, in_order)

    def _require_working_session(self, failure: BackendError) -> None:
        """Raise the failure if the session fails on rows that it ran before, or never ran any."""
        if self._known_good is None or any(batch.errors for batch in self._run([self._known_good])):
            raise failure

    def _results(self, item: _Item) -> Iterator[dict[str, object]]:
        row = {"id": item.row.id, **item.row.kept}
        if item.chunks is not None and item.error is None:
            for values in _rows_of_chunks(item.chunks.finished()):
                yield {**row, **values, "error": None}
            return
        no_values: Mapping[str, object] = dict.fromkeys(column.name for column in self._task.fields)
        tokens = None if item.encoding is None or item.chunks is not None else len(item.encoding.whole)
        yield {**row, **(item.values or no_values), "tokens": tokens, "error": item.error}


def _rows_of_chunks(chunks: TextChunks) -> Iterator[dict[str, object]]:
    numbers = zip(chunks.starts.tolist(), chunks.ends.tolist(), chunks.tokens.tolist(), strict=True)
    for chunk, ((start, end, tokens), vector) in enumerate(zip(numbers, chunks.vectors, strict=True)):
        yield {"chunk": chunk, "start": start, "end": end, "embedding": vector, "tokens": tokens}


def _counts(items: Sequence[_Item], before: PaddingCount, after: PaddingCount) -> RowCounts:
    failed = [item for item in items if item.error is not None]
    return RowCounts(
        rows=len(items),
        tokens=sum(len(item.encoding.whole) for item in items if item.encoding is not None and item.error is None),
        computed_tokens=after.tokens - before.tokens,
        padded_tokens=after.padded_tokens - before.padded_tokens,
        cut_rows=sum(item.encoding.whole.is_cut for item in items if item.encoding is not None and item.error is None),
        errors=dict(Counter(item.error_kind.value for item in failed)),
        first_error=f"row {failed[0].row.id}: {failed[0].error}" if failed else None,
        dropped_columns=sorted({name for item in items for name in item.row.dropped}),
    )


def checked_streaming(manifest: Manifest, task: TaskResults) -> StreamedOutputs:
    """How the rows of a task get their outputs when they are streamed.

    Raises:
        InputError: the bundle remembers nothing, or the task's results cannot be made segment by segment.
    """
    checked_segment(None, manifest, max_len=manifest.max_len)
    if not task.streams and task.splits:
        raise InputError(
            f"The bundle's task is {manifest.task}, whose results are not made segment by segment.\n"
            "Run texts in pieces: --overflow split"
        )
    if not task.streams:
        raise InputError(
            f"The bundle's task is {manifest.task}, whose outputs for all tokens of a document would fill the memory.\n"
            "Cut the texts: --overflow truncate"
        )
    return StreamedOutputs(manifest, task.outputs)


def _tokens_that_fit(manifest: Manifest, outputs: Sequence[str]) -> int:
    """Number of tokens whose outputs take `_OUTPUT_BYTES`."""
    bytes_per_token = 0
    for spec in manifest.outputs:
        if spec.name in outputs and "tokens" in spec.shape:
            bytes_per_token += 4 * math.prod(size for size in spec.shape if isinstance(size, int))
    return max(1, _OUTPUT_BYTES // max(1, bytes_per_token))
