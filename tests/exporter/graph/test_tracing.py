"""Tracing: inputs and outputs by name with dynamic axes, and what cannot be traced is an error."""

from __future__ import annotations

import pytest
import torch

from hdexport.attention.interface import use_operators
from hdexport.graph.tracing import trace
from hdexport.model.graph_module import GraphModule, graph_inputs
from hdruntime.bundle.manifest import Default, Fill, InputSpec, Role, Task
from hdruntime.errors import ExportError
from support.grids import TASKS_OF_EVERY_RUN, nightly_unless
from support.tiny_models import LABELS, VOCAB_SIZE, save_tiny_model

SHAPES = {
    "feature-extraction": {"last_hidden_state": ("batch", "tokens", 32)},
    "sentence-similarity": {"last_hidden_state": ("batch", "tokens", 32), "sentence_embedding": ("batch", 32)},
    "fill-mask": {"logits": ("batch", "tokens", VOCAB_SIZE)},
    "text-classification": {"logits": ("batch", len(LABELS))},
    "token-classification": {"logits": ("batch", "tokens", len(LABELS))},
    "question-answering": {"start_logits": ("batch", "tokens"), "end_logits": ("batch", "tokens")},
}


def shape_of(value) -> tuple[str | int, ...]:
    return tuple(axis if isinstance(axis, int) else str(axis) for axis in value.shape)


@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        nightly_unless(task in TASKS_OF_EVERY_RUN.get(name, ("feature-extraction",)), name, task)
        for name in ("bert", "roberta", "mpnet")
        for task in SHAPES
    ],
)
def test_names_and_axes_are_those_of_the_task(tiny_bundles, model_type: str, task: str) -> None:
    bundle = tiny_bundles(model_type, task)
    for graph in (bundle.graph.graph, bundle.cpu_graph.graph):
        assert {value.name: shape_of(value) for value in graph.outputs} == SHAPES[task]
        assert {shape_of(value) for value in graph.inputs} == {("batch", "tokens")}
    assert {spec.name: spec.shape for spec in bundle.manifest.outputs} == SHAPES[task]


def test_no_size_of_the_example_is_left_in_a_graph(tiny_bundles) -> None:
    """37 tokens, the example's, are a size of nothing else in the tiny models."""
    for model_type in ("bert", "mpnet"):
        graph = tiny_bundles(model_type).graph.graph
        values = [value for node in graph for value in node.outputs if value.shape is not None]
        assert len(values) > 20
        assert not [value for value in values if 37 in shape_of(value)]
        constants = [value.const_value.numpy() for value in graph.initializers.values() if value.dtype.name == "INT64"]
        assert not [constant for constant in constants if (constant == 37).any()]


class _Wrong(GraphModule):
    """A module that does what an exporter cannot follow."""

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        super().__init__(model, Task.FEATURE_EXTRACTION, inputs=graph_inputs(token_types=0))
        self.kind = kind

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *_: torch.Tensor) -> tuple:
        if self.kind == "frozen":
            return (torch.zeros(input_ids.shape[0], 37, 32),)
        if bool(input_ids.sum() > 5):
            return (torch.zeros(*input_ids.shape, 32),)
        return (torch.ones(*input_ids.shape, 32),)


class _Remembers(GraphModule):
    """A module with inputs that are not named arguments of a `GraphModule`."""

    def __init__(self) -> None:
        zeros, tokens = Default(fill=Fill.ZEROS), ("batch", "tokens")
        topics = InputSpec(name="topics", dtype="int64", shape=tokens, role=Role.GLOBAL_ATTENTION_MASK, default=zeros)
        memory = InputSpec(
            name="memory",
            dtype="float32",
            shape=MEMORY,
            role=Role.RECURRENT_STATE,
            default=zeros,
            fed_from="new_memory",
        )
        inputs = graph_inputs(token_types=2, others=[memory, topics])
        super().__init__(torch.nn.Identity(), Task.FEATURE_EXTRACTION, inputs=inputs)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: torch.Tensor) -> tuple:
        states = input_ids * attention_mask + others["token_type_ids"] - 2 * others["topics"]
        states = states[:, :, None] + others["memory"].mean(dim=1, keepdim=True)
        return states, others["memory"] + states[:, :1]


MEMORY = ("batch", 3, 32)


def test_inputs_of_a_kind_of_attention_have_their_names_and_axes() -> None:
    module, tokens = _Remembers(), ("batch", "tokens")
    graph = trace(module, max_len=64, vocab_size=VOCAB_SIZE).model.graph
    assert [(value.name, shape_of(value)) for value in graph.inputs] == [
        ("input_ids", tokens),
        ("attention_mask", tokens),
        ("token_type_ids", tokens),
        ("memory", MEMORY),
        ("topics", tokens),
    ]
    assert {value.name: shape_of(value) for value in graph.outputs} == {
        **SHAPES["feature-extraction"],
        "new_memory": MEMORY,
    }
    uses = [{str(value.name) for value in node.inputs if value is not None} for node in graph]
    assert any({"input_ids", "attention_mask"} <= names for names in uses)
    assert sum("topics" in names for names in uses) == 1
    assert "forward" not in vars(module)


class _Normalised(GraphModule):
    """A normalisation whose term is as small as what onnxscript's rewriter takes for 0."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Identity(), Task.FEATURE_EXTRACTION, inputs=graph_inputs(token_types=0))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *_: torch.Tensor) -> tuple:
        states = (input_ids * attention_mask).float()[:, :, None].expand(-1, -1, 32) + 0.0
        return (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-8),)


def test_a_term_of_a_normalisation_stays() -> None:
    graph = trace(_Normalised(), max_len=64, vocab_size=VOCAB_SIZE).model.graph
    sums = [node for node in graph if node.op_type == "Add"]
    assert [node.inputs[1].const_value.numpy().item() for node in sums] == [pytest.approx(1e-8)]


@pytest.fixture
def model(tmp_path) -> torch.nn.Module:
    model = save_tiny_model(tmp_path, "bert", Task.FEATURE_EXTRACTION)
    use_operators(model)
    return model


def test_an_axis_that_is_frozen_is_refused(model) -> None:
    with pytest.raises(ExportError, match=r"froze axis 1 of last_hidden_state to 37; .* at that size only"):
        trace(_Wrong(model, "frozen"), max_len=64, vocab_size=VOCAB_SIZE)


def test_what_cannot_be_traced_is_an_error_with_its_root_cause(model) -> None:
    cause = r"PyTorch could not export the model: \w*(Guard|DataDependent|Unsupported)"
    remedy = r"A family can compute that step with other operators \(CONTRIBUTING.md, Add a model family\)"
    with pytest.raises(ExportError, match=rf"{cause}(.|\n)*\n{remedy}"):
        trace(_Wrong(model, "depends on data"), max_len=64, vocab_size=VOCAB_SIZE)
