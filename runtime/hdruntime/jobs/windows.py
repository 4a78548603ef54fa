"""Rows of a job, one window at a time: a piece of work for any process that has a session."""

from __future__ import annotations

__all__ = [
    "WINDOW_CHARACTERS",
    "LocalPool",
    "Window",
    "WindowInference",
    "WindowOptions",
    "WindowPool",
    "WindowResult",
    "cut_windows",
]

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import BackendError, HdexportError, InputError, NonFiniteOutputError
from hdruntime.inference.scheduling import BatchResult, PaddingCount
from hdruntime.jobs.progress import RowCounts
from hdruntime.jobs.results import TaskResults
from hdruntime.jobs.row_encoding import RowEncoder, size_of_row
from hdruntime.jobs.rows import ErrorKind, Position, Row
from hdruntime.session import Session
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.splitting import SplitEncoding, SplitPooling, merged
from hdruntime.text.tasks import Aggregation
from hdruntime.text.tokenization import Encoding, Overflow

WINDOW_CHARACTERS = 2**17
"""A window ends at this many characters, where nothing says how large a batch is: about 32768 tokens. Within a window,
rows are sorted by length; and a window is what is lost when a job is killed."""

_CHARACTERS_PER_TOKEN = 4
"""Of English; only the size of windows depends on it."""

_WINDOW_BATCHES = 8
"""Batches of a window: enough for full ones of rows of about one length."""

_MOST_CHARACTERS = 2**22
"""Of a window, however large batches are: while it is done, a token takes about 200 bytes."""

_WINDOW_ROWS = 4096
"""Most rows of a window, however short they are."""

_OUTPUT_BYTES = 128 * 2**20
"""Outputs held at a time. For fill-mask that is few tokens: each has a logit for the whole vocabulary."""

