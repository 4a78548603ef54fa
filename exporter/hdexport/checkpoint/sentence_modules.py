"""The modules that sentence-transformers chains: ``modules.json``, and the settings of poolings and of scores."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hdexport.support.json_files import read_json, read_object, read_settings, shown
from hdruntime.bundle.checked_json import Size, TokenId
from hdruntime.errors import ModelError, Setting
from hdruntime.text.pooling import PoolingMode

LEGACY_POOLING_FLAGS = {
    "pooling_mode_cls_token": PoolingMode.CLS,
    "pooling_mode_max_tokens": PoolingMode.MAX,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": PoolingMode.MEAN_SQRT_LEN_TOKENS,
    "pooling_mode_weightedmean_tokens": PoolingMode.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": PoolingMode.LAST_TOKEN,
}
"""Flag of a ``1_Pooling/config.json`` without ``pooling_mode`` -> the mode, in the order in which results are
concatenated."""

TOKENS_INSTEAD = ("Build the token embeddings instead: ", Setting("task", "feature-extraction"))
"""The hint for a chain of modules that is not supported."""

TOKENS, SCORES = "token_embeddings", "scores"
"""sentence-transformers' names of the vectors of a text's tokens, and of a cross-encoder's logits."""


@dataclass(frozen=True, kw_only=True)
class SentenceModule:
    """One of sentence-transformers' modules.

    Attributes:
        kind: its class, without the package where that is sentence-transformers.
        folder: the folder that holds its settings, from the checkpoint's; empty for the checkpoint's own directory.
        reference: its class with the package, by which it is imported.
        options: names of the options of a call that it takes.
    """

    kind: str
    folder: str
    reference: str = ""
    options: tuple[str, ...] = ()


class PoolingSettings(NamedTuple):
    """How a sentence's vector is pooled.

    Attributes:
        modules: after the Transformer, without modules that matter in training alone.
        modes: modes of the Pooling, whose results are concatenated; ``()`` without a Pooling.
        include_prompt: whether a prompt's tokens are pooled, too.
    """

    modules: tuple[SentenceModule, ...]
    modes: tuple[PoolingMode, ...]
    include_prompt: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The modes where the tokens are pooled as they are, else the name of the module that takes them first."""
        first = self.modules[0].kind
        return self.modes if first == "Pooling" else (first,)


@dataclass(frozen=True, kw_only=True)
class _DenseConfig:
    """The settings that are read of the Dense layer that gives scores."""

    out_features: Size


@dataclass(frozen=True, kw_only=True)
class LogitScore:
    """A score by a generator's logits of the last token: that of `true_token_id`, less that of `false_token_id` if
    there is one."""

    true_token_id: TokenId
    false_token_id: TokenId | None = None
    module_input_name: Literal["causal_logits"] = "causal_logits"


def sentence_modules(directory: Path) -> tuple[SentenceModule, ...]:
    """The modules that ``modules.json`` of a checkpoint lists, in order; empty without the file. Folders outside of the
    checkpoint are rejected."""
    path = directory / "modules.json"
    if not path.is_file():
        return ()
    modules = read_json(path)
    if not isinstance(modules, list) or not modules:
        raise ModelError(f"{path} lists no modules.", hint="Download the model again.")
    return tuple(_sentence_module(path, module) for module in modules)


def encoder_folder(directory: Path) -> Path | None:
    """The folder of a chain's Transformer; None where that is the checkpoint's own, and without a Transformer."""
    first = next(iter(sentence_modules(directory)), None)
    if first is None or first.kind != "Transformer" or not first.folder:
        return None
    folder = directory / first.folder
    return folder if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")) else None


def logit_score(directory: Path) -> LogitScore | None:
    """The score of a Transformer that a LogitScore alone follows; None for other chains."""
    modules = sentence_modules(directory)
    if [module.kind for module in modules] != ["Transformer", "LogitScore"]:
        return None
    file = directory / modules[1].folder / "config.json"
    return read_settings(file, LogitScore)


def scored_labels(directory: Path) -> int | None:
    """Number of logits that a Dense, the last module after a Transformer, gives a pair; None for other chains."""
    trained = [module for module in sentence_modules(directory)[1:] if module.kind != "Dropout"]
    if not trained or trained[-1].kind != "Dense":
        return None
    file = directory / trained[-1].folder / "config.json"
    if SCORES not in reads_and_writes(file):
        return None
    return read_settings(file, _DenseConfig).out_features


def token_modules(directory: Path) -> tuple[SentenceModule, ...]:
    """The modules after a Transformer where all of them change tokens' vectors and none pools, as in late interaction.
    Empty for other chains, and without ``modules.json``."""
    modules = sentence_modules(directory)
    following = modules[1:]
    if not following or modules[0].kind != "Transformer":
        return ()
    are_of_tokens = (
        module.kind in ("Dense", "Normalize")
        and reads_and_writes(directory / module.folder / "config.json") == (TOKENS, TOKENS)
        for module in following
    )
    return following if all(are_of_tokens) else ()


def reads_and_writes(file: Path, *, default: str = "sentence_embedding") -> tuple[Any, Any]:
    """Names of the vectors that a module reads and writes; `default` where its settings, which may be missing, name
    none."""
    config = read_object(file, missing_ok=True)
    reads = config.get("module_input_name") or default
    return reads, config.get("module_output_name") or reads


def module_folders(directory: Path) -> list[str]:
    """The folders of sentence-transformers' modules that exist, as ``modules.json`` names them."""
    folders = [module.folder for module in sentence_modules(directory)]
    # The first module, the encoder, usually is at the top; one without settings may have no folder.
    return [folder for folder in folders if folder and (directory / folder).is_dir()]


