"""Loaded bundles that run batches and texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from hdruntime.arrays import FloatArray
from hdruntime.backends.choice import open_runner
from hdruntime.backends.precision import Precision
from hdruntime.batch_session import BatchSession
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting
from hdruntime.folders import require_utf8
from hdruntime.gpu.options import GpuOptions
from hdruntime.hub import opened_bundle
from hdruntime.tasks.embedding import ChunkEmbeddings, Embedding
from hdruntime.tasks.encode_options import EncodeOptions
from hdruntime.tasks.hybrid_similarity import EmbeddingKind, HybridEmbedding, HybridEmbeddings, checked_kinds
from hdruntime.tasks.question_answering import QuestionAnswers
from hdruntime.tasks.sparse_similarity import SparseVector, SparseVectors
from hdruntime.tasks.task import Text, TextTask
from hdruntime.tasks.text_classification import TextClassification, check_reranker, ranked_documents
from hdruntime.tasks.text_inference import answers_of
from hdruntime.tasks.token_classification import Entities
from hdruntime.text.answers import MAX_ANSWER_TOKENS, Answer, AnswerOptions
from hdruntime.text.checks import checked_choice, checked_texts, several
from hdruntime.text.chunking import Spans, TextChunks, overlap_of
from hdruntime.text.encoding import Overflow
from hdruntime.text.entities import Aggregation, Entity
from hdruntime.text.lengths import MaxSeqLength
from hdruntime.text.prompts import chosen_prompt, prompts_of
from hdruntime.text.splitting import SplitPooling

_MAX_THREADS = 1024
"""More than the cores of any machine; backends accept any number of threads."""


def load(
    bundle: Path | str | Bundle,
    backend: Backend | str = "auto",
    *,
    threads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    device: str | None = None,
    rebuild: bool = False,
    gpu: GpuOptions | None = None,
    max_seq_length: int | MaxSeqLength | None = None,
) -> Session:
    """Load a bundle.

    Args:
        bundle: path of a bundle; its name ``organisation/name[@revision]`` on the Hugging Face Hub, from which only the
            files of the backend are downloaded; or the result of :func:`open_bundle`.
        backend: a :class:`Backend`, which runs the bundle or raises; ``auto`` for the first backend that can: TensorRT
            engines, ONNX Runtime on the GPU, then on the CPU OpenVINO where it was measured to be faster, else ONNX
            Runtime. The choice and its reason are logged; an unused GPU causes a warning.
        threads: CPU threads; None for one per core of the process, by CPU affinity and container quota.
        precision: a :class:`Precision`, on CPUs. ``auto`` is ``bfloat16`` if the CPU supports it, the bundle has half
            precision and OpenVINO runs it, else ``float32``.
        device: ``cpu``, ``cuda`` or ``cuda:N`` restricts the backends to that device; or a device of OpenVINO, such as
            ``GPU`` or ``NPU``. None for any device.
        rebuild: build a TensorRT engine in place if no engine of the bundle runs on this GPU. Takes minutes and needs
            the packages for building.
        gpu: options of backends on a GPU; None for ``GpuOptions()``.
        max_seq_length: maximum tokens of texts, and tokens of chunks of split texts; ``"model"`` for the model's
            length, ``"bundle"`` for the bundle's maximum. None for the value of ``hdexport build --max-len``, or
            without one the model's length.

    Raises:
        BundleError: the bundle is missing, damaged or of another format version.
        BackendError: the backend cannot run here, or cannot run this bundle.
        InputError: an option is invalid, or ``max_seq_length`` is more than the bundle's maximum.
    """
    if threads is not None and not 1 <= threads <= _MAX_THREADS:
        raise InputError(
            parameter="threads",
            value=threads,
            accepted=f"1 to {_MAX_THREADS}",
            hint="Leave it out for one per core of the process.",
        )
    precision = checked_choice(Precision, precision, option="precision")
    opened = opened_bundle(bundle, backend, precision)
    require_utf8(opened.path)
    opened, runner, reason = open_runner(
        opened, backend, threads=threads, precision=precision, device=device, rebuild=rebuild, gpu=gpu
    )
    try:
        return Session(opened, runner, backend_reason=reason, max_seq_length=max_seq_length)
    except BaseException:
        runner.close()
        raise


class Session(BatchSession):
    """A loaded bundle, made by :func:`load`; also a context manager.

    Safe to use from several threads. If one thread closes the session, others get their results or a BackendError.

    A process that was forked after loading (``os.fork``, multiprocessing's start method ``fork``) gets a BackendError,
    because a fork copies neither threads nor GPU contexts: load the bundle in every process. A fork of a process that
    has run OpenVINO or CUDA can only use the backend onnxruntime.
    """

    def embed(
        self,
        texts: Iterable[str],
        *,
        batch_tokens: int | None = None,
        overflow: Overflow | str = Overflow.ERROR,
        stride: int = 0,
        split_pooling: SplitPooling | str = SplitPooling.MEAN,
        segment: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> FloatArray:
        """Embed texts: the bundle's ``sentence_embedding``, or without one the mean of the token embeddings.

        Args:
            texts: any number of texts, which may be empty.
            batch_tokens: maximum tokens per batch; a longer text runs alone. None for the backend's default.
            overflow: handling of texts of more than `max_seq_length` tokens: ``error``, ``truncate``, or ``split`` into
                chunks. ``recur`` streams every text, see :meth:`stream`, and pools all of its tokens.
            stride: number of tokens that consecutive chunks share.
            split_pooling: combines the embeddings of chunks: ``mean``, weighted by tokens, or ``max``. If all of them
                have norm 1, the result is normalized.
            segment: tokens per segment of a streamed text; see :meth:`stream`.
            prompt_name: name of the model's prompt before every text; None for the model's default.
            prompt: text before every text; replaces ``prompt_name``.

        Returns:
            float32 [texts, dimensions], in input order.

        Raises:
            InputError: the bundle's task has no embeddings, the bundle has no tokenizer, or an input is invalid.
            NonFiniteOutputError: an embedding is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        task = Embedding(self.manifest)
        encode_options = EncodeOptions.of(
            overflow=overflow,
            stride=stride,
            split_pooling=split_pooling,
            segment=segment,
            batch_tokens=batch_tokens,
        )
        inputs = _texts(texts)
        vectors = np.empty((len(inputs), task.dimensions), dtype=np.float32)
        answers_of(self, task, inputs, encode_options, prompt=self._prompt(prompt_name, prompt), into=vectors)
        return vectors

    def embed_sparse(
        self,
        texts: Iterable[str],
        *,
        max_active_dims: int | None = None,
        batch_tokens: int | None = None,
        overflow: Overflow | str = Overflow.ERROR,
        stride: int = 0,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[SparseVector]:
        """Embed texts as sparse vectors, with a bundle of the task sparse-similarity.

        Args:
            texts, batch_tokens, stride, prompt_name, prompt: see :meth:`embed`.
            max_active_dims: number of largest values of a vector that are kept; None for the model's number, by default
                all.
            overflow: ``error``, ``truncate``, or ``split``, which gives a token the maximum of its weights in the
                chunks, or their sum, as the model pools.

        Returns:
            [texts], in input order.

        Raises:
            InputError: see :meth:`embed`.
        """
        self._check_task(SparseVectors, method="embed_sparse")
        task = SparseVectors(self.manifest, max_active_dims)
        encode_options = EncodeOptions.of(overflow=overflow, stride=stride, batch_tokens=batch_tokens)
        return answers_of(self, task, _texts(texts), encode_options, prompt=self._prompt(prompt_name, prompt))

    def embed_hybrid(
        self,
        texts: Iterable[str],
        *,
        returns: Iterable[EmbeddingKind | str] = tuple(EmbeddingKind),
        batch_tokens: int | None = None,
        overflow: Overflow | str = Overflow.ERROR,
        stride: int = 0,
        split_pooling: SplitPooling | str = SplitPooling.MEAN,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[HybridEmbedding]:
        """Embed texts in several ways at once, with a bundle of the task hybrid-similarity (BGE-M3).

        Args:
            texts, batch_tokens, stride, split_pooling, prompt_name, prompt: see :meth:`embed`; `split_pooling` is of
                dense vectors.
            returns: ``dense``, ``sparse`` and ``colbert``, or some of them.
            overflow: ``error``, ``truncate``, or ``split``: a token's weight is then the largest of all chunks, and
                every token has a vector.

        Returns:
            [texts], in input order.

        Raises:
            InputError: see :meth:`embed`.
        """
        self._check_task(HybridEmbeddings, method="embed_hybrid")
        task = HybridEmbeddings(self.manifest, checked_kinds(returns))
        encode_options = EncodeOptions.of(
            overflow=overflow, stride=stride, split_pooling=split_pooling, batch_tokens=batch_tokens
        )
        return answers_of(self, task, _texts(texts), encode_options, prompt=self._prompt(prompt_name, prompt))

    @overload
    def embed_chunks(  # type: ignore[overload-overlap]
        self, texts: str, *, chunks: str | Spans, overlap: int | None = ..., batch_tokens: int | None = ...,
        prompt_name: str | None = ..., prompt: str | None = ...,
    ) -> TextChunks: ...  # fmt: skip

    @overload
    def embed_chunks(
        self, texts: Iterable[str], *, chunks: str | Sequence[Spans], overlap: int | None = ...,
        batch_tokens: int | None = ..., prompt_name: str | None = ..., prompt: str | None = ...,
    ) -> list[TextChunks]: ...  # fmt: skip

    def embed_chunks(
        self,
        texts: str | Iterable[str],
        *,
        chunks: str | Spans | Sequence[Spans],
        overlap: int | None = None,
        batch_tokens: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> TextChunks | list[TextChunks]:
        """Late chunking: encode a text as a whole, and embed each of its chunks as the mean of the chunk's tokens.

        The bundle must pool by mean: token embeddings (``feature-extraction``), or a sentence model of mean pooling,
        whose normalization is applied. A single chunk of the whole text equals :meth:`embed`: a chunk with the first
        token of the text includes the tokens before it (a special token, and the prompt if :meth:`embed` pools it), a
        chunk with the last token includes the special token after it.

        A text of more than `max_seq_length` tokens is encoded in overlapping macro chunks, each with special tokens and
        the prompt. Tokens in the first half of an overlap come from the earlier macro chunk, the others from the later
        one.

        Args:
            texts: a text, or several.
            chunks: ``"tokens:256"`` for chunks of 256 tokens, or any number; ``"sentences"``, see
                :mod:`hdruntime.text.sentences`; or (start, end) of each chunk, in any order, in characters without the
                prompt, end exclusive; for several texts a list per text. A token belongs to every chunk that has one of
                its characters.
            overlap: tokens that consecutive macro chunks share; None for 256, or a quarter of `max_seq_length` if less.
            batch_tokens, prompt_name, prompt: see :meth:`embed`.

        Returns:
            the chunks of the text, or of each text; empty for a text without tokens.

        Raises:
            InputError: the bundle does not pool by mean, a chunk is not within its text or has no token, or ``overlap``
                is too large.
            NonFiniteOutputError, BackendError: see :meth:`embed`.
        """
        whole = checked_texts(texts, name="texts", may_be_one=True)
        rule = chunks if isinstance(chunks, str) else None
        spans: list[Any] = [chunks]
        if rule is not None:
            spans = [None] * len(whole)
        elif not isinstance(texts, str):
            spans = list(several(chunks, name="chunks", of="chunks of each text", example="[[(0, 9)]]"))
        if len(spans) != len(whole):
            raise InputError(f"There are {len(whole)} texts, but chunks of {len(spans)}; give chunks of each.")
        inputs = [Text(text=text, spans=text_spans) for text, text_spans in zip(whole, spans, strict=True)]
        stride = overlap_of(overlap, self.max_seq_length)
        encode_options = EncodeOptions.of(overflow=Overflow.SPLIT, stride=stride, batch_tokens=batch_tokens)
        task = ChunkEmbeddings(self.manifest, rule)
        answers: list[TextChunks] = answers_of(
            self, task, inputs, encode_options, prompt=self._prompt(prompt_name, prompt)
        )
        return answers[0] if isinstance(texts, str) else answers

    def entities(
        self,
        texts: Iterable[str],
        *,
        aggregation: Aggregation | str = Aggregation.NONE,
        overflow: Overflow | str = Overflow.ERROR,
        stride: int = 0,
        batch_tokens: int | None = None,
    ) -> list[list[Entity]]:
        """Find entities in texts, with a bundle of the task token-classification.

        Entities are grouped as in transformers' pipeline. In a split text each token has its label from the chunk with
        most of its context, and an entity across a chunk boundary is one entity; transformers' pipeline makes two of it
        with ``stride=0``.

        Args:
            texts, stride, batch_tokens: see :meth:`embed`.
            aggregation: grouping of tokens: ``none``, ``simple``, ``first``, ``max`` or ``average``.
            overflow: ``error``, ``truncate`` or ``split``; see :meth:`embed`.

        Returns:
            a list of entities per text, in text order.

        Raises:
            InputError: see :meth:`embed`.
        """
        self._check_task(Entities, method="entities")
        aggregation = checked_choice(Aggregation, aggregation, option="aggregation")
        task = Entities(self.manifest, self.tokenizer.whole, aggregation)
        encode_options = EncodeOptions.of(overflow=overflow, stride=stride, batch_tokens=batch_tokens)
        return answers_of(self, task, _texts(texts), encode_options)

    def answers(
        self,
        questions: Iterable[str],
        contexts: Iterable[str],
        *,
        top_k: int = 1,
        handle_impossible_answer: bool = False,
        max_answer_tokens: int = MAX_ANSWER_TOKENS,
        overflow: Overflow | str = Overflow.ERROR,
        stride: int = 0,
        batch_tokens: int | None = None,
    ) -> list[list[Answer]]:
        """Answer questions from their contexts, with a bundle of the task question-answering.

        See :mod:`hdruntime.text.answers` for scores, and for differences from transformers' pipeline.

        Args:
            questions: questions of at least one token.
            contexts: a context per question, which may be empty.
            top_k: maximum number of answers per question.
            handle_impossible_answer: whether the empty answer is a candidate.
            max_answer_tokens: maximum tokens of an answer.
            overflow: ``error``, ``truncate``, or ``split``, which runs the question with each chunk of the context.
            stride: number of tokens that consecutive chunks share; at least `max_answer_tokens` keeps every answer
                within a chunk.
            batch_tokens: see :meth:`embed`.

        Returns:
            a list of 1 to ``top_k`` answers per question, best first.

        Raises:
            InputError: see :meth:`embed`; also for a question without tokens.
        """
        options = AnswerOptions(
            top_k=top_k, handle_impossible_answer=handle_impossible_answer, max_answer_tokens=max_answer_tokens
        )
        self._check_task(QuestionAnswers, method="answers")
        options.check()
        encode_options = EncodeOptions.of(overflow=overflow, stride=stride, batch_tokens=batch_tokens)
        first, second = checked_texts(questions, name="questions"), checked_texts(contexts, name="contexts")
        if len(first) != len(second):
            raise InputError(
                f"There are {len(first)} questions but {len(second)} contexts; pass a context per question."
            )
        pairs = [Text(text=question, text_pair=context) for question, context in zip(first, second, strict=True)]
        return answers_of(self, QuestionAnswers(self.manifest, options), pairs, encode_options, name="questions")

    def rank(
        self,
        query: str,
        documents: Iterable[str],
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
        """Rank documents by their score with a query, with a reranker: a text-classification bundle with one label.

        Args:
            query: first text of each pair.
            documents: second texts, which may be empty.
            top_k: maximum number of results; None for all documents.
            return_documents: whether results have the texts of the documents.
            overflow: handling of pairs of more than `max_seq_length` tokens: ``error``, ``truncate``, which truncates
                the longer text, or ``split``, which scores each chunk of the document with the whole query.
            split_pooling: combines the logits of chunks: ``max``, or ``mean``, weighted by tokens.
            stride, batch_tokens: see :meth:`embed`.
            prompt_name, prompt: prompt before the query; see :meth:`embed`.

        Returns:
            a dict per document, by descending score: ``corpus_id``, its index in ``documents``, ``score``, as
            `hdexport run` writes it, and, with ``return_documents``, ``text``.

        Raises:
            InputError: see :meth:`embed`; also for a bundle that is not a reranker.
        """
        check_reranker(self.manifest)
        task = TextClassification(self._bundle)
        encode_options = EncodeOptions.of(
            overflow=overflow, stride=stride, split_pooling=split_pooling, batch_tokens=batch_tokens
        )
        prompt = self._prompt(prompt_name, prompt)

        def scores_of(pairs: list[tuple[str, str]]) -> FloatArray:
            inputs = [Text(text=first, text_pair=second) for first, second in pairs]
            return task.scores(answers_of(self, task, inputs, encode_options, prompt=prompt, name="documents"))

        return ranked_documents(
            query,
            documents,
            tokenizer=self.tokenizer,
            encode_options=encode_options,
            prompt=prompt,
            scores_of=scores_of,
            top_k=top_k,
            return_documents=return_documents,
        )

    def _prompt(self, name: str | None, prompt: str | None) -> str:
        return chosen_prompt(*prompts_of(self.manifest), name=name, prompt=prompt)

    def _check_task(self, task: type[TextTask], *, method: str) -> None:
        if self.manifest.task != task.name:
            raise InputError(
                f"session.{method} is for {task.name}, and the bundle's task is {self.manifest.task}.",
                hint=(
                    f"Use a method for {self.manifest.task}, or build a bundle with ",
                    Setting("task", task.name, command="build"),
                    ".",
                ),
            )


def _texts(texts: Iterable[str]) -> list[Text]:
    return [Text(text=text) for text in checked_texts(texts, name="texts")]
