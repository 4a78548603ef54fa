"""A float16 bundle whose values a GPU could not hold is refused, by the name of the module that makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from hdexport.build import BuildOptions, build
from hdexport.cli import main
from hdexport.verify.fp16_overflow import OverflowCheck, check_fp16_overflow
from hdexport.verify.single_texts import sample_ids
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import VerificationError
from support.tampered_bundles import tampered
from support.tiny_models import BASE, save_tiny_model

LIMIT = 65504
MAX_LEN = 300
"""Of tiny bundles."""

OVERFLOWING_WEIGHT, OVERFLOWING_FACTOR = "encoder.layer.1.intermediate.dense.weight", 60_000
"""Such a weight fits float16, and what it makes does not."""

Change = Callable[[ir.Graph], None]


@pytest.fixture
def changed(tiny_bundles, tmp_path) -> Callable[..., Bundle]:
    """A float16 bundle after a change to its portable graph: (change, **options of the bundle)."""

    def make(change: Change, **options) -> Bundle:
        right = tiny_bundles("bert", precision="float16", **options)
        path = tampered(right, tmp_path / "bundle", lambda model: change(model.graph), "model.onnx")
        return Bundle(path, right.manifest)

    return make


def times(factors: dict[str, float]) -> Change:
    """Multiply weights, and biases, of modules."""

    def change(graph: ir.Graph) -> None:
        for name, value in graph.initializers.items():
            for module, factor in factors.items():
                if name.startswith(f"model.{module}."):
                    numbers = value.const_value.numpy().astype(np.float32) * factor
                    assert abs(numbers).max() < LIMIT, "the weight itself overflows"
                    value.const_value = ir.tensor(numbers.astype(np.float16), name=name)

    return change


def hooked(model: torch.nn.Module, text: np.ndarray) -> dict[str, torch.Tensor]:
    """What each Linear and each LayerNorm gives, and the latter is given ("... input"), in order of the calls."""
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str, is_norm: bool) -> Callable[..., None]:
        def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if is_norm:
                seen[f"{name} input"] = inputs[0]
            seen[name] = output

        return keep

    handles = [
        module.register_forward_hook(hook(name, isinstance(module, torch.nn.LayerNorm)))
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, torch.nn.LayerNorm)) and not name.startswith("pooler")
    ]
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(text)[None])
    for handle in handles:
        handle.remove()
    return seen


def short_text(bundle: Bundle) -> np.ndarray:
    """The shortest of the texts that a check runs, which the checkpoint's own positions serve."""
    return sample_ids(bundle, [32, BASE, MAX_LEN])[0][0]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hdexport.verify.fp16_overflow"]


def largest(check: OverflowCheck) -> float:
    assert check.record is not None
    assert check.record.largest is not None
    return check.record.largest


def test_the_largest_activation_is_that_of_pytorch(tiny_bundles, caplog) -> None:
    tiny = tiny_bundles("bert", precision="float16")
    bundle = Bundle(tiny.path, tiny.manifest)
    check = check_fp16_overflow(bundle)
    assert check.problem is None
    assert check.record is not None
    assert check.record.tokens == (32, BASE, MAX_LEN)
    texts, kind = sample_ids(bundle, check.record.tokens)
    made = [hooked(tiny.hugging_face.model, text) for text in texts]
    expected = max(float(value.abs().max()) for of_text in made for value in of_text.values())
    assert largest(check) == pytest.approx(expected, rel=0.01)
    assert (check.record.limit, check.record.text) == (65504, kind)
    assert warnings(caplog) == []


def test_the_first_module_that_overflows_is_the_one_that_overflows_in_pytorch(changed, tiny_bundles) -> None:
    module, factor = "encoder.layer.1.attention.output.dense", 100_000.0
    check = check_fp16_overflow(bundle := changed(times({module: factor})))
    assert check.problem is not None
    assert f" of {module}, magnitude " in check.problem
    with pytest.raises(VerificationError, match="\nBuild with precision='bfloat16', which has the range of float32"):
        check.require_passed()
    # Whether PyTorch agrees.
    model = AutoModel.from_pretrained(tiny_bundles("bert", precision="float16").checkpoint)
    with torch.no_grad():
        for parameter in model.get_submodule(module).parameters():
            parameter *= factor
    text = short_text(bundle)
    made = hooked(model.half(), text)
    broken = [name for name, value in made.items() if not value.isfinite().all()]
    assert broken[0] == module
    with_float32 = hooked(model.float(), text)
    assert largest(check) >= float(with_float32[module].abs().max()) * 0.99


