"""A small real bundle: an ONNX model whose answers are easy to compute by hand, and a tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from hdexport.support.bundle_writer import seal
from hdruntime.bundle.manifest import (
    Default,
    EngineFile,
    Fill,
    GraphFile,
    InputSpec,
    Manifest,
    PaddingRule,
    Positions,
    ProfileShape,
    Role,
    TensorSpec,
    TokenizerInfo,
)
from hdruntime.constants import FORMAT_VERSION
from support.onnx_models import parsed_model

HIDDEN_SIZE = 4
MAX_LEN = 16
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "long", "documents", "are", "read", "whole", "nan", ".")
NAN_ID = WORDS.index("nan")
"""The model's vector of this token is NaN."""

TABLE = np.random.default_rng(7).standard_normal((len(WORDS), HIDDEN_SIZE)).astype(np.float32)
TABLE[NAN_ID] = np.nan
TYPES = np.array([[0, 0, 0, 0], [10, 20, 30, 40]], dtype=np.float32)

INPUTS = tuple(
    InputSpec(name=name, dtype="int64", shape=("batch", "tokens"), role=role, default=Default(fill=fill), bound=bound)
    for name, role, fill, bound in (
        ("input_ids", Role.IDS, Fill.REQUIRED, None),
        ("attention_mask", Role.MASK, Fill.ONES, None),
        ("token_type_ids", Role.TOKEN_TYPES, Fill.ZEROS, len(TYPES)),
    )
)

_OUTPUTS = {
    "feature-extraction": {"last_hidden_state": ("batch", "tokens", HIDDEN_SIZE)},
    "sentence-similarity": {
        "last_hidden_state": ("batch", "tokens", HIDDEN_SIZE),
        "sentence_embedding": ("batch", HIDDEN_SIZE),
    },
    "text-classification": {"logits": ("batch", HIDDEN_SIZE)},
}


def hidden_states(
    input_ids: np.ndarray, attention_mask: np.ndarray | None = None, padding: PaddingRule | None = None
) -> np.ndarray:
    """The model's answer: each token's vector plus the mean of the row's real ones.

    With `padding` also plus their sum in the last block, unless all tokens are dense: [batch, tokens, hidden size].
    """
    vectors = TABLE[input_ids].astype(np.float64)
    mask = np.ones_like(input_ids) if attention_mask is None else attention_mask
    real = np.where(mask[..., None] == 1, vectors, 0)
    result = vectors + real.sum(1, keepdims=True) / np.maximum(mask.sum(1), 1)[:, None, None]
    tokens = input_ids.shape[1]
    if padding is not None and tokens > padding.free_up_to:
        result += real[:, (tokens - 1) // padding.multiple_of * padding.multiple_of :].sum(1, keepdims=True)
    return result


def write_model(
    path: Path, *, task: str, token_types: bool, masked: bool, external_data: bool, padding: PaddingRule | None = None
) -> None:
    """Write the model; with ``masked=False`` it ignores its mask, so that padding changes its answers.

    With `padding` they depend on the last block of the padded batch, as BigBird's do.
    """
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if token_types else [])]
    outputs = {name: f"float[{', '.join(map(str, shape))}]" for name, shape in _OUTPUTS[task].items()}
    nodes = f"""
        types_of_tokens = {"Identity(token_type_ids)" if token_types else "Mul(input_ids, zero_id)"}
        mask = {"Identity(attention_mask)" if masked else "Equal(attention_mask, attention_mask)"}
        words = Gather(table, input_ids)
        kinds = Gather(types, types_of_tokens)
        vectors = Add(words, kinds)
        mask_flat = Cast<to: int = 1>(mask)
        mask_float = Unsqueeze(mask_flat, axis_last)
        mask_bool = Cast<to: int = 9>(mask_float)
        real = Where(mask_bool, vectors, zero)
        total = ReduceSum(real, axis_tokens)
        count = ReduceSum(mask_float, axis_tokens)
        count_safe = Max(count, one)
        mean = Div(total, count_safe)
        {"states" if padding else "last_hidden_state"} = Add(vectors, mean)
    """
    constants: dict[str, object] = {
        "table": TABLE,
        "types": TYPES,
        "zero": np.float32(0),
        "one": np.float32(1),
        "zero_id": 0,
        "axis_tokens": [1],
        "axis_last": [2],
    }
    if padding is not None:
        constants |= {"block_size": [padding.multiple_of], "dense_tokens": [padding.free_up_to], "one_id": [1]}
        # The sum of the real tokens in the padded batch's last block, unless the batch is dense.
        nodes += """
            tokens = Shape<start = 1, end = 2>(input_ids)
            last_place = Sub(tokens, one_id)
            last_block = Div(last_place, block_size)
            block_start = Mul(last_block, block_size)
            in_last_block = Slice(real, block_start, tokens, axis_tokens)
            block_sum = ReduceSum(in_last_block, axis_tokens)
            is_sparse = Greater(tokens, dense_tokens)
            block_term = Where(is_sparse, block_sum, zero)
            last_hidden_state = Add(states, block_term)
        """
    if task != "feature-extraction":
        nodes += f"{list(outputs)[-1]} = Squeeze(mean, axis_tokens)"
    onnx.save(
        parsed_model(dict.fromkeys(names, "int64[batch, tokens]"), outputs, nodes, constants),
        path,
        save_as_external_data=external_data,
        location="model.onnx.data",
        size_threshold=100,  # the table only: ONNX Runtime needs axes and shapes in the graph
    )


