"""The results of each task in a batch job."""

from __future__ import annotations

__all__ = ["check_columns", "column_of_spans", "results_of_bundle"]

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.jobs.rows import Columns, Row
from hdruntime.jobs.sparse_results import sparse_similarity
from hdruntime.jobs.task_results import Outputs, Pairs, ResultOptions, TaskResults, Values
from hdruntime.jobs.token_vector_results import token_similarity
from hdruntime.text.answers import AnswerOptions, best_answers
from hdruntime.text.chunking import SENTENCES, LateChunking, LateChunks, tokens_per_chunk
from hdruntime.text.classes import activation_of, labels_of
from hdruntime.text.entities import Aggregation, EntityFinder
from hdruntime.text.logits import classification, fillings, text_score
from hdruntime.text.pooling import mean_over_tokens
from hdruntime.text.splitting import SplitEncoding, SplitPooling
from hdruntime.text.tokenization import Encoding, read_tokenizer

_SPAN = {"start": pa.int32(), "end": pa.int32()}
"""Columns of a place in a text, in characters."""


def results_of_bundle(bundle: Bundle, options: ResultOptions | None = None, *, tokenized: bool = False) -> TaskResults:
    """The columns of the bundle's task.

    Args:
        bundle: the bundle that will run.
        options: default `ResultOptions()`.
        tokenized: rows are ids, without a text.

    Raises:
        InputError: the bundle lacks a tokenizer or mask token that the task needs, the task needs a text, or an option
            is for another; or late chunking needs a text, or another bundle.
    """
    task, options = bundle.manifest.task, options or ResultOptions()
    if tokenized and task in _TASKS_ON_TEXT:
        raise InputError(f"The bundle's task is {task}, whose results are places in a text.\nGive it text columns.")
    if not tokenized and bundle.manifest.tokenizer is None:
        raise InputError(
            f"The bundle {bundle.path} has no tokenizer, so it cannot read text.\n"
            "Rebuild it from a checkpoint with a tokenizer.json, or give ids: --input-ids-column."
        )
    for name, (described, its_task) in _TASK_OF_OPTION.items():
        if getattr(options, name) is not None and task != its_task:
            raise InputError(
                f"{described} for {its_task}, and the bundle's task is {task}.\n"
                f"Leave {'it' if described.endswith(' is') else 'them'} out."
            )
    if options.late_chunking is not None:
        return _late_chunks(bundle, options.late_chunking, tokenized=tokenized)
    results = _RESULTS_OF_TASK[task](bundle, options)
    return dataclasses.replace(results, prompts=False) if tokenized else results


def check_columns(
    task: str, results: TaskResults, columns: Columns, *, pair_option: str = "--text-pair-column"
) -> None:
    """Refuse columns that do not fit the bundle's task.

    Raises:
        InputError: a pair of texts is missing or superfluous; the message names ``pair_option``.
    """
    has_pair = columns.text_pair is not None
    text_option = pair_option.replace("-pair", "").replace("_pair", "")
    if has_pair and columns.input_ids is not None:
        raise InputError(f"A row has texts or ids, not both.\nLeave out {pair_option}.")
    if results.pairs is Pairs.REQUIRED and not has_pair and columns.input_ids is None:
        raise InputError(
            f"The bundle's task is {task}: a row needs two texts, {results.texts}.\n"
            f"Name the columns of both, e.g.: {text_option} {results.columns[0]} {pair_option} {results.columns[1]}"
        )
    if results.pairs is Pairs.REFUSED and has_pair:
        raise InputError(f"The bundle's task is {task}, which reads one text.\nLeave out {pair_option}.")


def _feature_extraction(bundle: Bundle, options: ResultOptions) -> TaskResults:
    def of_piece(outputs: Outputs) -> Outputs:
        hidden_states = outputs["last_hidden_state"][np.newaxis]
        return {"sentence_embedding": mean_over_tokens(hidden_states, np.ones(hidden_states.shape[:2], np.int64))[0]}

    return dataclasses.replace(_embedding(bundle, "last_hidden_state"), of_piece=of_piece)


