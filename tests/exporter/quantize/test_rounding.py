"""Scales and rounded weights: near the exact products, and a wrong scale is far from them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hdexport.quantize.rounding import ActivationScale, Int8Weight, Statistics, activation_scale, round_weight

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
        found.add(part[None])
    return found


def product(activation: np.ndarray, scale: ActivationScale, weight: Int8Weight) -> np.ndarray:
    """As an int8 kernel computes it: integers first."""
    levels = np.clip(np.round(activation / scale.scale) + scale.zero_point, 0, 255).astype(np.int32)
    return (levels @ weight.values.astype(np.int32)) * weight.scale + weight.bias


def relative_errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """[outputs]"""
    return np.sqrt(((found - exact) ** 2).mean(0) / exact.var(0))


def test_statistics_are_those_of_all_tokens_together(activation, statistics) -> None:
    assert statistics.tokens == len(activation)
    np.testing.assert_allclose(statistics.mean, activation.mean(0), rtol=1e-4)
    np.testing.assert_allclose(statistics.covariance, np.cov(activation.T, bias=True), rtol=1e-2, atol=1e-3)
    np.testing.assert_array_equal(statistics.highest, activation.max(0))


def test_a_weighted_text_counts_as_often_as_its_weight(activation) -> None:
    weighted, repeated = Statistics.empty(CHANNELS), Statistics.empty(CHANNELS)
    weighted.add(activation[:50])
    weighted.add(activation[50:60], weight=3)
    for part in (activation[:50], *[activation[50:60]] * 3):
        repeated.add(part)
    assert weighted.tokens == repeated.tokens
    np.testing.assert_allclose(weighted.mean, repeated.mean, rtol=1e-6)
    np.testing.assert_allclose(weighted.products, repeated.products, rtol=1e-6)


def test_every_output_of_an_int8_product_is_near_the_exact_one(activation, weight, statistics) -> None:
    scale = activation_scale(statistics, [weight])
    rounded = round_weight(statistics, scale, weight)
    errors = relative_errors(product(activation, scale, rounded), activation @ weight)
    assert errors.max() < 0.03
    # What is estimated is what came.
    assert rounded.error == pytest.approx(float((errors**2).mean()), rel=5)


def test_the_bias_takes_away_the_mean_of_the_errors_of_weights(activation, weight, statistics) -> None:
    """What is left is the mean of the activation's rounding, as far from 0 as chance has it."""
    scale = activation_scale(statistics, [weight])
    rounded = round_weight(statistics, scale, weight)
    difference = weight * scale.scale[:, None] - rounded.values * rounded.scale
    of_weights = (statistics.mean / scale.scale @ difference).astype(np.float32)
    uncorrected = dataclasses.replace(rounded, bias=rounded.bias - of_weights)

    def standard_errors(rounded: Int8Weight) -> float:
        errors = product(activation, scale, rounded) - activation @ weight
        return float(np.abs(errors.mean(0) / (errors.std(0) / np.sqrt(len(errors)))).max())

    assert standard_errors(rounded) < 4
    assert standard_errors(uncorrected) > 10


@pytest.mark.parametrize("part", ["scale", "zero_point"])
def test_a_wrong_scale_of_one_channel_is_found(activation, weight, statistics, part: str) -> None:
    scale = activation_scale(statistics, [weight])
    rounded = round_weight(statistics, scale, weight)
    values = getattr(scale, part).copy()
    values[-1] = values[-1] * 0.8
    wrong = dataclasses.replace(scale, **{part: values})
    assert relative_errors(product(activation, wrong, rounded), activation @ weight).max() > 0.03


def test_the_calibrations_values_are_not_clipped_and_larger_ones_have_headroom(activation, weight, statistics) -> None:
    scale = activation_scale(statistics, [weight])
    levels = activation / scale.scale + scale.zero_point
    assert levels.min() > 0.5
    assert levels.max() < 254.5


def test_a_channel_that_is_always_0_is_no_obstacle(weight) -> None:
    statistics = Statistics.empty(CHANNELS)
    statistics.add(np.zeros((5, CHANNELS), np.float32))
    scale = activation_scale(statistics, [weight])
    rounded = round_weight(statistics, scale, weight)
    np.testing.assert_allclose(product(np.zeros((1, CHANNELS), np.float32), scale, rounded), 0, atol=1e-6)


def test_a_sum_of_two_products_fits_in_16_bits(activation, weight, statistics) -> None:
    """Processors without VNNI saturate there."""
    values = round_weight(statistics, activation_scale(statistics, [weight]), weight).values.astype(np.int32)
    largest = np.sort(np.abs(values), axis=0)[-2:].sum(0) * 255  # [outputs]
    assert largest.max() <= np.iinfo(np.int16).max
    assert largest.max() * 127 / 64 > np.iinfo(np.int16).max, "of 8 bits it would not fit: the weight shows something"


def test_rounding_that_hands_errors_on_beats_rounding_to_the_nearest(activation, weight, statistics) -> None:
    scale = activation_scale(statistics, [weight])
    rounded = round_weight(statistics, scale, weight)
    exact = weight * scale.scale[:, None]
    nearest = np.clip(np.round(exact / rounded.scale), -127, 127) * rounded.scale
    centred = (activation - activation.mean(0)) / scale.scale

    def error(values: np.ndarray) -> float:
        return float(((centred @ (values - exact)) ** 2).sum())

    assert error(rounded.values * rounded.scale) < 0.7 * error(nearest)
