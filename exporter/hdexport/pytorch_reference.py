"""PyTorch's answers, which a bundle's are compared with."""

from __future__ import annotations

__all__ = ["Reference", "positions_of", "reference_of", "use_dense_masks"]

import functools
import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdexport.checkpoint import Checkpoint
from hdexport.families import Family
from hdexport.positions import DEFAULT_ALPHA, Scheme
from hdexport.tasks import Task
from hdruntime.bundle import Bundle
from hdruntime.errors import ModelError
from hdruntime.manifest import Manifest, Window

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hdexport.heads import GraphModule

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Reference:
    """PyTorch's answers in float32, each distinct input computed once.

    Attributes:
        counts_from_padding: whether the model's blocks of tokens begin with the padding on the left.
    """

    def __init__(
        self,
        module: GraphModule,
        *,
        vocab_size: int,
        pad_token_id: int,
        positions_shift: bool,
        global_bound: int,
        special_ids: Sequence[int],
        counts_from_padding: bool,
    ) -> None:
        self._module, self.counts_from_padding = module, counts_from_padding
        self.pad_token_id, self.positions_shift = pad_token_id, positions_shift
        self._global_bound = global_bound
        self._answers: dict[tuple[int, int, int], dict[str, FloatArray]] = {}
        # Ordinary ids only: a padding id in a text would be a padded position to models of RoBERTa's kind.
        self._ids = np.setdiff1d(np.arange(vocab_size), np.array(special_ids, np.int64))

    @property
    def task(self) -> Task:
        """What the model does."""
        return self._module.task

    @property
    def takes_position_ids(self) -> bool:
        """Whether a text can be asked about as if padding were in front of it."""
        return "position_ids" in inspect.signature(self._module.model.forward).parameters

    @property
    def has_global_attention(self) -> bool:
        """Whether the model takes a ``global_attention_mask``."""
        return self._module.has_global_attention

    def global_tokens(self, length: int) -> IntArray:
        """[length], 1 for the tokens of a text that are global in a check: the first, one inside and the last."""
        marked = np.zeros(length, np.int64)
        marked[[0, length // 3, length - 1][: self._global_bound]] = 1
        return marked

    def text(self, row: int, length: int) -> IntArray:
        """[length], the first tokens of the row's text."""
        generator = np.random.default_rng(row)
        return self._ids[generator.integers(0, len(self._ids), length)].astype(np.int64)

    def unpadded(self, row: int, length: int, *, shift: int = 0) -> dict[str, FloatArray]:
        """The outputs for one row's text alone: name -> array without the batch axis.

        Args:
            row: which text.
            length: its tokens.
            shift: padding in front of it, which moves the positions of models of BERT's kind.
        """
        key = row, length, shift if self.positions_shift else 0
        if key not in self._answers:
            ids = self.text(row, length)[None]
            inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            if self.has_global_attention:
                inputs["global_attention_mask"] = self.global_tokens(length)[None]
            if self.positions_shift and self.takes_position_ids:
                inputs["position_ids"] = np.arange(shift, shift + length)[None]
            outputs = self.batch(inputs)
            self._answers[key] = {name: values[0] for name, values in outputs.items()}
        return self._answers[key]

    def batch(self, inputs: Mapping[str, IntArray]) -> dict[str, FloatArray]:
        """The outputs for a batch as it is: name -> array. Token types are 0."""
        import torch

        from hdexport.heads import OUTPUTS_OF_TASK

        feeds = dict(inputs)
        if self._module.has_token_types:
            feeds["token_type_ids"] = np.zeros_like(feeds["input_ids"])
        with torch.inference_mode():
            outputs = self._module(**{name: torch.from_numpy(ids) for name, ids in feeds.items()})
        return {name: output.numpy() for name, output in zip(OUTPUTS_OF_TASK[self.task], outputs, strict=True)}


def reference_of(bundle: Bundle, checkpoint: Checkpoint, *, allow_pickle: bool = False) -> Reference:
    """PyTorch's model for a bundle, its positions extended as the bundle's were.

    Args:
        bundle: the bundle to be verified.
        checkpoint: what it was built from.
        allow_pickle: also read ``pytorch_model.bin``.

    Raises:
        ModelError: the checkpoint is not the one that the bundle was built from.
    """
    from hdexport.block_masks import use_block_masks
    from hdexport.block_setup import read_setup
    from hdexport.heads import GraphModule
    from hdexport.sentence_pooling import sentence_pooling
    from hdexport.surgery import extend_positions

    manifest, task = bundle.manifest, Task(bundle.manifest.task)
    if checkpoint.config["model_type"] != manifest.model_type:
        raise ModelError(
            f"The bundle was built from a {manifest.model_type}, and {checkpoint.path} is a "
            f"{checkpoint.config['model_type']}.\nName the checkpoint it was built from with --model."
        )
    model = checkpoint.load(task, allow_pickle=allow_pickle)
    max_len, scheme, alpha = positions_of(manifest, checkpoint.family, model.config.to_dict())
    positions = extend_positions(model, checkpoint.family, max_len=max_len, scheme=scheme, alpha=alpha)
    if positions.base != manifest.positions.base:
        raise ModelError(
            f"The bundle was built from {manifest.positions.base} positions, and {checkpoint.path} has "
            f"{positions.base}.\nName the checkpoint it was built from with --model."
        )
    setup = read_setup(bundle)
    if manifest.window is not None:
        use_dense_masks(model, manifest.window)
    elif setup is not None and checkpoint.family.block_sparse is None:
        use_block_masks(model, setup)
    elif setup is not None and setup.listed_blocks is not None:
        assert checkpoint.family.adapt_blocks is not None
        # Hugging Face has tables in training only: the operator's definition in PyTorch, which tests hold to that.
        checkpoint.family.adapt_blocks(model, setup.spec, setup.tables(model.config.num_hidden_layers))
    else:
        checkpoint.family.as_trained(model)
    module = GraphModule(
        model,
        task,
        has_token_types=any(spec.name == "token_type_ids" for spec in manifest.inputs),
        folded_token_types=False,
        folded_positions=False,
        has_global_attention=manifest.global_attention is not None,
        pooling=sentence_pooling(checkpoint.path, hidden_size=model.config.hidden_size)
        if task is Task.SENTENCE_SIMILARITY
        else None,
    ).eval()
    pad_token_id = int(checkpoint.config.get("pad_token_id") or 0)
    return Reference(
        module,
        vocab_size=manifest.vocab_size,
        pad_token_id=pad_token_id,
        positions_shift=positions.first_row == 0,
        global_bound=0 if manifest.global_attention is None else manifest.global_attention.bound,
        special_ids=[pad_token_id, 0, 1, 2, 3],
        counts_from_padding=checkpoint.family.block_sparse is not None
        and setup is not None
        and setup.listed_blocks is None,
    )


def positions_of(manifest: Manifest, family: Family, config: Mapping[str, Any]) -> tuple[int, Scheme, float]:
    """How many positions the library's own model needs to answer what a bundle does, their scheme and its alpha.

    Args:
        manifest: of the bundle.
        family: of the model.
        config: content of the checkpoint's ``config.json``.
    """
    # The library may pad a text, and look up positions for the padding; what stands in those rows does not matter.
    max_len = family.padded_tokens(SimpleNamespace(**config), manifest.max_len)
    scheme, alpha = Scheme(manifest.positions.scheme), manifest.positions.alpha
    if scheme is Scheme.NONE and max_len > manifest.max_len:
        scheme = Scheme.TILE
    return max_len, scheme, DEFAULT_ALPHA if alpha is None else alpha


def use_dense_masks(model: PreTrainedModel, window: Window) -> None:
    """Make a model's own attention that of a window, by a mask for every pair of tokens, in place.

    This is what windowed bundles are compared with: PyTorch's attention and a mask, nothing of ours.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = "hdexport-dense-masks"
    ALL_ATTENTION_FUNCTIONS.register(name, ALL_ATTENTION_FUNCTIONS["sdpa"])
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, functools.partial(_dense_mask, window=window))
    model.config._attn_implementation = name


def _dense_mask(*_: Any, attention_mask: torch.Tensor, window: Window, **__: Any) -> torch.Tensor:
    """[batch, heads or 1, tokens, tokens], bool, True where a query (third axis) sees a key (fourth)."""
    import torch

    real = attention_mask.bool()
    is_global = real & (real.long().cumsum(1) <= window.global_tokens)
    places = torch.arange(real.shape[1])
    offset = places[None, :] - places[:, None]
    step = torch.tensor(window.dilation)[:, None, None]
    near = ((offset.abs() <= window.tokens * step) & (offset % step == 0))[None]  # [1, heads or 1, tokens, tokens]
    seen = near | is_global[:, None, None, :] | is_global[:, None, :, None]
    return seen & real[:, None, None, :]
