"""From texts to a task's answers, for sessions, encoders, jobs and servers.

Texts become tokens, whole or in chunks; chunks run in batches of similar lengths, or segment by segment; a text's
answer is made when the last of its chunks has run, so that little is held.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hdruntime.backends.registry import needs_gpu
from hdruntime.batch_session import BatchSession
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import BackendError, HdexportError, InputError, NonFiniteOutputError, OutOfMemoryError, Setting
from hdruntime.inference.inputs import check_text, surely_fit
from hdruntime.inference.overlapping import prefetched
from hdruntime.inference.scheduling import BatchResult
from hdruntime.inference.streaming import check_document_length, checked_segment
from hdruntime.packing import grouped
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.task import Outputs, Pairs, PendingText, Text, TextTask
from hdruntime.text.checks import TRUNCATE, RejectedTextsError, check_text_lengths
from hdruntime.text.encoding import Encoding, Overflow
from hdruntime.text.splitting import SplitEncoding, as_single_chunk, split_encodings
from hdruntime.text.streamed import StreamedOutputs
from hdruntime.text.tokenization import TextTokenizer

logger = logging.getLogger(__name__)

_OUTPUT_BYTES = 128 * 2**20
"""Maximum bytes of the outputs of a batch. For fill-mask these are few tokens, with logits for the vocabulary each."""

WINDOW_CHARACTERS = 2**17
_WINDOW_TEXTS = 4096
"""Minimum characters of a window, which is tokenized and run at a time, and its maximum texts: about 32,000 tokens.
Larger windows may have more texts."""

_CHARACTERS_PER_TOKEN = 8 * 4
_MAX_CHARACTERS = 2**22
"""Characters of a window per token of a batch: eight batches of English, each with texts of similar length."""

_CHARACTERS_PER_TOKEN_ON_GPU = 32 * 4
_CHARACTERS_ON_GPU = (2**21, 2**23)
"""Characters per token of a batch on a GPU, and minimum and maximum characters of a window.

