"""A task: what its bundles contain, the texts that it reads, its answer to each text, and who gives that answer how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
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
    """A text that a task reads, or a pair of texts; or `input_ids` in their place.

    `spans` are those of the text's chunks, for late chunking; their values are not checked. Every row of a job
    is a text, and a frozen dataclass takes ten times as long to make as a Struct.
    """

    text: str = ""
    text_pair: str | None = None
    input_ids: list[int] | None = None
    spans: Spans | None = None

    @property
    def characters(self) -> int:
        """Length of the text, or of both; an id counts as four, the characters of a token in English."""
        return len(self.text) + len(self.text_pair or "") if self.input_ids is None else 4 * len(self.input_ids)


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options that only some tasks have.

    Attributes:
        aggregation: how tokens are grouped to entities, for token-classification; None: one entity per token.
        answers: how many answers a question gets, and which, for question-answering; None: the best one. With more than
            one, the output has a list of them.
        late_chunking: how texts are cut into chunks, each of which is a row of the output: ``tokens:256`` (any number),
            ``sentences``, or the column with a list of (start, end) in characters; None: a text is one row. See
            :meth:`hdruntime.Session.embed_chunks`.
        max_active_dims: most values of a sparse vector that are kept, for sparse-similarity; None: the model's number,
            mostly all.
        prompt_name: name of the model's prompt before every text; None for the model's default, if it has one. For
            token-similarity, ``query`` says that the texts are queries; they are documents otherwise.
    """

    aggregation: Aggregation | None = None
    answers: AnswerOptions | None = None
    late_chunking: str | None = None
    max_active_dims: int | None = None
    prompt_name: str | None = None


class Pairs(str, Enum):
    """Whether a task reads a second text."""

    REFUSED = "refused"
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
        name: of the class.
        library: of the class in sentence-transformers.
        texts: what it reads, in the plural.
        call: an example; None where the library's answer is another than a session's.
    """

    name: str
    library: str
    texts: str
    call: str | None


class TextTask:
    """A task with a bundle: all that sessions, encoders, jobs and servers ask of it. Each task has a subclass.

    Attributes:
        encoder: its class with the interface of sentence-transformers; None without one.
        job_options: names of the `TaskOptions` that it alone has -> how each is given, as the begin of a sentence.
        needs_text: whether its answers are places in a text, which rows of ids do not show.
        reads_offsets: whether it reads `offsets` or `sequence_ids` of encodings, which take the tokenizer's time.
        outputs: names of the outputs that are read; all of `output_axes` unless it says otherwise.
        pairs: whether a text has a second text.
        splits: whether chunks that are run by themselves give a text's answer, small enough to combine.
        streams: whether the outputs of all tokens of a streamed document are small enough to join.
        pools_streams: whether a streamed document has one vector, pooled of all its tokens as they arrive.
        split_pooling: combines the chunks' outputs of a text, unless another pooling is asked for.
        pair_pooling: the same for the chunks of a pair's second text.
        prompts: whether a text may have a prompt; ids include it already.
        default_prompt_name: of the prompt unless another is asked for; None for the model's default.
        role: whether its texts are queries or documents, which may have a length of their own; None for neither.
        reads_by_prompt_name: whether the prompt's name says more than the prompt: queries are read in a way of their
            own.
        texts, columns: for tasks on pairs, the two texts, and examples of their columns.
    """

    name: ClassVar[Task]
    encoder: ClassVar[Encoder | None] = None
    job_options: ClassVar[Mapping[str, str]] = {}
    needs_text: ClassVar[bool] = False
    reads_offsets: ClassVar[bool] = True

    outputs: tuple[str, ...]
    pairs: Pairs = Pairs.REFUSED
    splits: bool = True
    streams: bool = True
    pools_streams: bool = False
    split_pooling: ChunkPooling = SplitPooling.MEAN
    pair_pooling: SplitPooling = SplitPooling.MEAN
    prompts: bool = False
    default_prompt_name: str | None = None
    reads_by_prompt_name: bool = False
    role: Role | None = None
    texts: str = "the two of a pair"
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

    @classmethod
    def described(cls, manifest: Manifest) -> Iterator[tuple[str, str]]:
        """Lines of `hdexport inspect`, name and value, that say what the bundle's answers are."""
        settings = manifest.sentence
        if settings is None:
            return
        steps = [
            *settings.pooling,
            *(["dense"] if settings.dense else []),
            *(["normalised"] if settings.normalize else []),
        ]
        if settings.truncate_dim is not None:
            steps.append(f"{settings.truncate_dim} dimensions kept")
        if settings.max_active_dims is not None:
            steps.append(f"{settings.max_active_dims} largest weights kept")
        own = settings.multi_vector
        of_tokens = ["of tokens"] if own is not None or not steps else []
        similarity = settings.similarity if own is None else own.similarity
        yield "vectors", f"{', '.join([*of_tokens, *steps])}; similarity {similarity}"
        if settings.text_template is not None:
            whose = "SentenceEncoder's texts" if manifest.template is None else "texts"
            yield "", f"{whose} are written in the checkpoint's chat template"

    @classmethod
    def pipeline(cls) -> str | None:
        """The task's name on the Hugging Face Hub; None where it has none."""
        return cls.name

    @classmethod
    def vectors_as(cls, manifest: Manifest) -> tuple[tuple[str, ...], bool] | None:
        """The poolings of the bundle's vectors, and whether their length is 1; None where the bundle does not say."""
        own = manifest.sentence
        return None if own is None else (own.pooling, own.normalize)

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
