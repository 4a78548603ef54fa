"""Scales and rounded weights: near the exact products, and a wrong scale is far from them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hdexport.quantize.rounding import ActivationScale, Int8Weight, Statistics, activation_scale, round_weight
from support.needs import needs_openvino

CHANNELS, OUTPUTS = 24, 10


@pytest.fixture(scope="module")
def activation() -> np.ndarray:
    """[tokens, channels] of very different magnitudes, shifted away from 0, and dependent on each other."""
    random = np.random.default_rng(0)
    mixed = random.normal(size=(500, CHANNELS)) @ random.normal(size=(CHANNELS, CHANNELS)) / 5
    return ((mixed + random.normal(size=CHANNELS)) * np.geomspace(0.1, 20, CHANNELS)).astype(np.float32)


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    """[channels, outputs], one output much larger than the others."""
    weight = np.random.default_rng(1).normal(size=(CHANNELS, OUTPUTS)).astype(np.float32)
    weight[:, 3] *= 100
    return weight


@pytest.fixture(scope="module")
def statistics(activation: np.ndarray) -> Statistics:
    found = Statistics.empty(CHANNELS)
    for part in np.array_split(activation, 3):
        found.add(part[None], weight=2)
    return found


def product(activation: np.ndarray, scale: ActivationScale, weight: Int8Weight) -> np.ndarray:
    """As an int8 kernel computes it: integers first."""
    levels = np.clip(np.round(activation / scale.scale) + scale.zero_point, 0, 255).astype(np.int32)
    return (levels @ weight.values.astype(np.int32)) * weight.scale + weight.bias


def relative_errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """[outputs]"""
    return np.sqrt(((found - exact) ** 2).mean(0) / exact.var(0))


def test_statistics_are_those_of_all_tokens_together(activation, statistics) -> None:
    assert statistics.tokens == 2 * len(activation)
    np.testing.assert_allclose(statistics.mean, activation.mean(0), rtol=1e-4)
    np.testing.assert_allclose(statistics.covariance, np.cov(activation.T, bias=True), rtol=1e-2, atol=1e-3)
    np.testing.assert_array_equal(statistics.highest, activation.max(0))
    np.testing.assert_array_equal(statistics.lowest, activation.min(0))


def test_every_output_of_an_int8_product_is_near_the_exact_one(activation, weight, statistics) -> None:
    scale = activation_scale(statistics, [weight])
    rounded = round_weight(statistics, scale, weight)
    errors = relative_errors(product(activation, scale, rounded), activation @ weight)
    assert errors.max() < 0.03


def test_the_bias_takes_away_the_mean_of_the_errors_of_weights(activation, weight, statistics) -> None:
    """What is left is the mean of the activation's rounding, as far from 0 as chance has it."""
    scale = activation_scale(statistics, [weight])
    rounded = round_weight(statistics, scale, weight)
    difference = weight * scale.scale[:, None] - rounded.values * rounded.scale
    of_weights = (statistics.mean / scale.scale @ difference).astype(np.float32)
    uncorrected = rounded._replace(bias=rounded.bias - of_weights)

    def standard_errors(rounded: Int8Weight) -> float:
        errors = product(activation, scale, rounded) - activation @ weight
        return float(np.abs(errors.mean(0) / (errors.std(0) / np.sqrt(len(errors)))).max())

    assert standard_errors(rounded) < 4
    assert standard_errors(uncorrected) > 10


def test_a_wrong_scale_of_one_channel_is_found(activation, weight, statistics) -> None:
    part = "scale"
    scale = activation_scale(statistics, [weight])
    rounded = round_weight(statistics, scale, weight)
    values = getattr(scale, part).copy()
    values[-1] = values[-1] * 0.8
    wrong = dataclasses.replace(scale, **{part: values})
    assert relative_errors(product(activation, wrong, rounded), activation @ weight).max() > 0.03


def test_channels_far_from_0_are_not_clipped(activation, weight) -> None:
    """Of a range without 0, uint8 has no zero point."""
    shifted = activation + np.where(np.arange(CHANNELS) % 2, 1, -1) * 5 * np.abs(activation).max(0)
    statistics = Statistics.empty(CHANNELS)
    statistics.add(shifted)
    scale = activation_scale(statistics, [weight])
    levels = np.round(shifted / scale.scale) + scale.zero_point
    assert levels.min() >= 0
    assert levels.max() <= 255
    assert (
        relative_errors(product(shifted, scale, round_weight(statistics, scale, weight)), shifted @ weight).max() < 0.2
    )


