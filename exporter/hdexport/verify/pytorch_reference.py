"""PyTorch's answers, which a bundle's are compared with."""

from __future__ import annotations

__all__ = ["Reference", "positions_of", "reference_of"]

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdexport.checkpoint import Checkpoint
from hdexport.families import Family
from hdexport.model.positions import DEFAULT_ALPHA, Scheme
from hdexport.model.tasks import Task
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from hdexport.model.graph_module import GraphModule

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Reference:
    """PyTorch's answers in float32. Nothing is kept: an answer may have gigabytes.

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

    @property
    def has_token_types(self) -> bool:
        """Whether the model takes ``token_type_ids``."""
        return self._module.has_token_types

    def token_types(self, length: int) -> IntArray:
        """[length], the types of a text's tokens in a check: its second half is another text than its first."""
        return (np.arange(length) >= (length + 1) // 2).astype(np.int64)

    def global_tokens(self, length: int) -> IntArray:
        """[length], 1 for the tokens of a text that are global in a check: the first, one inside and the last."""
        marked = np.zeros(length, np.int64)
        marked[[0, length // 3, length - 1][: self._global_bound]] = 1
        return marked

    def text(self, row: int, length: int) -> IntArray:
        """[length], the first tokens of the row's text."""
        generator = np.random.default_rng(row)
        return self._ids[generator.integers(0, len(self._ids), length)].astype(np.int64)

    def unpadded(
        self, row: int, length: int, *, shift: int = 0, samples: IntArray | None = None
    ) -> dict[str, FloatArray]:
        """The outputs for one row's text alone: name -> array without the batch axis.

        Args:
            row: which text.
            length: its tokens.
            shift: padding in front of it, which moves the positions of models of BERT's kind.
            samples: as :meth:`batch` takes it.
        """
        ids = self.text(row, length)[None]
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        if self.has_token_types:
            inputs["token_type_ids"] = self.token_types(length)[None]
        if self.has_global_attention:
            inputs["global_attention_mask"] = self.global_tokens(length)[None]
        if self.positions_shift and self.takes_position_ids:
            inputs["position_ids"] = np.arange(shift, shift + length)[None]
        return {name: values[0] for name, values in self.batch(inputs, samples=samples).items()}

    def batch(self, inputs: Mapping[str, IntArray], *, samples: IntArray | None = None) -> dict[str, FloatArray]:
        """The outputs for a batch as it is: name -> array.

        Args:
            inputs: name -> [batch, tokens]; token types are 0 by default.
            samples: [samples], the tokens whose logits are computed, where not all of them fit in memory; the outputs
                then hold what the head is given for every token, too, by the name `HEAD_INPUT`.
        """
        import torch

        from hdexport.graph.vocabulary_head import HEAD_INPUT, sampled_head
        from hdexport.model.graph_module import OUTPUTS_OF_TASK

        feeds = dict(inputs)
        if self.has_token_types:
            feeds.setdefault("token_type_ids", np.zeros_like(feeds["input_ids"]))
        tensors = {name: torch.from_numpy(ids) for name, ids in feeds.items()}
        with torch.inference_mode():
            if samples is None:
                outputs = dict(zip(OUTPUTS_OF_TASK[self.task], self._module(**tensors), strict=True))
            else:
                with sampled_head(self._module.model, torch.from_numpy(samples)) as given:
                    outputs = dict(zip(OUTPUTS_OF_TASK[self.task], self._module(**tensors), strict=True))
                outputs[HEAD_INPUT] = given[0]
        return {name: output.numpy() for name, output in outputs.items()}


def reference_of(bundle: Bundle, checkpoint: Checkpoint, *, allow_pickle: bool = False) -> Reference:
    """PyTorch's model for a bundle, its positions extended as the bundle's were.

    Args:
        bundle: the bundle to be verified.
        checkpoint: what it was built from.
        allow_pickle: also read ``pytorch_model.bin``.

    Raises:
        ModelError: the checkpoint is not the one that the bundle was built from.
    """
    from hdexport.attention.blocks.reference import use_block_masks
    from hdexport.attention.blocks.setup import read_setup
    from hdexport.attention.window.reference import use_window_masks
    from hdexport.checkpoint.sentence_pooling import sentence_pooling
    from hdexport.model.graph_module import GraphModule
    from hdexport.model.surgery import extend_positions

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
        use_window_masks(model, manifest.window)
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
