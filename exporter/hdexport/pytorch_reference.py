"""PyTorch's answers, which a bundle's are compared with."""

from __future__ import annotations

__all__ = ["Reference", "reference_of"]

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdexport.checkpoint import Checkpoint
from hdexport.tasks import Task
from hdruntime.bundle import Bundle
from hdruntime.errors import ModelError

if TYPE_CHECKING:
    from hdexport.heads import GraphModule

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Reference:
    """PyTorch's answers in float32, each distinct input computed once."""

    def __init__(
        self,
        module: GraphModule,
        *,
        vocab_size: int,
        pad_token_id: int,
        positions_shift: bool,
        special_ids: Sequence[int],
    ) -> None:
        self._module = module
        self.pad_token_id, self.positions_shift = pad_token_id, positions_shift
        self._answers: dict[tuple[int, int, int], dict[str, FloatArray]] = {}
        # Ordinary ids only: a padding id in a text would be a padded position to models of RoBERTa's kind.
        self._ids = np.setdiff1d(np.arange(vocab_size), np.array(special_ids, np.int64))

    @property
    def task(self) -> Task:
        """What the model does."""
        return self._module.task

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
            positions = np.arange(shift, shift + length)[None] if self.positions_shift else None
            outputs = self.batch(ids, np.ones_like(ids), positions)
            self._answers[key] = {name: values[0] for name, values in outputs.items()}
        return self._answers[key]

    def batch(
        self, input_ids: IntArray, attention_mask: IntArray, position_ids: IntArray | None = None
    ) -> dict[str, FloatArray]:
        """The outputs for a batch as it is: name -> array."""
        import torch

        from hdexport.heads import OUTPUTS_OF_TASK

        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self._module.has_token_types:
            inputs["token_type_ids"] = np.zeros_like(input_ids)
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        with torch.inference_mode():
            outputs = self._module(**{name: torch.from_numpy(ids) for name, ids in inputs.items()})
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
    from hdexport.heads import GraphModule
    from hdexport.positions import DEFAULT_ALPHA, Scheme
    from hdexport.sentence_pooling import sentence_pooling
    from hdexport.surgery import extend_positions

    manifest, task = bundle.manifest, Task(bundle.manifest.task)
    if checkpoint.config["model_type"] != manifest.model_type:
        raise ModelError(
            f"The bundle was built from a {manifest.model_type}, and {checkpoint.path} is a "
            f"{checkpoint.config['model_type']}.\nName the checkpoint it was built from with --model."
        )
    model = checkpoint.load(task, allow_pickle=allow_pickle)
    positions = extend_positions(
        model,
        checkpoint.family,
        max_len=manifest.max_len,
        scheme=Scheme(manifest.positions.scheme),
        alpha=DEFAULT_ALPHA if manifest.positions.alpha is None else manifest.positions.alpha,
    )
    if positions.base != manifest.positions.base:
        raise ModelError(
            f"The bundle was built from {manifest.positions.base} positions, and {checkpoint.path} has "
            f"{positions.base}.\nName the checkpoint it was built from with --model."
        )
    module = GraphModule(
        model,
        task,
        has_token_types=any(spec.name == "token_type_ids" for spec in manifest.inputs),
        folded_token_types=False,
        folded_positions=False,
        pooling=sentence_pooling(checkpoint.path) if task is Task.SENTENCE_SIMILARITY else None,
    ).eval()
    pad_token_id = int(checkpoint.config.get("pad_token_id") or 0)
    return Reference(
        module,
        vocab_size=manifest.vocab_size,
        pad_token_id=pad_token_id,
        positions_shift=positions.first_row == 0,
        special_ids=[pad_token_id, 0, 1, 2, 3],
    )
