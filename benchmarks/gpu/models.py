"""Models of BERT-base's and Longformer-base's shape with random weights, and the ways to run their attention."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases.window import WindowCase
from benchmarks.gpu.kernels import architecture_of
from benchmarks.gpu.peers import compile_every_shape, flex_attention_on
from hdplugins import OPERATORS
from hdplugins.attention.kernel_launch import launch
from hdplugins.attention.plugin_spec import plugin_spec_of

_MAX_GLOBAL = 16
"""Global tokens that a Longformer's graph has place for, as in a bundle; the first token is one."""

_GAIN = 2.0
"""Of a random weight matrix: numbers of spread 1 become numbers of that spread, several times what BERT begins with.
Attention is then far from uniform, and a window that is wrong by one token shows."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a model; `window` counts tokens on each side, and `block_size` the tokens of BigBird's blocks."""

    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    vocab_size: int
    max_len: int
    window: int
    block_size: int = 64


_BASE = Sizes(hidden_size=768, layers=12, heads=12, intermediate_size=3072, vocab_size=30522, max_len=16384, window=256)
_TINY = Sizes(
    hidden_size=64, layers=1, heads=2, intermediate_size=96, vocab_size=100, max_len=128, window=8, block_size=8
)


def sizes_of(*, rehearsal: bool) -> Sizes:
    """Of both models: base, or tiny in a rehearsal."""
    return _TINY if rehearsal else _BASE


def save_checkpoint(model: str, folder: Path, *, rehearsal: bool) -> Sizes:
    """Write a model as published, with random weights, as a checkpoint."""
    sizes = sizes_of(rehearsal=rehearsal)
    _as_published(model, sizes, attention="sdpa").save_pretrained(folder)
    return sizes


def add_pooling(folder: Path, sizes: Sizes) -> None:
    """Make a checkpoint one of sentence-transformers, which means over tokens."""
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": sizes.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def prepare(model: str, variant: str, *, sizes: Sizes, device: str) -> Callable[[Any], Any]:
    """Make a model in float16 that runs as the variant says: ids [batch, tokens] in, hidden states out.

    Args:
        model: ``bert-base`` or ``longformer-base``.
        variant: ``torch sdpa``, ``hugging face``, ``torch.compile``, ``FlexAttention``..., ``our kernel``...
        device: ``cuda``, or ``cpu`` where Triton interprets.
    """
    import torch

    is_windowed = variant.startswith(("FlexAttention", "our kernel"))
    module = _windowed(model, sizes) if is_windowed else _as_published(model, sizes, attention="sdpa")
    module = module.to(device=device, dtype=torch.float16)
    if is_windowed:
        _attend_by(_FlexAttention(device) if variant.startswith("FlexAttention") else _OurKernel())
    if variant == "torch.compile":
        compile_every_shape()
        # A layer after the other, for all are alike: the whole model takes minutes to compile. A rehearsal does without
        # the compiler, which takes a minute on a CPU.
        for layer in module.encoder.layer:
            layer.compile(dynamic=False, backend="inductor" if device == "cuda" else "eager")
    return _call_of(model, module, is_windowed=is_windowed)


def expected(model: str, variant: str, ids: Any, *, sizes: Sizes, device: str) -> Any:
    """Hidden states in float32 by the definition: dense attention with all scores, or the reference of windows.

    Longformer's are those of its adapted model in every variant: Hugging Face's own is one that is checked.
    """
    import torch

    dense = model == "bert-base" and not variant.startswith(("FlexAttention", "our kernel"))
    module = _as_published(model, sizes, attention="eager") if dense else _windowed(model, sizes)
    with torch.inference_mode():
        return _call_of(model, module.to(device), is_windowed=not dense)(ids)


def _call_of(model: str, module: Any, *, is_windowed: bool) -> Callable[[Any], Any]:
    """From ids to hidden states; dense attention gets no mask, with which its fastest kernel could not serve."""

    def call(ids: Any) -> Any:
        ones, first = _marks(*ids.shape, ids.device)
        masks = {"attention_mask": ones} if is_windowed else {}
        if model == "longformer-base":
            masks = {"attention_mask": ones, "global_attention_mask": first}
        return module(input_ids=ids, **masks).last_hidden_state

    return call


@functools.lru_cache(maxsize=1)
def _marks(batch: int, tokens: int, device: Any) -> tuple[Any, Any]:
    """[batch, tokens] each: every token is real, the first is global. Kept, so that a CUDA graph can be captured."""
    import torch

    ones = torch.ones(batch, tokens, dtype=torch.int64, device=device)
    first = torch.zeros_like(ones)
    first[:, 0] = 1
    return ones, first


