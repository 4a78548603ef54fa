"""The task of a bundle, with its options checked."""

from __future__ import annotations

import importlib
from typing import cast

from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError
from hdruntime.tasks.embedding import ChunkEmbeddings, column_of_spans
from hdruntime.tasks.task import Pairs, TaskOptions, TextTask


def class_of(task: Task) -> type[TextTask]:
    """The class of a task: `TASK` of the file of this folder that is named as the task is."""
    module = importlib.import_module(f"hdruntime.tasks.{task.replace('-', '_')}")
    return cast(type[TextTask], module.TASK)


def task_of_bundle(bundle: Bundle, options: TaskOptions | None = None, *, tokenized: bool = False) -> TextTask:
    """The task as a job runs it; `tokenized` rows are ids, without a text. Options of other tasks are refused."""
    name, options = bundle.manifest.task, options or TaskOptions()
    kind = class_of(name)
    if tokenized and kind.needs_text:
        raise InputError(
            f"The bundle's task is {name}, whose results are places in a text.", hint="Give it text columns."
        )
    if not tokenized and bundle.manifest.tokenizer is None:
        raise InputError(
            f"The bundle {bundle.path} has no tokenizer, so it cannot read text.",
            hint="Rebuild it from a checkpoint with a tokenizer.json, or give ids: --input-ids-column.",
        )
    for other in Task:
        for option, described in class_of(other).job_options.items():
            if getattr(options, option) is not None and name != other:
                raise InputError(
                    f"{described} for {other}, and the bundle's task is {name}.",
                    hint=f"Leave {'it' if described.endswith(' is') else 'them'} out.",
                )
    if options.late_chunking is not None:
        if tokenized:
            raise InputError(
                "--late-chunking needs texts, not ids: a chunk has characters.", hint="Leave out --input-ids-column."
            )
        rule = options.late_chunking if column_of_spans(options.late_chunking) is None else None
        return ChunkEmbeddings(bundle.manifest, rule, some=True)
    task = kind.of_job(bundle, options)
    # Ids include the prompt.
    task.prompts = task.prompts and not tokenized
    return task


def check_pairs(task: TextTask, *, has_pair: bool, has_ids: bool, pair_option: str = "--text-pair-column") -> None:
    """Refuse columns that do not fit the task: whether rows have a second text, and whether they are ids.

    `pair_option` names the column of the second text, for messages.
    """
    text_option, name = pair_option.replace("-pair", "").replace("_pair", ""), task.manifest.task
    if has_pair and has_ids:
        raise InputError("A row has texts or ids, not both.", hint=f"Leave out {pair_option}.")
    if task.pairs is Pairs.REQUIRED and not has_pair and not has_ids:
        raise InputError(
            f"The bundle's task is {name}: a row needs two texts, {task.texts}.",
            hint=f"Name the columns of both, e.g.: {text_option} {task.columns[0]} {pair_option} {task.columns[1]}",
        )
    if task.pairs is Pairs.REFUSED and has_pair:
        raise InputError(f"The bundle's task is {name}, which reads one text.", hint=f"Leave out {pair_option}.")