Padding matters more than memory there: two million tokens take about 100 MB, as do the windows before and after. Of
texts of 8 to 1200 words, padding is 4 % of a batch of 16384 tokens and 3 % of a batch of 65536; with eight batches per
window it is 11 and 13 %."""

_GROUP_BATCHES = 8
"""Batches of neighbouring texts whose chunks are sorted by length together, where texts have several: the last chunk of
a text is the shortest, and would run near the end of a window."""

_STREAM_CHARACTERS = 2**16
"""Characters of a window per streamed text that runs at a time: about 16384 tokens, which rarely leave a slot empty."""

_TOKENIZED_TEXTS = 4096
_TOKENIZED_CHARACTERS = 2**20
"""Texts tokenised together: enough long ones for all cores. Their tokens take about 50 MB meanwhile."""


@dataclasses.dataclass(kw_only=True, slots=True)
class TextItem:
    """A text in progress: it gets an encoding, then its answer, or an error at any step.

    `pending` collects the outputs of the text's chunks, of which `missing` have not run.
    """

    text: Text
    encoding: SplitEncoding | None = None
    answer: Any = None
    error: HdexportError | None = None
    pending: PendingText | None = None
    missing: int = 0


class EncodedChunk(NamedTuple):
    """A chunk of a text in progress: the only one of a text that fits, or one of several."""

    item: TextItem
    number: int
    encoding: Encoding


class TextInference:
    """Runs texts with a session, and remembers whether the session has ever worked.

    Batches are smaller than the options say if their outputs would fill the memory.

    Args:
        prompt: prompt before every text; ids include it already.
        tokenizer: a tokenizer with another limit on tokens; None for the limit of the options.
        on_done: called with 1 for each text that has its answer.
        on_batch: called after each batch, when its texts have their answers.

    Attributes:
        max_seq_length: tokens to which texts and rows of ids are truncated.
        batch_slots: texts that are streamed at a time; 0 if texts are not streamed.
        window_characters: number of characters of the texts that are encoded and run together.
    """

    def __init__(
        self,
        session: BatchSession,
        task: TextTask,
        encode_options: EncodeOptions,
        *,
        prompt: str = "",
        tokenizer: TextTokenizer | None = None,
        on_done: Callable[[int], None] = lambda texts: None,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_batch = on_batch
        self._session, self._task, self._encode_options, self._prompt = session, task, encode_options, prompt
        self._on_done = on_done
        if tokenizer is None and session.manifest.tokenizer is not None:
            has_pairs = task.pairs is Pairs.REQUIRED
            tokenizer = session.tokenizer_of(encode_options.max_seq_length, role=task.role, has_pairs=has_pairs)
        self._tokenizer = tokenizer
        plain = session.length_of_texts(encode_options.max_seq_length)
        self.max_seq_length = plain if tokenizer is None else tokenizer.max_len
        self._streamed, self._segment, self.batch_slots = None, 0, 0
        outputs: Sequence[str] = task.outputs
        if encode_options.overflow is Overflow.RECUR:
            self._streamed = checked_streaming(session.manifest, task)
            outputs = self._streamed.needed
        batch_tokens = session.batch_tokens if encode_options.batch_tokens is None else encode_options.batch_tokens
        self._batch_tokens = min(batch_tokens, _tokens_that_fit(session.manifest, outputs))
        if encode_options.overflow is Overflow.RECUR:
            self._segment = checked_segment(encode_options.segment, session.manifest, max_len=session.max_len)
            batch_slots = min(self._batch_tokens // self._segment, session.max_rows(self._segment))
            self.batch_slots = max(1, min(batch_slots, encode_options.batch_size or batch_slots))
        if needs_gpu(session.backend):
            minimum, maximum = _CHARACTERS_ON_GPU
            characters = min(max(minimum, batch_tokens * _CHARACTERS_PER_TOKEN_ON_GPU), maximum)
            if self._streamed is None:
                # Answers may have a vector for each token, of four characters: half of `_OUTPUT_BYTES` for a window's.
                characters = min(characters, 2 * _tokens_that_fit(session.manifest, outputs))
            self.window_characters = max(WINDOW_CHARACTERS, characters)
        else:
            of_batches, of_streams = batch_tokens * _CHARACTERS_PER_TOKEN, self.batch_slots * _STREAM_CHARACTERS
            characters = max(WINDOW_CHARACTERS, of_batches, of_streams)
            self.window_characters = min(characters, _MAX_CHARACTERS)
        self._known_good: Encoding | None = None
        self._taking = threading.Lock()

    @property
    def max_tokens(self) -> float:
        """Maximum tokens of a text with all its chunks; infinity if texts are split."""
        return math.inf if self._encode_options.overflow is Overflow.SPLIT else self.max_seq_length

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the texts; an InputError where the bundle has none."""
        return self._tokenizer or self._session.tokenizer

    def encode(self, texts: Sequence[Text]) -> list[TextItem]:
        """The texts with their tokens, in order, or with their errors."""
        items = [TextItem(text=text) for text in texts]
        # A very long text is encoded alone: if it is too long, no other is encoded twice.
        sizes = [text.characters for text in texts]
        for chunk in grouped(sizes, max_items=_TOKENIZED_TEXTS, max_total=_TOKENIZED_CHARACTERS):
            self._encode(items[chunk])
        return items

    def warn_of_truncation(self, items: Sequence[TextItem], length: str) -> None:
        """Log, once per session, that texts are truncated; `length` is the argument that sets to how many tokens."""
        if not self._session.says_truncation or not any(
            item.encoding and item.encoding.whole.is_truncated for item in items
        ):
            return
        self._session.says_truncation = False
        max_tokens, longest = self.max_seq_length, self._session.max_len
        hint = f"{length} sets another number, or 'bundle' for the longest."
        if max_tokens == longest:
            hint = f"{length} sets a smaller number; build the bundle again with a larger max_len for longer texts."
        logger.warning(
            "Texts of more than %d tokens are truncated to that many; the bundle runs up to %d.\n%s",
            max_tokens, longest, hint,
        )  # fmt: skip

    def run(self, items: Sequence[TextItem]) -> None:
        """Give each item that has an encoding its answer, or its error; an item that has its answer keeps it.

        A BackendError is raised where every text failed, and so does one that ran before: the session is broken.
        """
        encoded = [item for item in items if item.encoding is not None]
        if self._streamed is None:
            self._run_groups(self._groups(encoded))
        else:
            self._stream(encoded)

    def _encode(self, items: Sequence[TextItem]) -> None:
        try:
            encoded = self._encoded([item.text for item in items])
        except InputError as error:
            if len(items) == 1:
                items[0].error = error
                return
            # Refused texts are tried alone, for the error of each, and so are all where it is not known which they are.
            rejected = set(error.texts if isinstance(error, RejectedTextsError) else range(len(items)))
            for index in rejected:
                self._encode([items[index]])
            others = [item for index, item in enumerate(items) if index not in rejected]
            if others:
                self._encode(others)
            return
        for item, split in zip(items, encoded, strict=True):
            try:
                item.pending = self._task.begin(
                    split, item.text, prompt=self._prompt, pooling=self._encode_options.split_pooling
                )
                item.encoding, item.missing = split, len(split.chunks)
            except InputError as error:
                item.error = error

    def _encoded(self, texts: Sequence[Text]) -> list[SplitEncoding]:
        encode_options = self._encode_options
        if texts[0].input_ids is not None:
            splits = [as_single_chunk(self._from_ids(text.input_ids or [])) for text in texts]
        else:
            splits = self._tokenized(texts)
        manifest, chunks = self._session.manifest, [chunk for split in splits for chunk in split.chunks]
        if encode_options.overflow is Overflow.RECUR:
            for chunk in chunks:
                check_document_length(len(chunk), manifest)
        if not surely_fit(chunks, manifest):
            for chunk in chunks:
                check_text(chunk, manifest)
        return splits

    def _tokenized(self, texts: Sequence[Text]) -> list[SplitEncoding]:
        encode_options = self._encode_options
        tokenizer = self.tokenizer
        pairs = [text.text_pair for text in texts if text.text_pair is not None] or None
        encodings = self._task.encode(
            tokenizer, [text.text for text in texts], pairs, overflow=encode_options.overflow, prompt=self._prompt
        )
        if encode_options.overflow is Overflow.SPLIT:
            return split_encodings(
                encodings, max_len=tokenizer.max_len, stride=encode_options.stride, is_pair=pairs is not None
            )
        if encode_options.overflow is not Overflow.RECUR:
            check_text_lengths([len(encoding) for encoding in encodings], self._session.max_len)
        return [as_single_chunk(encoding) for encoding in encodings]

    def _from_ids(self, ids: list[int]) -> Encoding:
        overflow, max_tokens, given_tokens = self._encode_options.overflow, self.max_seq_length, len(ids)
        if overflow is Overflow.TRUNCATE and given_tokens > max_tokens:
            tokenizer = self._tokenizer
            keeps_ends = tokenizer is not None and tokenizer.has_special_tokens(ids)
            ids = tokenizer.checked_ids(ids, max_len=max_tokens) if tokenizer and keeps_ends else ids[:max_tokens]
        if overflow is not Overflow.RECUR:
            check_text_lengths([len(ids)], max_tokens, longest=self._session.max_len)
        return Encoding.of_ids(ids, given_tokens=given_tokens)

    def run_chunks(self, chunks: Sequence[EncodedChunk]) -> None:
        """Run chunks, the last of which gives its text the answer; errors are raised as by `run`.

        The chunks of a text may run in several calls, also in several threads, and in other sessions by `with_session`.
        """
        self._run_groups([chunks])

    def with_session(self, session: BatchSession) -> TextInference:
        """The same for another session of the bundle, loaded with the same options."""
        if session is self._session:
            return self
        other = copy.copy(self)
        other._session, other._known_good = session, None
        return other

    def _groups(self, items: Sequence[TextItem]) -> Iterator[list[EncodedChunk]]:
        """The chunks of texts, those together that are sorted by length; which these are depends only on the texts."""
        split = [item for item in items if item.encoding is not None and len(item.encoding.chunks) > 1]
        if not split or needs_gpu(self._session.backend):
            yield chunks_of(items)
            return
        tokens = [sum(len(chunk.encoding) for chunk in chunks_of([item])) for item in split]
        for group in grouped(tokens, max_items=len(split), max_total=_GROUP_BATCHES * self._batch_tokens):
            yield chunks_of(split[group])
        yield chunks_of([item for item in items if item.encoding is not None and len(item.encoding.chunks) == 1])

    def _run_groups(self, groups: Iterable[Sequence[EncodedChunk]]) -> None:
        failure: BackendError | None = None
        has_worked = False
        for chunks in groups:
            for error in self._run_group(chunks):
                if not isinstance(error, BackendError) or isinstance(error, NonFiniteOutputError):
                    has_worked = True
                else:
                    failure = failure or error
        if failure is not None and not has_worked:
            self._require_working_session(failure)

    def _run_group(self, chunks: Sequence[EncodedChunk]) -> Iterator[HdexportError | None]:
        """Run chunks, sorted by length; yields the error of each, or None, unless its text had its answer before."""
        done = {number for number, chunk in enumerate(chunks) if chunk.item.answer is not None}
        if done and self._known_good is None:
            self._known_good = chunks[min(done)].encoding
        for batch in self._batches([chunk.encoding for chunk in chunks], done):
            for index, number in enumerate(batch.rows):
                chunk, error = chunks[number], batch.errors.get(number)
                if number in done:
                    continue
                if error is None:
                    self._known_good = chunk.encoding
                    self._take(chunk, self._session.outputs_of_row(batch, index, len(chunk.encoding)))
                else:
                    chunk.item.error = error
                yield error
            self._on_batch()

    def _stream(self, items: list[TextItem]) -> None:
        """Stream texts, some at a time. Those of a batch that failed begin again, with fewer texts or alone."""
        batch_slots, failure, has_worked = self.batch_slots, None, False
        while items:
            batch_slots = min(batch_slots, len(items))
            try:
                for _ in self._streamed_items(items, batch_slots):
                    has_worked = True
                    self._on_batch()
                break
            except BackendError as error:
                items = [item for item in items if item.answer is None and item.error is None]
                if batch_slots == 1:
                    items.pop(0).error = error
                    failure = failure or error
                elif isinstance(error, OutOfMemoryError):
                    batch_slots = self.batch_slots = batch_slots // 2
                else:
                    batch_slots = 1
        if failure is not None and not has_worked:
            self._require_working_session(failure)

    def _streamed_items(self, items: list[TextItem], batch_slots: int) -> Iterator[TextItem]:
        """Stream texts, `batch_slots` at a time; yields each when it has its answer or its error."""
        assert self._streamed is not None
        begun = {}
        encodings = [item.encoding.whole for item in items if item.encoding is not None]
        for part in self._session.stream_all(
            encodings, segment=self._segment, rows=min(batch_slots, len(items)), outputs=self._streamed.needed
        ):
            item, encoding = items[part.document], encodings[part.document]
            if part.document not in begun:
                begun[part.document] = self._streamed.begin(encoding)
            if part.error is not None:
                item.error = part.error
            else:
                begun[part.document].add(part.tokens.start, part.outputs)
            if not part.is_last:
                continue
            document = begun.pop(part.document)
            if part.error is None:
                self._known_good = Encoding.of_ids(encoding.input_ids[: self._segment])
                self._finish(item, document.finished())
            yield item

    def _batches(self, encodings: list[Encoding], done: Collection[int] = ()) -> Iterator[BatchResult]:
        return self._session.run_batches(
            encodings,
            batch_tokens=self._batch_tokens,
            batch_size=self._encode_options.batch_size,
            outputs=self._task.outputs,
            done=done,
        )

    def _take(self, chunk: EncodedChunk, outputs: Outputs) -> None:
        """Add a chunk's outputs to its text; the last chunk completes the answer."""
        item = chunk.item
        with self._taking:
            item.missing -= 1
            if not item.missing:
                self._finish(item, outputs, chunk.number)
            elif item.pending is not None:
                item.pending.add(chunk.number, outputs)

    def _finish(self, item: TextItem, outputs: Outputs, chunk: int = 0) -> None:
        """Add the last outputs of a text, and answer it."""
        pending, item.pending = item.pending, None
        assert pending is not None, "a text is finished once"
        try:
            pending.add(chunk, outputs)
            item.answer = pending.finished()
        except InputError as error:
            item.error = error
        else:
            self._on_done(1)

    def _require_working_session(self, failure: BackendError) -> None:
        """Raise the failure where a text that ran before fails, too, or no text ever ran."""
        if self._known_good is None or any(batch.errors for batch in self._batches([self._known_good])):
            raise failure