def _as_published(model: str, sizes: Sizes, *, attention: str) -> Any:
    """The library's model, in evaluation mode; the weights of one seed."""
    import torch
    import transformers

    common = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.intermediate_size,
        "initializer_range": _GAIN / sizes.hidden_size**0.5,
        "pad_token_id": 1,
    }
    torch.manual_seed(0)
    if model == "bert-base":
        config = transformers.BertConfig(**common, max_position_embeddings=sizes.max_len, attn_implementation=attention)
        return transformers.BertModel(config, add_pooling_layer=False).eval()
    if model == "bigbird-base":
        config = transformers.BigBirdConfig(
            **common, max_position_embeddings=sizes.max_len, block_size=sizes.block_size
        )
        return transformers.BigBirdModel(config, add_pooling_layer=False).eval()
    config = transformers.LongformerConfig(
        **common,
        # The first position is the row after the padding's; Hugging Face pads a text to whole windows.
        max_position_embeddings=sizes.max_len + 2 * sizes.window + 2,
        attention_window=[2 * sizes.window] * sizes.layers,
        type_vocab_size=1,
        sep_token_id=2,
    )
    return transformers.LongformerModel(config, add_pooling_layer=False).eval()


def _windowed(model: str, sizes: Sizes) -> Any:
    """The same weights with our operator as attention, by its definition until `_attend_by`."""
    from hdexport.attention.attention_type import ConversionContext
    from hdexport.attention.interface import use_operators
    from hdexport.attention.window import Window
    from hdexport.attention.window.attention_type import WindowAttentionType, WindowRequest
    from hdexport.families import family_of
    from hdruntime.bundle.manifest import Task

    module = _as_published(model, sizes, attention="sdpa")
    family = family_of(module.config.model_type)
    request = WindowRequest(max_global=_MAX_GLOBAL)
    if model == "bert-base":
        request = WindowRequest(window=Window(tokens=sizes.window, global_tokens=0, dilation=(1,)))
    context = ConversionContext(model=module, family=family, task=Task.FEATURE_EXTRACTION, max_len=sizes.max_len)
    conversion = WindowAttentionType().conversion(request, context)
    assert conversion is not None
    conversion.adapt(module, family)
    use_operators(module)
    return module


def _attend_by(node: Callable[..., Any]) -> None:
    """Let the windowed attention of this process be computed by `node`, which takes what the operator takes."""
    import hdexport.attention.window.model
    import hdexport.families.longformer

    hdexport.attention.window.model.sliding_window_node = node  # type: ignore[assignment]
    hdexport.families.longformer.sliding_window_node = node  # type: ignore[attr-defined]


class _OurKernel:
    """The Triton kernel on strided states; the layers of a forward pass share one block index, as in an engine."""

    def __init__(self) -> None:
        self._token_kind: Any = None
        self._scratch: dict[str, Any] = {}

    def __call__(
        self, query: Any, key: Any, value: Any, token_kind: Any, *, dilation: tuple[int, ...] = (1,), **others: Any
    ) -> Any:
        import torch

        operator, attributes = OPERATORS["SlidingWindowAttention"], {"dilation": dilation, **others}
        inputs, spec = (query, key, value, token_kind), plugin_spec_of(operator)
        shapes = [tuple(tensor.shape) for tensor in inputs]
        # The layers of one pass are handed one tensor. It is kept, so that no other takes its place.
        has_block_index = token_kind is self._token_kind
        if not has_block_index:
            self._token_kind = token_kind
            self._scratch = {
                name: torch.empty(size, dtype=torch.uint8, device=query.device)
                for name, size in spec.workspace(shapes, attributes).items()
            }
        dtype, architecture = str(query.dtype).removeprefix("torch."), architecture_of(query.device.type)
        block_config = spec.block_config(shapes, attributes, dtype=dtype, architecture=architecture)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        launch(
            operator,
            inputs,
            out,
            self._scratch,
            block_config=block_config,
            attributes=attributes,
            has_block_index=has_block_index,
        )
        return out


class _FlexAttention:
    """FlexAttention with a mask of blocks, made once a length; the first token is global where one may be."""

    def __init__(self, device: str) -> None:
        self._attention = flex_attention_on(device)
        self._mask = functools.lru_cache(self._new_mask)

    def __call__(
        self, query: Any, key: Any, value: Any, token_kind: Any, *,
        left: int, right: int, dilation: tuple[int, ...] = (1,), global_bound: int, scale: float,
    ) -> Any:  # fmt: skip
        mask = self._mask(query.shape, left, right, min(global_bound, 1), str(query.device))
        states = (state.transpose(1, 2) for state in (query, key, value))
        return self._attention(*states, block_mask=mask, scale=scale).transpose(1, 2)

    @staticmethod
    def _new_mask(shape: tuple[int, ...], left: int, right: int, leading_globals: int, device: str) -> Any:
        sizes = dict(zip(("batch", "tokens", "heads", "head_dim"), shape, strict=True))
        case = WindowCase(**sizes, dtype="float16", left=left, right=right, globals=leading_globals)
        return case.flex_mask(device)