def _sentence_similarity(bundle: Bundle, options: ResultOptions) -> TaskResults:
    return _embedding(bundle, "sentence_embedding")


def _embedding(bundle: Bundle, output: str) -> TaskResults:
    def values(outputs: Outputs, encoding: Encoding, row: Row) -> Values:
        return {"embedding": outputs["sentence_embedding"]}

    width = _last_axis(bundle, output)
    kind = pa.list_(pa.float32(), -1 if width is None else width)
    fields = (pa.field("embedding", kind),)
    return TaskResults(outputs=(output,), pairs=Pairs.ALLOWED, fields=fields, values=values, prompts=True)


def _late_chunks(bundle: Bundle, chunks: str, *, tokenized: bool) -> TaskResults:
    if tokenized:
        raise InputError("--late-chunking needs texts, not ids: a chunk has characters.\nLeave out --input-ids-column.")
    chunking = LateChunking(bundle.manifest)
    is_rule = column_of_spans(chunks) is None

    def begin(split: SplitEncoding, row: Row, prompt: str) -> LateChunks:
        begun = chunking.begin(split, row.text, chunks if is_rule else row.spans or [], prompt=prompt)
        if not len(begun):
            raise InputError("The text has no chunk: it has no token, or no chunk is given for it.\nLeave it out.")
        return begun

    fields = (
        *pa.schema({"chunk": pa.int32(), **_SPAN}),
        pa.field("embedding", pa.list_(pa.float32(), bundle.manifest.hidden_size)),
    )
    return TaskResults(
        outputs=(chunking.output.name,), pairs=Pairs.REFUSED, fields=fields, values=None, chunks=begin, prompts=True
    )


def column_of_spans(late_chunking: str) -> str | None:
    """The column that an option of late chunking names; None if it is a rule.

    Raises:
        InputError: the option is empty, or a rule with an invalid number.
    """
    if not late_chunking:
        raise InputError("--late-chunking is empty.\nType tokens:256, sentences, or the name of a column.")
    is_rule = late_chunking == SENTENCES or tokens_per_chunk(late_chunking) is not None
    return None if is_rule else late_chunking


def _text_classification(bundle: Bundle, options: ResultOptions) -> TaskResults:
    labels, activation = labels_of(bundle.manifest), activation_of(bundle)

    def values(outputs: Outputs, encoding: Encoding, row: Row) -> Values:
        return vars(classification(outputs["logits"], labels, activation=activation))

    scores = pa.struct([(label, pa.float32()) for label in labels])
    fields = tuple(pa.schema({"label": pa.string(), "score": pa.float32(), "scores": scores}))
    return TaskResults(
        outputs=("logits",),
        pairs=Pairs.ALLOWED if bundle.manifest.sentence is None else Pairs.REQUIRED,
        fields=fields,
        values=values,
        pair_pooling=SplitPooling.MAX if len(labels) == 1 else SplitPooling.MEAN,
        prompts=True,
        texts="which its cross-encoder compares",
        columns=("query", "document"),
    )


def _token_classification(bundle: Bundle, options: ResultOptions) -> TaskResults:
    info = bundle.manifest.tokenizer
    assert info is not None, "results_of_bundle checks it"
    find = EntityFinder(
        bundle.manifest, read_tokenizer(bundle.file(info.file)), options.aggregation or Aggregation.NONE
    )

    def values(outputs: Outputs, encoding: Encoding, row: Row) -> Values:
        found = find(outputs["logits"], text=row.text, encoding=encoding)
        return {"entities": [dataclasses.asdict(entity) for entity in found]}

    entity = pa.struct({**_SPAN, "text": pa.string(), "label": pa.string(), "score": pa.float32()})
    fields = (pa.field("entities", pa.list_(entity)),)
    return TaskResults(outputs=("logits",), pairs=Pairs.REFUSED, fields=fields, values=values)