def chunks_of(items: Sequence[TextItem]) -> list[EncodedChunk]:
    return [
        EncodedChunk(item, number, chunk)
        for item in items
        if item.encoding is not None
        for number, chunk in enumerate(item.encoding.chunks)
    ]


def answers_of(
    session: BatchSession,
    task: TextTask,
    texts: Sequence[Text],
    encode_options: EncodeOptions,
    *,
    prompt: str = "",
    tokenizer: TextTokenizer | None = None,
    name: str = "texts",
    length: str = "The argument max_seq_length of hdruntime.load",
    on_done: Callable[[int], None] = lambda texts: None,
    into: Any = None,
) -> Any:
    """The answers to texts, in order, a window of texts at a time; the longest texts are run first.

    Args:
        prompt, tokenizer, on_done: see `TextInference`.
        name: the texts' in an error: ``sentences[3]: ...``.
        length: the argument that sets the length of the texts, for the warning of the first truncated one.
        into: an array [texts, ...] that takes the answers; None for a list.
    """
    inference = TextInference(session, task, encode_options, prompt=prompt, tokenizer=tokenizer, on_done=on_done)
    answers: Any = [None] * len(texts) if into is None else into
    sizes = [text.characters for text in texts]
    by_size = sorted(range(len(texts)), key=lambda index: -sizes[index])
    characters = inference.window_characters
    parts = grouped([sizes[i] for i in by_size], max_items=texts_of_window(characters), max_total=characters)
    windows = [by_size[part] for part in parts]
    encoded = ((window, inference.encode([texts[index] for index in window])) for window in windows)
    with prefetched(encoded, is_ahead=needs_gpu(session.backend) and len(windows) > 1) as ahead:
        for window, items in ahead:
            _raise_first(items, window, name, alone=len(texts) == 1)
            inference.warn_of_truncation(items, length)
            inference.run(items)
            _raise_first(items, window, name, alone=len(texts) == 1)
            for index, item in zip(window, items, strict=True):
                answers[index] = item.answer
    return answers


