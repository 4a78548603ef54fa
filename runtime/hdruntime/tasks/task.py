"""A task: the texts that it reads, and its answer to each text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

from hdruntime.arrays import FloatArray
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.task_formats import format_of
from hdruntime.text.answers import AnswerOptions
from hdruntime.text.chunking import Spans
from hdruntime.text.encoding import Encoding, Overflow
from hdruntime.text.entities import Aggregation
from hdruntime.text.lengths import Role
from hdruntime.text.splitting import ChunkPooling, SplitEncoding, SplitPooling, merged
from hdruntime.text.tokenization import TextTokenizer

if TYPE_CHECKING:
    import pyarrow as pa

Outputs = Mapping[str, FloatArray]
Values = dict[str, object]


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A text or a pair of texts, or their `input_ids`.

    `spans` are the spans of the text's chunks, for late chunking, or the rule that makes them (``tokens:256``); their
    values are not checked. Every row of a job is a text, and making a frozen dataclass takes ten times as long as
    making a Struct.
    """

    text: str = ""
    text_pair: str | None = None
    input_ids: list[int] | None = None
    spans: Spans | str | None = None

    @property
    def characters(self) -> int:
        """Characters of the text, or of both texts; an id counts as four, the characters of a token in English."""
        return len(self.text) + len(self.text_pair or "") if self.input_ids is None else 4 * len(self.input_ids)


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options that only some tasks have.

    Attributes:
        aggregation: grouping of tokens to entities, for token-classification; None: one entity per token.
        answers: number and kind of a question's answers, for question-answering; None: the best answer. With several
            answers, the output has a list.
        late_chunking: chunks of a text, each of which is a row of the output: ``tokens:256`` (any number),
            ``sentences``, or the column with a list of (start, end) in characters; None: a text is one row. See
            :meth:`hdruntime.Session.embed_chunks`.
        max_active_dims: maximum values of a sparse vector that are kept, for sparse-similarity; None: the model's
            number, which is all values for most models.
        returns: kinds of embeddings of a text, for hybrid-similarity: ``dense``, ``sparse`` and ``colbert``; None for
            ``dense``.
        prompt_name: name of the model's prompt before every text; None for the model's default prompt, if it has one.
            For token-similarity, ``query`` means that the texts are queries; without it they are documents.
    """

    aggregation: Aggregation | None = None
    answers: AnswerOptions | None = None
    late_chunking: str | None = None
    max_active_dims: int | None = None
    returns: tuple[str, ...] | None = None
    prompt_name: str | None = None


class Pairs(StrEnum):
    """Whether a task reads a second text."""

    REJECTED = "rejected"
    ALLOWED = "allowed"
    REQUIRED = "required"


class PendingText(Protocol):
    """A text whose chunks are being run."""

    def add(self, chunk: int, outputs: Outputs) -> None:
        """Add the outputs of a chunk, without batch axis and padding; each chunk is added once, in any order."""

    def finished(self) -> Any:
        """The task's answer, when every chunk was added; an InputError if the text does not fit the task."""


class Encoder(NamedTuple):
    """The class of hdruntime that runs a task's bundles behind the interface of sentence-transformers.

    Attributes:
        name: name of the class.
        library: name of the class of sentence-transformers.
        texts: what the class reads, in the plural.
        call: an example; None where sentence-transformers returns something else than a session does.
    """

    name: str
    library: str
    texts: str
    call: str | None


