"""The task of a bundle, with its options checked."""

from __future__ import annotations

from collections.abc import Callable

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.tasks.answers import QuestionAnswers
from hdruntime.tasks.classification import TextClassification
from hdruntime.tasks.embedding import Embedding
from hdruntime.tasks.entities import Entities
from hdruntime.tasks.fill_mask import MaskFillings
from hdruntime.tasks.late_chunks import ChunkEmbeddings, column_of_spans
from hdruntime.tasks.sparse_vectors import SparseVectors
from hdruntime.tasks.task import Pairs, TaskOptions, TextTask
from hdruntime.tasks.text_scores import TextScores
from hdruntime.tasks.token_vectors import TokenVectors
from hdruntime.text.answers import AnswerOptions
from hdruntime.text.entities import Aggregation
from hdruntime.text.token_vectors import Side
from hdruntime.text.tokenization import read_tokenizer


def task_of_bundle(bundle: Bundle, options: TaskOptions | None = None, *, tokenized: bool = False) -> TextTask:
    """The task as a job runs it.

    Args:
        bundle: the bundle that will run.
        options: default `TaskOptions()`.
        tokenized: rows are ids, without a text.

    Raises:
        InputError: the bundle lacks a tokenizer or mask token that the task needs, the task needs a text, or an option
            is for another; or late chunking needs a text, or another bundle.
    """
    name, options = bundle.manifest.task, options or TaskOptions()
    if tokenized and name in _TASKS_ON_TEXT:
        raise InputError(f"The bundle's task is {name}, whose results are places in a text.\nGive it text columns.")
    if not tokenized and bundle.manifest.tokenizer is None:
        raise InputError(
            f"The bundle {bundle.path} has no tokenizer, so it cannot read text.\n"
            "Rebuild it from a checkpoint with a tokenizer.json, or give ids: --input-ids-column."
        )
    for option, (described, its_task) in _TASK_OF_OPTION.items():
        if getattr(options, option) is not None and name != its_task:
            raise InputError(
                f"{described} for {its_task}, and the bundle's task is {name}.\n"
                f"Leave {'it' if described.endswith(' is') else 'them'} out."
            )
    if options.late_chunking is not None:
        return _late_chunks(bundle, options.late_chunking, tokenized=tokenized)
    task = _TASKS[name](bundle, options)
    # Ids include the prompt.
    task.prompts = task.prompts and not tokenized
    return task


def check_pairs(task: TextTask, *, has_pair: bool, has_ids: bool, pair_option: str = "--text-pair-column") -> None:
    """Refuse columns that do not fit the task.

    Args:
        task: the task.
        has_pair: whether rows have a second text.
        has_ids: whether rows are ids.
        pair_option: names the column of the second text, for messages.

    Raises:
        InputError: a pair of texts is missing or superfluous.
    """
    text_option, name = pair_option.replace("-pair", "").replace("_pair", ""), task.manifest.task
    if has_pair and has_ids:
        raise InputError(f"A row has texts or ids, not both.\nLeave out {pair_option}.")
    if task.pairs is Pairs.REQUIRED and not has_pair and not has_ids:
        raise InputError(
            f"The bundle's task is {name}: a row needs two texts, {task.texts}.\n"
            f"Name the columns of both, e.g.: {text_option} {task.columns[0]} {pair_option} {task.columns[1]}"
        )
    if task.pairs is Pairs.REFUSED and has_pair:
        raise InputError(f"The bundle's task is {name}, which reads one text.\nLeave out {pair_option}.")


def _late_chunks(bundle: Bundle, chunks: str, *, tokenized: bool) -> TextTask:
    if tokenized:
        raise InputError("--late-chunking needs texts, not ids: a chunk has characters.\nLeave out --input-ids-column.")
    return ChunkEmbeddings(bundle.manifest, chunks if column_of_spans(chunks) is None else None, some=True)


def _entities(bundle: Bundle, options: TaskOptions) -> TextTask:
    info = bundle.manifest.tokenizer
    assert info is not None, "task_of_bundle checks it"
    return Entities(bundle.manifest, read_tokenizer(bundle.file(info.file)), options.aggregation or Aggregation.NONE)


def _token_vectors(bundle: Bundle, options: TaskOptions) -> TextTask:
    """Documents are read as far as the bundle serves; queries as far as the model reads them."""
    side = Side.QUERY if options.prompt_name == Side.QUERY.value else Side.DOCUMENT
    return TokenVectors(bundle.manifest, side, as_far_as_model=True)


_TASKS: dict[str, Callable[[Bundle, TaskOptions], TextTask]] = {
    "feature-extraction": lambda bundle, options: Embedding(bundle.manifest),
    "sentence-similarity": lambda bundle, options: Embedding(bundle.manifest),
    "sparse-similarity": lambda bundle, options: SparseVectors(bundle.manifest, options.max_active_dims),
    "token-similarity": _token_vectors,
    "text-classification": lambda bundle, options: TextClassification(bundle),
    "fill-mask": lambda bundle, options: MaskFillings(bundle),
    "text-scoring": lambda bundle, options: TextScores(bundle.manifest),
    "token-classification": _entities,
    "question-answering": lambda bundle, options: QuestionAnswers(bundle.manifest, options.answers or AnswerOptions()),
}

_TASK_OF_OPTION = {
    "aggregation": ("--aggregation is", "token-classification"),
    "answers": ("--top-k and --handle-impossible-answer are", "question-answering"),
    "max_active_dims": ("--max-active-dims is", "sparse-similarity"),
}
"""Option of `TaskOptions` -> how it is given, as the begin of a sentence, and the one task that has it."""

_TASKS_ON_TEXT = ("token-classification", "question-answering")
"""Tasks whose results are places in a text, which ids do not show."""
