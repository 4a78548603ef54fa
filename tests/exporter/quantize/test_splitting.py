"""Split channels: both parts are the value, the widest are chosen, and graphs with them round less."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from hdexport.quantize.calibration import calibrate
from hdexport.quantize.insert import quantize_matmuls
from hdexport.quantize.matmuls import weight_matmuls
from hdexport.quantize.rounding import Statistics, activation_scale, round_weight
from hdexport.quantize.selection import float_graph
from hdexport.quantize.splitting import Split, chosen_split, splittable_activation
from hdexport.quantize.texts import CalibrationTexts
from hdexport.verify.single_texts import single_text_runner
from hdruntime.bundle.reader import open_bundle

CHANNELS, OUTPUTS, WIDE = 96, 10, (5, 60)


@pytest.fixture(scope="module")
def activation() -> np.ndarray:
    """[tokens, channels] like those after GELU: two channels are large for some tokens."""
    random = np.random.default_rng(0)
    values = random.normal(size=(2000, CHANNELS))
    values[:, WIDE] *= np.where(random.random((2000, 1)) < 0.02, 40, 1)
    return np.where(values > 0, values, 0.1 * np.tanh(values)).astype(np.float32)


@pytest.fixture(scope="module")
def weight() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(CHANNELS, OUTPUTS)).astype(np.float32)


@pytest.fixture(scope="module")
def split(activation: np.ndarray, weight: np.ndarray) -> Split:
    shares = np.full(len(activation), 1 / len(activation))
    found = chosen_split(activation, shares, [weight])
    assert found is not None
    return found


def parts_of(split: Split, channel: int) -> np.ndarray:
    """From the lowest to the highest."""
    parts = np.flatnonzero(split.sources == channel)
    return parts[np.argsort(split.starts[parts])]


def test_the_widest_channels_are_split(split: Split) -> None:
    counts = np.bincount(split.sources, minlength=CHANNELS)
    assert len(split.sources) == CHANNELS + CHANNELS // 24
    assert counts.min() == 1
    assert counts[list(WIDE)].min() > 1
    for channel in WIDE:
        parts = parts_of(split, channel)
        assert (split.starts[parts[0]], split.ends[parts[-1]]) == (-np.inf, np.inf)
        np.testing.assert_array_equal(split.ends[parts[:-1]], split.starts[parts[1:]])
        assert split.share[parts[0]] > 0.9
        assert ((split.share[parts[1:]] > 0) & (split.share[parts[1:]] < 0.1)).all()


def test_all_parts_give_the_product(activation: np.ndarray, weight: np.ndarray, split: Split) -> None:
    found = split.of_activation(activation) @ split.of_weight(weight)
    np.testing.assert_allclose(found, activation @ weight, rtol=1e-4, atol=1e-4)


def test_a_split_activation_is_rounded_less(activation: np.ndarray, weight: np.ndarray, split: Split) -> None:
    def error(split: Split | None) -> float:
        statistics = Statistics.empty(CHANNELS if split is None else len(split.sources))
        statistics.add(activation if split is None else split.of_activation(activation))
        widened = weight if split is None else split.of_weight(weight)
        scale = activation_scale(statistics, [widened], split)
        rounded = round_weight(statistics, scale, widened)
        source = activation if split is None else activation[:, split.sources]
        levels = np.clip(np.round((source - scale.start) / scale.scale) + scale.zero_point.astype(np.float32), 0, 255)
        found = levels @ (rounded.values * rounded.scale) + rounded.bias
        return float(((found - activation @ weight) ** 2).mean())

    assert error(split) < 0.5 * error(None)


def products_of(model: ir.Model) -> dict[str, ir.Node]:
    return {product.weight: product for product in weight_matmuls(model)}


def test_only_what_operators_of_single_elements_make_is_widened(tiny_bundles) -> None:
    products = products_of(float_graph(open_bundle(tiny_bundles("bert").path)))
    widened = {name for name, product in products.items() if splittable_activation(product) is not None}
    assert widened == {name for name in products if ".output.dense" in name and "attention" not in name}


@pytest.mark.parametrize("made_of_int8", [False, True])
def test_a_graph_with_a_split_product_is_near_the_float_one(tiny_bundles, made_of_int8: bool) -> None:
    """What makes the activation may be float or int8 itself."""
    bundle = open_bundle(tiny_bundles("bert").path)
    random = np.random.default_rng(0)
    texts = [random.integers(5, bundle.manifest.vocab_size, tokens) for tokens in (2, 9, 40, 40, 40)]
    calibrating = CalibrationTexts(ids=texts, checked=texts, source="random ids")
    products = calibrate(bundle, float_graph(bundle), calibrating)
    split = {name for name, product in products.items() if product.activation.split is not None}
    assert split
    rounded = {name: product for name, product in products.items() if name in split or made_of_int8}
    stored = {name: ir.tensor(product.weight.values, name=f"{name}.int8") for name, product in rounded.items()}
    model = float_graph(bundle)
    quantize_matmuls(model, rounded, stored)
    names = [spec.name for spec in bundle.manifest.result_outputs]
    run, exact = single_text_runner(bundle, model), single_text_runner(bundle, float_graph(bundle))
    for text in texts:
        found, expected = run(names, text)[names[0]], exact(names, text)[names[0]]
        cosines = (found * expected).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert 0.999 < cosines.min() < 1
