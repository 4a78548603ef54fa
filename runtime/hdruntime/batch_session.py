"""Loaded bundles that run arrays, encoded texts and streamed documents."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, Self

import numpy.typing as npt

from hdruntime.arrays import FloatArray
from hdruntime.backends import DeviceRunner, Runner
from hdruntime.backends.precision import Precision
from hdruntime.backends.registry import needs_gpu
from hdruntime.bundle.manifest import Backend, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.sentence_settings import PairTemplate, TextTemplate
from hdruntime.errors import BackendError, InputError, Message, NonFiniteOutputError, Setting
from hdruntime.inference.batching import tokens_with_room
from hdruntime.inference.inputs import check_global_questions, checked_inputs, inputs_of_texts
from hdruntime.inference.overlapping import prefetched
from hdruntime.inference.scheduling import BatchResult, PaddingCount, Scheduler, non_finite_rows
from hdruntime.inference.streaming import BatchSlots, Columns, Document, DocumentStream, Segment, columns_of
from hdruntime.process_limits import free_bytes
from hdruntime.text.checks import check_text_lengths, several
from hdruntime.text.encoding import Encoding, Overflow
from hdruntime.text.lengths import MaxSeqLength, Role, checked_length
from hdruntime.text.splitting import SplitEncoding, split_encodings
from hdruntime.text.tokenization import TextTokenizer

if TYPE_CHECKING:
    from hdruntime.gpu.device_arrays import DeviceArray

logger = logging.getLogger(__name__)

_BF16, _FP16 = Setting("bf16", True, command="build"), Setting("fp16", True, command="build")


class BatchSession:
    """A loaded bundle that runs arrays, encoded texts and streamed documents; `Session` adds methods for tasks."""

    def __init__(
        self,
        bundle: Bundle,
        runner: Runner,
        *,
        backend_reason: str = "",
        max_seq_length: int | MaxSeqLength | None = None,
    ) -> None:
        self._bundle = bundle
        self._output_names = [spec.name for spec in bundle.manifest.outputs]
        self._scheduler = Scheduler(
            runner,
            mask=bundle.manifest.mask,
            padding_limit=bundle.manifest.padding_limit,
            non_finite_error=self._non_finite_error,
            room=_room(bundle.manifest, runner),
        )
        self._backend, self._backend_reason = runner.backend, backend_reason
        self._precision = runner.precision
        self._max_len = min(bundle.manifest.max_len, runner.max_len)
        self._with_tokens = {spec.name for spec in bundle.manifest.outputs if spec.has_tokens_axis}
        has_tokenizer, template = bundle.manifest.tokenizer is not None, bundle.manifest.template
        whole = TextTokenizer.of(bundle, max_len=self._max_len, template=template) if has_tokenizer else None
        self._load_length = max_seq_length
        self._tokenizer = whole and self._limited(whole, max_seq_length)
        self._max_seq_length = self._tokenizer.max_len if self._tokenizer else self.length_of_texts()
        self.says_truncation = True

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self._bundle.manifest

    @property
    def backend(self) -> Backend:
        """The backend that runs the bundle."""
        return self._backend

    @property
    def precision(self) -> Precision:
        """The backend's precision; ``auto`` on a GPU, where the graph or the engine decides."""
        return self._precision

    @property
    def backend_reason(self) -> str:
        """Why `backend` runs the bundle, in sentences: the backend was requested, or why ``auto`` chose the backend."""
        return self._backend_reason

    @property
    def max_len(self) -> int:
        """Maximum tokens of a text: the manifest's limit, or the engine's if it is lower."""
        return self._max_len

    @property
    def max_seq_length(self) -> int:
        """Maximum tokens of texts, and tokens of chunks of split texts, special tokens included.

        See :func:`hdruntime.load`. Arrays and encodings may have up to `max_len` tokens.
        """
        return self._max_seq_length

    @property
    def batch_tokens(self) -> int:
        """Default of the maximum tokens per batch, padding included.

        The backend's preferred number, or fewer on a CPU if less memory was free at loading.

        Raises:
            BackendError: the session is closed.
        """
        return self._scheduler.batch_tokens

    def share_memory(self, sessions: int) -> None:
        """Leave memory to other sessions that run batches at the same time: `batch_tokens` gets its share of the memory
        that was free at loading.

        Args:
            sessions: number of the sessions, with this one.
        """
        memory = self._scheduler.memory
        memory.batch_tokens = max(1, memory.batch_tokens // sessions)

    @property
    def padding(self) -> PaddingCount:
        """Number of computed tokens of texts and of padding since the bundle was loaded."""
        return self._scheduler.padding

    @property
    def engine_bytes(self) -> int | None:
        """GPU memory of the engine's weights and contexts, in bytes; None on a CPU or if the engine does not report it.

        Scratch memory of the contexts grows with the largest batch.

        Raises:
            BackendError: the session is closed.
        """
        runner = self._scheduler.runner
        return runner.engine_bytes() if isinstance(runner, DeviceRunner) else None

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the session's texts, with the limit `max_seq_length`.

        Raises:
            InputError: the bundle has no tokenizer.
        """
        if self._tokenizer is None:
            raise InputError(f"The bundle {self._bundle.path} has no tokenizer.", hint="Pass input_ids.")
        return self._tokenizer

    def tokenizer_of(
        self,
        max_seq_length: int | MaxSeqLength | None = None,
        *,
        role: Role | None = None,
        name: str = "max_seq_length",
        has_pairs: bool = False,
        template: TextTemplate | None = None,
    ) -> TextTokenizer:
        """The tokenizer with another maximum length.

        Args:
            max_seq_length: a number of tokens, ``"model"`` or ``"bundle"``; None for the session's length.
            role: role of the texts, which may have a default length.
            name: name of the parameter, for an error.
            has_pairs: whether the texts are pairs, which have more special tokens.
            template: chat template of the texts; None for the session's template.

        Raises:
            InputError: the length is more than the bundle's maximum, or leaves no room for a token of a text.
        """
        if max_seq_length is None and role is None and template is None:
            # Kept, as a tokenizer that truncates takes milliseconds to make.
            return self.tokenizer
        tokenizer = self.tokenizer if template is None else self.tokenizer.with_template(template)
        return self._limited(tokenizer, max_seq_length, role=role, name=name, has_pairs=has_pairs)

    def _limited(
        self, tokenizer: TextTokenizer, length: int | MaxSeqLength | None, *, has_pairs: bool = False, **options: Any
    ) -> TextTokenizer:
        """The tokenizer with a length that leaves room for a token of a text."""
        whole, min_tokens = tokenizer.limited(self._max_len), 1
        if not (length is None or isinstance(length, str)):
            pairs = [""] if has_pairs or isinstance(self.manifest.template, PairTemplate) else None
            (sample,) = whole.encode(["a"], pairs, overflow=Overflow.TRUNCATE)
            min_tokens += sample.sequence_ids.count(None)
        return whole.limited(self.length_of_texts(length, min_tokens=min_tokens, **options))

    def length_of_texts(self, length: int | MaxSeqLength | None = None, **options: Any) -> int:
        """The number of tokens to which texts are truncated; see `checked_length`. None for the session's length."""
        length = self._load_length if length is None else length
        return checked_length(length, self.manifest, max_tokens=self._max_len, **options)

    def max_rows(self, tokens: int) -> int:
        """Maximum number of texts of a length in one run of the backend; larger batches are split.

        Limited by an engine's profiles, and by memory after a batch that did not fit; else ``sys.maxsize``.

        Raises:
            BackendError: the session is closed.
        """
        return self._scheduler.max_rows(tokens)

    def __call__(self, **inputs: npt.ArrayLike | None) -> dict[str, FloatArray]:
        """Run one batch of arrays.

        Args:
            input_ids: [batch, tokens], ids of the vocabulary, of any integer type; nested lists are accepted.
            attention_mask: [batch, tokens], 1 for real tokens, 0 for padding; default ones.
            token_type_ids: [batch, tokens], less than the `bound` of the input, if the bundle has this input; default
                zeros, or, for question answering with BigBird, 0 up to the first separator and 1 after it.
            global_attention_mask: [batch, tokens], 1 for global tokens, if the bundle has this input; padding is never
                global. The default is transformers': for question answering the tokens before the first separator, for
                text-classification the first real token of a row, else no token.
            recurrent states: by name, float32 of the manifest's shape: an output of the previous call for these rows,
                which the manifest names. All memory caches have one size. The default is the start of a text, with
                caches of the size of the other states', or of the maximum size. :meth:`stream` passes them.

        Returns:
            output name -> float32 array of the shape in the manifest. Padded positions hold 0.

        Raises:
            InputError: an input does not fit.
            NonFiniteOutputError: a real token's output is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        arrays = checked_inputs(inputs, self.manifest, max_len=self._max_len)
        result = self._scheduler.run_batch(arrays, outputs=self._output_names)
        self._raise_failures(result, result.rows)
        return result.outputs

    def stream(
        self, document: Document, *, segment: int | None = None, outputs: Sequence[str] | None = None
    ) -> DocumentStream:
        """Run a document of any length segment by segment, with the model's recurrent states.

        The document is tokenized as a whole: special tokens are at its two ends only. The states stay in the backend's
        memory.

        ::

            with session.stream(text) as stream:
                for segment in stream:
                    print(segment.tokens, segment.outputs["last_hidden_state"].shape)

        Args:
            document: a text, an encoding (``session.tokenize(texts, overflow="recur")``), or ids with special tokens.
            segment: tokens per segment; None for 512, or the session's `max_len` if less.
            outputs: names of outputs; None for all except the recurrent states.

        Returns:
            an iterator over the segments, which are computed lazily.

        Raises:
            InputError: the bundle has no recurrent states, ``segment`` is too large, or the document is empty, of
                another type, or has an id outside of the vocabulary. From the iterator: the stream is closed.
            NonFiniteOutputError: from the iterator: an output is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        return DocumentStream(self._batch_slots(segment, 1, outputs, documents=1), self._columns(document))

    def stream_all(
        self,
        documents: Iterable[Document],
        *,
        segment: int | None = None,
        rows: int | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Iterator[Segment]:
        """Stream documents as :meth:`stream` does, one per row of a batch.

        When a document ends, its row takes the next document, and the other rows continue. Results equal those of
        :meth:`stream`.

        Args:
            documents: see :meth:`stream`; consumed lazily.
            segment, outputs: see :meth:`stream`.
            rows: number of documents per batch; None for the number that fills the backend's preferred batch.

        Returns:
            an iterator over segments: in order for a document, interleaved for different documents. A document with NaN
            or infinity ends with a segment that has its error; the other documents continue.

        Raises:
            InputError: see :meth:`stream`, with the number of the document; or ``rows`` is less than 1.
            BackendError: see :meth:`stream`.
        """
        documents = several(documents, name="documents", of="documents", example="[text]")
        known = len(documents) if isinstance(documents, Sized) else sys.maxsize
        slots = self._batch_slots(segment, rows, outputs, documents=known)
        columns = (self._columns(document, number) for number, document in enumerate(documents))
        # A caller's iterator is taken from in the caller's thread.
        is_ahead = isinstance(documents, Sized) and needs_gpu(self._backend)

        def segments() -> Iterator[Segment]:
            with prefetched(columns, is_ahead=is_ahead) as ahead:
                yield from slots.run(ahead)

        return segments()

    def run_on_device(self, *, outputs: Sequence[str] | None = None, **inputs: object) -> dict[str, DeviceArray]:
        """Run one batch in GPU memory, and leave its outputs in GPU memory.

        Values are not checked, because that needs a copy to the CPU: ids and token types out of range, masks other than
        0 and 1, NaN in outputs.

        Args:
            outputs: names of outputs; None for all.
            inputs: every input of the manifest, of its shape, contiguous int64 or int32, or float32 for a recurrent
                state, with ``__dlpack__`` or ``__cuda_array_interface__`` (PyTorch's and CuPy's arrays have both). They
                have been read when the call returns.

        Returns:
            output name -> array of the shape in the manifest, which may still be computed: ``torch.from_dlpack``
            synchronizes as needed. Padded positions are 0.

        Raises:
            InputError: an input does not fit, or is not on the session's GPU.
            BackendError: the backend does not accept such arrays, it failed, or the session is closed.
        """
        runner = self._scheduler.runner
        if not isinstance(runner, DeviceRunner):
            raise BackendError(
                f"The backend {self._backend} does not accept arrays on a GPU.",
                hint="Call the session itself with arrays on the CPU, or load the bundle with a backend of the GPU.",
            )
        names = self._output_names if outputs is None else self._checked_outputs(outputs)
        return runner.start_on_device(inputs, names)

    def tokenize(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        overflow: Overflow | str = Overflow.ERROR,
        prompt: str = "",
    ) -> list[Encoding]:
        """Encode texts, or pairs, with the bundle's tokenizer; see :meth:`TextTokenizer.encode`.

        Raises:
            InputError: the bundle has no tokenizer, a text does not fit, or ``overflow`` is ``split``, which needs more
                than one encoding per text: :meth:`split` does that.
        """
        if overflow == Overflow.SPLIT:
            raise InputError(
                "tokenize returns one encoding per text, so it cannot split.",
                hint="Use session.split(texts, stride=...), or session.embed(texts, overflow='split').",
            )
        return self.tokenizer.encode(texts, pairs, overflow=overflow, prompt=prompt)

    def split(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, stride: int = 0, prompt: str = ""
    ) -> list[SplitEncoding]:
        """Encode texts, or pairs, and split them into chunks of up to `max_seq_length` tokens.

        Args:
            texts: any number of texts, which may be empty.
            pairs: second text of each pair. Only second texts are split; every chunk has the whole first text.
            stride: number of tokens that consecutive chunks share.
            prompt: text before every chunk.

        Returns:
            a result per text, in order; :func:`hdruntime.text.splitting.merged` merges the outputs of its chunks.

        Raises:
            InputError: the bundle has no tokenizer, or ``stride`` is too large.
        """
        encodings = self.tokenizer.encode(texts, pairs, overflow=Overflow.SPLIT, prompt=prompt)
        return split_encodings(encodings, max_len=self._max_seq_length, stride=stride, is_pair=pairs is not None)

    def infer(
        self,
        encodings: Sequence[Encoding],
        *,
        batch_tokens: int | None = None,
        outputs: Sequence[str] | None = None,
    ) -> list[dict[str, FloatArray]]:
        """Run texts of different lengths, batched by length.

        Args:
            encodings: results of :meth:`tokenize`.
            batch_tokens: maximum tokens per batch; a longer text runs alone. None for the backend's default.
            outputs: names of outputs; None for all except recurrent states.

        Returns:
            a dict per text, in order: output name -> float32 array without the batch axis; its tokens axis is as long
            as the text.

        Raises:
            InputError: a text is too long, an id or a token type is out of range, an output is unknown, or questions
                have global attention and a text has no question, or a question of too many tokens.
            NonFiniteOutputError: an output is NaN or infinite; rows are numbered as in ``encodings``.
            BackendError: the backend failed, or the session is closed.
        """
        results: list[dict[str, FloatArray]] = [{} for _ in encodings]
        for result in self.run_batches(encodings, batch_tokens=batch_tokens, outputs=outputs):
            self._raise_failures(result, range(len(encodings)))
            for index, row in enumerate(result.rows):
                results[row] = self.outputs_of_row(result, index, len(encodings[row]))
        return results

    def run_batches(
        self,
        encodings: Sequence[Encoding],
        *,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
        outputs: Sequence[str] | None = None,
        done: Collection[int] = (),
    ) -> Iterator[BatchResult]:
        """Run texts of different lengths as :meth:`infer` does, and yield each batch when it is finished.

        The longest texts run first. A batch that does not fit in memory is halved, and texts of such lengths run in
        smaller batches for the rest of the session. A row whose output is NaN or infinite, or on which the backend
        fails, has an error; the other rows of the batch have their outputs.

        Args:
            encodings: results of :meth:`tokenize`.
            batch_tokens: maximum tokens per batch; a longer text runs alone. None for the backend's default.
            batch_size: maximum texts per batch; None for any number.
            outputs: see :meth:`infer`.
            done: indices of texts with results of an earlier call with these texts. The other texts run in the batches
                of that call, and batches of ``done`` texts only are skipped.

        Returns:
            an iterator; each text that is not ``done`` is in one of its results.

        Raises:
            InputError: see :meth:`infer`; an id or a token type out of range is found when its batch starts.
            OutOfMemoryError: no text ever fitted in memory, or a text does not fit whose length fitted before.
            BackendError: the session is closed.
        """
        lengths = [len(encoding) for encoding in encodings]
        check_text_lengths(lengths, self._max_len)
        check_global_questions(encodings, self.manifest)
        return self._scheduler.run(
            lengths,
            lambda rows: inputs_of_texts(
                [encodings[row] for row in rows], self.manifest, memory=self.manifest.min_memory
            ),
            outputs=self._checked_outputs(outputs),
            batch_tokens=batch_tokens,
            batch_size=batch_size,
            done=done,
        )

    def outputs_of_row(self, batch: BatchResult, index: int, tokens: int) -> dict[str, FloatArray]:
        """The outputs of a text of a batch, without batch axis and padding: views of the batch's arrays.

        Args:
            batch: a batch of :meth:`run_batches`.
            index: index of the text in the batch's ``rows``.
            tokens: number of tokens of the text.
        """
        return {
            name: values[index, :tokens] if name in self._with_tokens else values[index]
            for name, values in batch.outputs.items()
        }

    def _batch_slots(
        self, segment: int | None, rows: int | None, outputs: Sequence[str] | None, *, documents: int
    ) -> BatchSlots:
        return BatchSlots(
            self._scheduler,
            self.manifest,
            max_len=self._max_len,
            segment=segment,
            rows=rows,
            documents=documents,
            outputs=self._checked_outputs(outputs),
        )

    def _columns(self, document: Document, number: int | None = None) -> Columns:
        try:
            if isinstance(document, str):
                (document,) = self.tokenize([document], overflow=Overflow.RECUR)
            return columns_of(document, self.manifest)
        except InputError as error:
            raise (error if number is None else error.prefixed(f"Document {number}: ")) from None

    def _checked_outputs(self, names: Sequence[str] | None) -> list[str]:
        """Names of outputs, checked; None for all except recurrent states."""
        for name in names or ():
            if name not in self._output_names:
                has = ", ".join(self._output_names)
                raise InputError(f"The bundle has no output {name!r}; its outputs are {has}.")
        return [spec.name for spec in self.manifest.result_outputs] if names is None else list(names)

    def _non_finite_error(self, name: str, rows: Sequence[int]) -> NonFiniteOutputError:
        """The error of an output with NaN or infinity in some rows; without ``rows`` it names no row."""
        shown = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
        where = f" in rows {shown}" if rows else ""
        hint: Message = (
            ("float16 may overflow in this model: build the bundle again with ", _BF16, ", or without ", _FP16, ".")
            if self.manifest.dtype == "float16"
            else f"Compare the bundle with its checkpoint: hdexport verify {shlex.quote(str(self._bundle.path))}"
        )
        return NonFiniteOutputError(f"The output {name} holds NaN or infinity{where}.", hint=hint)

    def _raise_failures(self, result: BatchResult, numbers: Sequence[int]) -> None:
        """Raise for a batch with failed rows; the error names the caller's row numbers if there are several rows."""
        if not result.errors:
            return
        for name, wrong in non_finite_rows(result.outputs).items():
            named = sorted({numbers[result.rows[index]] for index in wrong}) if numbers[-1] > 0 else []
            raise self._non_finite_error(name, named)
        raise next(iter(result.errors.values()))

    def close(self) -> None:
        """Free the backend's memory; later calls, and calls running in other threads, raise BackendError."""
        self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _room(manifest: Manifest, runner: Runner) -> int:
    """Default of the maximum tokens per batch: by free memory on a CPU; unlimited on a GPU, where a lack of memory is
    an error that does not kill the process."""
    if needs_gpu(runner.backend):
        return sys.maxsize
    free = free_bytes()
    room = tokens_with_room(manifest, free_bytes=free)
    if free is not None and room < runner.batch_tokens:
        logger.info("batches have at most %d tokens: %.0f MB of memory are free", room, free / 1e6)
    return room
