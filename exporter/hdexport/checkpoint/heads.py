"""The modules that sentence-transformers puts after the model of a task, loaded by sentence-transformers, as one
PyTorch module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hdexport.checkpoint import Checkpoint
from hdexport.checkpoint.hybrid import HybridHead, hybrid_head
from hdexport.checkpoint.multi_vector import PROJECTION, late_interaction
from hdexport.checkpoint.pooling import POOLED_MASK, SENTENCE, Features, Pooling, splade_pooling
from hdexport.checkpoint.sentence_modules import (
    SCORES,
    TOKENS,
    TOKENS_INSTEAD,
    SentenceModule,
    pooling_settings,
    reads_and_writes,
    scored_labels,
    token_modules,
)
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdexport.checkpoint.weight_files import read_weights, weight_files
from hdexport.model.graph_module import Head
from hdexport.support.json_files import read_object, shown
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError, Setting
from hdruntime.optional import require


class ModuleChain(Head):
    """Modules that take a text's features one after the other, and add to them: sentence-transformers' own, or with
    their interface. `gives` names the features that are the task's outputs."""

    def __init__(self, modules: Sequence[torch.nn.Module], gives: tuple[str, ...]) -> None:
        super().__init__()
        self.chain = torch.nn.ModuleList(modules)
        self.gives = gives

    def forward(
        self, token_embeddings: torch.Tensor, attention_mask: torch.Tensor, pooled_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The features that are given: [batch, tokens, width] for tokens' vectors, else [batch, width]; float32.

        Args:
            token_embeddings: [batch, tokens, hidden_size], float32.
            attention_mask: [batch, tokens], int64, 1 for real tokens.
            pooled_mask: the same, 1 for tokens that are pooled; None for all real tokens.
        """
        features = _features(token_embeddings, attention_mask, pooled_mask)
        for module in self.chain:
            features = module(features)
        return tuple(features[name] for name in self.gives)

    def outputs(
        self, states: torch.Tensor, attention_mask: torch.Tensor, pooled_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        return self(states.float(), attention_mask, pooled_mask)


class _Normalize(torch.nn.Module):
    """The same as sentence-transformers' module, which takes seconds to import."""

    def __init__(self, reads: str, writes: str) -> None:
        super().__init__()
        self.reads, self.writes = reads, writes

    def forward(self, features: Features) -> Features:
        return {**features, self.writes: torch.nn.functional.normalize(features[self.reads], p=2.0, dim=-1)}


class _WithoutPadding(torch.nn.Module):
    """Makes the vectors of padding 0."""

    def forward(self, features: Features) -> Features:
        # A product would make NaN of a NaN in the padding.
        is_real = features["attention_mask"].unsqueeze(-1) > 0
        return {**features, TOKENS: torch.where(is_real, features[TOKENS], 0.0)}


def task_head(checkpoint: Checkpoint, task: Task) -> Head | None:
    """The modules after the model that a bundle for a task computes; None where the model's outputs are the task's.
    Sentences' vectors and scores of pairs take all modules. Tokens' vectors are given as they are where a pooling
    follows, and take the modules of a chain without one."""
    read = _HEADS.get(task)
    if read is None:
        return None
    hidden_size = checkpoint.family.token_width(checkpoint.settings())
    return read(checkpoint.path, hidden_size=hidden_size, trust=checkpoint.trust)


def sentence_vectors(path: Path, *, hidden_size: int, trust: Trust = UNTRUSTED) -> ModuleChain:
    """The modules that give the vectors of a text's tokens, `hidden_size` wide at first, and the text's vector."""
    return _chain(path, pooling_settings(path).modules, (TOKENS, SENTENCE), hidden_size, trust)


def token_layers(path: Path, *, hidden_size: int, trust: Trust = UNTRUSTED) -> ModuleChain | None:
    """The modules of a chain that changes tokens' vectors and pools none; None for other chains."""
    modules = token_modules(path)
    return _token_chain(path, modules, [], hidden_size, trust) if modules else None


def _pair_scores(path: Path, *, hidden_size: int, trust: Trust) -> ModuleChain | None:
    """The modules that give a pair's logits; None where the model itself gives them."""
    if scored_labels(path) is None:
        return None
    return _chain(path, pooling_settings(path).modules, (SCORES,), hidden_size, trust)


def _hybrid_head(path: Path, *, hidden_size: int, trust: Trust) -> HybridHead:
    """The heads of a model that embeds texts in three ways."""
    sentence = _chain(path, pooling_settings(path).modules, (SENTENCE,), hidden_size, trust)
    return hybrid_head(path, sentence, hidden_size=hidden_size, trust=trust)


def _late_interaction_layers(path: Path, *, hidden_size: int, trust: Trust) -> ModuleChain:
    """The layers that a model of late interaction applies to each token."""
    model = late_interaction(path)
    first = [_projection(path, hidden_size, trust)] if model.is_stanford else []
    return _token_chain(path, model.layers, first, hidden_size, trust)


_HEADS: dict[Task, Callable[..., Head | None]] = {
    Task.FEATURE_EXTRACTION: token_layers,
    Task.SENTENCE_SIMILARITY: sentence_vectors,
    Task.SPARSE_SIMILARITY: lambda path, **_: splade_pooling(path),
    Task.TOKEN_SIMILARITY: _late_interaction_layers,
    Task.HYBRID_SIMILARITY: _hybrid_head,
    Task.TEXT_CLASSIFICATION: _pair_scores,
}


def _token_chain(
    path: Path, modules: Sequence[SentenceModule], first: list[torch.nn.Module], width: int, trust: Trust
) -> ModuleChain:
    layers = [_loaded(path, module, trust, reads=TOKENS) for module in modules]
    return _tried(path, ModuleChain([*first, *layers, _WithoutPadding()], (TOKENS,)), width)


def _chain(
    path: Path, modules: Sequence[SentenceModule], gives: tuple[str, ...], width: int, trust: Trust
) -> ModuleChain:
    loaded = [_loaded(path, module, trust, reads=SENTENCE) for module in modules]
    # Modules that mix tokens, such as convolutions, must see zeros after a text's last token.
    first = [] if isinstance(loaded[0], Pooling) else [_WithoutPadding()]
    return _tried(path, ModuleChain([*first, *loaded], gives), width)


def _loaded(path: Path, module: SentenceModule, trust: Trust, *, reads: str) -> torch.nn.Module:
    """A module with its weights, in float32; `reads` is the feature that a layer takes where its settings name none."""
    file = path / module.folder / "config.json"
    if module.kind == "Pooling":
        return Pooling(pooling_settings(path).modes)
    if module.kind == "Normalize":
        return _Normalize(*reads_and_writes(file, default=reads))
    _check_code(path, module, trust)
    _check_weights(file, module, trust)
    try:
        loaded = _of_library(path, module, trust, reads)
    except (MemoryError, ModelError):
        raise
    except Exception as error:
        # The code of a module, sentence-transformers' or the checkpoint's, may raise any error.
        raise ModelError(
            f"sentence-transformers cannot load the module {module.kind} in {file.parent}: {shown(error)}",
            hint=("Download the model again. ", *TOKENS_INSTEAD),
        ) from error
    if module.options or getattr(loaded, "forward_kwargs", None):
        arguments = ", ".join(sorted({*module.options, *getattr(loaded, "forward_kwargs", ())}))
        raise ModelError(
            f"The module {module.kind} in {file.parent} depends on arguments of each call ({arguments}), and a bundle "
            "takes texts alone.",
            hint=TOKENS_INSTEAD,
        )
    return loaded.float()


def _of_library(path: Path, module: SentenceModule, trust: Trust, reads: str) -> torch.nn.Module:
    require("sentence_transformers")
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.util import import_module_class

    kind: Any = import_module_class(
        module.reference, str(path), trust_remote_code=trust.trust_remote_code, local_files_only=True
    )
    if len(inspect.signature(kind.load).parameters) == 1:
        # The signature of modules for versions before 5.
        return torch.nn.Module.eval(kind.load(str(path / module.folder)))
    # A Dense of PyLate, and of versions before 5.4, does not say what it reads.
    defaults = {"init_defaults": {"module_input_name": reads}} if issubclass(kind, Dense) else {}
    return torch.nn.Module.eval(
        kind.load(
            str(path),
            subfolder=module.folder,
            local_files_only=True,
            trust_remote_code=trust.trust_remote_code,
            **defaults,
        )
    )


def _check_code(path: Path, module: SentenceModule, trust: Trust) -> None:
    """Rejects untrusted code of the checkpoint, which may be a module or its activation."""
    if trust.trust_remote_code:
        return
    is_theirs = module.reference.startswith("sentence_transformers.")
    config = read_object(path / module.folder / "config.json") if is_theirs and module.kind == "Dense" else {}
    # The library takes Tanh in place of an activation that it does not trust.
    activation = config.get("activation_function")
    if is_theirs and (activation is None or str(activation).startswith("torch.")):
        return
    raise ModelError(
        f"{path} has the module {shown(module.reference if activation is None else activation)}, which is not "
        "sentence-transformers' own: to load it is to run its code.",
        hint=("Read the code, and use ", Setting("trust_remote_code", True), " if you trust it. ", *TOKENS_INSTEAD),
    )


def _check_weights(config_file: Path, module: SentenceModule, trust: Trust) -> None:
    """Rejects pickles that are not allowed, weights that are integers or not finite, and a Dense of other sizes."""
    folder = config_file.parent
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        return
    files = weight_files(folder, allow_pickle=trust.allow_pickle)
    weights = {name: weight for file in files for name, weight in read_weights(file).items()}
    wrong = [name for name, weight in weights.items() if not (weight.is_floating_point() and weight.isfinite().all())]
    if wrong:
        raise ModelError(
            f"The module in {folder} has weights that are integers, NaN or infinite: {', '.join(wrong)}.",
            hint="Download the model again, or build the checkpoint that was quantised.",
        )
    if module.kind != "Dense":
        return
    # The library makes a layer of the settings' sizes, which may be more than a machine has, before it reads weights.
    config, weight = read_object(config_file), weights.get("linear.weight")
    sizes = [config.get("out_features"), config.get("in_features")]
    if weight is None or sizes != list(weight.shape) or 0 in sizes:
        actual = "no such weight" if weight is None else list(weight.shape)
        raise ModelError(
            f"{config_file} says that linear.weight is {shown(sizes)}, and the layer has {actual}.",
            hint="Download the model again.",
        )


def _projection(path: Path, width: int, trust: Trust) -> torch.nn.Module:
    """The layer that Stanford's ColBERT has after BERT, stored among BERT's weights."""
    files = weight_files(path, allow_pickle=trust.allow_pickle)
    weight = next((weights[PROJECTION] for file in files if PROJECTION in (weights := read_weights(file))), None)
    if weight is None or weight.ndim != 2 or weight.shape[1] != width or not weight.is_floating_point():
        actual = "no such weight" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        raise ModelError(
            f"{path} needs the weight {PROJECTION}, floats [dimensions, {width}], and has {actual}.",
            hint="Download the model again.",
        )
    if not weight.isfinite().all():
        raise ModelError(f"{path} has a weight {PROJECTION} that is NaN or infinite.", hint="Download the model again.")
    require("sentence_transformers")
    from sentence_transformers.base.modules import Dense

    outputs, inputs = weight.shape
    return Dense(
        inputs,
        outputs,
        bias=False,
        activation_function=torch.nn.Identity(),
        init_weight=weight.float(),
        module_input_name=TOKENS,
    )


def _features(tokens: torch.Tensor, mask: torch.Tensor, pooled_mask: torch.Tensor | None) -> Features:
    return {TOKENS: tokens, "attention_mask": mask, POOLED_MASK: mask if pooled_mask is None else pooled_mask}


@torch.no_grad()
def _tried(path: Path, chain: ModuleChain, width: int) -> ModuleChain:
    """The chain, after it was tried: texts of three tokens pass it, with the same results with padding and without."""
    tokens = torch.linspace(-1.0, 1.0, 10 * width).sin().reshape(2, 5, width)
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 2)
    module: torch.nn.Module = chain
    try:
        features = _features(tokens[:, :3], mask[:, :3], None)
        for module in chain.chain:
            features = module(features)
        module = chain
        for name, padded in zip(chain.gives, chain(tokens, mask), strict=True):
            shape = list(features[name].shape)
            if shape[:-1] != ([2, 3] if name == TOKENS else [2]):
                raise ValueError(f"{name} has the shape {shape} for 2 texts of 3 tokens")
            if not torch.allclose(padded[:, :3] if name == TOKENS else padded, features[name], rtol=1e-3, atol=1e-4):
                raise ValueError(f"{name} depends on the padding of a batch")
    except MemoryError:
        raise
    except Exception as error:
        # The code of a module, sentence-transformers' or the checkpoint's, may raise any error.
        why = f"it needs {shown(error.args[0])}" if isinstance(error, KeyError) else shown(error)
        raise ModelError(
            f"{_named(module)} of {path} cannot be run on the encoder's states, whose width is {width}: {why}.",
            hint=("Check that modules.json and the encoder belong together. ", *TOKENS_INSTEAD),
        ) from error
    return chain


def _named(module: torch.nn.Module) -> str:
    return "The chain of modules" if isinstance(module, ModuleChain) else f"The module {type(module).__name__}"