def pooling_settings(path: Path) -> PoolingSettings:
    """The modules after the Transformer, and the settings of the Pooling among them."""
    modules = sentence_modules(path)
    kinds = [module.kind for module in modules]
    following = tuple(module for module in modules[1:] if module.kind != "Dropout")
    poolings = [module for module in following if module.kind == "Pooling"]
    if not following or kinds[0] != "Transformer" or len(poolings) > 1:
        raise ModelError(
            f"{path} chains the modules {', '.join(kinds) or '(none)'}; a Transformer followed by a Pooling, or by "
            f"another module that pools, is supported.",
            hint=TOKENS_INSTEAD,
        )
    if not poolings:
        return PoolingSettings(modules=following, modes=(), include_prompt=True)
    file = path / poolings[0].folder / "config.json"
    config = read_object(file)
    return PoolingSettings(
        modules=following,
        modes=_pooling_modes(file, config),
        include_prompt=bool(config.get("include_prompt", True)),
    )


def _sentence_module(path: Path, module: object) -> SentenceModule:
    kind, folder = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
    if not isinstance(module, dict) or not isinstance(kind, str) or not isinstance(folder, str):
        raise ModelError(f"{path} lists a module without type or path.", hint="Download the model again.")
    # In POSIX, ".", "./1_Pooling" and "1_Pooling/" name folders, too.
    plain = posixpath.normpath(folder)
    if plain.startswith(("..", "/")) or "\0" in folder:
        raise ModelError(
            f"{path} names the folder {shown(folder)}, which is not one of the checkpoint's own.",
            hint="Download the model again.",
        )
    # A checkpoint may bring another class of the same name.
    is_theirs = kind.startswith("sentence_transformers.")
    options = module.get("kwargs") or []
    return SentenceModule(
        kind=kind.rpartition(".")[2] if is_theirs else kind,
        folder="" if plain == "." else plain,
        reference=kind,
        options=tuple(map(str, options)) if isinstance(options, list) else (shown(options),),
    )


def _pooling_modes(config_path: Path, config: dict[str, Any]) -> tuple[PoolingMode, ...]:
    names = config.get("pooling_mode") or _modes_of_flags(config) or [PoolingMode.MEAN]
    names = names.split("+") if isinstance(names, str) else names if isinstance(names, list) else [names]
    unsupported = [name for name in names if name not in list(PoolingMode)]
    if unsupported:
        listed = ", ".join(name if isinstance(name, str) else shown(name) for name in unsupported)
        raise ModelError(
            f"{config_path} has the pooling mode {listed}; supported: {', '.join(PoolingMode)}.", hint=TOKENS_INSTEAD
        )
    return tuple(map(PoolingMode, names))


def _modes_of_flags(config: dict[str, Any]) -> list[str]:
    """The modes of legacy flags that are true; a flag of no known mode names itself."""
    flags = [flag for flag in dict.fromkeys((*LEGACY_POOLING_FLAGS, *config)) if config.get(flag)]
    prefix = "pooling_mode_"
    return [LEGACY_POOLING_FLAGS.get(flag, flag.removeprefix(prefix)) for flag in flags if flag.startswith(prefix)]
