"""Tunes a checkpoint: reads texts, trains positions, writes a Hugging Face directory that says how it was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import platform
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hdexport.attention.registry import attention_from_spec
from hdexport.checkpoint import Checkpoint, find_checkpoint
from hdexport.checkpoint.extended_files import (
    CHECKPOINT_DIRECTORY,
    Extension,
    check_extendable,
    extension_of,
    write_extended,
)
from hdexport.checkpoint.ignored_keys import ignored_keys
from hdexport.checkpoint.position_choice import PositionChoice, choose_positions
from hdexport.model.positions import TABLES
from hdexport.model.task import TASKS
from hdexport.support.progress import Progress, warn
from hdexport.tune.corpus import Corpus, read_corpus
from hdexport.tune.objectives import Contrast, Distill, MaskedTokens, Objective
from hdexport.tune.options import Loss, Trained, TuneOptions
from hdexport.tune.student import Student, make_student, make_teacher, training_device
from hdexport.tune.training import Outcome, opened_tune_folder, train
from hdruntime.bundle.manifest import Scheme, Task
from hdruntime.bundle.staging import require_replaceable, staged_directory
from hdruntime.errors import InputError, ModelError, Setting
from hdruntime.jobs.identity import Identity

logger = logging.getLogger(__name__)

RECORD_FILE = "tuning.json"

_PACKAGES = ("hdexport", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The outcome of a tuning.

    Attributes:
        extension: the record in the new checkpoint's ``config.json``.
        outcome: outcome of the training.
        trained_values: numbers that were trained.
    """

    extension: Extension
    outcome: Outcome
    trained_values: int


def tune(options: TuneOptions, progress: Progress | None = None) -> Tuned:
    """Tune a checkpoint, or continue.

    The checkpoint appears at ``options.output`` when it is complete. Until then, the state of the tuning is kept beside
    it, and the same call continues from there.

    Raises:
        HdexportError: one of `hdruntime.errors`; then only the state beside the output is written.
    """
    progress = progress or Progress()
    options.check()
    progress.step("Reading the checkpoint")
    device = training_device(options.device)
    checkpoint = find_checkpoint(options.model, revision=options.revision, trust=options.trust)
    checkpoint = checkpoint.with_source(options.tokenizer)
    for remark in checkpoint.remarks:
        progress.result(remark)
    check_extendable(checkpoint, options.output)
    if checkpoint.family.tuning_unsupported_reason is not None:
        raise ModelError(
            f"{checkpoint.origin} is a {checkpoint.config['model_type']}, which cannot be tuned. "
            f"{checkpoint.family.tuning_unsupported_reason}",
            hint=f"Build it as it is: hdexport build {shlex.quote(str(checkpoint.origin))} --max-len 4096",
        )
    require_replaceable(options.output.resolve(), CHECKPOINT_DIRECTORY, force=options.force)
    loss, reason = _loss(checkpoint, options)
    progress.result(f"Loss: {loss.value}, {reason}.")
    choice = _choice(checkpoint, options)
    if choice.remark:
        progress.result(choice.remark)
    progress.result(f"Start: {choice.describe()}: {choice.reason}.")
    task = Task.FILL_MASK if loss is Loss.MLM else _encoder_task(checkpoint)
    for line in ignored_keys(checkpoint, task):
        warn(logger, line)
    progress.step("Reading the texts")
    corpus = _corpus(checkpoint, options)
    progress.result(
        f"Texts: {corpus.texts}; {len(corpus.long)} chunks are longer than {checkpoint.base_positions} tokens, "
        f"{len(corpus.short)} are not."
    )
    identity = _identity(checkpoint, corpus, options, loss, choice)
    with opened_tune_folder(options.output, identity, restart=options.restart) as folder:
        progress.step("Loading the model")
        student = make_student(checkpoint, task, options, choice, device, progress)
        objective = _objective(loss, checkpoint, corpus, options, device)
        progress.step(f"Training {options.train.value} ({device.type})")
        outcome = train(student, objective, options, folder, progress)
        progress.step("Writing the checkpoint")
        extension = _extension(checkpoint, student, options, choice)
        record = _record(checkpoint, corpus, options, loss, choice, outcome)
        _write(checkpoint, student, extension, record, options)
        folder.remove()
    count = sum(weight.numel() for weight in student.trained().values())
    return Tuned(extension=extension, outcome=outcome, trained_values=count)


def _loss(checkpoint: Checkpoint, options: TuneOptions) -> tuple[Loss, str]:
    if options.loss is not None:
        return options.loss, "as asked for"
    task = checkpoint.task()
    if TASKS[task].vectors == "texts":
        return Loss.CONTRAST, f"for {task} models"
    if task is Task.FILL_MASK:
        return Loss.MLM, "because the checkpoint has that head"
    return Loss.DISTILL, f"because a {task} model has neither text embeddings nor a head for masked tokens"


def _encoder_task(checkpoint: Checkpoint) -> Task:
    task = checkpoint.task()
    return task if task is Task.SENTENCE_SIMILARITY else Task.FEATURE_EXTRACTION


