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

_MOST_THREADS = 1024
"""More than the cores of any machine; a backend would try to start any number of threads."""


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
        bundle: its directory; ``organisation/name[@revision]`` on the Hugging Face Hub, of which only the backend's
            files are downloaded, see `hdruntime.hub`; or the result of :func:`open_bundle`.
        backend: one of :class:`Backend`, which runs or raises; ``auto`` takes the first that can run here, engines
            first, then ONNX Runtime on the GPU, then on the CPU OpenVINO where it was measured to be faster, else ONNX
            Runtime; the log has the choice and the reason. An unused GPU causes a warning.
        threads: CPU threads of one run; None: one for each core that the process may use, by its affinity and its
            container's quota.
        precision: one of :class:`Precision`, for a CPU. ``auto`` is ``bfloat16`` where the CPU computes in
            it, the bundle is of half precision and OpenVINO runs it, else ``float32``.
        device: ``cpu``, or ``cuda`` or ``cuda:N`` for the NVIDIA GPU of that number, leave only the backends that run
            there; or OpenVINO's name of a device, for example ``GPU`` or ``NPU``. None: any.
        rebuild: if no engine of the bundle runs on this machine's GPU, build one in place first. It takes minutes, and
            needs the packages for building.
        gpu: options of backends on a GPU, by default ``GpuOptions()``.
        max_seq_length: tokens to which texts are truncated, and chunks of split texts; ``"model"`` for the model's own
            length, ``"bundle"`` for the longest that the bundle runs. None: the value of ``hdexport build --max-len``,
            or else the model's own length.

    Raises:
        BundleError: the bundle is missing, damaged or of another format.
        BackendError: the backend cannot run here, or cannot run this bundle.
        InputError: the backend or the precision is unknown, ``threads`` is not 1 to 1024, or the bundle does not run
            texts of ``max_seq_length`` tokens.
    """
    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise InputError(
            f"threads is {threads}; it must be 1 to {_MOST_THREADS}.",
            hint="Leave it out for one per core that the process may use.",
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

    Safe to use from several threads. If one closes it, the others get their results or a BackendError. In a process
    that was forked after loading (``os.fork``, multiprocessing's start method ``fork``) it raises BackendError, because
    a fork copies neither threads nor GPU contexts. Load the bundle in every process. A fork of a process that has run
    OpenVINO or used CUDA loads it with the backend onnxruntime alone.
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
        """One vector per text: the bundle's ``sentence_embedding``, else the mean of its token vectors.

        Args:
            texts: may be empty strings.
            batch_tokens: most tokens per batch; a longer text runs alone. None: the backend's default.
            overflow: for a text of too many tokens: ``error``, ``truncate``, or ``split``, which embeds it in chunks.
                ``recur`` streams every text, see :meth:`stream`, and pools all its tokens as one long text's.
            stride: tokens that a chunk of a split text repeats from the previous chunk.
            split_pooling: combines the chunks' vectors: ``mean``, weighted by tokens, or ``max``. If all of them have
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
        """One sparse vector per text, for bundles of the task sparse-similarity.

        Args:
            texts: may be empty strings.
            max_active_dims: most values of a vector that are kept, the largest; None for the model's number, mostly
                all.
            batch_tokens, stride, prompt_name, prompt: as of :meth:`embed`.
            overflow: ``error``, ``truncate``, or ``split``: a token then has its largest weight in any of the
                chunks, or the sum of its weights, as the model pools.

        Returns:
            [texts], in order.

        Raises:
            InputError: the bundle's task is another one, it has no tokenizer, or a text does not fit.
            NonFiniteOutputError, BackendError: as of :meth:`embed`.
        """
        self._check_task(SparseVectors, method="embed_sparse")
        task = SparseVectors(self.manifest, max_active_dims)
        encode_options = EncodeOptions.of(overflow=overflow, stride=stride, batch_tokens=batch_tokens)
        vectors: list[SparseVector] = answers_of(
            self, task, _texts(texts), encode_options, prompt=self._prompt(prompt_name, prompt)
        )
        return vectors

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
        """Late chunking: each text is encoded whole, and each of its chunks is the mean of its own tokens' states.

        For bundles whose vectors are such means: of token vectors (``feature-extraction``), or of a sentence model of
        mean pooling, whose normalisation follows. One chunk of a whole text has the vector of :meth:`embed`: a chunk
        with the text's first token includes the tokens before it (a special token, and the prompt where :meth:`embed`
        pools it), a chunk with the last one includes the special token after it.

        A text of more than `max_seq_length` tokens is encoded in overlapping macro chunks of so many tokens, each with
        special tokens and the prompt. Tokens in the first half of an overlap have their states from the earlier macro
        chunk, the others from the later one.

        Args:
            texts: one text, or several.
            chunks: ``"tokens:256"``, each of so many tokens; ``"sentences"``, see :mod:`hdruntime.text.sentences`; or
                the (start, end) of each chunk of the text, a list of these for several texts, in characters without
                the prompt, end exclusive, in any order. A token belongs to every chunk with one of its characters.
            overlap: tokens that consecutive macro chunks share; None: 256, or a quarter of `max_seq_length` if less.
            batch_tokens, prompt_name, prompt: as in :meth:`embed`.

        Returns:
            the chunks of the text, or of each text; none for a text without tokens.

        Raises:
            InputError: the bundle's vectors are not such means, it has no tokenizer, a given chunk is not within its
                text or has no token, or ``overlap`` leaves no new token for a macro chunk.
            NonFiniteOutputError: a state is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
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
        """The entities of every text, for bundles of token-classification.

        Entities are grouped as by transformers' pipeline. A text that is split is one text: each token has its label
        from the chunk in which it sees most of the text, and an entity on both sides of a chunk's border is one entity;
        transformers' pipeline makes two of it where its ``stride`` is 0.

        Args:
            texts: may be empty strings.
            aggregation: how tokens are grouped: ``none``, ``simple``, ``first``, ``max`` or ``average``.
            overflow: for a text of too many tokens: ``error``, ``truncate``, or ``split``.
            stride: tokens that a chunk of a split text repeats from the previous chunk.
            batch_tokens: as of :meth:`embed`.

        Returns:
            one list per text, in order, of its entities in order.

        Raises:
            InputError: the bundle's task is another one, it has no tokenizer, or a text does not fit.
            NonFiniteOutputError: a logit is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
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
        """The best answers to questions, each from its context, for bundles of question-answering.

        See :mod:`hdruntime.text.answers` for scores, and for differences to Hugging Face's pipeline.

        Args:
            questions: with a token each.
            contexts: one for each question; may be empty strings.
            top_k: at most so many answers to a question.
            handle_impossible_answer: whether the empty answer is one.
            max_answer_tokens: the longest answer.
            overflow: for a pair of too many tokens: ``error``, ``truncate``, or ``split``, which runs the question with
                every chunk of the context.
            stride: tokens that a chunk of a split context repeats; with `max_answer_tokens`, no answer is cut.
            batch_tokens: as of :meth:`embed`.

        Returns:
            one list per question, in order: 1 to ``top_k`` answers, best first.

        Raises:
            InputError: the bundle's task is another one, it has no tokenizer, a pair does not fit, or a question has no
                token.
            NonFiniteOutputError: a logit is NaN or infinite.
            BackendError: the backend failed, or the session is closed.
        """
        options = AnswerOptions(
            top_k=top_k, handle_impossible_answer=handle_impossible_answer, max_answer_tokens=max_answer_tokens
        )
        self._check_task(QuestionAnswers, method="answers")
        options.check()
        encode_options = EncodeOptions.of(overflow=overflow, stride=stride, batch_tokens=batch_tokens)
        first, second = checked_texts(questions, name="questions"), checked_texts(contexts, name="contexts")
        if len(first) != len(second):
            raise InputError(f"There are {len(first)} questions but {len(second)} contexts; give one for each.")
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
        """Rank documents by a reranker's scores of each with a query: a bundle of text-classification with one label.

        Args:
            query: the first text of each pair.
            documents: the second texts; may be empty strings.
            top_k: most documents that are returned; None for all.
            return_documents: whether results have the documents' texts.
            overflow: for a pair of too many tokens: ``error``; ``truncate``, which cuts the end of the longer text; or
                ``split``, which cuts the document into chunks, each of which is read with the whole query.
            stride: tokens that a chunk of a split document repeats from the previous chunk.
            split_pooling: combines the chunks' logits: ``max``, or ``mean``, weighted by tokens.
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
