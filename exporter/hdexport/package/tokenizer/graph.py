"""A tokenizer as nodes of a graph: strings in, token ids and their mask out, with onnxruntime-extensions' operators.

Its tokenizers (``BertTokenizer``, ``GPT2Tokenizer``, ``SentencepieceTokenizer``) split words into tokens. The graph
adds what they lack, or do in another way than the tokenizers library (0.15.2):

1. Special tokens inside a text, such as ``[SEP]``: the texts are split at them first.
2. BERT's normalization: accents, capital letters that are not ASCII, control characters. Each character's normal form
   is read from the tokenizer itself.
3. A word with an unknown part is the unknown token alone; ``BertTokenizer`` keeps the tokens before that part.
4. A batch of texts for BERT, truncation that keeps the closing special token, and padding by the model's own token.

All texts of a batch are one string until the end, in which noncharacters of Unicode mark where texts and tokens are:
onnxruntime-extensions' operators on strings do not keep the rows of texts that they split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
from tokenizers import Tokenizer

from hdexport.package.tokenizer.byte_pairs import byte_pairs
from hdexport.package.tokenizer.characters import CharacterRules
from hdexport.package.tokenizer.nodes import (
    BREAK,
    CLOSE,
    DOMAIN,
    INT64,
    OPEN,
    OTHER,
    SENTINELS,
    SPACES,
    TEXT,
    Encode,
    Rewrites,
    join,
    literal,
    map_strings,
    replace,
    split,
    strings,
    token_sentinel,
    unsupported,
)
from hdexport.package.tokenizer.sentence_pieces import sentence_pieces
from hdexport.package.tokenizer.word_pieces import word_pieces
from hdplugins.op_builder import OpBuilder
from hdruntime.bundle.manifest import Side
from hdruntime.bundle.reader import Bundle

ML_DOMAIN, ML_OPSET = "ai.onnx.ml", 2

_CHANGING = r"[A-Z]|[^\x00-\x7F]"
"""Characters whose normal form may be another one. ``StringLower`` of version 0.12 is wrong for U+00D7."""


@dataclass(frozen=True, kw_only=True)
class TokenizerGraph:
    """A tokenizer that a graph has nodes for.

    Attributes:
        encode: writes the nodes of its model.
        prefix, suffix: ids of the special tokens around a text.
        special: token in the text -> id; matched before normalization.
        normal_special: token in the text -> id; matched after normalization.
        left_spaces, right_spaces: special tokens that take the white space before or after them.
        rules: the normalizer's rules for each character.
        words: rewrites of normal texts, whose special tokens are sentinels.
    """

    encode: Encode
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    special: Mapping[str, int]
    normal_special: Mapping[str, int]
    left_spaces: frozenset[str] = frozenset()
    right_spaces: frozenset[str] = frozenset()
    rules: CharacterRules = field(default_factory=CharacterRules)
    words: Rewrites = ()

    def write(
        self,
        op: OpBuilder,
        texts: ir.Value,
        *,
        max_tokens: int,
        pad_id: int,
        truncation_side: Side = "right",
        prompt: str = "",
    ) -> tuple[ir.Value, ir.Value]:
        """Write the nodes.

        Args:
            op: builder of the nodes.
            texts: texts, strings, ``[batch]``.
            max_tokens: tokens of a text with its special tokens; longer texts are truncated.
            pad_id: token after the end of shorter texts.
            truncation_side: end at which texts are truncated.
            prompt: prompt before every text.

        Returns:
            The ids and the attention mask, int64, ``[batch, tokens]``.
        """
        segments = self._split(op, texts, prompt)
        keys = {token_sentinel(number): number for number in (*self.special.values(), *self.normal_special.values())}
        ids_of_segments = op.call(
            "LabelEncoder",
            segments,
            _domain=ML_DOMAIN,
            keys_strings=[TEXT, BREAK, *keys],
            values_int64s=[-2, -3, *keys.values()],
            default_int64=-1,
        )
        is_text = op.Equal(ids_of_segments, -2)
        rows = op.Sub(op.CumSum(op.Cast(is_text, to=INT64), 0), 1)
        ordinary = op.Equal(ids_of_segments, -1)
        ids, segment_of_id = self.encode(op, op.Where(ordinary, segments, strings(op, "")))
        # Special tokens come between the others: all are sorted by their segments, and TopK keeps the order of equals.
        places = op.Squeeze(op.NonZero(op.GreaterOrEqual(ids_of_segments, 0)), [0])
        ids = op.Concat(ids, op.Gather(ids_of_segments, places), axis=0)
        segment_of_id = op.Concat(segment_of_id, places, axis=0)
        segment_of_id, order = op.TopK(segment_of_id, op.Shape(segment_of_id), largest=0, _outputs=2)
        return self._pad(
            op,
            op.Gather(ids, order),
            op.Gather(rows, segment_of_id),
            op.Shape(texts),
            limit=max(max_tokens - len(self.prefix) - len(self.suffix), 0),
            pad_id=pad_id,
            from_end=truncation_side == "left",
        )

    def _split(self, op: OpBuilder, texts: ir.Value, prompt: str) -> ir.Value:
        """Normalized segments of all texts: sentinels, special tokens, and the texts between them."""
        texts = replace(op, texts, SENTINELS.pattern, OTHER)
        text = join(op, op.Concat(strings(op, ""), texts, axis=0), TEXT + prompt)
        text = self._insert_sentinels(op, text, self.special, self.rules.others)
        for pattern, replacement in self.rules.rewrites():
            text = replace(op, text, pattern, replacement)
        text = self._insert_sentinels(op, text, self.normal_special, {})
        for pattern, replacement in self.words:
            text = replace(op, text, pattern, replacement)
        return split(op, text, f"{TEXT}|{BREAK}|{OPEN}[0-9]+{CLOSE}")

    def _insert_sentinels(
        self, op: OpBuilder, text: ir.Value, tokens: Mapping[str, int], characters: Mapping[str, str]
    ) -> ir.Value:
        """Replace tokens by their sentinels, and characters by their normal forms."""
        text = self._take_spaces(op, text, tokens)
        patterns = [literal(token) for token in sorted(tokens, key=len, reverse=True)]
        if characters:
            patterns.append(_CHANGING)
        if not patterns:
            return text
        changed = {token: token_sentinel(number) for token, number in tokens.items()} | dict(characters)
        return join(op, map_strings(op, split(op, text, "|".join(patterns)), changed), "")

    def _take_spaces(self, op: OpBuilder, text: ir.Value, tokens: Iterable[str]) -> ir.Value:
        for token in tokens:
            left = f"{SPACES}*" if token in self.left_spaces else ""
            right = f"{SPACES}*" if token in self.right_spaces else ""
            if left or right:
                text = replace(op, text, f"{left}({literal(token)}){right}", r"\1")
        return text

    def _pad(
        self,
        op: OpBuilder,
        ids: ir.Value,
        rows: ir.Value,
        batch: ir.Value,
        *,
        limit: int,
        pad_id: int,
        from_end: bool,
    ) -> tuple[ir.Value, ir.Value]:
        """Rows of ids in the frame of their special tokens.

        Args:
            op: builder of the nodes.
            ids: ``[tokens]``, of all texts.
            rows: text of each id, ascending.
            batch: ``[1]``, the number of texts.
            limit: ids that are kept of a text.
            pad_id: id of padding.
            from_end: whether the last ids are kept.
        """
        counts = op.ScatterElements(op.Expand(0, batch), rows, op.Expand(1, op.Shape(ids)), axis=0, reduction="add")
        starts = op.CumSum(counts, 0, exclusive=1)
        places = op.Sub(op.Range(0, op.Squeeze(op.Shape(ids), [0]), 1), op.Gather(starts, rows))
        if from_end:
            places = op.Sub(places, op.Gather(op.Max(op.Sub(counts, limit), 0), rows))
        kept = op.And(op.Less(places, limit), op.GreaterOrEqual(places, 0))
        ids, rows, places = (op.Compress(value, kept, axis=0) for value in (ids, rows, places))
        counts = op.Min(counts, limit)
        before, after = len(self.prefix), len(self.suffix)
        lengths = op.Add(counts, before + after)
        longest = op.ReduceMax(lengths, keepdims=1)
        table = op.Expand(pad_id, op.Concat(batch, longest, axis=0))
        table = op.ScatterND(table, op.Concat(_column(op, rows), _column(op, op.Add(places, before)), axis=1), ids)
        texts = op.Range(0, op.Squeeze(batch, [0]), 1)
        for place, token in enumerate(self.prefix):
            at = op.Concat(_column(op, texts), _column(op, op.Expand(place, batch)), axis=1)
            table = op.ScatterND(table, at, op.Expand(token, batch))
        for place, token in enumerate(self.suffix):
            at = op.Concat(_column(op, texts), _column(op, op.Add(counts, before + place)), axis=1)
            table = op.ScatterND(table, at, op.Expand(token, batch))
        columns = op.Range(0, op.Squeeze(longest, [0]), 1)
        mask = op.Cast(op.Less(op.Unsqueeze(columns, [0]), _column(op, lengths)), to=INT64)
        return table, mask


def _column(op: OpBuilder, values: ir.Value) -> ir.Value:
    return op.Unsqueeze(values, [1])


def read_tokenizer(bundle: Bundle) -> Tokenizer:
    """The tokenizer of a bundle, which neither truncates nor pads."""
    info = bundle.manifest.tokenizer
    assert info is not None
    tokenizer = Tokenizer.from_file(str(bundle.file(info.file)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_model(graph: TokenizerGraph, *, opset: int, **options: Any) -> ir.Model:
    """A tokenizer alone: ``input`` -> ``input_ids`` and ``attention_mask``; see `write` for `options`."""
    texts = ir.Value(name="input", type=ir.TensorType(ir.DataType.STRING), shape=ir.Shape(["batch"]))
    main = ir.Graph([texts], [], nodes=[], opset_imports={"": opset, DOMAIN: 1, ML_DOMAIN: ML_OPSET}, name="tokenizer")
    outputs = graph.write(OpBuilder.append(main, opset=opset), texts, **options)
    for name, value in zip(("input_ids", "attention_mask"), outputs, strict=True):
        value.name, value.type, value.shape = name, ir.TensorType(ir.DataType.INT64), ir.Shape(["batch", "tokens"])
    main.outputs.extend(outputs)
    return ir.Model(main, ir_version=8)


def tokenizer_graph(tokenizer: Tokenizer) -> TokenizerGraph:
    """Read a tokenizer.

    Raises:
        InputError: onnxruntime-extensions has no operators for it.
    """
    settings = json.loads(tokenizer.to_str())
    kind = settings["model"].get("type")
    if kind not in _MODELS:
        raise unsupported(f"its model is {kind}; {', '.join(_MODELS)} have operators")
    rules = CharacterRules.of(tokenizer.normalizer)
    prefix, suffix = _frame(tokenizer)
    tokens = [_added_token(each, tokenizer) for each in settings["added_tokens"]]
    normal = {each["content"] for each in tokens if each["normalized"] and settings["normalizer"] is not None}
    encode, words = _MODELS[kind](tokenizer, settings, rules)
    return TokenizerGraph(
        encode=encode,
        words=words,
        rules=rules,
        prefix=prefix,
        suffix=suffix,
        special={each["content"]: each["id"] for each in tokens if each["content"] not in normal},
        normal_special={each["content"]: each["id"] for each in tokens if each["content"] in normal},
        left_spaces=frozenset(each["content"] for each in tokens if each["lstrip"]),
        right_spaces=frozenset(each["content"] for each in tokens if each["rstrip"]),
    )


def _frame(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of the special tokens before and after a text."""
    tokenizer = type(tokenizer).from_str(tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = "a text"
    bare, framed = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(text)
    if any(framed.type_ids):
        raise unsupported(f"its token types of one text are {sorted(set(framed.type_ids))}; 0 has a graph")
    size = len(bare.ids)
    start = next(place for place in range(len(framed.ids)) if framed.ids[place : place + size] == bare.ids)
    return tuple(framed.ids[:start]), tuple(framed.ids[start + size :])


def _added_token(token: Mapping[str, Any], tokenizer: Tokenizer) -> Mapping[str, Any]:
    content = token["content"]
    if token["single_word"]:
        raise unsupported(f"its token {content!r} is one only between words (single_word)")
    if re.search(f"[\\x00-\\x1f{TEXT}-{CLOSE}]", content):
        raise unsupported(f"its token {content!r} has control characters")
    if token["normalized"] and tokenizer.normalizer is not None:
        normal = tokenizer.normalizer.normalize_str(content)
        if normal != content:
            raise unsupported(f"its token {content!r} is normalized to {normal!r}")
    return token


_MODELS = {"WordPiece": word_pieces, "BPE": byte_pairs, "Unigram": sentence_pieces}
"""Models of the tokenizers library."""
