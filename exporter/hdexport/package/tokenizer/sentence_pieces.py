"""Unigram, by ``SentencepieceTokenizer``, whose model is made of the vocabulary."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
from tokenizers import Tokenizer

from hdexport.package.tokenizer.characters import BY_CHARACTER, CharacterRules, required_steps
from hdexport.package.tokenizer.nodes import (
    DOMAIN,
    INT64,
    OTHER,
    SPACES,
    Encode,
    Rewrites,
    count_before,
    literal,
    replace,
    token_sentinel,
    unsupported,
)
from hdplugins.op_builder import OpBuilder


def sentence_pieces(
    tokenizer: Tokenizer, settings: Mapping[str, Any], rules: CharacterRules
) -> tuple[Encode, Rewrites]:
    from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

    """How a graph tokenizes as a tokenizer of Unigram does."""
    model = settings["model"]
    normal = required_steps(settings["normalizer"], "normalizers", BY_CHARACTER | {"Strip", "Replace"}, "normalizer")
    steps = required_steps(
        settings["pre_tokenizer"], "pretokenizers", {"WhitespaceSplit", "Metaspace"}, "pre-tokenizer"
    )
    if model.get("byte_fallback"):
        raise unsupported("its model has byte_fallback")
    if not steps or steps[-1]["type"] != "Metaspace" or steps[-1].get("prepend_scheme", "always") != "always":
        raise unsupported("its pre-tokenizer is not Metaspace that is put before every text")
    for step in normal:
        if step["type"] == "Replace" and step["pattern"] != {"Regex": " {2,}"}:
            raise unsupported(f"its normalizer replaces {step['pattern']}")
    charsmap = next((step["precompiled_charsmap"] for step in normal if step["type"] == "Precompiled"), None)
    split = any(step["type"] == "WhitespaceSplit" for step in steps)
    ends = [step for step in normal if step["type"] == "Strip"]
    stripped = {name: split or any(step[name] for step in ends) for name in ("strip_left", "strip_right")}
    single = split or any(step["type"] == "Replace" for step in normal)

    proto = sentencepiece.ModelProto()
    proto.trainer_spec.model_type = proto.trainer_spec.UNIGRAM
    proto.trainer_spec.unk_id = model["unk_id"]
    proto.trainer_spec.bos_id = proto.trainer_spec.eos_id = proto.trainer_spec.pad_id = -1
    # Its own rules for spaces would come after its normalization, and before that of some characters.
    proto.normalizer_spec.add_dummy_prefix = proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.escape_whitespaces = True
    if charsmap is not None:
        proto.normalizer_spec.precompiled_charsmap = base64.b64decode(charsmap)
    last = {piece: number for number, (piece, _) in enumerate(model["vocab"])}
    for number, (piece, score) in enumerate(model["vocab"]):
        kind = proto.SentencePiece.UNKNOWN if number == model["unk_id"] else proto.SentencePiece.NORMAL
        # SentencePiece rejects equal pieces, and ends a piece at NUL. Of equal pieces the tokenizers library takes the
        # last one.
        is_reached = last[piece] == number and piece and "\0" not in piece
        proto.pieces.add(piece=piece if is_reached else token_sentinel(number), score=score, type=kind)
    serialized = base64.b64encode(proto.SerializeToString()).decode()

    def encode(op: OpBuilder, segments: ir.Value) -> tuple[ir.Value, ir.Value]:
        if split:
            segments = replace(op, segments, SPACES, " ")
        if stripped["strip_left"]:
            segments = replace(op, segments, rf"\A{SPACES}+", "")
        if stripped["strip_right"]:
            segments = replace(op, segments, rf"{SPACES}+\z", "")
        if single:
            segments = replace(op, segments, " {2,}", " ")
        if split:
            segments = replace(op, segments, " \u2581", "\u2581")
        segments = replace(op, segments, "\\A([^ \u2581])", r" \1")
        no = op.Constant(value=ir.tensor([False], ir.DataType.BOOL))
        ids, starts = op.call(
            "SentencepieceTokenizer",
            segments,
            *(op.Constant(value=ir.tensor([0], ir.DataType.INT64)), op.Constant(value=ir.tensor([0.0]))),
            *(no, no, no),
            _domain=DOMAIN,
            _outputs=2,
            model=serialized,
        )
        ids = op.Cast(ids, to=INT64)
        return ids, op.Sub(count_before(op, op.Slice(starts, [0], [-1]), op.Shape(ids)), 1)

    # SentencePiece never finds the unknown token in a text; a character that it does not know has its id.
    return encode, ((literal(model["vocab"][model["unk_id"]][0]), OTHER),)
