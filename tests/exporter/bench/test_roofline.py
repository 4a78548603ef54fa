"""The work of a graph, against numbers worked out by hand and against PyTorch's own count of the model's operations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hdexport.bench.measure.roofline import Work, roofline, work_of
from hdexport.bench.results.result import Ceilings
from hdexport.model.tasks import AUTO_CLASS_OF_TASK, Task
from hdruntime.bundle.writer import seal
from hdruntime.errors import ExportError, InputError

H100 = Ceilings(device="cuda", dtype="float16", matmul_flops_per_s=800e12, copy_bytes_per_s=3.0e12)
BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 1}
"""One of the twelve layers of BERT-base."""


def operations_of_pytorch(checkpoint: Path, task: str, *, batch: int, tokens: int) -> int:
    """What PyTorch counts as the model runs; fused attention, which it would miss, is taken apart."""
    model = getattr(transformers, AUTO_CLASS_OF_TASK[Task(task)]).from_pretrained(checkpoint).eval()
    ids = torch.full((batch, tokens), 7)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("model_type", "task"),
    [("roberta", "text-classification"), ("modernbert", "text-classification")],
)
def test_dense_operations_are_those_that_pytorch_counts(
    model_type: str, task: str, tiny_bundles: Callable[..., Any]
) -> None:
    """A head over one token of a text, one over all of them, and windows that PyTorch computes densely."""
    built = tiny_bundles(model_type, task)
    for batch, tokens in ((1, 61), (3, 40)):
        work = work_of(built.path, batch=batch, tokens=tokens)
        assert work.dense_flops == operations_of_pytorch(built.checkpoint, task, batch=batch, tokens=tokens)
        assert (work.flops < work.dense_flops) == (model_type == "modernbert")


@pytest.fixture(scope="module")
def layer(tiny_bundles: Callable[..., Any]) -> Any:
    return tiny_bundles("bert", max_len=4096, attention="window:256,global:0", **BASE)


def test_a_layer_of_bert_base_is_as_calculated_by_hand(layer: Any) -> None:
    work = work_of(layer.path, batch=1, tokens=4096)
    projections = 2 * 4096 * (4 * 768**2 + 2 * 768 * 3072)
    assert work.dense_flops == projections + 2 * (2 * 4096**2 * 768)
    # 513 keys a query, but where the window hangs over an end of the text.
    assert work.flops == projections + 2 * (2 * 768 * (513 * 4096 - 256 * 257))
    # All twelve layers on an H100, in milliseconds, as is well known of it.
    assert 12 * work.dense_flops / 800e12 * 1e3 == pytest.approx(1.64, abs=0.005)
    assert 12 * work.flops / 800e12 * 1e3 == pytest.approx(0.96, abs=0.005)
    eight = work_of(layer.path, batch=8, tokens=4096)
    assert (eight.flops, eight.dense_flops) == (8 * work.flops, 8 * work.dense_flops)


@pytest.mark.parametrize(("batch", "tokens", "words"), [(1, 100, 100), (2, 100, 120)])
def test_weights_move_once_and_of_tables_only_what_is_looked_up(
    batch: int, tokens: int, words: int, layer: Any
) -> None:
    """The table of words has 120 rows and that of token types 2; that of positions gives one row per token."""
    matrices = 4 * 768**2 + 2 * 768 * 3072
    vectors = (4 * 768 + 768 + 3072) + 2 * (2 * 768) + 2 * 768  # biases, and three normalisations
    rows = words + 2 + tokens
    moved_bytes = work_of(layer.path, batch=batch, tokens=tokens).moved_bytes
    exact = 4 * (matrices + vectors + rows * 768) + batch * tokens * (3 * 8 + 4 * 768)
    # Beside them the graph holds a few numbers: shapes, axes, the scale.
    assert exact <= moved_bytes < exact + 256


def test_the_rows_of_longformers_global_tokens_are_counted_as_the_graph_has_them(
    tiny_bundles: Callable[..., Any],
) -> None:
    built = tiny_bundles("longformer")
    tokens, width, heads, slots = 70, 128, 4, 16
    by_hand = 0
    for window in (4, 8):  # on each side
        by_hand += 2 * tokens * (4 * width**2 + 2 * width * 48)
        # Query, and keys and values moved to the queries' side; then scores and sums over all tokens.
        by_hand += 3 * 2 * slots * width**2 + 2 * 2 * (heads * slots) * tokens * width
        in_window = (2 * window + 1) * tokens - window * (window + 1)
        first_token_beyond_it = tokens - window - 1
        by_hand += 2 * 2 * width * (in_window + first_token_beyond_it)
    assert work_of(built.path, batch=1, tokens=tokens).flops == by_hand
    without = work_of(built.path, batch=1, tokens=tokens, global_tokens=0).flops
    assert without == by_hand - 2 * 2 * width * sum(tokens - window - 1 for window in (4, 8))


def test_texts_are_alone_and_what_is_computed_once_is_not_counted(tiny_bundles: Callable[..., Any]) -> None:
    """Two layers of XLNet; the products of the weights with the sines of distances do not depend on the text."""
    built, tokens, memory, width = tiny_bundles("xlnet", mem_len=20), 30, 1, 32
    keys = tokens + memory
    projections = 2 * (2 * tokens * width**2 + 2 * keys * width**2 + 2 * tokens * width * 48)
    # Query by key, query by position, and weights by value.
    by_hand = 2 * (projections + 3 * 2 * tokens * keys * width)
    work = work_of(built.path, batch=1, tokens=tokens)
    assert (work.flops, work.dense_flops) == (by_hand, by_hand)
    assert work_of(built.path, batch=3, tokens=tokens).flops == 3 * by_hand


def test_keys_behind_a_query_are_counted_only_had_attention_been_dense(tiny_bundles: Callable[..., Any]) -> None:
    """Two layers of Transformer-XL, with four heads of 8."""
    work = work_of(tiny_bundles("transfo-xl").path, batch=1, tokens=30)
    assert work.dense_flops - work.flops == 2 * 3 * 2 * (30 * 29 // 2) * 32


ONE_LAYER = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 1}


def operations_of_one_layer(tokens: int, pairs: int) -> int:
    """Of `ONE_LAYER`; the pairs are those of one head."""
    return 2 * tokens * (4 * 64**2 + 2 * 64 * 48) + 2 * (2 * pairs * 64)


def test_global_tokens_that_the_graph_puts_in_front_are_counted(tiny_bundles: Callable[..., Any]) -> None:
    """6 of them take 2 blocks of 4; with a text of 61 tokens, the last of 18 blocks has one token."""
    built = tiny_bundles("bert", attention="etc:global=6,block=4,tokens=3", **ONE_LAYER)
    global_rows = 8 * 69
    # Keys of 2 global blocks, and of one, two or three others.
    pairs = global_rows + 4 * (8 + 8) + 13 * 4 * (8 + 12) + 4 * (8 + 9) + 1 * (8 + 5)
    assert work_of(built.path, batch=1, tokens=61).flops == operations_of_one_layer(69, pairs)


def test_blocks_are_counted_as_the_table_in_the_graph_lists_them(tiny_bundles: Callable[..., Any]) -> None:
    built = tiny_bundles("bert", attention="bigbird:block=4,random=2,mode=table", **ONE_LAYER)
    (node,) = (node for node in ir.load(built.path / "model.onnx").graph if node.domain == "hdexport")
    table = ir.convenience.get_const_tensor(node.inputs[4]).numpy()
    assert table.shape[::2] == (2, 2)
    pairs = 0
    for head in table:
        # 61 tokens are 16 blocks, the last of one token; the table is one for longer texts.
        sizes = dict(enumerate([4] * 15 + [1]))
        for block in range(16):
            seen = {0, 15, block - 1, block, block + 1, *head[block - 1]} if 0 < block < 15 else set(range(16))
            pairs += sizes[block] * sum(sizes.get(other, 0) for other in seen)
    assert work_of(built.path, batch=1, tokens=61).flops == operations_of_one_layer(61, pairs // 2)
    assert work_of(built.path, batch=1, tokens=36).flops == operations_of_one_layer(36, 36**2)


def test_a_table_that_is_computed_is_not_left_out(tiny_bundles: Callable[..., Any], tmp_path: Path) -> None:
    built = tiny_bundles("bert", attention="bigbird:block=4,random=2,mode=table", **ONE_LAYER)
    path = tmp_path / "bundle"
    shutil.copytree(built.path, path)
    model = ir.load(path / "model.onnx")
    (node,) = (node for node in model.graph if node.domain == "hdexport")
    computed = ir.node("Neg", [node.inputs[4]])
    model.graph.insert_before(node, computed)
    node.replace_input_with(4, computed.outputs[0])
    ir.save(model, path / "model.onnx")
    seal(path, built.manifest)
    with pytest.raises(ExportError, match="the table of an attention, so its work cannot be counted"):
        work_of(path, batch=1, tokens=64)


def test_a_shape_that_the_bundle_does_not_take_is_refused(layer: Any) -> None:
    for batch, tokens in ((1, 4097), (0, 64), (1, 0)):
        with pytest.raises(InputError, match=f"{batch} x {tokens} tokens do not fit(.|\n)*1 to 4096 tokens"):
            work_of(layer.path, batch=batch, tokens=tokens)


def _to_einsum(node: ir.Node, graph: ir.Graph) -> None:
    node.op_type = "Einsum"
    node.attributes.add(ir.AttrString("equation", "bij,jk->bik"))


def _to_any_number_of_tokens(node: ir.Node, graph: ir.Graph) -> None:
    """Its first input is now the tokens that only values can tell: those that a mask keeps."""
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    first_row = ir.node("Gather", [mask, ir.Value(name="zero", const_value=ir.tensor(0))], attributes={"axis": 0})
    graph.register_initializer(first_row.inputs[1])
    kept = ir.node("Cast", [first_row.outputs[0]], attributes={"to": ir.DataType.BOOL})
    some = ir.node("Compress", [node.inputs[0], kept.outputs[0]], attributes={"axis": 1})
    graph.insert_before(node, [first_row, kept, some])
    node.replace_input_with(0, some.outputs[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [(_to_einsum, "product of type Einsum"), (_to_any_number_of_tokens, "does not state the shape of")],
)
def test_work_that_is_not_understood_is_not_left_out(
    change: Callable[[ir.Node, ir.Graph], None], message: str, tiny_bundles: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "bundle"
    built = tiny_bundles("roberta", "text-classification")
    shutil.copytree(built.path, path)
    model = ir.load(path / "model.onnx")
    change(next(node for node in model.graph if node.op_type == "MatMul"), model.graph)
    ir.save(model, path / "model.onnx")
    seal(path, built.manifest)
    with pytest.raises(ExportError, match=message):
        work_of(path, batch=1, tokens=64)


def test_what_takes_longer_bounds_the_latency() -> None:
    products = Work(flops=800_000_000_000, dense_flops=1, moved_bytes=3_000_000)
    assert roofline(products, H100, p50_ms=4.0).bound_ms == 1.0
    moves = Work(flops=800_000_000, dense_flops=1, moved_bytes=6_000_000_000)
    found = roofline(moves, H100, p50_ms=4.0)
    assert (found.bound_ms, found.fraction) == (2.0, 0.5)
    assert (found.flops, found.dense_flops, found.moved_bytes) == (800_000_000, 1, 6_000_000_000)