def write_tokenizer(path: Path) -> None:
    """A word-level tokenizer that carries truncation to 8 tokens and padding, as real files do."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))],
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))


def make_bundle(
    directory: Path,
    *,
    task: str = "feature-extraction",
    token_types: bool = False,
    cpu_graph: bool = False,
    external_data: bool = False,
    tokenizer: bool = True,
    dtype: str = "float32",
    padding: PaddingRule | None = None,
) -> Path:
    """Make a sealed bundle of the tiny model; ``cpu_graph`` adds one for the CPU that ignores its mask.

    With `padding` its answers depend on the padded length by that rule.
    """
    directory.mkdir(parents=True, exist_ok=True)
    graphs = [GraphFile(file="model.onnx", lowering="portable", dtype="float32")]
    options = {"task": task, "token_types": token_types, "padding": padding}
    write_model(directory / "model.onnx", masked=True, external_data=external_data, **options)
    if cpu_graph:
        graphs.append(GraphFile(file="onnxruntime_cpu.onnx", lowering="onnxruntime_cpu", dtype="float32"))
        write_model(directory / "onnxruntime_cpu.onnx", masked=False, external_data=False, **options)
    if tokenizer:
        write_tokenizer(directory / "tokenizer.json")
    (directory / "config.json").write_text("{}")
    manifest = _manifest(task, tuple(graphs), token_types, tokenizer, dtype)
    seal(directory, dataclasses.replace(manifest, padding=padding))
    return directory


def engine_file(name: str, **changes: Any) -> EngineFile:
    """The manifest's entry of an engine of TensorRT-RTX; `changes` are other fields."""
    return dataclasses.replace(
        EngineFile(
            file=f"engines/{name}.engine",
            metadata=f"engines/{name}.json",
            variant="tensorrt_rtx",
            version="1.7.1",
            precision="float32",
            architectures=("sm89",),
            profiles=(ProfileShape(batch=(1, 1, 8), tokens=(1, 8, 16)),),
        ),
        **changes,
    )


def _manifest(task: str, graphs: tuple[GraphFile, ...], token_types: bool, tokenizer: bool, dtype: str) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        name="tiny",
        model_type="bert",
        task=task,
        max_len=MAX_LEN,
        dtype=dtype,
        hidden_size=HIDDEN_SIZE,
        vocab_size=len(WORDS),
        num_layers=1,
        num_heads=1,
        parameters=TABLE.size,
        positions=Positions(scheme="hierarchical", alpha=0.4, base=4, rows=MAX_LEN, first_row=0, form="folded"),
        operators={"Attention": 1},
        attention=(),
        inputs=INPUTS if token_types else INPUTS[:2],
        outputs=tuple(TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in _OUTPUTS[task].items()),
        graphs=graphs,
        engines=(),
        tokenizer=TokenizerInfo(
            file="tokenizer.json", pad_token_id=0, pad_token="[PAD]", unk_token_id=1, mask_token_id=None
        )
        if tokenizer
        else None,
        labels=(),
        verification=None,
        made_by={"hdexport": "0.1.0", "command": "hdexport build tiny"},
        files={},
    )
