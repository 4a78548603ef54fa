"""Pooling, dense layers and normalisation as sentence-transformers computes them, each against NumPy by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers.sentence_transformer import modules

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.heads import sentence_vectors, token_layers
from hdexport.checkpoint.sentence_modules import pooling_settings
from hdexport.checkpoint.sentence_settings import sentence_settings
from hdexport.checkpoint.trust import Trust
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from hdruntime.text.pooling import PoolingMode
from support.comparators import assert_close
from support.pooling import POOLED_BY_HAND
from support.tiny_models import change_json, pickle_weights, save_sentence_modules

WIDTH = 6
TOKENS = np.random.default_rng(0).normal(size=(3, 9, WIDTH)).astype(np.float32)
MASK = np.array([[1] * 9, [1] * 4 + [0] * 5, [0] * 3 + [1, 0, 1, 1, 0, 0]])

# The weights of a row with a gap are of positions.
BY_HAND = {mode: pool for mode, pool in POOLED_BY_HAND.items() if mode is not PoolingMode.WEIGHTED_MEAN}
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def pooled_by_hand(*modes: str) -> np.ndarray:
    rows = zip(TOKENS.astype(np.float64), MASK == 1, strict=True)
    return np.stack([np.concatenate([BY_HAND[mode](row[real]) for mode in modes]) for row, real in rows])


def pooled(directory: Path) -> np.ndarray:
    with torch.inference_mode():
        chain = sentence_vectors(directory, hidden_size=WIDTH)
        return chain(torch.from_numpy(TOKENS), torch.from_numpy(MASK))[-1].numpy()


def flags(*modes: str) -> dict[str, object]:
    return {"word_embedding_dimension": WIDTH} | {flag: mode in modes for mode, flag in FLAGS.items()}


@pytest.mark.parametrize("pooling", [{"pooling_mode": list(BY_HAND)}, flags(*BY_HAND)], ids=["names", "flags"])
def test_each_mode_is_that_of_the_real_tokens(pooling: dict[str, object], tmp_path: Path) -> None:
    save_sentence_modules(tmp_path, pooling=pooling)
    assert_close(pooled(tmp_path), pooled_by_hand(*BY_HAND), atol=1e-6)


@pytest.mark.parametrize(
    "pooling",
    [
        flags("mean", "cls"),
        # The flags do not order the results, sentence-transformers does.
        dict(reversed(flags("cls", "mean").items())),
        {"pooling_mode": "cls+mean"},
    ],
    ids=["flags", "reversed flags", "joined"],
)
def test_several_modes_are_concatenated_in_order(pooling: dict[str, object], tmp_path: Path) -> None:
    save_sentence_modules(tmp_path, pooling=pooling)
    assert_close(pooled(tmp_path), pooled_by_hand("cls", "mean"), atol=1e-6)


@pytest.mark.parametrize("prompt_tokens", [0, 2])
def test_all_modes_are_sentence_transformers_own_with_and_without_a_prompt(prompt_tokens: int, tmp_path: Path) -> None:
    """Texts without padding, with padding on the right and on the left; the prompt is at the beginning."""
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5, [0] * 3 + [1] * 6])
    pooled_mask = mask * (mask.cumsum(1) > prompt_tokens)
    tokens = torch.from_numpy(TOKENS)
    for mode in PoolingMode:
        save_sentence_modules(tmp_path, pooling={"pooling_mode": mode})
        features = {"token_embeddings": tokens, "attention_mask": mask, "prompt_length": prompt_tokens}
        expected = modules.Pooling(WIDTH, mode, include_prompt=False)(features)["sentence_embedding"]
        chain = sentence_vectors(tmp_path, hidden_size=WIDTH)
        assert_close(chain(tokens, mask, pooled_mask)[-1].numpy(), expected.numpy(), atol=1e-6)
        if prompt_tokens and mode is not PoolingMode.LAST_TOKEN:
            assert np.abs(chain(tokens, mask)[-1].numpy() - expected.numpy()).max() > 0.01, (
                "the prompt makes a difference"
            )


def save_dense(folder: Path, *, activation: str | None, bias: bool = True) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    weight = generator.normal(size=(4, WIDTH)).astype(np.float32)
    shift = generator.normal(size=4).astype(np.float32) if bias else np.zeros(4, np.float32)
    config: dict[str, object] = {"in_features": WIDTH, "out_features": 4, "bias": bias}
    if activation is not None:
        config["activation_function"] = f"torch.nn.modules.activation.{activation}"
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"linear.weight": torch.from_numpy(weight)} | ({"linear.bias": torch.from_numpy(shift)} if bias else {})
    save_file(tensors, folder / "model.safetensors")
    return weight, shift


def test_layers_after_a_pooling_are_sentence_transformers_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = (
        modules.Dense(WIDTH, 4, activation_function=torch.nn.GELU(), use_residual=True),
        modules.LayerNorm(4),
        modules.Dropout(0.9),
        modules.Dense(4, 4, bias=False, activation_function=torch.nn.SiLU(), use_residual=True),
        modules.Dense(4, 5, activation_function=torch.nn.Sigmoid()),
    )
    torch.nn.init.normal_(layers[1].norm.bias)
    save_sentence_modules(tmp_path, *(type(layer).__name__ for layer in layers), pooling=flags("mean"))
    features = {"sentence_embedding": torch.from_numpy(pooled_by_hand("mean")).float()}
    with torch.inference_mode():
        for number, layer in enumerate(layers, 2):
            layer.save(str(tmp_path / f"{number}_{type(layer).__name__}"))
            features = layer.eval()(features)
    assert_close(pooled(tmp_path), features["sentence_embedding"].numpy(), atol=1e-6)
    (tmp_path / "3_LayerNorm" / "config.json").write_text('{"dimension": 5}')
    with pytest.raises(ModelError, match=r"(?s)the module LayerNorm in .*3_LayerNorm: .*size mismatch.*task="):
        pooled(tmp_path)


def test_a_row_of_padding_only_stays_finite(tmp_path: Path) -> None:
    save_sentence_modules(tmp_path, "Normalize", pooling=flags("mean", "cls", "mean_sqrt_len_tokens"))
    chain = sentence_vectors(tmp_path, hidden_size=WIDTH)
    with torch.inference_mode():
        vector = chain(torch.from_numpy(TOKENS), torch.zeros(3, 9, dtype=torch.int64))[-1]
    assert vector.isfinite().all()


@pytest.mark.parametrize("pooling", [{"word_embedding_dimension": WIDTH}, flags()], ids=["no flags", "all false"])
def test_settings_that_name_no_mode_have_that_of_sentence_transformers(pooling, tmp_path: Path) -> None:
    save_sentence_modules(tmp_path, pooling=pooling)
    assert modules.Pooling.load(str(tmp_path), subfolder="1_Pooling").pooling_mode == "mean"
    assert_close(pooled(tmp_path), pooled_by_hand("mean"), atol=1e-6)


def test_a_mode_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    save_sentence_modules(tmp_path, pooling=flags("mean") | {"pooling_mode_attention": True})
    with pytest.raises(ModelError, match=r"has the pooling mode attention; supported: cls, max, mean, .*\n.*task="):
        sentence_vectors(tmp_path, hidden_size=WIDTH)


def test_a_module_that_needs_what_a_bundle_has_not_is_refused_by_name(tmp_path: Path) -> None:
    save_sentence_modules(tmp_path, "WordWeights", pooling=flags("mean"))
    modules.WordWeights(["a"], {"a": 2.0}).save(str(tmp_path / "2_WordWeights"))
    with pytest.raises(ModelError, match=r"module WordWeights of .*: it needs 'input_ids'(.|\n)*task=.feature-"):
        sentence_vectors(tmp_path, hidden_size=WIDTH)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "lists no modules"),
        ("not json", "cannot be read"),
        (
            '[{"type": "sentence_transformers.models.Transformer", "path": ""}]',
            "chains the modules Transformer; a Transformer followed by",
        ),
        (
            json.dumps(
                [
                    {"type": f"sentence_transformers.models.{kind}", "path": kind}
                    for kind in ("Transformer", "Pooling", "Pooling")
                ]
            ),
            "chains the modules Transformer, Pooling, Pooling; a Transformer followed by",
        ),
    ],
)
def test_modules_that_cannot_be_followed_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        sentence_vectors(tmp_path, hidden_size=WIDTH)


def test_a_pooling_without_its_config_is_refused(tmp_path: Path) -> None:
    save_sentence_modules(tmp_path, pooling=flags("mean"))
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"1_Pooling/config.json.*cannot be read"):
        sentence_vectors(tmp_path, hidden_size=WIDTH)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"out_features": 5}, r"2_Dense.* is \[5, 6\], and the layer has \[4, 6\]"),
        ({"in_features": "6"}, r"2_Dense.* is \[4, '6'\], and"),
        ({"bias": False}, "2_Dense: .*linear.bias"),
        ({"use_residual": True}, "2_Dense: .*residual.weight"),
        ({"module_input_name": "other"}, "^The module Dense .*: it needs 'other'"),
        ({"module_input_name": "token_embeddings", "module_output_name": "sentence_embedding"}, r"shape \[2, 3, 4\]"),
        ({"activation_function": "torch.nn.functional.relu"}, "must be a torch.nn.Module"),
        ({"activation_function": "theirs.Swish"}, "'theirs.Swish', which is not(.|\n)*trust_remote_code=True"),
    ],
)
def test_a_dense_layer_that_does_not_fit_is_refused(config: dict[str, object], message: str, tmp_path: Path) -> None:
    save_sentence_modules(
        tmp_path,
        "Dense",
        pooling=flags("mean"),
    )
    save_dense(tmp_path / "2_Dense", activation="Tanh")
    change_json(tmp_path / "2_Dense" / "config.json", **config)
    with pytest.raises(ModelError, match=rf"(?s){message}"):
        sentence_vectors(tmp_path, hidden_size=WIDTH)


def test_modules_whose_answers_depend_on_a_batch_are_refused(tmp_path: Path) -> None:
    save_sentence_modules(tmp_path, "Largest", pooling=flags("mean"))
    (tmp_path / "largest.py").write_text(
        "import torch\nclass Largest(torch.nn.Module):\n"
        "    @staticmethod\n    def load(path):\n        return Largest()\n"
        "    def forward(self, features):\n"
        "        return {**features, 'sentence_embedding': features['token_embeddings'].amax(dim=1)}\n"
    )
    chain = json.loads((tmp_path / "modules.json").read_text())
    chain[2]["type"] = "largest.Largest"
    (tmp_path / "modules.json").write_text(json.dumps(chain))
    with pytest.raises(ModelError, match=r"chain of modules .*: sentence_embedding depends on the padding"):
        sentence_vectors(tmp_path, hidden_size=WIDTH, trust=Trust(trust_remote_code=True))


# Modules of the checkpoint's own

POOLING_OF_ITS_OWN = """
import torch

