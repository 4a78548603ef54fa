"""The task of a bundle, with its options checked."""

from __future__ import annotations

import importlib
from typing import cast

from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import InputError, Setting
from hdruntime.tasks.embedding import ChunkEmbeddings, column_of_spans
from hdruntime.tasks.task import Pairs, TaskOptions, TextTask


def class_of(task: Task) -> type[TextTask]:
    """The class of a task: `TASK` of the file of this folder that is named as the task is."""
    module = importlib.import_module(f"hdruntime.tasks.{task.replace('-', '_')}")
    return cast(type[TextTask], module.TASK)


def task_of_bundle(bundle: Bundle, options: TaskOptions | None = None, *, tokenized: bool = False) -> TextTask:
    """The task as a job runs it; `tokenized` rows are ids, without a text. Options of other tasks are rejected."""
    name, options = bundle.manifest.task, options or TaskOptions()
    kind = class_of(name)
    if tokenized and kind.needs_text:
        raise InputError(
            f"The bundle's task is {name}, whose results are places in a text.", hint="Give it text columns."
        )
    if not tokenized and bundle.manifest.tokenizer is None:
        raise InputError(
            f"The bundle {bundle.path} has no tokenizer, so it cannot read text.",
            hint=(
                "Rebuild it from a checkpoint with a tokenizer.json, or give ids: ",
                Setting("input_ids_column"),
                ".",
            ),
        )
    _check_options(name, options)
    if options.late_chunking is not None:
        if tokenized:
            raise InputError(
                Setting("late_chunking"),
                " needs texts, not ids: a chunk has characters.",
                hint=("Leave out ", Setting("input_ids_column"), "."),
            )
        rule = options.late_chunking if column_of_spans(options.late_chunking) is None else None
        return ChunkEmbeddings(bundle.manifest, rule, some=True)
    task = kind.of_job(bundle, options)
    # Ids include the prompt.
    task.prompts = task.prompts and not tokenized
    return task


def _check_options(name: Task, options: TaskOptions) -> None:
    """Reject options that another task has alone."""
    for other in Task:
        for option in class_of(other).job_options:
            if getattr(options, option) is None or name == other:
                continue
            settings = _settings_of(option)
            raise InputError(
                *settings,
                f" {'is' if len(settings) == 1 else 'are'} for {other}, and the bundle's task is {name}.",
                hint=f"Leave {'it' if len(settings) == 1 else 'them'} out.",
            )


def _settings_of(option: str) -> list[str | Setting]:
    """The parameters of a field of `TaskOptions` in a message: those of `AnswerOptions` for ``answers``."""
    if option != "answers":
        return [Setting(option)]
    return [Setting("top_k"), " and ", Setting("handle_impossible_answer")]


def check_pairs(task: TextTask, *, has_pair: bool, has_ids: bool) -> None:
    """Reject columns that do not fit the task: whether rows have a second text, and whether they are ids."""
    name, leave_out = task.manifest.task, ("Leave out ", Setting("text_pair_column"), ".")
    if has_pair and has_ids:
        raise InputError("A row has texts or ids, not both.", hint=leave_out)
    if task.pairs is Pairs.REQUIRED and not has_pair and not has_ids:
        text, pair = task.columns
        columns = Setting("text_column", text), " ", Setting("text_pair_column", pair)
        raise InputError(
            f"The bundle's task is {name}: a row needs two texts, such as a {text} and its {pair}.",
            hint=("Name the columns of both: ", *columns),
        )
    if task.pairs is Pairs.REJECTED and has_pair:
        raise InputError(f"The bundle's task is {name}, which reads one text.", hint=leave_out)