def _question_answering(bundle: Bundle, options: ResultOptions) -> TaskResults:
    wanted = options.answers or AnswerOptions()

    def values(split: SplitEncoding, outputs: Sequence[Outputs], row: Row) -> Values:
        assert row.text_pair is not None, "the job was planned without a context"
        found = [vars(answer) for answer in best_answers(split, outputs, context=row.text_pair, options=wanted)]
        return dict(found[0]) if wanted.top_k == 1 else {"answers": found}

    columns = {"answer": pa.string(), **_SPAN, "score": pa.float32()}
    if wanted.top_k > 1:
        columns = {"answers": pa.list_(pa.struct(columns))}
    return TaskResults(
        outputs=("start_logits", "end_logits"),
        pairs=Pairs.REQUIRED,
        fields=tuple(pa.schema(columns)),
        values=None,
        values_of_pieces=values,
    )


def _fill_mask(bundle: Bundle, options: ResultOptions) -> TaskResults:
    info = bundle.manifest.tokenizer
    if info is None or info.mask_token_id is None:
        raise InputError(f"The tokenizer of {bundle.path} has no mask token, so there is nothing to fill.")
    mask_token_id, tokenizer = info.mask_token_id, read_tokenizer(bundle.file(info.file))

    def spelling(token_id: int) -> str:
        # "Paris" instead of the vocabulary's "\u0120Paris".
        return str(tokenizer.decode([token_id], skip_special_tokens=False))

    def values(outputs: Outputs, encoding: Encoding, row: Row) -> Values:
        masks = fillings(outputs["logits"], mask_token_id=mask_token_id, spelling=spelling, encoding=encoding)
        return {"masks": [[dataclasses.asdict(filling) for filling in mask] for mask in masks]}

    filling = pa.struct([("token", pa.string()), ("token_id", pa.int32()), ("score", pa.float32())])
    fields = (pa.field("masks", pa.list_(pa.list_(filling))),)
    # Logits for the whole vocabulary at every token of a long text would fill the memory.
    return TaskResults(
        outputs=("logits",), pairs=Pairs.REFUSED, fields=fields, values=values, splits=False, streams=False
    )


def _text_scoring(bundle: Bundle, options: ResultOptions) -> TaskResults:
    def values(outputs: Outputs, encoding: Encoding, row: Row) -> Values:
        return vars(text_score(outputs["log_probabilities"]))

    columns = {"log_probability": pa.float64(), "perplexity": pa.float64(), "log_probabilities": pa.list_(pa.float32())}
    # The first token of a piece that is run by itself would have no score.
    return TaskResults(
        outputs=("log_probabilities",),
        pairs=Pairs.REFUSED,
        fields=tuple(pa.schema(columns)),
        values=values,
        splits=False,
    )


_RESULTS_OF_TASK: dict[str, Callable[[Bundle, ResultOptions], TaskResults]] = {
    "feature-extraction": _feature_extraction,
    "sentence-similarity": _sentence_similarity,
    "sparse-similarity": sparse_similarity,
    "token-similarity": token_similarity,
    "text-classification": _text_classification,
    "fill-mask": _fill_mask,
    "text-scoring": _text_scoring,
    "token-classification": _token_classification,
    "question-answering": _question_answering,
}

_TASK_OF_OPTION = {
    "aggregation": ("--aggregation is", "token-classification"),
    "answers": ("--top-k and --handle-impossible-answer are", "question-answering"),
    "max_active_dims": ("--max-active-dims is", "sparse-similarity"),
}
"""Option of `ResultOptions` -> how it is given, as the begin of a sentence, and the one task that has it."""

_TASKS_ON_TEXT = ("token-classification", "question-answering")
"""Tasks whose results are places in a text, which ids do not show."""


def _last_axis(bundle: Bundle, output: str) -> int | None:
    """Size of an output's last axis; None if it is dynamic."""
    size = next(spec.shape[-1] for spec in bundle.manifest.outputs if spec.name == output)
    return size if isinstance(size, int) else None