def _choice(checkpoint: Checkpoint, options: TuneOptions) -> PositionChoice:
    base = checkpoint.base_positions
    if options.max_len <= base:
        raise InputError(
            parameter="max_len", value=options.max_len, accepted=f"more than the checkpoint's {base} positions"
        )
    if options.scheme not in TABLES:
        raise InputError(
            Setting("scheme", options.scheme),
            " chooses rows by the length of each text; no row is there to be trained.",
            hint=("Use ", Setting("scheme", Scheme.HIERARCHICAL), ", tile or interpolate:static."),
        )
    return choose_positions(
        checkpoint,
        task=checkpoint.task(),
        max_len=options.max_len,
        scheme=options.scheme,
        alpha=options.alpha,
        attention_scale=options.attention_scale,
        attention=attention_from_spec(options.attention, options.attention_options),
    )


def _corpus(checkpoint: Checkpoint, options: TuneOptions) -> Corpus:
    if checkpoint.tokenizer is None:
        raise ModelError(
            f"{checkpoint.path} has no tokenizer, so no text can be read.",
            hint="Add the tokenizer.json that belongs to it.",
        )
    return read_corpus(
        options.texts,
        checkpoint.tokenizer,
        column=options.text_column,
        base=checkpoint.base_positions,
        max_tokens=options.longest_chunk(checkpoint.base_positions),
    )


def _objective(
    loss: Loss, checkpoint: Checkpoint, corpus: Corpus, options: TuneOptions, device: torch.device
) -> Objective:
    base, tokenizer = checkpoint.base_positions, checkpoint.tokenizer
    if loss is Loss.DISTILL:
        teacher = make_teacher(checkpoint, _encoder_task(checkpoint), device)
        return Distill(corpus.long, tokenizer, teacher, base=base)
    if loss is Loss.MLM:
        if tokenizer.mask_token is None:
            raise ModelError(
                f"The tokenizer of {checkpoint.path} has no mask token.",
                hint=("Use ", Setting("loss", Loss.DISTILL), "."),
            )
        return MaskedTokens(corpus.long, tokenizer)
    contrast = Contrast(corpus, tokenizer, base=base, learns_short=options.train is Trained.ALL)
    if len(contrast.documents) < 2:
        raise InputError(
            f"{len(contrast.documents)} of the long texts have two sentences or more; none could be confused with "
            "another.",
            hint=("Name texts with sentences with ", Setting("texts"), ", or use ", Setting("loss", Loss.DISTILL), "."),
        )
    return contrast


def _extension(checkpoint: Checkpoint, student: Student, options: TuneOptions, choice: PositionChoice) -> Extension:
    extension = extension_of(checkpoint, student.positions)
    assert extension is not None
    return replace(extension, attention_scale=choice.attention_scale, attention=options.attention, tuned=True)


def _write(
    checkpoint: Checkpoint, student: Student, extension: Extension, record: dict[str, object], options: TuneOptions
) -> None:
    files = checkpoint.weight_files()
    trained = student.results()
    with staged_directory(options.output, CHECKPOINT_DIRECTORY, force=options.force) as directory:
        write_extended(checkpoint, files, student.positions, extension, directory, trained=trained)
        (directory / RECORD_FILE).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _identity(
    checkpoint: Checkpoint, corpus: Corpus, options: TuneOptions, loss: Loss, choice: PositionChoice
) -> Identity:
    """Options that another run must share to continue; minutes, steps and learning rate may differ."""
    weights = checkpoint.weight_files()
    return {
        "version": importlib.metadata.version("hdexport"),
        "model": str(checkpoint.origin),
        "weights_bytes": sum(file.stat().st_size for file in weights),
        "settings": {
            "max_len": options.max_len,
            "chunk_tokens": options.longest_chunk(checkpoint.base_positions),
            "loss": loss.value,
            "train": options.train.value,
            "positions": choice.describe(),
            "attention": options.attention,
            "tokenizer": options.tokenizer,
            "batch_tokens": options.batch_tokens,
            "seed": options.seed,
        },
        "texts": corpus.digest,
    }


def _record(
    checkpoint: Checkpoint,
    corpus: Corpus,
    options: TuneOptions,
    loss: Loss,
    choice: PositionChoice,
    outcome: Outcome,
) -> dict[str, object]:
    """Content of the record beside ``config.json``."""
    return {
        "command": options.command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "source": checkpoint.source,
        "loss": loss.value,
        "train": options.train.value,
        "max_len": options.max_len,
        "chunk_tokens": options.longest_chunk(checkpoint.base_positions),
        "positions": choice.describe(),
        "attention": options.attention,
        "learning_rate": options.peak_learning_rate,
        "batch_tokens": options.batch_tokens,
        "seed": options.seed,
        "texts": {
            "name": Path(options.texts).name,
            "number": corpus.texts,
            "long": len(corpus.long),
            "short": len(corpus.short),
            "sha256": corpus.digest,
        },
        "steps": outcome.steps,
        "documents": outcome.documents,
        "seconds": round(outcome.seconds, 1),
        "losses": [float(f"{value:.5g}") for value in outcome.losses],
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in _PACKAGES},
    }
