"""Options of a build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from hdexport.checkpoint import Checkpoint
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdexport.engines.build import EngineOptions
from hdexport.model.limits import MAX_POSITIONS
from hdexport.quantize import Int8Options
from hdexport.verify.grid import Grid
from hdruntime.bundle.manifest import AttentionScale, Dtype, Scheme, Task, TokenizerSource
from hdruntime.errors import InputError
from hdruntime.folders import require_utf8


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Which bundle is built, and how.

    Attributes:
        model: a checkpoint's directory, ``organisation/name[@revision]`` on the Hugging Face hub, or what
            `find_checkpoint` found.
        output: the bundle's directory.
        max_len: the longest input, in tokens.
        text_length: tokens that encoders cut texts to by default; None for the model's own number.
        precision: ``float32``, ``float16`` or ``bfloat16``, the type of weights and activations.
        fp32_weights: whether a float32 bundle stores float32 weights, too, where the checkpoint has large ones in
            half precision; by default they keep their dtype, and the graphs upcast them.
        task: None infers it from the checkpoint.
        adapter: name of the checkpoint's adapter that is merged into its weights; None for none.
        tokenizer: whose ids texts have: ``library``, those of transformers' class, which sentence-transformers
            computes with, or ``file``, those of the checkpoint's ``tokenizer.json``; None for a bundle that takes token
            ids.
        scheme: source of the positions after the checkpoint's.
        alpha: weight of the coarse position in the hierarchical scheme; None chooses, see `choose_positions`.
        attention_scale: ``logn`` multiplies queries by max(1, ln n / ln positions of the checkpoint), for n tokens that
            they see; ``none`` leaves them; None chooses.
        rope_factor: factor of the base of rotary positions in layers that attend to the whole text, above 1; None
            leaves the base.
        attention: requests to attention types, by the kinds' names, as `attention_from_spec` reads them; empty
            keeps the model's attention.
        recurrence: tokens of earlier calls that the model remembers, at least 2; None for the checkpoint's number.
        ffn_chunk: most tokens of a batch, at least 1, that a feed-forward network computes at once in ONNX Runtime;
            None for all.
        targets: names of targets whose graphs the bundle gets, beside those of ONNX; see `hdexport.graph.targets`.
        int8: how graphs for CPUs with int8 weights are made; None makes none.
        engines: engines beside the ONNX graphs.
        verify: cases in which the bundle is compared with PyTorch before it appears; None skips the comparison. A model
            without a family is compared in all cases of the full grid.
        verify_memory: bytes that a session's weights may take in the comparison; None for the free memory less a fifth.
        unverified: whether the comparison may be skipped for a model without a family.
        force: replace a bundle at `output`.
        trust: which code of the checkpoint may run.
        command: the command line, for the record.
    """

    model: str | Path | Checkpoint
    output: Path
    max_len: int
    text_length: int | None = None
    precision: Dtype = "float32"
    fp32_weights: bool = False
    task: Task | None = None
    adapter: str | None = None
    tokenizer: TokenizerSource | None = "library"
    scheme: Scheme = Scheme.HIERARCHICAL
    alpha: float | None = None
    attention_scale: AttentionScale | None = None
    rope_factor: float | None = None
    attention: Mapping[str, Any] = field(default_factory=dict)
    recurrence: int | None = None
    ffn_chunk: int | None = None
    targets: tuple[str, ...] = ()
    int8: Int8Options | None = None
    engines: EngineOptions = field(default_factory=EngineOptions)
    verify: Grid | None = Grid.QUICK
    verify_memory: int | None = None
    unverified: bool = False
    force: bool = False
    trust: Trust = UNTRUSTED
    command: str = ""

    def check(self) -> None:
        """Reject a type of weights, a tokenizer and numbers of tokens that no bundle has, and unreadable texts.

        Raises:
            InputError: the type or the tokenizer is unknown, a number is out of range, or the calibration's texts
                cannot be read.
        """
        if self.precision not in get_args(Dtype):
            raise InputError(f"precision is {self.precision!r}.", hint=f"Choose from: {', '.join(get_args(Dtype))}.")
        if self.tokenizer not in (None, *get_args(TokenizerSource)):
            raise InputError(
                f"tokenizer is {self.tokenizer!r}.",
                hint=f"Choose from: {', '.join(get_args(TokenizerSource))}, or None.",
            )
        if self.ffn_chunk is not None and not 1 <= self.ffn_chunk <= MAX_POSITIONS:
            raise InputError(
                parameter="ffn_chunk",
                value=self.ffn_chunk,
                accepted=f"1 to {MAX_POSITIONS} tokens",
                hint="Leave it out to compute all tokens of a feed-forward network at once.",
            )
        require_utf8(self.output)
        if self.int8 is not None:
            self.int8.check()
        # A graph for one token could not be told from a graph for any number of them.
        if self.recurrence is not None and not 2 <= self.recurrence <= MAX_POSITIONS:
            raise InputError(parameter="recurrence", value=self.recurrence, accepted=f"2 to {MAX_POSITIONS} tokens")