class Attentive(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = torch.nn.Linear(width, 1, bias=False)
        torch.nn.init.constant_(self.score.weight, 0.5)

    def forward(self, features):
        scores = self.score(features["token_embeddings"]).squeeze(-1)
        scores = scores.masked_fill(features["attention_mask"] == 0, -1e9)
        weights = torch.softmax(scores, dim=-1).unsqueeze(-1)
        return {**features, "sentence_embedding": (features["token_embeddings"] * weights).sum(dim=1)}

    @staticmethod
    def load(LOADED):
        return Attentive(WIDTH)
"""


@pytest.mark.parametrize("loaded", ["path", "path, subfolder='', **options"], ids=["as before 5", "as of 5"])
def test_a_pooling_of_the_checkpoints_own_is_run_where_it_is_trusted(loaded: str, tmp_path: Path) -> None:
    code = POOLING_OF_ITS_OWN.replace("LOADED", loaded).replace("WIDTH", str(WIDTH))
    (tmp_path / "attentive.py").write_text(code)
    save_sentence_modules(tmp_path, "Normalize", pooling={})
    chain = json.loads((tmp_path / "modules.json").read_text())
    chain[1]["type"] = "attentive.Attentive"
    (tmp_path / "modules.json").write_text(json.dumps(chain))
    with pytest.raises(ModelError, match=r"'attentive.Attentive', which is not(.|\n)*trust_remote_code=True"):
        sentence_vectors(tmp_path, hidden_size=WIDTH)
    head = sentence_vectors(tmp_path, hidden_size=WIDTH, trust=Trust(trust_remote_code=True))
    with torch.inference_mode():
        given = head(torch.from_numpy(TOKENS), torch.from_numpy(MASK))[-1].numpy()
    weights = np.where(MASK == 1, np.exp(TOKENS.sum(axis=-1, dtype=np.float64) / 2), 0.0)
    expected = (TOKENS * (weights / weights.sum(axis=1, keepdims=True))[:, :, None]).sum(axis=1)
    assert_close(given, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)
    settings = pooling_settings(tmp_path)
    assert settings.names == ("attentive.Attentive",)


def test_a_dense_layer_in_a_pickle_is_read_where_that_is_allowed(tmp_path: Path) -> None:
    save_sentence_modules(tmp_path, "Dense", pooling=flags("mean"))
    save_dense(tmp_path / "2_Dense", activation="Tanh")
    expected = sentence_vectors(tmp_path, hidden_size=WIDTH).state_dict()
    pickle_weights(tmp_path / "2_Dense")
    with pytest.raises(ModelError, match=r"2_Dense holds its weights as a pickle(.|\n)*allow_pickle=True"):
        sentence_vectors(tmp_path, hidden_size=WIDTH)
    read = sentence_vectors(tmp_path, hidden_size=WIDTH, trust=Trust(allow_pickle=True)).state_dict()
    assert read.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in read.items())


# Late interaction


def save_token_layers(path: Path, *, vectors: str = "token_embeddings", pooled: bool = False) -> np.ndarray:
    """A chain of a Transformer, a Dense and a Normalize, of tokens or of what is pooled; returns the Dense's weight."""
    kinds = ("Transformer", *(("Pooling",) if pooled else ()), "Dense", "Normalize")
    chain = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{index}_{kind}" if index else ""}
        for index, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(chain))
    for module in chain[1:]:
        (path / module["path"]).mkdir()
        change_json(path / module["path"] / "config.json", module_input_name=vectors)
    folder = path / chain[-2]["path"]
    weight, _ = save_dense(folder, activation="Identity", bias=False)
    change_json(folder / "config.json", module_input_name=vectors, module_output_name=vectors)
    return weight


