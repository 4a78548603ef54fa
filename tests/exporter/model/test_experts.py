"""Mixtures of experts: the experts that tokens chose give the library's sums, of every form that the library has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hdexport.checkpoint.loading import _as_loaded
from hdexport.checkpoint.weight_files import stored_weights
from hdexport.model.experts import use_chosen_experts
from support.comparators import assert_close

EXPERTS, WIDTH = 5, 16

CLASSES: dict[type[Any], dict[str, Any]] = {
    Qwen3MoeExperts: {"num_experts": EXPERTS, "hidden_act": "silu"},
    # Interleaved and transposed, with biases and a gate of its own.
    GptOssExperts: {"num_local_experts": EXPERTS, "intermediate_size": 8, "swiglu_alpha": 1.7, "swiglu_limit": 2.0},
    NemotronHExperts: {"n_routed_experts": EXPERTS, "moe_latent_size": None, "mlp_hidden_act": "relu2"},
    MuseSparkExperts: {
        "num_local_experts": EXPERTS,
        "moe_hidden_size": WIDTH,
        "hidden_act": "silu",
        "post_norm_eps": 1e-5,
    },
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_give_the_librarys_sums(kind: type[Any], tokens: int) -> None:
    """One token leaves most experts without any."""
    torch.manual_seed(tokens)
    config = transformers.PreTrainedConfig(hidden_size=WIDTH, moe_intermediate_size=8, **CLASSES[kind])
    config._experts_implementation = "eager"
    experts = kind(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    states, scores = torch.randn(tokens, WIDTH), torch.rand(tokens, EXPERTS)
    scores[:, 3] = 0.0
    weights, chosen = scores.topk(2)
    with torch.inference_mode():
        expected = experts(states, chosen, weights)
        use_chosen_experts(experts)
        assert config._experts_implementation != "eager"
        found = experts(states, chosen, weights)
    assert expected.abs().max() > 0.1
    assert_close(found.numpy(), expected.numpy(), atol=1e-5)
    with pytest.raises(AssertionError):
        assert_close(experts(states, chosen.flip(1), weights).detach().numpy(), expected.numpy(), atol=1e-3)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_weights_of_single_experts_are_those_of_the_model(tmp_path: Path, model_type: str) -> None:
    """As they are published: a file has each expert's weights by itself."""
    sizes = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "moe_intermediate_size": 8, "intermediate_size": 8}
    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, **sizes
    )
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    stored = stored_weights((tmp_path / "model.safetensors",))
    assert sum(f".experts.{EXPERTS - 1}." in name for name in stored) == 2 * 3
    loaded, _ = _as_loaded(stored, model)
    assert {name: weight.shape for name, weight in loaded.items()} == {
        name: tuple(weight.shape) for name, weight in model.state_dict().items()
    }
    lacking = {name: weight for name, weight in stored.items() if not name.endswith(("gate_proj.weight", "w1.weight"))}
    assert not [name for name in _as_loaded(lacking, model)[0] if name.endswith("gate_up_proj")], "as they are stored"
