"""A case of an attention kernel: one description of a call for checks, timings and shipped kernels alike."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hdplugins import Operator
from hdplugins.kernels.block_config import BlockConfig


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One call of an operator on [batch, tokens, heads, head_dim]; a subclass for each operator.

    Attributes:
        OPERATOR: the operator.
        COMPILED: attributes that its kernels are compiled for besides head_dim and dtype, each time other kernels.
        IN_ROWS: what a result says of a case besides its shape.
        REHEARSED_BLOCK_CONFIG: small ones.
        REHEARSED_TOKENS: of the text that a rehearsal times, short as it is.
    """

    OPERATOR: ClassVar[Operator]
    COMPILED: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    IN_ROWS: ClassVar[tuple[str, ...]] = ()
    REHEARSED_BLOCK_CONFIG: ClassVar[BlockConfig] = BlockConfig(64, 64, 4, 2, 32)
    REHEARSED_TOKENS: ClassVar[int] = 100

    batch: int
    heads: int
    tokens: int
    head_dim: int
    dtype: str

    @classmethod
    def compiled_shapes(cls, head_dim: int) -> list[tuple[int, ...]]:
        """Of the inputs; axes that vary are 1."""
        states = cls.OPERATOR.states
        return [*[(1, 1, 1, head_dim)] * states, (1, 1), *[(1, 1, 1)] * (len(cls.OPERATOR.inputs) - states - 1)]

    @classmethod
    @abstractmethod
    def checked(cls, head_dim: int, dtype: str) -> Iterator[Case]:
        """What must be right before anything is timed, the short texts first."""

    @classmethod
    def shipped(cls) -> Case:
        """What kernels are checked with that were compiled ahead of time."""
        return list(cls.checked(64, "float16"))[-1]

    @classmethod
    @abstractmethod
    def timed(cls, window: int, **shape: Any) -> Iterator[tuple[str, Case, str]]:
        """(name, case, runner) of each case that is timed; cases with windows have windows of `window` tokens.

        The runner is ``kernel`` or one of `benchmarks.gpu.peers.PEERS`, which follow the kernel of an equal case.
        """

    @property
    @abstractmethod
    def attributes(self) -> dict[str, Any]:
        """All of the operator's."""

    @abstractmethod
    def masks(self, device: str) -> list[Any]:
        """The inputs after the states, a mask of the tokens first; None for an optional one that is left out."""

    def make_ragged(self, mask: Any) -> None:
        """Let the mask of the tokens say padding, at the end of the first text and within the second."""
        mask[0, self.tokens - self.tokens // 4 :] = 0
        mask[1, 1 :: max(2, self.tokens // 4)] = 0

    @property
    def decisive(self) -> dict[str, Any]:
        """The attributes and numbers that decide which keys a query sees, as the face `pairs` takes them."""
        return self.attributes

    def pairs(self) -> int:
        """Queries and keys that see each other in one text without padding, in all heads."""
        return int(self.OPERATOR.pairs(self.decisive, tokens=self.tokens, heads=self.heads))

    def flex_mask(self, device: str) -> Any:
        """The same as a BlockMask of FlexAttention, where that is timed; None where every query sees every key."""
        raise NotImplementedError

    def flex_score(self, tensors: Sequence[Any]) -> Any:
        """A ``score_mod`` for FlexAttention, which reads the operator's inputs; None where scores stay as they are."""
        return None

    def is_computed_by(self, peer: str) -> bool:
        """Whether a peer's answers are the operator's: FlexAttention's are, which has the same mask and scores."""
        return peer == "definition" or peer.startswith("flex")

    @property
    def row(self) -> dict[str, Any]:
        """What a result says of the case."""
        shape = [each.name for each in dataclasses.fields(Case)]
        return {name: getattr(self, name) for name in (*shape, *self.IN_ROWS)}

    def tensors(self, device: str, *, is_ragged: bool = False) -> list[Any]:
        """The operator's inputs; the states are random.

        Args:
            device: ``cuda``, or ``cpu`` where Triton interprets.
            is_ragged: some tokens are padding, and some are what else a mask can say.
        """
        import torch

        size, dtype = (self.batch, self.tokens, self.heads, self.head_dim), getattr(torch, self.dtype)
        texts = [torch.randn(size, device=device, dtype=dtype) for _ in range(self.OPERATOR.states)]
        masks = self.masks(device)
        if is_ragged:
            self.make_ragged(masks[0])
        return [*texts, *masks]
