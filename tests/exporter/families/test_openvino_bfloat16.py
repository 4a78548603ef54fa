"""OpenVINO's graphs in bfloat16 are as near Hugging Face's float32 answers as PyTorch's bfloat16, on every processor.

Where a CPU computes in bfloat16, OpenVINO is asked. On every CPU, ONNX Runtime runs OpenVINO's graph with each value
rounded, which is the most that a processor may round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from onnx_ir.passes.common import ShapeInferencePass

import hdruntime
from support.answers import inputs_of
from support.comparators import assert_nearest, assert_rounded_as_pytorch, named_case
from support.grids import nightly_unless
from support.hugging_face import HuggingFace
from support.needs import needs_openvino, openvino_computes_bfloat16
from support.padded_batches import cases

pytestmark = needs_openvino

WINDOWED = ("embedding_gemma2_text", "gemma3_text", "neomme", "ultrabert")
LENGTHS = (9, 17, 300)
"""Around the windows, and beyond the 256 tokens that bfloat16 counts exactly."""

Run = Callable[..., Mapping[str, np.ndarray]]

FAMILIES = [*WINDOWED, "gte", "roformer"]


@dataclass(frozen=True)
class Answers:
    """Vectors of all real tokens of all texts, [tokens, width]."""

    right: np.ndarray
    """Hugging Face's, in float32."""
    pytorch: np.ndarray
    """Hugging Face's, in bfloat16."""
    wrong: Mapping[str, np.ndarray]
    """Those of a wrong model in float32, by its mistake."""
    wrong_in_bfloat16: Mapping[str, np.ndarray]
    """Theirs in bfloat16, where they were asked for."""


def vectors_of(bundle: Any, run: Run) -> np.ndarray:
    found = []
    for _, _, input_ids, attention_mask in cases(LENGTHS, sizes=(3,)):
        states = run(**inputs_of(bundle, input_ids, attention_mask))["last_hidden_state"]
        found.append(states[attention_mask == 1])
    return np.concatenate(found)


def answers_of(bundle: Any, *, of_wrong_in_bfloat16: bool) -> Answers:
    def in_bfloat16(model: HuggingFace) -> np.ndarray:
        model.model.bfloat16()
        return vectors_of(bundle, model)

    model, wrong_models = new_model(bundle), dict(wrong_models_of(bundle))
    return Answers(
        right=vectors_of(bundle, model),
        pytorch=in_bfloat16(model),
        wrong={mistake: vectors_of(bundle, model) for mistake, model in wrong_models.items()},
        wrong_in_bfloat16={mistake: in_bfloat16(model) for mistake, model in wrong_models.items()}
        if of_wrong_in_bfloat16
        else {},
    )


def new_model(bundle: Any) -> HuggingFace:
    return HuggingFace(bundle.checkpoint, bundle.manifest.task, max_len=bundle.manifest.max_len)


def wrong_models_of(bundle: Any) -> Iterator[tuple[str, HuggingFace]]:
    model_type = bundle.manifest.model_type
    for off in (-1, 1) if model_type in WINDOWED else ():
        model = new_model(bundle)
        settings = json.loads((bundle.checkpoint / "config.json").read_text())
        # Of EmbeddingGemma it counts both sides.
        settings["sliding_window"] += off * (2 if model_type == "gemma3_text" else 1)
        config = transformers.AutoConfig.for_model(**settings)
        model.model = transformers.AutoModel.from_pretrained(bundle.checkpoint, config=config).eval()
        yield f"a window of {off:+d} token", model
    model = new_model(bundle)
    _move_tokens(model.model)
    yield "tokens from the 32nd on one place further", model
    model = new_model(bundle)
    _scale_first_head(model.model)
    yield "scores of one head 5 % larger", model


def _move_tokens(model: torch.nn.Module) -> None:
    if model.config.model_type == "roformer":
        table = model.base_model.encoder.embed_positions.weight
        with torch.no_grad():
            table[32:-1] = table[33:].clone()
        return
    forward = model.forward

    def moved(input_ids: torch.Tensor, **given: Any) -> Any:
        places = torch.arange(input_ids.shape[1])[None]
        return forward(input_ids=input_ids, position_ids=places + (places >= 32), **given)

    model.forward = moved


def _scale_first_head(model: torch.nn.Module) -> None:
    """Of the first layer; where queries are normalised, they are scaled after it."""
    heads = model.config.num_attention_heads
    for name, module in model.named_modules():
        if name.endswith("q_norm"):
            module.register_forward_hook(lambda _, __, states: states * _first_is_larger(states, heads))
            return
    names = (".q_proj", ".query")
    queries = next(module for name, module in model.named_modules() if name.endswith(names))
    queries.register_forward_hook(
        lambda _, __, states: (
            states.unflatten(-1, (heads, -1)) * _first_is_larger(states[..., None], heads, axis=-2)
        ).flatten(-2)
    )


