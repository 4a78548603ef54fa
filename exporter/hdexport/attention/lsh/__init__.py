"""LSH attention: tokens attend to tokens whose hashes are alike; and the local attention of its chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hdexport.attention.attention_type import DENSE_BASELINE, AttentionRecord
from hdruntime.bundle.checked_json import Count, Length, TokenCount
from hdruntime.bundle.manifest import Manifest

LayerType = Literal["lsh", "local"]


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The chunks that a query sees.

    Attributes:
        tokens: number of tokens of a chunk.
        before: chunks before its own.
        after: chunks after it.
    """

    tokens: Length
    before: TokenCount
    after: TokenCount

    @property
    def keys(self) -> int:
        """Tokens that a query sees."""
        return self.tokens * (self.before + 1 + self.after)


@dataclass(frozen=True, kw_only=True)
class Hashes:
    """How tokens are hashed.

    Attributes:
        buckets: factors of the number of buckets, each even.
        rounds: number of rounds of hashing.
        seed: seed of the rotations.
    """

    buckets: tuple[Length, ...]
    rounds: Length
    seed: Count


@dataclass(frozen=True, kw_only=True)
class LshAttention(AttentionRecord):
    """Layers whose tokens are sorted by hashes and cut into chunks, and, in a Reformer, layers of chunks unsorted.

    Attributes:
        layers: the kind of each layer.
        hashes: the hashes of the layers ``lsh``; None without such layers.
        hashed: the chunks of their sorted tokens; likewise.
        local: the chunks of the layers ``local``; None without such layers.
        multiple: tokens of which the length of a padded text is a multiple, so that whole chunks fit.
        causal: whether tokens see earlier ones only.
        converted: whether it took the place of dense attention; then padding changes no answer.
    """

    holds_scores: ClassVar = False
    type: Literal["lsh"] = "lsh"
    layers: tuple[LayerType, ...]
    hashes: Hashes | None
    hashed: Chunks | None
    local: Chunks | None
    multiple: Length
    causal: bool = False
    converted: bool = False

    def keys_of_layers(self, manifest: Manifest, tokens: int) -> list[int]:
        """Keys in a query's chunks, in every round."""
        keys = {"lsh": 0, "local": 0}
        if self.hashed is not None and self.hashes is not None:
            keys["lsh"] = self.hashes.rounds * self.hashed.keys
        if self.local is not None:
            keys["local"] = self.local.keys
        return [min(tokens, keys[layer]) for layer in self.layers]

    @property
    def baseline_note(self) -> str | None:
        """PyTorch's model is dense where hashes took that place, and may draw others where they are its own."""
        if not self.converted:
            return "draws its hashes by config.json, anew in each call where that has no hash_seed"
        return DENSE_BASELINE.format("hashes")

    def export_note(self, tokens: int) -> str | None:
        """PyTorch's exporters trace the code's choices for one length."""
        return None if self.converted else "pads and hashes as the model does for a text of that length"
