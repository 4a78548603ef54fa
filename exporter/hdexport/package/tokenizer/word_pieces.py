"""WordPiece, by ``BertTokenizer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir
from tokenizers import Tokenizer

from hdexport.package.tokenizer.characters import (
    BY_CHARACTER,
    CharacterRules,
    character_class,
    isolated,
    required_steps,
)
from hdexport.package.tokenizer.nodes import DOMAIN, INT64, Encode, Rewrites, join, replace, unsupported
from hdplugins.op_builder import OpBuilder

_WORD_END, _SEGMENT_END = "\x02", "\x03"
"""Words between the words of a text: control characters, which BERT's normalization removes."""

_MAX_WORD = 100
"""Characters of a word that the operator looks up."""


def word_pieces(tokenizer: Tokenizer, settings: Mapping[str, Any], rules: CharacterRules) -> tuple[Encode, Rewrites]:
    """How a graph tokenizes as a WordPiece tokenizer does."""
    model = settings["model"]
    required_steps(settings["normalizer"], "normalizers", BY_CHARACTER - {"Precompiled"}, "normalizer")
    required_steps(
        settings["pre_tokenizer"],
        "pretokenizers",
        {"BertPreTokenizer", "WhitespaceSplit", "Punctuation"},
        "pre-tokenizer",
    )
    if not {_WORD_END, _SEGMENT_END} <= rules.removed:
        raise unsupported("its normalizer keeps control characters")
    longest = model["max_input_chars_per_word"]
    if longest > _MAX_WORD:
        raise unsupported(f"words have up to {longest} characters (max_input_chars_per_word); {_MAX_WORD} are possible")
    words = {number: word for word, number in model["vocab"].items()}
    size = max(words) + 1
    # The operator's words are lines, and empty ones are not counted.
    lines = [
        word if (word := words.get(number, "")) and not set(word) & {"\r", "\n"} else f"{_WORD_END}{number}"
        for number in range(size)
    ]
    unknown = model["unk_token"]
    unknown_id = model["vocab"][unknown]
    apart, spaces = isolated(tokenizer.pre_tokenizer)

    def encode(op: OpBuilder, segments: onnx_ir.Value) -> tuple[onnx_ir.Value, onnx_ir.Value]:
        text = join(op, segments, f" {_SEGMENT_END} ")
        text = replace(op, text, f"({character_class(apart)})", r" \1 ")
        text = replace(op, text, f"{character_class(spaces | {' '})}+", f" {_WORD_END} ")
        text = replace(op, text, r"\A +", "")
        if longest < _MAX_WORD:
            text = replace(op, text, f"[^ ]{{{longest + 1},}}", unknown)
        named = dict.fromkeys(("unk_token", "sep_token", "pad_token", "cls_token", "mask_token"), unknown)
        ids, *_ = op.call(
            "BertTokenizer",
            text,
            _domain=DOMAIN,
            _outputs=3,
            vocab_file="\n".join([*lines, _WORD_END, _SEGMENT_END]),
            do_basic_tokenize=0,
            do_lower_case=0,
            strip_accents=0,
            suffix_indicator=model["continuing_subword_prefix"],
            **named,
        )
        ids = op.Slice(ids, [1], [-1])
        is_word_end, is_segment_end = op.Equal(ids, size), op.Equal(ids, size + 1)
        words = op.CumSum(op.Cast(is_word_end, to=INT64), 0)
        numbers = op.CumSum(op.Cast(is_segment_end, to=INT64), 0)
        # A word has an unknown part if one of its ids says so; what comes before that part goes.
        is_unknown = op.Equal(ids, unknown_id)
        unknowns = op.ScatterElements(
            op.Expand(0, op.Add(op.Shape(ids), 1)), words, op.Cast(is_unknown, to=INT64), axis=0, reduction="add"
        )
        is_known = op.Equal(op.Gather(unknowns, words), 0)
        kept = op.And(op.Less(ids, size), op.Or(is_known, is_unknown))
        return op.Compress(ids, kept, axis=0), op.Compress(numbers, kept, axis=0)

    return encode, ()