def _first_is_larger(states: torch.Tensor, heads: int, axis: int | None = None) -> torch.Tensor:
    """Factors for states with an axis of heads, the last but one unless tokens follow it."""
    axis = axis if axis is not None else -2 if states.shape[-2] == heads else -3
    factors = torch.ones(heads, dtype=states.dtype)
    factors[0] = 1.05
    return factors.reshape(heads, *[1] * (-axis - 1))


def every_value_rounded(bundle: Any) -> Run:
    """OpenVINO's graph in ONNX Runtime, with weights and what each node gives rounded to bfloat16."""
    model = ShapeInferencePass()(ir.load(bundle.path / "openvino.onnx")).model
    graph = model.graph
    for value in graph.initializers.values():
        if value.dtype is ir.DataType.FLOAT:
            weight = torch.from_numpy(value.const_value.numpy().copy()).bfloat16().float().numpy()
            value.const_value = ir.tensor(weight, name=value.name)
    for node in list(graph):
        for value in node.outputs:
            if value.dtype is ir.DataType.FLOAT and value not in graph.outputs:
                uses = list(value.uses())
                narrow = ir.node("Cast", [value], {"to": int(ir.DataType.BFLOAT16)})
                wide = ir.node("Cast", [narrow.outputs[0]], {"to": int(ir.DataType.FLOAT)})
                narrow.outputs[0].type, wide.outputs[0].type = ir.TensorType(ir.DataType.BFLOAT16), value.type
                wide.outputs[0].shape = value.shape
                graph.insert_after(node, [narrow, wide])
                for use in uses:
                    use.node.replace_input_with(use.idx, wide.outputs[0])
    _repeat_masks(graph)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    # No pass may take the casts away.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options)
    names = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]
    return lambda **feeds: dict(zip(outputs, session.run(outputs, {name: feeds[name] for name in names}), strict=True))


def _repeat_masks(graph: ir.Graph) -> None:
    """ONNX Runtime's attention wants the row of a mask repeated for every query."""
    for node in [node for node in graph if node.op_type == "Attention" and len(node.inputs) > 3]:
        mask = node.inputs[3]
        if mask is not None and mask.shape is not None and mask.shape[2] == 1:
            sizes = ir.node("Shape", [node.inputs[0]], {"start": 2, "end": 3})
            ones, one = (ir.node("Constant", [], {"value_ints": [1] * number}) for number in (2, 1))
            shape = ir.node("Concat", [ones.outputs[0], sizes.outputs[0], one.outputs[0]], {"axis": 0})
            repeated = ir.node("Expand", [mask, shape.outputs[0]])
            graph.insert_before(node, [sizes, ones, one, shape, repeated])
            node.replace_input_with(3, repeated.outputs[0])


@openvino_computes_bfloat16
@pytest.mark.parametrize("model_type", FAMILIES)
def test_openvino_is_as_near_hugging_face_as_pytorch(openvino_bundles, model_type: str) -> None:
    bundle = openvino_bundles(model_type)
    answers = answers_of(bundle, of_wrong_in_bfloat16=False)
    with hdruntime.load(bundle.path, "openvino", threads=1, precision="bfloat16") as session:
        got = vectors_of(bundle, session)
    assert_rounded_as_pytorch(got, answers.right, answers.pytorch)
    assert_nearest(got, answers.right, answers.wrong)


@pytest.mark.parametrize(
    "model_type", [nightly_unless(name in ("embedding_gemma2_text", "roformer"), name) for name in FAMILIES]
)
def test_rounding_every_value_of_the_graph_passes_and_a_small_mistake_does_not(
    openvino_bundles, model_type: str
) -> None:
    bundle = openvino_bundles(model_type)
    answers = answers_of(bundle, of_wrong_in_bfloat16=True)
    got = vectors_of(bundle, every_value_rounded(bundle))
    assert_rounded_as_pytorch(got, answers.right, answers.pytorch)
    assert_nearest(got, answers.right, answers.wrong)
    for mistake, wrong in answers.wrong_in_bfloat16.items():
        with pytest.raises(AssertionError, match="of the way from the right answer"):
            assert_nearest(wrong, answers.right, {mistake: answers.wrong[mistake]})
        if "head" not in mistake:
            # 5 % of a head's scores are less than the rounding of most tokens: only the direction shows them.
            with named_case(mistake), pytest.raises(AssertionError, match="vector's length >"):
                assert_rounded_as_pytorch(wrong, answers.right, answers.pytorch)
