"""Loaded bundles that run batches and texts."""

from __future__ import annotations

__all__ = ["Encoding", "Session", "load"]

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from hdruntime.backends import DeviceRunner, Runner
from hdruntime.backends.choice import open_runner
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, Manifest, TensorSpec
from hdruntime.bundle.padding_limit import padding_limit
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendError, InputError, NonFiniteOutputError
from hdruntime.gpu.options import GpuOptions
from hdruntime.inference.inputs import checked_inputs
from hdruntime.inference.marks import check_texts_for_marks
from hdruntime.inference.pair_logits import PairOptions, check_query, pair_logits, ranked
from hdruntime.inference.scheduling import BatchResult, PaddingCount, Scheduler, non_finite_rows
from hdruntime.inference.streaming import Document, DocumentStream, Segment, Streams
from hdruntime.inference.text_inputs import inputs_of_texts
from hdruntime.text.answers import MAX_ANSWER_TOKENS, Answer, AnswerOptions, best_answers
from hdruntime.text.checks import check_text_lengths, checked_choice
from hdruntime.text.chunking import LateChunking, LateChunks, Spans, TextChunks, overlap_of
from hdruntime.text.classes import activation_of, check_reranker
from hdruntime.text.entities import Aggregation, Entity, EntityFinder
from hdruntime.text.pooling import embedding_output, embedding_size, mean_over_tokens
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.splitting import (
    SplitEncoding,
    SplitPooling,
    in_one_piece,
    merged,
    pooled_embedding,
    split_encodings,
)
from hdruntime.text.tasks import activated
from hdruntime.text.tokenization import Encoding, Overflow, TextTokenizer

if TYPE_CHECKING:
    from hdruntime.gpu.device_arrays import DeviceArray

_MOST_THREADS = 1024
"""More than the cores of any machine; a backend would try to start any number of threads."""

FloatArray = npt.NDArray[np.float32]


def load(
    bundle: Path | str | Bundle,
    backend: Backend | str = "auto",
    *,
    threads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str | None = None,
    rebuild: bool = False,
    gpu: GpuOptions | None = None,
) -> Session:
    """Load a bundle.

    Args:
        bundle: its directory, or the result of :func:`open_bundle`.
        backend: one of :class:`Backend`, which runs or raises; ``auto`` takes the first that can run here, engines
            first, then ONNX Runtime on the GPU, then on the CPU OpenVINO, where it is installed and the bundle has its
            graph, then ONNX Runtime; it logs its choice and the reason. An unused GPU causes a warning.
        threads: CPU threads of one run; None leaves the number to the backend.
        precision: one of :class:`Precision`: what a CPU computes in. ``auto`` is ``bfloat16`` where the CPU computes in
            it, the bundle is of half precision and OpenVINO runs it, else ``float32``.
        device: OpenVINO's name of the device, for example ``GPU`` or ``NPU``; by default its CPU.
        rebuild: if no engine of the bundle runs on this machine's GPU, build one in place first. It takes minutes, and
            needs the packages for building.
        gpu: options of backends on a GPU, by default ``GpuOptions()``.

    Raises:
        BundleError: the bundle is missing, damaged or too new.
        BackendError: the backend cannot run here, or cannot run this bundle.
        InputError: the backend or the precision is unknown, or ``threads`` is not 1 to 1024.
    """
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise InputError(
            f"threads is {threads}; it must be 1 to {_MOST_THREADS}.\nLeave it out for the backend's default."
        )
    precision = checked_choice(Precision, precision, option="precision")
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(Path(bundle))
    opened, runner, reason = open_runner(
        opened, backend, threads=threads, precision=precision, device=device, rebuild=rebuild, gpu=gpu
    )
    try:
        return Session(opened, runner, backend_reason=reason)
    except BaseException:
        runner.close()
        raise


