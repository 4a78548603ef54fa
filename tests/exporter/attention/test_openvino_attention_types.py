"""In OpenVINO, a bundle of each attention type answers as in ONNX Runtime, which other files hold to PyTorch.

Every operator is held to its definition in tests/exporter/graph/targets/test_lowering_openvino.py; one that hashes,
whose decisions must be followed, is in tests/exporter/verify/test_precisions.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hdruntime
from support.answers import ATOL
from support.comparators import assert_close, named_case
from support.grids import nightly_unless
from support.hugging_face import first_real_tokens
from support.needs import needs_openvino
from support.padded_batches import cases

pytestmark = needs_openvino

# Bundles of the other files.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("roberta", {"attention": "window:5,right:16,dilation:1/1/2/3"}),
    "windows and marked tokens": ("longformer", {}),
    "blocks": ("big_bird", {}),
    "features": ("bert", {"attention": "favor:features=48,seed=3", "attention_scale": "logn"}),
    "distances and memories": ("xlnet", {"mem_len": 20}),
}


@pytest.mark.parametrize(
    ("model_type", "options"),
    [nightly_unless(name in ("windows", "blocks"), *options) for name, options in KINDS.items()],
    ids=KINDS,
)
def test_openvino_answers_as_onnx_runtime(openvino_bundles, model_type: str, options: dict[str, Any]) -> None:
    bundle = openvino_bundles(model_type, **options)
    with hdruntime.load(bundle.path, "openvino", threads=1) as session:
        carried: dict[str, np.ndarray] = {}
        for tokens, name, input_ids, attention_mask in cases((17, 65, 129), sizes=(3,)):
            values = {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "token_type_ids": input_ids % 2,
                "global_attention_mask": first_real_tokens(attention_mask),
            }
            feeds = {spec.name: values[spec.name] for spec in bundle.manifest.inputs if spec.name in values}
            got, expected = session(**feeds, **carried), bundle.session(**feeds, **carried)
            real = attention_mask == 1
            with named_case(f"{tokens} tokens", name):
                assert set(got) == set(expected)
                assert_close(got["last_hidden_state"][real], expected["last_hidden_state"][real], atol=ATOL)
                for spec in bundle.manifest.recurrent_states:
                    assert_close(got[str(spec.fed_from)], expected[str(spec.fed_from)], atol=ATOL)
            carried = {spec.name: expected[str(spec.fed_from)] for spec in bundle.manifest.recurrent_states}
