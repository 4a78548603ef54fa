"""Which product is left float: the one whose int8 values change answers, whatever its estimated error."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from hdexport.quantize.calibration import calibrate
from hdexport.quantize.insert import StoredProduct
from hdexport.quantize.selection import _answers, _costliest_of_token, _weakest_token, float_graph, kept_float
from hdexport.support.progress import Progress
from hdruntime.bundle.reader import open_bundle


@pytest.fixture(scope="module")
def calibrated(tiny_bundles):
    """A tiny BERT, its products, as graphs hold them, and texts to check them with."""
    bundle = open_bundle(tiny_bundles("bert").path)
    random = np.random.default_rng(0)
    texts = [random.integers(5, bundle.manifest.vocab_size, tokens) for tokens in (2, 9, 40, 40, 40, 40)]
    products = calibrate(bundle, float_graph(bundle), texts, rare=texts[:2])
    stored = {
        name: StoredProduct(
            activation=product.activation,
            values=ir.tensor(product.weight.values, name=f"{name}.int8"),
            scale=product.weight.scale,
            bias=product.weight.bias,
        )
        for name, product in products.items()
    }
    return bundle, products, stored, texts


def test_good_products_all_become_int8(calibrated) -> None:
    kept, cosine = kept_float(*calibrated, Progress())
    assert not kept
    assert 0.999 <= cosine < 1


def test_a_wrong_product_is_left_float_and_no_other(calibrated) -> None:
    bundle, products, stored, texts = calibrated
    wrong = max(products, key=lambda name: products[name].weight.error)
    spoilt = dataclasses.replace(stored[wrong], scale=-stored[wrong].scale)
    kept, cosine = kept_float(bundle, products, {**stored, wrong: spoilt}, texts, Progress())
    assert kept == {wrong}
    assert cosine >= 0.999


def test_products_are_left_float_by_what_they_change_and_not_by_their_own_error(calibrated) -> None:
    bundle, products, stored, texts = calibrated
    by_error = sorted(products, key=lambda name: products[name].weight.error, reverse=True)
    wrong = by_error[len(by_error) // 2 - 1]
    spoilt = dataclasses.replace(stored[wrong], scale=-stored[wrong].scale)
    kept, _ = kept_float(bundle, products, {**stored, wrong: spoilt}, texts, Progress())
    assert kept == {wrong}


def test_the_product_that_spoils_a_single_token_is_found(calibrated) -> None:
    bundle, _, stored, texts = calibrated
    exact = _answers(bundle, float_graph(bundle), texts)
    answers = [[each.copy() for each in found] for found in exact]
    answers[2][0][7, ::2] *= -1
    weakest = _weakest_token(bundle, answers, exact)
    assert weakest is not None
    assert (weakest.text, weakest.answer, weakest.token) == (2, 0, 7)
    assert weakest.cosine < 0.9
    for wrong in list(stored)[:2]:
        spoilt = dataclasses.replace(stored[wrong], scale=-stored[wrong].scale)
        assert _costliest_of_token(bundle, {**stored, wrong: spoilt}, texts, exact, weakest) == wrong