@pytest.mark.parametrize("options", [{"vectors": "sentence_embedding"}, {"pooled": True}])
def test_tokens_are_given_as_they_are_where_layers_are_not_of_tokens(options: dict[str, Any], tmp_path: Path) -> None:
    save_token_layers(tmp_path, **options)
    assert token_layers(tmp_path, hidden_size=WIDTH) is None


@pytest.mark.parametrize("saved_from", ["SentenceTransformer", "MultiVectorEncoder"])
def test_a_chain_of_token_layers_is_built_for_its_tokens(saved_from: str, tiny_bert: Path) -> None:
    save_token_layers(tiny_bert)
    change_json(tiny_bert / "config_sentence_transformers.json", model_type=saved_from, similarity_fn_name="maxsim")
    checkpoint = find_checkpoint(tiny_bert)
    assert checkpoint.task() is Task.FEATURE_EXTRACTION
    settings = sentence_settings(checkpoint, Task.FEATURE_EXTRACTION)
    assert settings is not None
    assert settings.similarity == "cosine"
    change_json(tiny_bert / "sentence_bert_config.json", query_length=32)
    with pytest.raises(ModelError, match="'query_length' 32, which a bundle cannot honour"):
        sentence_settings(checkpoint, Task.FEATURE_EXTRACTION)
