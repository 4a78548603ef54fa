"""Byte-level BPE, by ``GPT2Tokenizer``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import onnx_ir
from tokenizers import Tokenizer, pre_tokenizers

from hdexport.package.tokenizer.characters import BY_CHARACTER, CharacterRules, required_steps
from hdexport.package.tokenizer.nodes import BREAK, CLOSE, DOMAIN, OPEN, SPACES, TEXT, Encode, Rewrites, unsupported
from hdplugins.op_builder import OpBuilder


def byte_pairs(tokenizer: Tokenizer, settings: Mapping[str, Any], rules: CharacterRules) -> tuple[Encode, Rewrites]:
    """How a graph tokenizes as a tokenizer of byte pairs does."""
    model = settings["model"]
    required_steps(settings["normalizer"], "normalizers", BY_CHARACTER - {"Precompiled"}, "normalizer")
    steps = required_steps(settings["pre_tokenizer"], "pretokenizers", {"ByteLevel"}, "pre-tokenizer")
    if len(steps) != 1 or not steps[0].get("use_regex", True):
        raise unsupported("its pre-tokenizer is not ByteLevel with GPT-2's pattern")
    changed = {
        name: model[name]
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        if model.get(name)
    }
    if changed:
        raise unsupported(f"its model has {', '.join(changed)}")
    vocab = model["vocab"]
    if missing := set(pre_tokenizers.ByteLevel.alphabet()) - set(vocab):
        raise unsupported(f"its vocabulary lacks {len(missing)} of the 256 bytes")
    if model["merges"] and "".join(model["merges"][0]).startswith("#"):
        raise unsupported("its first merge begins with '#', as a comment does")
    merges = "\n".join(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    spaced = steps[0].get("add_prefix_space", True)

    def encode(op: OpBuilder, segments: onnx_ir.Value) -> tuple[onnx_ir.Value, onnx_ir.Value]:
        ids, mask = op.call(
            "GPT2Tokenizer",
            segments,
            _domain=DOMAIN,
            _outputs=2,
            vocab=json.dumps(vocab),
            merges=merges,
            padding_length=-1,
        )
        places = op.NonZero(mask)
        numbers = op.Squeeze(op.Slice(places, [0], [1]), [0])
        return op.GatherND(ids, op.Transpose(places)), numbers

    before = rf"({TEXT}|{CLOSE})"
    return encode, (
        *([(rf"{before}([^ {TEXT}-{CLOSE}])", r"\1 \2")] if spaced else []),
        # GPT-2's pattern leaves the last white space before a word to it; version 0.12 takes all of it.
        (rf"({SPACES}{{2,}})([{TEXT}-{OPEN}]|\z)", rf"{BREAK}\1\2"),
        (rf"({SPACES}+)({SPACES}[^{SPACES[1:-1]}{TEXT}-{CLOSE}])", rf"{BREAK}\1{BREAK}\2"),
        # The operator's own special token is cut between punctuation and a letter, where words end in any case.
        (r"(<\|)(endoftext\|>)", rf"\1{BREAK}\2"),
    )
