"""A batch job's facts about a task: its result columns, and their values for a row."""

from __future__ import annotations

__all__ = ["Outputs", "Pairs", "ResultOptions", "TaskResults", "Values"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hdruntime.jobs.rows import Row
from hdruntime.text.answers import AnswerOptions
from hdruntime.text.chunking import LateChunks
from hdruntime.text.entities import Aggregation
from hdruntime.text.splitting import PiecePooling, SplitEncoding, SplitPooling
from hdruntime.text.tokenization import Encoding, Overflow

Outputs = Mapping[str, npt.NDArray[np.float32]]
Values = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Options that only the results of some tasks have.

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


@dataclass(frozen=True, kw_only=True)
class TaskResults:
    """A task as a job needs it.

    Attributes:
        outputs: names of the outputs that are read.
        pairs: whether a row has a second text.
        fields: result columns, Arrow fields.
        of_piece: outputs of a row or piece, without batch axis -> the needed part, kept until all pieces have run.
        values: (that part, combined from all pieces; the encoding of the row; the row) -> a value for each field;
            raises InputError for a row that does not fit the task. None with `chunks` or `values_of_pieces`.
        values_of_pieces: in place of `values`, for results that do not come from combined outputs: (the row's pieces;
            the parts of each; the row) -> a value for each field.
        chunks: for late chunking, (the row's pieces; the row; the prompt) -> its chunks, to which the output of every
            piece is added; raises InputError for a row without chunks.
        splits: whether pieces that are run by themselves give a text's values, small enough to combine.
        streams: whether the outputs of all tokens of a streamed document are small enough to join.
        split_pooling: combines the pieces' results of a text, unless another pooling is asked for.
        pair_pooling: the same for the pieces of a pair's second text.
        prompts: whether a text may have a prompt; ids include it already.
        default_prompt_name: of the prompt unless another is asked for; None for the model's default.
        reads_by_prompt_name: whether the prompt's name says more than the prompt: queries are read in a way of their
            own.
        encode: in place of the session's tokenizer: (texts, overflow, the prompt) -> their tokens.
        texts, columns: for tasks on pairs, the texts of a row, and examples of their columns.
    """

    outputs: tuple[str, ...]
    pairs: Pairs
    fields: tuple[pa.Field, ...]
    values: Callable[[Outputs, Encoding, Row], Values] | None
    values_of_pieces: Callable[[SplitEncoding, Sequence[Outputs], Row], Values] | None = None
    chunks: Callable[[SplitEncoding, Row, str], LateChunks] | None = None
    of_piece: Callable[[Outputs], Outputs] = lambda outputs: outputs
    splits: bool = True
    streams: bool = True
    split_pooling: PiecePooling = SplitPooling.MEAN
    pair_pooling: SplitPooling = SplitPooling.MEAN
    prompts: bool = False
    default_prompt_name: str | None = None
    reads_by_prompt_name: bool = False
    encode: Callable[[Sequence[str], Overflow, str], list[Encoding]] | None = None
    texts: str = "a question and its context"
    columns: tuple[str, str] = ("question", "context")
