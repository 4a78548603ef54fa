"""The buckets that a graph puts tokens into, which PyTorch follows.

A token belongs to the direction with the largest product. Where two products are nearly equal, rounding decides between
two buckets, and all tokens that are sorted after it move by a place: a few such tokens of a long text change most of
its answers, in transformers' own model on another machine as well.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from hdexport.attention.attention_type import DISCRETE_OUTPUT
from hdexport.attention.lsh import LshAttention
from hdplugins import ONNX_DOMAIN
from hdplugins.attention.lsh.operator import OPERATOR
from hdruntime.arrays import IntArray

if TYPE_CHECKING:
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention


_SORTED_BY = "sorting"
"""Name of the buckets in every body of LSHAttention, in it or in its loop."""

_CLOSE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
"""Type of a bundle -> by how much products may differ that rounding makes equal, relative to the vector's length.

Products of another token, direction or round differ by about the length.
"""


class LshDiscreteOutputs:
    """The decisions of LSH attention; see `hdexport.attention.attention_type.DiscreteOutputs`.

    `rotations` are [heads, head_dim, rounds, directions]; `dtype` is the bundle's.
    """

    inlined = re.compile(rf"{_SORTED_BY}(_\d+)?")
    """Names after the first are numbered."""

    def __init__(self, record: LshAttention, rotations: torch.Tensor, dtype: str = "float32") -> None:
        assert record.hashes is not None
        self._hashes, self._rotations, self._close = record.hashes, rotations, _CLOSE[dtype]
        self._followed: list[torch.Tensor] = []
        self._layer, self._tokens = -1, torch.zeros(0)
        self._wrong = 0

    def watch(self, model: ir.Model) -> None:
        """Make the buckets outputs of each node's body, and of the graph; see `DiscreteOutputs`."""
        # A body's name begins with the operator's.
        nodes = [node for node in model.graph if node.domain == ONNX_DOMAIN and node.op_type.startswith(OPERATOR.name)]
        for identifier in {node.op_identifier() for node in nodes}:
            function = model.functions[identifier]
            function.outputs.append(_buckets(function.graph))
        for number, node in enumerate(nodes):
            node.resize_outputs(2)
            node.outputs[1].name = f"{DISCRETE_OUTPUT}{number}"
            node.outputs[1].dtype = ir.DataType.INT64
            model.graph.outputs.append(node.outputs[1])

    @contextlib.contextmanager
    def follow(self, decisions: Sequence[IntArray], *, row: int, tokens: slice) -> Iterator[None]:
        heads, rounds = self._rotations.shape[0], self._hashes.rounds
        by_row = (torch.from_numpy(found.reshape(-1, heads, rounds, found.shape[-1]))[row] for found in decisions)
        self._followed, self._layer = [found[..., tokens] for found in by_row], -1
        try:
            yield
        finally:
            self._followed = []

    def take_wrong(self) -> list[str]:
        wrong, self._wrong = self._wrong, 0
        return [f"{wrong} tokens in a bucket of a smaller product"] if wrong else []

    def begin_layer(self, layer: int | None = None, *, tokens: torch.Tensor | None = None) -> None:
        """This layer's module is used next; None for the layer after the last one.

        Args:
            layer: its number among the layers that hash.
            tokens: [tokens], bool, True for the tokens of the text that the layer is given; None for all.
        """
        self._layer = self._layer + 1 if layer is None else layer
        self._tokens = torch.ones(0) if tokens is None else tokens

    def use(self, attention: LSHSelfAttention) -> None:
        """Make a module of transformers hash as the record says, and in float32, in place."""
        buckets = self._hashes.buckets
        attention.num_buckets = buckets[0] if len(buckets) == 1 else list(buckets)
        attention.hash_seed, attention.num_hashes = self._hashes.seed, self._hashes.rounds
        original: Callable[..., torch.Tensor] = attention._hash_vectors

        def hash_vectors(vectors: torch.Tensor, rounds: int, mask: torch.Tensor, **others: Any) -> torch.Tensor:
            buckets = original(vectors.float(), rounds, mask, **others)
            return self._decided(vectors.float(), buckets, mask) if self._followed else buckets

        attention._hash_vectors = hash_vectors

    def _decided(self, vectors: torch.Tensor, hashed: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[1, heads, rounds * tokens], the buckets of the graph in place of transformers'.

        Args:
            vectors: [1, heads, tokens, head_dim], also of the padding after the text.
            hashed: [1, heads, rounds * tokens], buckets, one round's after the other's.
            mask: [1, tokens], 0 for padding, which has a bucket of its own.
        """
        followed = self._followed[self._layer]
        if len(self._tokens):
            followed = followed[..., self._tokens]
        tokens, all_buckets = followed.shape[-1], math.prod(self._hashes.buckets)
        in_round = all_buckets + (not bool(mask.all()))
        rounds = torch.arange(self._hashes.rounds)[:, None] * in_round
        decided = hashed.unflatten(2, (self._hashes.rounds, -1)) - rounds  # [1, heads, rounds, tokens]
        real = mask[0, :tokens].bool()
        own = decided[..., :tokens].clone()
        decided[..., :tokens] = torch.where(real, followed, own)
        self._check(vectors[:, :, :tokens], own[0], decided[0, ..., :tokens])
        return (decided + rounds).flatten(2)

    def _check(self, vectors: torch.Tensor, own: torch.Tensor, decided: torch.Tensor) -> None:
        """Count the tokens of the graph whose direction is not nearly as good as the best.

        Args:
            vectors: [1, heads, tokens, head_dim].
            own: [heads, rounds, tokens], transformers' buckets.
            decided: the same of the graph.
        """
        heads, rounds, tokens = (own != decided).nonzero(as_tuple=True)
        vector, bucket = vectors[0, heads, tokens], decided[heads, rounds, tokens]  # [differing, head_dim], [differing]
        directions = self._rotations[heads, :, rounds]  # [differing, head_dim, directions]
        products = torch.einsum("td,tdn->tn", vector, directions)
        wrong = (bucket < 0) | (bucket >= math.prod(self._hashes.buckets))
        first = 0
        for number, factor in enumerate(self._hashes.buckets):
            part = products[:, first : first + factor // 2]
            first += factor // 2
            both = torch.cat([part, -part], dim=-1)
            chosen = bucket.clamp(min=0) // math.prod(self._hashes.buckets[:number]) % factor
            reached = both.gather(1, chosen[:, None])[:, 0]
            wrong |= both.amax(1) - reached > self._close * vector.norm(dim=-1)
        self._wrong += int(wrong.sum())


def _buckets(graph: ir.Graph) -> ir.Value:
    """The values that a body sorts by, also where they are in its loop."""
    for node in graph:
        for value in node.outputs:
            if value.name == _SORTED_BY:
                return value
        body = node.attributes.get("body")
        if body is not None:
            inner = [value for part in body.as_graph() for value in part.outputs if value.name == _SORTED_BY]
            if inner:
                body.as_graph().outputs.append(inner[0])
                node.resize_outputs(len(node.outputs) + 1)
                node.outputs[-1].name = f"{_SORTED_BY}_of_steps"
                node.outputs[-1].dtype = ir.DataType.INT64
                return node.outputs[-1]
    raise AssertionError("the body of LSHAttention has no value of that name")