class Session:
    """A loaded bundle, made by :func:`load`; also a context manager.

    Safe to use from several threads. If one closes it, the others get their results or a BackendError. In a process
    that was forked after loading (``os.fork``, multiprocessing's start method ``fork``) it raises BackendError, because
    a fork copies neither threads nor GPU contexts. Load the bundle in every process.
    """

    def __init__(self, bundle: Bundle, runner: Runner, *, backend_reason: str = "") -> None:
        self._bundle = bundle
        self._has_tokens_axis = {spec.name: spec.has_tokens_axis for spec in bundle.manifest.outputs}
        self._output_names = list(self._has_tokens_axis)
        self._answers = [spec.name for spec in bundle.manifest.answers]
        self._scheduler = Scheduler(
            runner,
            mask=bundle.manifest.mask,
            padding_limit=functools.partial(padding_limit, bundle.manifest.padding),
            non_finite_error=self._non_finite_error,
        )
        self._backend, self._backend_reason = runner.backend, backend_reason
        self._precision = runner.precision
        info = bundle.manifest.tokenizer
        self._max_len = min(bundle.manifest.max_len, runner.max_len)
        self._tokenizer = TextTokenizer(bundle.file(info.file), max_len=self._max_len) if info else None
        self._streams = Streams(
            self._scheduler,
            bundle.manifest,
            max_len=self._max_len,
            encode=lambda text: self.tokenize([text], overflow=Overflow.RECUR)[0],
        )

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
        """What the backend computes in; ``auto`` on a GPU, where it is what the graph or the engine was built in."""
        return self._precision

    @property
    def backend_reason(self) -> str:
        """Why `backend` runs the bundle: ``asked for``, or why ``auto`` took it."""
        return self._backend_reason

    @property
    def max_len(self) -> int:
        """Most tokens of a text: the manifest's limit, or the engine's if it is lower."""
        return self._max_len

    @property
    def batch_tokens(self) -> int:
        """The backend's preferred tokens of a batch, including padding; default of :meth:`embed` and :meth:`infer`.

        Raises:
            BackendError: the session is closed.
        """
        return self._scheduler.runner.batch_tokens

    @property
    def padding(self) -> PaddingCount:
        """Tokens of texts, and of padding, computed since the bundle was loaded."""
        return self._scheduler.padding

    @property
    def engine_bytes(self) -> int | None:
        """GPU memory of the engine's weights and contexts as reported by TensorRT; None without a report, or on a CPU.

        Scratch memory of the contexts grows to the needs of the largest batch so far.

        Raises:
            BackendError: the session is closed.
        """
        runner = self._scheduler.runner
        return runner.engine_bytes() if isinstance(runner, DeviceRunner) else None

    def most_rows(self, tokens: int) -> int:
        """Most texts of this length that a call runs in one piece; a larger batch runs in parts.

        An engine's profiles limit it, and so does memory after a batch that did not fit; else ``sys.maxsize``.

        Raises:
            BackendError: the session is closed.
        """
        return self._scheduler.most_rows(tokens)

    def __call__(self, **inputs: npt.ArrayLike | None) -> dict[str, FloatArray]:
        """Run one batch as given.

        Args:
            input_ids: [batch, tokens], any integers; nested lists are accepted.
            attention_mask: [batch, tokens], 1 for real tokens, 0 for padding; default ones.
            token_type_ids: [batch, tokens], default zeros, or, for question answering with BigBird, 0 up to the first
                separator and 1 after it; only if the bundle has this input.
            global_attention_mask: [batch, tokens], 1 for global tokens; only if the bundle has this input. The default
                is the first real token of a row, or, for question answering, the tokens before the first separator.
                Marks on padding are ignored.
            memories: of a recurrent model, by name, each float32 of the manifest's shape: the output that the manifest
                names, from the previous call for the same rows. Axes ``memory`` have one size. The default is the start
                of a text, with room for as many tokens as the other memories have, else for the most.
                :meth:`stream` feeds them.

        Returns:
            output name -> float32 array of the shape in the manifest. Padded positions hold 0.

        Raises:
            InputError: an input does not fit.
            NonFiniteOutputError: a real token's output is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        arrays = checked_inputs(inputs, self.manifest, max_len=self._max_len)
        result = self._scheduler.run_batch(arrays, outputs=self._output_names)
        self._require_good(result, result.rows)
        return result.outputs

    def stream(
        self, document: Document, *, segment: int | None = None, outputs: Sequence[str] | None = None
    ) -> DocumentStream:
        """Run a document of any number of tokens in segments, which see what the model remembers of those before them.

        The document is tokenised as a whole: special tokens are at its two ends only. What is remembered stays in the
        backend's memory.

        ::

            with session.stream(text) as stream:
                for segment in stream:
                    print(segment.tokens, segment.outputs["last_hidden_state"].shape)

        Args:
            document: a text, an encoding (``session.tokenize(texts, overflow="recur")``), or ids with special tokens.
            segment: tokens of a segment; None: 512, or the session's `max_len` if that is less.
            outputs: names of the requested outputs, default all but what the model remembers.

        Returns:
            an iterator over the segments, which computes each when it is asked for.

        Raises:
            InputError: the bundle remembers nothing, the segment does not fit, or the document is empty, is of another
                type or has an id outside of the vocabulary. Raised by the iterator: its stream was closed.
            NonFiniteOutputError: of the iterator: a result is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        names = self._checked_output_names(outputs, self._answers)
        return self._streams.of_document(document, segment=segment, outputs=names)

    def stream_all(
        self,
        documents: Iterable[Document],
        *,
        segment: int | None = None,
        rows: int | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Iterator[Segment]:
        """Run documents as :meth:`stream` does, several of them in each batch.

        Each row of a batch has a document of its own. When it ends, the row begins the next document, and the other
        rows go on with theirs. The results are those of each document alone.

        Args:
            documents: as of :meth:`stream`; one is taken when there is a row for it.
            segment, outputs: as of :meth:`stream`.
            rows: documents at a time; None: as many as fill the backend's preferred batch.

        Returns:
            an iterator over segments: those of a document in order, those of different documents interleaved. A
            document whose results are NaN or infinite ends with a segment that has its error; the others go on.

        Raises:
            InputError: as :meth:`stream`; the message has the document's number. Or ``rows`` does not fit.
            BackendError: as :meth:`stream`.
        """
        names = self._checked_output_names(outputs, self._answers)
        return self._streams.of_documents(documents, segment=segment, rows=rows, outputs=names)

    def run_on_device(self, *, outputs: Sequence[str] | None = None, **inputs: object) -> dict[str, DeviceArray]:
        """Run one batch that is in GPU memory, and leave its results there.

        Values are not checked, because that would need a copy to the CPU: ids outside the vocabulary, masks that are
        neither 0 nor 1, NaN in results.

        Args:
            outputs: names of the requested outputs, default all.
            inputs: every input of the manifest, of its shape, contiguous int64 or int32, or float32 for a memory, with
                ``__dlpack__`` or ``__cuda_array_interface__`` (PyTorch's and CuPy's arrays have both). They have been
                read on return.

        Returns:
            output name -> array of the shape in the manifest, whose computation may continue: ``torch.from_dlpack``
            accepts it, and waits as needed. Padded positions hold 0.

        Raises:
            InputError: an input does not fit, or is not on the engine's GPU.
            BackendError: the backend does not accept such arrays, it failed, or the session is closed.
        """
        runner = self._scheduler.runner
        if not isinstance(runner, DeviceRunner):
            raise BackendError(
                f"The backend {self._backend.value} does not accept arrays on a GPU.\n"
                "Call the session itself with arrays on the CPU, or load the bundle with a TensorRT backend."
            )
        return runner.start_on_device(inputs, self._checked_output_names(outputs, self._output_names))

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
                "tokenize returns one encoding per text, so it cannot split.\n"
                "Use session.split(texts, stride=...), or session.embed(texts, overflow='split')."
            )
        return self._text_tokenizer.encode(texts, pairs, overflow=overflow, prompt=prompt)

    def split(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, stride: int = 0, prompt: str = ""
    ) -> list[SplitEncoding]:
        """Encode texts, or pairs, of any number of tokens; texts that are too long are cut into pieces.

        Args:
            texts: may be empty strings.
            pairs: the second text of each pair, as many as ``texts``. Only it is cut; every piece has the whole first
                text.
            stride: tokens that a piece repeats from the previous piece.
            prompt: goes before every piece.

        Returns:
            one result per text, in order; :func:`hdruntime.text.splitting.merged` merges the outputs of its pieces.

        Raises:
            InputError: the bundle has no tokenizer, or ``stride`` leaves no new token for a piece.
        """
        encodings = self._text_tokenizer.encode(texts, pairs, overflow=Overflow.SPLIT, prompt=prompt)
        return split_encodings(encodings, max_len=self._max_len, stride=stride, is_pair=pairs is not None)

    def infer(
        self,
        encodings: Sequence[Encoding],
        *,
        batch_tokens: int | None = None,
        outputs: Sequence[str] | None = None,
    ) -> list[dict[str, FloatArray]]:
        """Run texts of different lengths, batched by length.

        Args:
            encodings: from :meth:`tokenize`.
            batch_tokens: most tokens per batch; a longer text runs alone. None: the backend's default.
            outputs: names of the requested outputs, default all but what a recurrent model remembers: every text is
                run alone.

        Returns:
            one dict per text, in order: output name -> float32 array without the batch axis, its tokens axis as long
            as the text.

        Raises:
            InputError: a text is too long, an id is not in the vocabulary, an output is unknown, or the bundle marks
                questions as global and a text has no question, or one of too many tokens.
            NonFiniteOutputError: a result is NaN or infinite; rows are numbered as in ``encodings``.
            BackendError: the backend failed, or the session is closed.
        """
        return self._infer(encodings, range(len(encodings)), batch_tokens=batch_tokens, outputs=outputs)

    def run_batches(
        self,
        encodings: Sequence[Encoding],
        *,
        batch_tokens: int | None = None,
        batch_size: int | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Iterator[BatchResult]:
        """Run texts of different lengths as :meth:`infer` does, and yield each batch when it is finished.

        The longest texts come first. A batch that does not fit in memory is halved, and texts of such lengths run in
        smaller batches for the rest of the session. A row has its error if its result is NaN or infinite, or if the
        backend fails on it alone; the other rows of its batch have their results.

        Args:
            encodings: from :meth:`tokenize`.
            batch_tokens: most tokens per batch; a longer text runs alone. None: the backend's default.
            batch_size: most texts of a batch; None: any number.
            outputs: as of :meth:`infer`.

        Returns:
            an iterator; each text is in one of its results.

        Raises:
            InputError: as :meth:`infer`. An id outside the vocabulary is only found when its batch begins.
            OutOfMemoryError: no text ever fitted in memory, or one no longer fits whose length did before.
            BackendError: the session is closed.
        """
        lengths = [len(encoding) for encoding in encodings]
        check_text_lengths(lengths, self._max_len)
        check_texts_for_marks([encoding.input_ids for encoding in encodings], self.manifest)
        return self._scheduler.run(
            lengths,
            lambda rows: inputs_of_texts(
                [encodings[row] for row in rows],
                self.manifest,
                max_len=self._max_len,
                memory=self.manifest.least_memory,
            ),
            outputs=self._checked_output_names(outputs, self._answers),
            batch_tokens=batch_tokens,
            batch_size=batch_size,
        )

    def embed(
        self,
        texts: Sequence[str],
        *,
        batch_tokens: int | None = None,
        overflow: Overflow | str = Overflow.ERROR,
        stride: int = 0,
        split_pooling: SplitPooling | str = SplitPooling.MEAN,
        segment: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> FloatArray:
        """One vector per text: the bundle's ``sentence_embedding``, else the mean of its token vectors.

        Args:
            texts: may be empty strings.
            batch_tokens: most tokens per batch; a longer text runs alone. None: the backend's default.
            overflow: for a text of too many tokens: ``error``, ``truncate``, or ``split``, which embeds it in pieces.
                ``recur`` streams every text, see :meth:`stream`, and pools all its tokens as those of one long text.
            stride: tokens that a piece of a split text repeats from the previous piece.
            split_pooling: combines the pieces' vectors: ``mean``, weighted by tokens, or ``max``. If all of them have
                norm 1, the result is normalised too.
            segment: tokens of a segment of a streamed text; None: as of :meth:`stream`.
            prompt_name: the model's prompt that goes before every text; None for the model's default, if it has one.
            prompt: the prompt itself.

        Returns:
            float32 [texts, dimensions], in order.

        Raises:
            InputError: the bundle's task has no embeddings, it has no tokenizer, or a text does not fit.
            NonFiniteOutputError: an embedding is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        output = embedding_output(self.manifest)
        pooling = checked_choice(SplitPooling, split_pooling, option="split_pooling")
        prompt = chosen_prompt(*prompts_of(self.manifest), name=prompt_name, prompt=prompt)
        if segment is not None and overflow != Overflow.RECUR:
            raise InputError(f"segment is {segment}, but only overflow='recur' has segments.")
        if overflow == Overflow.RECUR and not stride:
            encodings = self.tokenize(texts, overflow=overflow, prompt=prompt)
            vectors = self._streams.vectors(encodings, segment=segment, batch_tokens=batch_tokens)
            return np.stack(vectors) if vectors else self._no_vectors()
        splits = self._encoded(texts, overflow=overflow, stride=stride, prompt=prompt)
        text_of_piece = [text for text, split in enumerate(splits) for _ in split.pieces]
        pieces = [piece for split in splits for piece in split.pieces]
        of_pieces = iter(self._vectors(output, pieces, text_of_piece, batch_tokens))
        vectors = [pooled_embedding(split, list(islice(of_pieces, len(split.pieces))), pooling) for split in splits]
        return np.stack(vectors) if vectors else self._no_vectors()

    @overload
    def embed_chunks(  # type: ignore[overload-overlap]
        self, texts: str, *, chunks: str | Spans, overlap: int | None = ..., batch_tokens: int | None = ...,
        prompt_name: str | None = ..., prompt: str | None = ...,
    ) -> TextChunks: ...  # fmt: skip

    @overload
    def embed_chunks(
        self, texts: Sequence[str], *, chunks: str | Sequence[Spans], overlap: int | None = ...,
        batch_tokens: int | None = ..., prompt_name: str | None = ..., prompt: str | None = ...,
    ) -> list[TextChunks]: ...  # fmt: skip

    def embed_chunks(
        self,
        texts: str | Sequence[str],
        *,
        chunks: str | Spans | Sequence[Spans],
        overlap: int | None = None,
        batch_tokens: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> TextChunks | list[TextChunks]:
        """Late chunking: each text is encoded whole, and each of its chunks is the mean of its own tokens' states.

        For bundles whose vectors are such means: of token vectors (``feature-extraction``), or of a sentence model of
        mean pooling, whose normalisation follows. One chunk of a whole text has the vector of :meth:`embed`: a chunk
        with the text's first token includes what precedes that (a special token, and the prompt where :meth:`embed`
        pools it), a chunk with the last one includes the special token after it.

        A text of more than `max_len` tokens is encoded in overlapping macro chunks of so many tokens, each with special
        tokens and the prompt. Tokens in the first half of an overlap have their states from the earlier macro chunk,
        the others from the later one.

        Args:
            texts: one text, or several.
            chunks: ``"tokens:256"``, each of so many tokens; ``"sentences"``, see :mod:`hdruntime.text.sentences`; or
                the (start, end) of each chunk of the text, a list of these for several texts, in characters without
                the prompt, end exclusive, in any order. A token belongs to every chunk with one of its characters.
            overlap: tokens that consecutive macro chunks share; None: 256, or a quarter of `max_len` if that is less.
            batch_tokens, prompt_name, prompt: as in :meth:`embed`.

        Returns:
            the chunks of the text, or of each text; none for a text without tokens.

        Raises:
            InputError: the bundle's vectors are not such means, it has no tokenizer, a given chunk is not within its
                text or has no token, or ``overlap`` leaves no new token for a macro chunk.
            NonFiniteOutputError: a state is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        several = [texts] if isinstance(texts, str) else texts
        of_texts = [chunks] * len(several) if isinstance(chunks, str) or isinstance(texts, str) else chunks
        if len(of_texts) != len(several):
            raise InputError(f"There are {len(several)} texts, but chunks of {len(of_texts)}; give chunks of each.")
        chunking = LateChunking(self.manifest)
        prompt = chosen_prompt(*prompts_of(self.manifest), name=prompt_name, prompt=prompt)
        splits = self.split(several, stride=overlap_of(overlap, self._max_len), prompt=prompt)
        begun: list[LateChunks] = []
        for number, of_text in enumerate(zip(splits, several, of_texts, strict=True)):
            try:
                begun.append(chunking.begin(*of_text, prompt=prompt))  # type: ignore[arg-type]
            except InputError as error:
                raise InputError(f"Text {number}: {error}" if len(several) > 1 else str(error)) from None
        places = [(text, number) for text, split in enumerate(splits) for number in range(len(split.pieces))]
        pieces = [splits[text].pieces[number] for text, number in places]
        for result in self.run_batches(pieces, batch_tokens=batch_tokens, outputs=[chunking.output.name]):
            self._require_good(result, [text for text, _ in places])
            for index, row in enumerate(result.rows):
                text, number = places[row]
                begun[text].add(number, result.outputs[chunking.output.name][index, : len(pieces[row])])
        found = [each.finished() for each in begun]
        return found[0] if isinstance(texts, str) else found

    def entities(
        self,
        texts: Sequence[str],
        *,
        aggregation: Aggregation | str = Aggregation.NONE,
        overflow: Overflow | str = Overflow.ERROR,
        stride: int = 0,
        batch_tokens: int | None = None,
    ) -> list[list[Entity]]:
        """The entities of every text, for bundles of token-classification.

        They are those of transformers' pipeline. A text that is split is one text: each token has its label from the
        piece in which it sees most of the text, and an entity on both sides of a cut is one, which the pipeline cuts.

        Args:
            texts: may be empty strings.
            aggregation: how tokens are grouped: ``none``, ``simple``, ``first``, ``max`` or ``average``.
            overflow: for a text of too many tokens: ``error``, ``truncate``, or ``split``.
            stride: tokens that a piece of a split text repeats from the previous piece.
            batch_tokens: as of :meth:`embed`.

        Returns:
            one list per text, in order, of its entities in order.

        Raises:
            InputError: the bundle's task is another one, it has no tokenizer, or a text does not fit.
            NonFiniteOutputError: a logit is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        self._check_task("token-classification", "entities", overflow)
        aggregation = checked_choice(Aggregation, aggregation, option="aggregation")
        splits = self._encoded(texts, overflow=overflow, stride=stride)
        find = EntityFinder(self.manifest, self._text_tokenizer.whole, aggregation)
        found = []
        for text, split, outputs in zip(
            texts, splits, self._outputs_of_pieces(splits, ["logits"], batch_tokens), strict=True
        ):
            whole = merged(split, outputs, specs=self.manifest.outputs, pooling=SplitPooling.MEAN)
            found.append(find(whole["logits"], text=text, encoding=split.whole))
        return found

    def answers(
        self,
        questions: Sequence[str],
        contexts: Sequence[str],
        *,
        top_k: int = 1,
        handle_impossible_answer: bool = False,
        max_answer_tokens: int = MAX_ANSWER_TOKENS,
        overflow: Overflow | str = Overflow.ERROR,
        stride: int = 0,
        batch_tokens: int | None = None,
    ) -> list[list[Answer]]:
        """The best answers to questions, each from its context, for bundles of question-answering.

        See :mod:`hdruntime.text.answers` for scores, and what differs from Hugging Face's pipeline.

        Args:
            questions: with a token each.
            contexts: one for each question; may be empty strings.
            top_k: at most so many answers to a question.
            handle_impossible_answer: whether the empty answer is one.
            max_answer_tokens: the longest answer.
            overflow: for a pair of too many tokens: ``error``, ``truncate``, or ``split``, which runs the question with
                every piece of the context.
            stride: tokens that a piece of a split context repeats; with `max_answer_tokens`, no answer is cut.
            batch_tokens: as of :meth:`embed`.

        Returns:
            one list per question, in order: 1 to ``top_k`` answers, best first.

        Raises:
            InputError: the bundle's task is another one, it has no tokenizer, a pair does not fit, or a question has no
                token.
            NonFiniteOutputError: a logit is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        self._check_task("question-answering", "answers", overflow)
        options = AnswerOptions(
            top_k=top_k, handle_impossible_answer=handle_impossible_answer, max_answer_tokens=max_answer_tokens
        )
        options.check()
        splits = self._encoded(questions, contexts, overflow=overflow, stride=stride)
        names = ["start_logits", "end_logits"]
        return [
            best_answers(split, outputs, context=context, options=options)
            for split, outputs, context in zip(
                splits, self._outputs_of_pieces(splits, names, batch_tokens), contexts, strict=True
            )
        ]

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        return_documents: bool = False,
        overflow: Overflow | str = Overflow.ERROR,
        stride: int = 0,
        split_pooling: SplitPooling | str = SplitPooling.MAX,
        batch_tokens: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[dict[str, int | float | str]]:
        """Rank documents by a reranker's scores of each with a query: a bundle of text-classification with one label.

        Args:
            query: the first text of each pair.
            documents: the second texts; may be empty strings.
            top_k: most documents that are returned; None for all.
            return_documents: whether results have the documents' texts.
            overflow: for a pair of too many tokens: ``error``; ``truncate``, which cuts the end of the longer text; or
                ``split``, which cuts the document into pieces, each of which is read with the whole query.
            stride: tokens that a piece of a split document repeats from the previous piece.
            split_pooling: combines the pieces' logits: ``max``, or ``mean``, weighted by tokens.
            batch_tokens: most tokens per batch; a longer pair runs alone. None: the backend's default.
            prompt_name: the model's prompt that goes before the query; None for the model's default, if it has one.
            prompt: the prompt itself.

        Returns:
            the documents by descending score, each a dict with ``corpus_id``, its place in ``documents``, ``score``,
            as `hdexport run` writes it, and ``text`` if asked for.

        Raises:
            InputError: the bundle is no reranker, it has no tokenizer, a text does not fit, or an option is invalid.
            NonFiniteOutputError: a score is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        check_reranker(self.manifest)
        prompt = chosen_prompt(*prompts_of(self.manifest), name=prompt_name, prompt=prompt)
        options = PairOptions(overflow=overflow, stride=stride, split_pooling=split_pooling, prompt=prompt)
        check_query(query, self._text_tokenizer, options)
        logits = pair_logits(
            [(query, document) for document in documents],
            self._text_tokenizer,
            functools.partial(self.run_batches, batch_tokens=batch_tokens, outputs=["logits"]),
            labels=1,
            options=options,
            name="documents",
        )
        scores = activated(logits, activation_of(self._bundle))[:, 0]
        return ranked(scores, documents, top_k=top_k, return_documents=return_documents)

    def close(self) -> None:
        """Free the backend's memory; later calls, and calls running in other threads, raise BackendError."""
        self._scheduler.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _text_tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise InputError(f"The bundle {self._bundle.path} has no tokenizer; give it input_ids.")
        return self._tokenizer

    def _checked_output_names(self, names: Sequence[str] | None, default: Sequence[str]) -> list[str]:
        for name in names or ():
            if name not in self._output_names:
                raise InputError(f"No output {name!r}; this bundle has {', '.join(self._output_names)}.")
        return list(default) if names is None else list(names)

    def _infer(
        self,
        encodings: Sequence[Encoding],
        numbers: Sequence[int],
        *,
        batch_tokens: int | None,
        outputs: Sequence[str] | None,
    ) -> list[dict[str, FloatArray]]:
        """As :meth:`infer`; errors use the encodings' ``numbers``."""
        names = self._checked_output_names(outputs, self._answers)
        results: list[dict[str, FloatArray]] = [{} for _ in encodings]
        for result in self.run_batches(encodings, batch_tokens=batch_tokens, outputs=names):
            self._require_good(result, numbers)
            for index, row in enumerate(result.rows):
                length = len(encodings[row])
                for name, values in result.outputs.items():
                    results[row][name] = values[index, :length] if self._has_tokens_axis[name] else values[index]
        return results

    def _encoded(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        overflow: Overflow | str,
        stride: int,
        prompt: str = "",
    ) -> list[SplitEncoding]:
        """The pieces of every text; one, where texts are not split."""
        if overflow == Overflow.SPLIT:
            return self.split(texts, pairs, stride=stride, prompt=prompt)
        if stride:
            raise InputError(f"stride is {stride}, but only overflow='split' has a stride.")
        return [in_one_piece(each) for each in self.tokenize(texts, pairs, overflow=overflow, prompt=prompt)]

    def _outputs_of_pieces(
        self, splits: Sequence[SplitEncoding], outputs: Sequence[str], batch_tokens: int | None
    ) -> list[list[dict[str, FloatArray]]]:
        """[texts][pieces], the outputs of each piece."""
        pieces = [piece for split in splits for piece in split.pieces]
        numbers = [text for text, split in enumerate(splits) for _ in split.pieces]
        found = iter(self._infer(pieces, numbers, batch_tokens=batch_tokens, outputs=outputs))
        return [list(islice(found, len(split.pieces))) for split in splits]

    def _check_task(self, task: str, method: str, overflow: Overflow | str) -> None:
        if self.manifest.task != task:
            raise InputError(f"session.{method} is for {task}, and the bundle's task is {self.manifest.task}.")
        if overflow == Overflow.RECUR:
            raise InputError(
                f"session.{method} does not stream texts.\nUse overflow='split', or hdexport run --overflow recur."
            )

    def _vectors(
        self, output: TensorSpec, encodings: Sequence[Encoding], numbers: Sequence[int], batch_tokens: int | None
    ) -> FloatArray:
        """[encodings, dimensions], one vector per encoding; errors use their ``numbers``."""
        vectors: FloatArray | None = None
        for result in self.run_batches(encodings, batch_tokens=batch_tokens, outputs=[output.name]):
            self._require_good(result, numbers)
            values = result.outputs[output.name]
            if output.has_tokens_axis:
                values = mean_over_tokens(values, result.attention_mask)
            if vectors is None:
                vectors = np.empty((len(encodings), values.shape[1]), dtype=np.float32)
            vectors[result.rows] = values
        return self._no_vectors() if vectors is None else vectors

    def _no_vectors(self) -> FloatArray:
        return np.empty((0, embedding_size(self.manifest)), dtype=np.float32)

    def _require_good(self, result: BatchResult, numbers: Sequence[int]) -> None:
        """Raise for a batch with failed rows, named by the caller's numbers if there is more than one row."""
        if not result.errors:
            return
        for name, wrong in non_finite_rows(result.outputs).items():
            named = sorted({numbers[result.rows[index]] for index in wrong}) if numbers[-1] > 0 else []
            raise self._non_finite_error(name, named)
        raise next(iter(result.errors.values()))

    def _non_finite_error(self, name: str, rows: Sequence[int]) -> NonFiniteOutputError:
        shown = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
        where = f" in rows {shown}" if rows else ""
        advice = (
            "float16 may overflow in this model: rebuild with --bf16, or without --fp16."
            if self.manifest.dtype == "float16"
            else f"Compare the bundle with its checkpoint: hdexport verify {self._bundle.path}"
        )
        return NonFiniteOutputError(f"The output {name} holds NaN or infinity{where}.\n{advice}")