class TextTask:
    """A task with a bundle: the texts that it reads, and its answers. Each task has a subclass.

    Attributes:
        name: the task's name in the manifest.
        encoder: the task's class with the interface of sentence-transformers, or None.
        job_options: fields of `TaskOptions` that no other task has.
        needs_text: whether answers are places in a text, which rows of ids do not have.
        reads_offsets: whether answers need `offsets` or `sequence_ids` of encodings, which take the tokenizer's time.
        outputs: names of the outputs that are read; by default all of the task's format.
        pairs: whether a text has a second text.
        splits: whether an answer can be made of chunks that run separately, with outputs that are small enough to keep.
        streams: whether the outputs of all tokens of a streamed document are small enough to join.
        pools_streams: whether a streamed document has one vector, which is pooled of all tokens as they arrive.
        split_pooling: pooling of the outputs of a text's chunks, unless the caller chooses one.
        pair_pooling: pooling of the outputs of a pair's chunks, unless the caller chooses one.
        prompts: whether a text may have a prompt; ids include the prompt already.
        role: whether texts are queries or documents, which may have different lengths and prompts; None for neither.
        columns: names of the two texts of a pair, as a job's input may have them.
    """

    name: ClassVar[Task]
    encoder: ClassVar[Encoder | None] = None
    job_options: ClassVar[tuple[str, ...]] = ()
    needs_text: ClassVar[bool] = False
    reads_offsets: ClassVar[bool] = True

    outputs: tuple[str, ...]
    pairs: Pairs = Pairs.REJECTED
    splits: bool = True
    streams: bool = True
    pools_streams: bool = False
    split_pooling: ChunkPooling = SplitPooling.MEAN
    pair_pooling: SplitPooling = SplitPooling.MEAN
    prompts: bool = False
    role: Role | None = None
    columns: tuple[str, str] = ("text", "text_pair")

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        if not hasattr(self, "outputs"):
            self.outputs = tuple(format_of(manifest.task).output_axes)

    @classmethod
    def of_job(cls, bundle: Bundle, options: TaskOptions) -> TextTask:
        """The task as a job runs it; the bundle has a tokenizer where the task `needs_text`."""
        return cls(bundle.manifest)

    @classmethod
    def encoder_of(cls, manifest: Manifest) -> Encoder | None:
        """The `encoder` that runs the bundle; None if none does."""
        return cls.encoder

    def fields(self) -> tuple[pa.Field, ...]:
        """The columns of a job."""
        raise NotImplementedError

    def values(self, answer: Any) -> Values:
        """A value for each column."""
        raise NotImplementedError

    def rows(self, answer: Any) -> list[Values]:
        """The values of each row that a job writes of an answer."""
        return [self.values(answer)]

    def encode(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[str],
        pairs: Sequence[str] | None,
        *,
        overflow: Overflow,
        prompt: str,
    ) -> list[Encoding]:
        """The tokens of texts, or pairs; see :meth:`TextTokenizer.encode`."""
        # A split needs to know which tokens are a text's own.
        offsets = self.reads_offsets or overflow is Overflow.SPLIT
        return tokenizer.encode(texts, pairs, overflow=overflow, prompt=prompt, offsets=offsets)

    def begin(self, split: SplitEncoding, text: Text, *, prompt: str, pooling: SplitPooling | None) -> PendingText:
        """Begin a text, whose chunks' outputs a `pooling` combines, or by default the task's own."""
        default = self.split_pooling if text.text_pair is None else self.pair_pooling
        return _PendingChunks(self, split, text, pooling or default)

    def part(self, outputs: Outputs) -> Outputs:
        """The needed part of a chunk's outputs, which is kept until all chunks have run."""
        return outputs

    def answer(self, split: SplitEncoding, parts: Sequence[Outputs], text: Text, pooling: ChunkPooling) -> Any:
        """The answer to a text from each chunk's `part`: [chunks]; `pooling` combines outputs without a tokens axis."""
        whole = merged(split, parts, specs=self.manifest.outputs, pooling=pooling)
        return self.answer_of_whole(whole, split.whole, text)

    def answer_of_whole(self, outputs: Outputs, encoding: Encoding, text: Text) -> Any:
        """The answer to a text from its outputs, combined from all chunks."""
        raise NotImplementedError


class _PendingChunks:
    def __init__(self, task: TextTask, split: SplitEncoding, text: Text, pooling: ChunkPooling) -> None:
        self._task, self._split, self._text, self._pooling = task, split, text, pooling
        self._parts: dict[int, Outputs] = {}

    def add(self, chunk: int, outputs: Outputs) -> None:
        self._parts[chunk] = self._task.part(outputs)

    def finished(self) -> Any:
        parts = [self._parts[chunk] for chunk in range(len(self._split.chunks))]
        return self._task.answer(self._split, parts, self._text, self._pooling)