Outputs = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How windows are done.

    Attributes:
        batch_tokens: most tokens of a batch, padding included; a longer row goes alone. None: what suits the
            backend.
        batch_size: most rows of a batch; None: any number.
        overflow: what happens to a row of too many tokens. A row of ids loses its last; it cannot be split.
        stride: tokens that each piece of a split text repeats from the piece before.
        split_pooling: how the pieces' vectors are combined, or their logits where a text has one row of them.
        prompt_name: the model's prompt that goes before every text; None for the model's default, if it has one.
        prompt: the prompt itself.
        aggregation: what an entity is, for token-classification; None for a token.
    """

    batch_tokens: int | None = None
    batch_size: int | None = None
    overflow: Overflow = Overflow.ERROR
    stride: int = 0
    split_pooling: SplitPooling = SplitPooling.MEAN
    prompt_name: str | None = None
    prompt: str | None = None
    aggregation: Aggregation | None = None

    def check(self) -> None:
        """Refuse what no session can do.

        Raises:
            InputError: an option's value does not fit.
        """
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise InputError(
                f"--batch-tokens {self.batch_tokens} is too small.\n"
                "Use 1 or more, or leave it out for what suits the backend."
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"--batch-size {self.batch_size} is too small.\nUse 1 or more texts, or leave it out.")
        if self.stride < 0:
            raise InputError(f"--stride {self.stride} is negative.\nUse 0 or more tokens.")
        if self.stride and self.overflow is not Overflow.SPLIT:
            raise InputError("--stride is for texts that are split.\nAdd --overflow split, or leave it out.")
        if self.prompt is not None and self.prompt_name is not None:
            raise InputError("--prompt and --prompt-name both say what goes before a text.\nLeave one of them out.")

    def chosen_prompt(self, manifest: Manifest, task: TaskResults) -> str:
        """What goes before every text.

        Raises:
            InputError: the bundle has no prompt of that name, or the task takes none.
        """
        if (self.prompt or self.prompt_name) and not task.prompts:
            raise InputError("A prompt goes before texts that are embedded or classified; these rows are not.")
        return chosen_prompt(*prompts_of(manifest), name=self.prompt_name, prompt=self.prompt)


@dataclass(frozen=True, kw_only=True)
class Window:
    """Rows that follow each other; where a window ends depends on nothing but the rows."""

    rows: list[Row]

    @property
    def end(self) -> Position:
        """Where the next window begins."""
        return self.rows[-1].end


@dataclass(frozen=True, kw_only=True)
class WindowResult:
    """The results of a window; it can be pickled.

    Attributes:
        results: one dict per row, in order: ``id``, the task's columns, ``tokens`` and ``error``.
        counts: their sum.
    """

    results: list[dict[str, object]]
    counts: RowCounts


class WindowPool(Protocol):
    """One process or many that do windows.

    Attributes:
        window_characters: about how long the texts of a window should be.
    """

    window_characters: int

    def map(self, windows: Iterator[Window]) -> Iterator[tuple[Window, WindowResult]]:
        """Do each window once; results come in the order of the windows.

        Raises:
            BackendError: the rows are not the cause.
        """


def cut_windows(rows: Iterable[Row], *, characters: int = WINDOW_CHARACTERS) -> Iterator[Window]:
    """Rows in groups that bound the memory and are large enough to be sorted by length.

    Args:
        rows: in order.
        characters: of a window's texts; the row that reaches them is its last. A token id counts as four.
    """
    window: list[Row] = []
    size = 0
    for row in rows:
        window.append(row)
        size += size_of_row(row)
        if len(window) >= _WINDOW_ROWS or size >= characters:
            yield Window(rows=window)
            window, size = [], 0
    if window:
        yield Window(rows=window)


class LocalPool:
    """Does windows in this process, one after the other.

    Args:
        session: what runs them.
        task: what is read from the session's outputs.
        options: how; default `WindowOptions()`.
    """

    def __init__(self, session: Session, task: TaskResults, *, options: WindowOptions | None = None) -> None:
        options = options or WindowOptions()
        batch_tokens = options.batch_tokens or session.batch_tokens
        self.window_characters = min(_WINDOW_BATCHES * batch_tokens * _CHARACTERS_PER_TOKEN, _MOST_CHARACTERS)
        self._infer = WindowInference(session, task, options=options)

    def map(self, windows: Iterator[Window]) -> Iterator[tuple[Window, WindowResult]]:
        """Do every window; see `WindowPool`."""
        for window in windows:
            yield window, self._infer(window.rows)


@dataclass(kw_only=True)
class _Item:
    """A row in progress: it gets an encoding, the outputs of its pieces, and values; or, at any step, an error."""

    row: Row
    encoding: SplitEncoding | None = None
    outputs: dict[int, Outputs] = field(default_factory=dict)
    values: Mapping[str, object] | None = None
    error: str | None = None
    error_kind: ErrorKind = ErrorKind.INPUT

    def fail(self, error: HdexportError) -> None:
        """Note why the row has no values."""
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
    """Does windows with a session, and remembers whether the session has ever worked.

    Args:
        session: what runs them.
        task: what is read from the session's outputs.
        options: how; default `WindowOptions()`. Batches are smaller where their outputs would fill the memory.
    """

    def __init__(self, session: Session, task: TaskResults, *, options: WindowOptions | None = None) -> None:
        options = options or WindowOptions()
        self._session = session
        self._task = task
        self._pooling = options.split_pooling
        self._encoder = RowEncoder(
            session,
            overflow=options.overflow,
            stride=options.stride,
            prompt=options.chosen_prompt(session.manifest, task),
        )
        batch_tokens = options.batch_tokens or session.batch_tokens
        self._batch_size = options.batch_size
        self._batch_tokens = min(batch_tokens, _tokens_that_fit(session.manifest, task))
        self._with_tokens = {spec.name for spec in session.manifest.outputs if spec.shape[1:2] == ("tokens",)}
        self._known_good: Encoding | None = None

    def __call__(self, rows: Sequence[Row]) -> WindowResult:
        """Tokenise rows, run them, and make the task's values of what comes out.

        Raises:
            BackendError: every row failed, and so does one that ran before: the session is broken.
        """
        before = self._session.padding
        items = [_Item(row=row, error=row.error, error_kind=row.error_kind) for row in rows]
        self._encode([item for item in items if item.error is None])
        self._infer([item for item in items if item.encoding is not None])
        counts = _counts(items, before, self._session.padding)
        return WindowResult(results=[self._result(item) for item in items], counts=counts)

    def _encode(self, items: list[_Item]) -> None:
        for item, encoded in zip(items, self._encoder.encode([item.row for item in items]), strict=True):
            if isinstance(encoded, SplitEncoding):
                item.encoding = encoded
            else:
                item.fail(encoded)

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

    def _run(self, encodings: list[Encoding]) -> Iterator[BatchResult]:
        return self._session.run_batches(
            encodings, batch_tokens=self._batch_tokens, batch_size=self._batch_size, outputs=self._task.outputs
        )

    def _outputs_of_row(self, batch: BatchResult, index: int, tokens: int) -> Outputs:
        """A row's outputs without their batch axis and without padding."""
        return {
            name: values[index, :tokens] if name in self._with_tokens else values[index]
            for name, values in batch.outputs.items()
        }

    def _take(self, piece: _Piece, outputs: Outputs) -> None:
        """Keep what is needed of a piece's outputs; with the last piece the row gets its values."""
        item = piece.item
        assert item.encoding is not None, "what has pieces has an encoding"
        item.outputs[piece.number] = self._task.of_piece(outputs)
        if len(item.outputs) < len(item.encoding.pieces):
            return
        in_order = [item.outputs[number] for number in range(len(item.outputs))]
        item.outputs = {}
        whole = merged(item.encoding, in_order, specs=self._session.manifest.outputs, pooling=self._pooling)
        try:
            item.values = self._task.values(whole, item.encoding.whole, item.row)
        except InputError as error:
            item.fail(error)

    def _require_working_session(self, failure: BackendError) -> None:
        """Raise the failure if the session does not run what it ran before, or never ran anything."""
        if self._known_good is None or any(batch.errors for batch in self._run([self._known_good])):
            raise failure

    def _result(self, item: _Item) -> dict[str, object]:
        values = item.values or dict.fromkeys(column.name for column in self._task.fields)
        tokens = None if item.encoding is None else len(item.encoding.whole)
        return {"id": item.row.id, **(item.row.kept or {}), **values, "tokens": tokens, "error": item.error}


def _counts(items: Sequence[_Item], before: PaddingCount, after: PaddingCount) -> RowCounts:
    failed = [item for item in items if item.error is not None]
    return RowCounts(
        rows=len(items),
        tokens=sum(len(item.encoding.whole) for item in items if item.encoding is not None and item.error is None),
        computed_tokens=after.tokens - before.tokens,
        padded_tokens=after.padded_tokens - before.padded_tokens,
        errors=dict(Counter(item.error_kind.value for item in failed)),
        first_error=f"row {failed[0].row.id}: {failed[0].error}" if failed else None,
    )


def _tokens_that_fit(manifest: Manifest, task: TaskResults) -> int:
    """Tokens whose outputs take `_OUTPUT_BYTES`."""
    bytes_per_token = 0
    for spec in manifest.outputs:
        if spec.name in task.outputs and "tokens" in spec.shape:
            bytes_per_token += 4 * math.prod(size for size in spec.shape if isinstance(size, int))
    return max(1, _OUTPUT_BYTES // max(1, bytes_per_token))
