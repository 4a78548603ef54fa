"""An engine's profiles where nobody described any: those of the command line, from Python as well."""

from __future__ import annotations

import dataclasses

import pytest

from hdexport.graph.targets.tensorrt.profiles import default_profiles


@pytest.mark.parametrize(("model_type", "lengths"), [("bert", (128, 300)), ("albert", (300,))])
def test_a_bundle_has_a_profile_for_each_bucket_and_one_if_its_layers_are_one(
    tiny_bundles, model_type: str, lengths: tuple[int, ...]
) -> None:
    manifest = dataclasses.replace(tiny_bundles("bert").manifest, model_type=model_type)
    assert tuple(profile.tokens[-1] for profile in default_profiles(manifest)) == lengths
