"""The selection leaves the product float whose int8 values change answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from hdexport.quantize.calibration import CalibratedMatMul, calibrate
from hdexport.quantize.insert import quantize_matmuls
from hdexport.quantize.selection import SwitchedGraph, _by_loss, float_graph, kept_float
from hdexport.quantize.texts import CalibrationTexts
from hdexport.support.progress import Progress
from hdruntime.bundle.reader import open_bundle


@pytest.fixture(scope="module")
def calibrated(tiny_bundles):
    """A tiny BERT, its products, and texts to check them with."""
    bundle = open_bundle(tiny_bundles("bert").path)
    random = np.random.default_rng(0)
    texts = [random.integers(5, bundle.manifest.vocab_size, tokens) for tokens in (2, 9, 40, 40, 40, 40)]
    calibrating = CalibrationTexts(ids=texts, checked=texts, source="random ids", rare=texts[:2])
    return bundle, calibrate(bundle, float_graph(bundle), calibrating), texts


def spoilt(products: Mapping[str, CalibratedMatMul], name: str) -> dict[str, CalibratedMatMul]:
    """With the sign of one product turned."""
    weight = products[name].weight._replace(scale=-products[name].weight.scale)
    return {**products, name: products[name]._replace(weight=weight)}


def test_good_products_all_become_int8(calibrated) -> None:
    kept, cosine = kept_float(*calibrated, Progress())
    assert not kept
    assert 0.999 <= cosine < 1


def test_two_wrong_products_are_left_float_and_no_other(calibrated) -> None:
    bundle, products, texts = calibrated
    wrong = sorted(products)[:2]
    kept, cosine = kept_float(bundle, spoilt(spoilt(products, wrong[0]), wrong[1]), texts, Progress())
    assert kept == set(wrong)
    assert cosine >= 0.999


def test_at_most_a_third_is_left_float_and_a_user_is_told_that_it_does_not_help(calibrated, caplog) -> None:
    bundle, products, texts = calibrated
    all_wrong = dict(products)
    for name in products:
        all_wrong = spoilt(all_wrong, name)
    kept, cosine = kept_float(bundle, all_wrong, texts, Progress())
    sizes = {name: product.weight.values.size for name, product in products.items()}
    assert 0.2 < sum(sizes[name] for name in kept) / sum(sizes.values()) <= 1 / 3
    assert cosine < 0.998
    assert f"although {len(kept)} weights are left float" in caplog.text


class Turned:
    """A graph that answers for each token with a unit vector, which a product turns by so much of its length."""

    def __init__(self, turns: Mapping[str, np.ndarray]) -> None:
        self._turns = turns

    def answers(self, used: Collection[str], texts: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        turned = sum((self._turns[name] for name in used), np.zeros(100))
        return [[np.stack([np.ones(100), turned], -1)[: len(text)].astype(np.float32)] for text in texts]


def test_the_product_of_the_worst_token_comes_before_one_that_loses_more_on_average(calibrated) -> None:
    one = np.zeros(100)
    one[17] = 0.08
    even = np.full(100, 0.01)
    assert (one**2).mean() < (even**2).mean()
    (product, *_) = calibrated[1].values()
    turned = Turned({"even": even, "one": one})
    ranked = _by_loss(turned, {"even": product, "one": product}, [np.arange(100)], most_tokens=1000)
    assert ranked == ["one", "even"]


@pytest.mark.parametrize("is_split", [False, True])
def test_switched_products_compute_what_the_int8_graph_is_defined_to(calibrated, is_split: bool) -> None:
    """Also of weights so large that 16 bits saturate, which some processors' kernels do."""
    bundle, products, texts = calibrated
    name = next(name for name, product in products.items() if (product.activation.split is not None) == is_split)
    weight = products[name].weight
    values = np.full_like(weight.values, 127)
    large = products[name]._replace(weight=weight._replace(values=values))
    graph = SwitchedGraph(bundle, float_graph(bundle), {**products, name: large})
    model = float_graph(bundle)
    assert quantize_matmuls(model, {name: large}, {name: ir.tensor(values, name="values")}) == [name]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    for text, (found, *_), (exact, *_) in zip(
        texts, graph.answers([name], texts), graph.answers((), texts), strict=True
    ):
        ones = np.ones((1, len(text)), np.int64)
        feeds = {"input_ids": text[None], "attention_mask": ones, "token_type_ids": 0 * ones}
        asked = {value.name: feeds[value.name] for value in session.get_inputs()}
        np.testing.assert_allclose(found, session.run(["last_hidden_state"], asked)[0][0], atol=1e-4)
        assert np.abs(found - exact).max() > 0.01