def test_values_close_to_the_limit_pass_with_a_warning(changed, caplog) -> None:
    module = "encoder.layer.1.output.dense"
    check = check_fp16_overflow(changed(one_number("dense.bias", -40_000.0)))
    assert check.problem is None
    assert LIMIT / 4 < largest(check) < LIMIT
    (warning,) = warnings(caplog)
    assert f" of {module}, magnitude {largest(check):,.0f}. Other texts may exceed it.\nBuild with" in warning


ATTENTIONS = {
    "DenseAttention": None,
    # Dense for the shortest text and sparse for the others, each in a branch of the graph.
    "BlockSparseAttention": "bigbird:block=4,random=3",
}


@pytest.mark.parametrize(("operator", "attention"), ATTENTIONS.items(), ids=ATTENTIONS)
def test_scores_are_looked_at_inside_of_attention(changed, tiny_bundles, operator, attention) -> None:
    heads, factor = "encoder.layer.1.attention.self", 600.0
    modules = dict.fromkeys((f"{heads}.query", f"{heads}.key"), factor)
    bundle = changed(times(modules), attention=attention)
    check = check_fp16_overflow(bundle)
    assert check.problem is not None
    # Queries and keys themselves are far from the limit.
    assert check.problem.count(f"{operator} node_") == check.problem.count("magnitude")
    assert f"infinity or NaN of {operator} " in check.problem
    assert f" of {heads}, magnitude " in check.problem
    only_short = check_fp16_overflow(Bundle(bundle.path, dataclasses.replace(bundle.manifest, max_len=32)))
    assert only_short.record is not None
    assert only_short.record.tokens == (32,)
    assert only_short.record.operator == operator
    if attention is None:
        tiny = tiny_bundles("bert", precision="float16")
        scores = []
        for text in sample_ids(bundle, [32, BASE, MAX_LEN])[0]:
            made = hooked(tiny.hugging_face.model, text)
            query, key = (made[name].unflatten(-1, (4, -1)).transpose(1, 2) * factor for name in modules)
            scores.append(float((query @ key.transpose(-1, -2)).abs().max()) * query.shape[-1] ** -0.5)
        assert largest(check) == pytest.approx(max(scores), rel=0.01)


def test_scores_below_zero_count_as_those_above(tiny_bundles, tmp_path) -> None:
    heads, right = "encoder.layer.1.attention.self", tiny_bundles("bert", precision="float16")
    found = []
    for factor in (600.0, -600.0):
        change = times({f"{heads}.query": factor, f"{heads}.key": 600.0})
        path = tampered(right, tmp_path / str(factor), lambda model, change=change: change(model.graph), "model.onnx")
        found.append(largest(check_fp16_overflow(Bundle(path, right.manifest))))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def one_number(name: str, number: float) -> Change:
    """Another sixth number of a weight of the last layer's output."""

    def change(graph: ir.Graph) -> None:
        weight = graph.initializers[f"model.encoder.layer.1.output.{name}"]
        numbers = weight.const_value.numpy().copy()
        numbers[5] = number
        weight.const_value = ir.tensor(numbers, name=weight.name)

    return change


def test_nan_in_an_output_counts(changed) -> None:
    check = check_fp16_overflow(changed(one_number("LayerNorm.weight", np.nan)))
    assert check.record is not None
    assert check.record.largest is None
    assert check.problem is not None
    assert "output last_hidden_state, magnitude infinity or NaN" in check.problem


def test_a_weight_that_is_not_finite_is_named(changed) -> None:
    check = check_fp16_overflow(changed(one_number("dense.bias", np.inf)))
    assert check.problem is not None
    assert "weight model.encoder.layer.1.output.dense.bias, magnitude infinity or NaN" in check.problem