def test_a_channel_that_is_always_0_is_no_obstacle(weight) -> None:
    statistics = Statistics.empty(CHANNELS)
    statistics.add(np.zeros((5, CHANNELS), np.float32))
    scale = activation_scale(statistics, [weight])
    rounded = round_weight(statistics, scale, weight)
    np.testing.assert_allclose(product(np.zeros((1, CHANNELS), np.float32), scale, rounded), 0, atol=1e-6)


def largest_pair(values: np.ndarray) -> int:
    """What a processor without VNNI may have to hold in 16 bits, of neighbours."""
    pairs = values.astype(np.int64).reshape(-1, 2, values.shape[1])
    return int(255 * max(np.maximum(sign * pairs, 0).sum(1).max() for sign in (1, -1)))


@pytest.mark.parametrize("channels", [24, 33])
def test_rounding_keeps_the_range_of_neighbours_where_it_hands_errors_on(channels: int) -> None:
    random = np.random.default_rng(2)
    activation = random.normal(size=(300, channels)) @ random.normal(size=(channels, channels))
    statistics = Statistics.empty(channels)
    statistics.add(activation.astype(np.float32))
    weight = random.choice([-1, 1], size=(channels, 50)).astype(np.float32)
    values = round_weight(statistics, activation_scale(statistics, [weight]), weight).values
    assert largest_pair(np.concatenate([values, np.zeros((channels % 2, 50), np.int8)])) <= np.iinfo(np.int16).max


def saturating_model(values: np.ndarray) -> bytes:
    """A product of uint8 and int8 values, [channels, outputs], as runtimes make one of QuantizeLinear."""
    import onnx_ir as ir

    def constant(name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        return ir.Value(name=name, const_value=tensor, shape=tensor.shape, type=ir.TensorType(tensor.dtype))

    one, zero = constant("one", np.array(1, np.float32)), constant("zero", np.array(0, np.uint8))
    weight, steps = constant("weight", values), constant("steps", np.ones(values.shape[1], np.float32))
    source = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["tokens", len(values)]))
    nodes = [ir.node("QuantizeLinear", [source, one, zero])]
    nodes.append(ir.node("DequantizeLinear", [nodes[0].outputs[0], one, zero]))
    nodes.append(ir.node("DequantizeLinear", [weight, steps], {"axis": 1}))
    nodes.append(ir.node("MatMul", [nodes[1].outputs[0], nodes[2].outputs[0]]))
    result = nodes[-1].outputs[0]
    result.name, result.type, result.shape = "y", source.type, ir.Shape(["tokens", values.shape[1]])
    graph = ir.Graph(
        [source], [result], nodes=nodes, initializers=[one, zero, weight, steps], opset_imports={"": 21}, name="product"
    )
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()


@pytest.mark.parametrize("runtime", ["onnxruntime", pytest.param("openvino", marks=needs_openvino)])
@pytest.mark.parametrize(("channels", "outputs"), [(384, 64), (37, 16)])
def test_kernels_add_neighbours_and_never_saturate_where_those_fit(runtime: str, channels: int, outputs: int) -> None:
    """Pairs of 1 and 127, 2 and 126 and so on, all activations at their largest level: no more would fit.

    A processor without VNNI gives another answer where the pairs begin at the second channel; others do not care.
    """
    random = np.random.default_rng(0)
    first = random.integers(1, 128, (-(-channels // 2), outputs))
    pairs = np.stack([first, 128 - first], axis=1).reshape(-1, outputs)[:channels]
    values = (pairs * random.choice([-1, 1], size=outputs)).astype(np.int8)
    model = saturating_model(values)
    for tokens in (1, 2, 3, 5, 37):
        levels = np.full((tokens, channels), 255, np.float32)
        if runtime == "onnxruntime":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            (found,) = onnxruntime.InferenceSession(model, options).run(None, {"x": levels})
        else:
            import openvino

            core = openvino.Core()
            found = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_NUM_THREADS": 1})(levels)[0]
        np.testing.assert_array_equal(found, levels.astype(np.int64) @ values.astype(np.int64))


def test_rounding_that_hands_errors_on_beats_rounding_to_the_nearest(activation, weight, statistics) -> None:
    scale = activation_scale(statistics, [weight])
    rounded = round_weight(statistics, scale, weight)
    exact = weight * scale.scale[:, None]
    nearest = np.clip(np.round(exact / rounded.scale), -127, 127) * rounded.scale
    centred = (activation - activation.mean(0)) / scale.scale

    def error(values: np.ndarray) -> float:
        return float(((centred @ (values - exact)) ** 2).sum())

    assert error(rounded.values * rounded.scale) < 0.7 * error(nearest)