def texts_of_window(characters: int) -> int:
    """Maximum texts of a window; a text takes about 2 KB beside its tokens and its answer."""
    return _WINDOW_TEXTS * max(1, characters // 2**19)


def checked_streaming(manifest: Manifest, task: TextTask) -> StreamedOutputs:
    """How the texts of a task get their outputs when they are streamed; a task that cannot be is rejected."""
    checked_segment(None, manifest, max_len=manifest.max_len)
    if not task.streams and task.splits:
        raise InputError(
            f"The bundle's task is {manifest.task}, whose results are not made segment by segment.",
            hint=("Run texts in chunks: ", Setting("overflow", Overflow.SPLIT), "."),
        )
    if not task.streams:
        raise InputError(
            f"The bundle's task is {manifest.task}, whose outputs for all tokens of a document would fill the memory.",
            hint=("Truncate the texts: ", TRUNCATE),
        )
    return StreamedOutputs(manifest, task.outputs, pools=task.pools_streams)


def _raise_first(items: Sequence[TextItem], numbers: Sequence[int], name: str, *, alone: bool) -> None:
    """Raise the error of the first text that has one, named by its number."""
    failed = min((number for number, item in zip(numbers, items, strict=True) if item.error is not None), default=None)
    if failed is None:
        return
    error = items[numbers.index(failed)].error
    assert error is not None
    if alone:
        raise error
    raise error.prefixed(f"{name}[{failed}]: ") from error


def _tokens_that_fit(manifest: Manifest, outputs: Sequence[str]) -> int:
    """How many tokens have outputs of `_OUTPUT_BYTES` together."""
    bytes_per_token = 0
    for spec in manifest.outputs:
        if spec.name in outputs and "tokens" in spec.shape:
            bytes_per_token += 4 * math.prod(size for size in spec.shape if isinstance(size, int))
    return max(1, _OUTPUT_BYTES // max(1, bytes_per_token))