def test_infinity_in_the_place_of_masked_values_is_not_an_overflow(changed) -> None:
    def change(graph: ir.Graph) -> None:
        cast = graph.outputs[0].producer()
        mask = next(node for node in graph if node.outputs[0].dtype is ir.DataType.BOOL).outputs[0]
        nothing = ir.Value(name="nothing", const_value=ir.tensor(np.array(-np.inf, np.float16), name="nothing"))
        nothing.dtype, nothing.shape = ir.DataType.FLOAT16, ir.Shape([])
        graph.register_initializer(nothing)
        axis = ir.node("Constant", [], {"value_ints": [2]}, name="axis")
        column = ir.node("Unsqueeze", [mask, axis.outputs[0]], name="column")
        filled = ir.node("Where", [column.outputs[0], cast.inputs[0], nothing], name="filled")
        filled.outputs[0].dtype = ir.DataType.FLOAT16
        graph.insert_before(cast, [axis, column, filled])
        cast.replace_input_with(0, filled.outputs[0])

    assert check_fp16_overflow(changed(change)).problem is None


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory) -> Path:
    """A checkpoint whose weights fit float16, and whose activations do not."""
    path = tmp_path_factory.mktemp("checkpoints") / "large"
    save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION)
    weights = load_file(path / "model.safetensors")
    weights[OVERFLOWING_WEIGHT] *= OVERFLOWING_FACTOR
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_float16_build_stops_and_leaves_nothing(overflowing, tmp_path) -> None:
    options = BuildOptions(model=overflowing, output=tmp_path / "bundle", max_len=65, precision="float16")
    with pytest.raises(
        VerificationError,
        match=r"of encoder\.layer\.1\.intermediate\.dense, magnitude [\d,]+\.(.|\n)*precision='bfloat16'",
    ):
        build(options)
    assert list(tmp_path.iterdir()) == []


def test_bundles_of_a_larger_range_are_not_looked_at(tiny_bundles, tmp_path) -> None:
    tiny = tiny_bundles("bert", precision="float16")
    path = tampered(tiny, tmp_path / "bundle", lambda model: scale_weight(model.graph), "model.onnx")
    for dtype in ("float16", "bfloat16", "float32"):
        graphs = tuple(dataclasses.replace(graph, dtype=dtype) for graph in tiny.manifest.graphs)
        found = check_fp16_overflow(Bundle(path, dataclasses.replace(tiny.manifest, graphs=graphs)))
        assert (found == OverflowCheck()) == (dtype != "float16"), dtype


def scale_weight(graph: ir.Graph) -> None:
    """The change to `overflowing`, made to a graph."""
    (name,) = (name for name in graph.initializers if name.startswith(f"model.{OVERFLOWING_WEIGHT}"))
    weight = graph.initializers[name]
    numbers = weight.const_value.numpy().astype(np.float32) * OVERFLOWING_FACTOR
    weight.const_value = ir.tensor(numbers.astype(np.float16), name=name)


def test_verify_fails_such_a_bundle_and_records_it(tiny_bundles, overflowing, tmp_path, capsys) -> None:
    tiny = tiny_bundles("bert", precision="float16")
    files = [graph.file for graph in tiny.manifest.graphs]
    path = tampered(tiny, tmp_path / "bundle", lambda model: scale_weight(model.graph), *files)
    assert main(["verify", str(path), "--model", str(overflowing), "--longest", "2"]) == 1
    printed = capsys.readouterr()
    (line,) = (line for line in printed.out.splitlines() if line.startswith("float16 range: largest activation "))
    assert line.endswith("random ids of 32, 64, 300 tokens)")
    assert "error: The model goes beyond float16, which ends at 65,504" in printed.err
    assert "encoder.layer.1.intermediate.dense, magnitude" in printed.err
    manifest = open_bundle(path).manifest
    assert manifest.verification is not None
    assert manifest.verification.passed is False
    assert manifest.fp16_overflow is not None
    assert manifest.fp16_overflow.module == "encoder.layer.1.intermediate.dense"
    assert manifest.fp16_overflow.largest > LIMIT
    assert main(["inspect", str(path)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("float16 range"))
    assert line.split()[2:5] == ["largest", "activation", f"{manifest.fp16_overflow.largest:,.5g},"]
    assert line.endswith("of encoder.layer.1.intermediate.dense, random ids of 32, 64, 300 tokens)")
