"""The settings of sentence-transformers: read into the manifest, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.normalizers import NFD, Lowercase
from transformers import AutoTokenizer

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.sentence_settings import sentence_settings
from hdexport.checkpoint.tokenizer_files import write_tokenizer
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.sentence_settings import SentenceSettings
from hdruntime.errors import ModelError
from support.tiny_models import BASE, change_json, save_sentence_modules, save_tiny_model

CONFIG, TRANSFORMER = "config_sentence_transformers.json", "sentence_bert_config.json"


@pytest.fixture
def encoder(tiny_bert: Path) -> Path:
    save_sentence_modules(tiny_bert, "Normalize", pooling={"pooling_mode": "mean"})
    return tiny_bert


@pytest.fixture
def cross_encoder(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, "bert", Task.TEXT_CLASSIFICATION, id2label={0: "score"}, label2id={"score": 0})
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    change_json(tmp_path / CONFIG, model_type="CrossEncoder")
    return tmp_path


def settings(path: Path, task: Task | None = None) -> SentenceSettings | None:
    checkpoint = find_checkpoint(path)
    return sentence_settings(checkpoint, task or checkpoint.task())


def test_settings_are_those_of_the_files(encoder: Path) -> None:
    assert settings(encoder) == SentenceSettings(kind="encoder", max_seq_length=BASE, pooling=("mean",), normalize=True)
    change_json(
        encoder / CONFIG,
        prompts={"query": "query: ", "title": None},
        default_prompt_name="title",
        similarity_fn_name="dot",
        truncate_dim=5,
    )
    change_json(encoder / TRANSFORMER, max_seq_length=12, do_lower_case=False)
    change_json(encoder / "1_Pooling/config.json", include_prompt=False)
    assert settings(encoder) == SentenceSettings(
        kind="encoder",
        max_seq_length=12,
        prompts={"query": "query: ", "title": ""},
        default_prompt_name="title",
        include_prompt=False,
        pooling=("mean",),
        normalize=True,
        truncate_dim=5,
        similarity="dot",
    )


@pytest.mark.parametrize("modules", [["Dense"], ["Dense", "Normalize"], ["Normalize", "Dense"]])
def test_a_dense_layer_after_the_pooling_is_stated(encoder: Path, modules: list[str]) -> None:
    save_sentence_modules(encoder, *modules, pooling={"pooling_mode_mean_tokens": True})
    found = settings(encoder)
    assert found is not None
    assert (found.dense, found.normalize) == ("Dense" in modules, modules[-1:] == ["Normalize"])


@pytest.mark.parametrize(
    ("file", "values", "tokens"),
    [
        (TRANSFORMER, {"max_seq_length": BASE - 1}, BASE - 1),
        (TRANSFORMER, {"max_seq_length": BASE + 1}, BASE),
        (TRANSFORMER, {"tokenizer_args": {"model_max_length": 9}, "max_seq_length": 10}, 9),
        ("sentence_roberta_config.json", {"max_seq_length": 8}, 8),
        ("tokenizer_config.json", {"model_max_length": 7}, 7),
        ("tokenizer_config.json", {"model_max_length": 10**30}, BASE),
    ],
)
def test_the_own_length_is_the_least_of_those_in_the_files(
    encoder: Path, file: str, values: dict[str, object], tokens: int
) -> None:
    change_json(encoder / file, **values)
    found = settings(encoder)
    assert found is not None
    assert found.max_seq_length == tokens


def test_other_tasks_have_no_such_settings(encoder: Path) -> None:
    assert settings(encoder, Task.FILL_MASK) is None


def test_token_vectors_keep_prompts_and_length_whatever_follows_the_transformer(encoder: Path) -> None:
    (encoder / "modules.json").write_text('[{"type": "own.Transformer", "path": ""}, {"type": "own.Head", "path": ""}]')
    change_json(encoder / CONFIG, prompts={"query": "q: "}, model_type="SparseEncoder")
    change_json(encoder / TRANSFORMER, max_seq_length=11, query_length=4)
    expected = SentenceSettings(kind="encoder", max_seq_length=11, prompts={"query": "q: "})
    assert settings(encoder, Task.FEATURE_EXTRACTION) == expected
    for name in ("modules.json", CONFIG, TRANSFORMER):
        (encoder / name).unlink()
    expected = SentenceSettings(kind="encoder", max_seq_length=BASE)
    assert settings(encoder, Task.FEATURE_EXTRACTION) == expected
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (encoder / name).unlink()
    assert settings(encoder, Task.FEATURE_EXTRACTION) is None


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (CONFIG, {"prompts": ["query: "]}, r"prompts should be `object \| null`, not \[\"query: \"\]"),
        (
            CONFIG,
            {"default_prompt_name": "passage"},
            " has default_prompt_name 'passage'; its prompts are query, document",
        ),
        (
            CONFIG,
            {"similarity_fn_name": "maxsim"},
            "similarity_fn_name should be one of .*'cosine', 'dot'.*, not \"maxsim\"",
        ),
        (
            CONFIG,
            {"model_type": "PixelEncoder"},
            "model_type .PixelEncoder.; SentenceTransformer, SparseEncoder and CrossEncoder are",
        ),
        (TRANSFORMER, {"query_length": 32}, "'query_length' 32, which a bundle cannot honour"),
        (TRANSFORMER, {"tokenizer_args": {"use_fast": 1}}, r"'tokenizer_args\.use_fast' 1, which"),
        (TRANSFORMER, {"model_args": "float16"}, "'model_args' 'float16', which"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(
    encoder: Path, file: str, values: dict[str, object], message: str
) -> None:
    change_json(encoder / file, **values)
    with pytest.raises(ModelError, match=rf"{file}.*{message}"):
        settings(encoder)


def test_settings_that_change_no_result_are_accepted(encoder: Path) -> None:
    plain = settings(encoder)
    change_json(
        encoder / TRANSFORMER,
        transformer_task="feature-extraction",
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
        unpad_inputs=True,
        query_length=None,
        model_args={"dtype": "float16", "trust_remote_code": True},
        tokenizer_args={"padding_side": "left", "trust_remote_code": True},
        config_args={"trust_remote_code": True},
        processing_kwargs={},
    )
    assert settings(encoder) == plain


def test_a_class_of_the_checkpoints_own_is_not_taken_for_one_of_the_library(encoder: Path) -> None:
    modules = json.loads((encoder / "modules.json").read_text())
    modules[1]["type"] = "custom.Pooling"
    (encoder / "modules.json").write_text(json.dumps(modules))
    assert settings(encoder).pooling == ("custom.Pooling",)
    modules[0]["type"] = "custom.Transformer"
    (encoder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"chains the modules custom\.Transformer, custom\.Pooling, Normalize; a"):
        settings(encoder)


@pytest.mark.parametrize(
    ("named", "labels", "activation", "version"),
    [
        (None, 1, "sigmoid", 3),
        (None, 1, "sigmoid", 5),
        (None, 3, "identity", 6),
        ("torch.nn.modules.activation.Softmax", 3, "softmax", 3),
        ("torch.nn.Identity", 1, "identity", 5),
        ("torch.nn.modules.activation.Sigmoid", 3, "sigmoid", 6),
    ],
)
def test_the_activation_of_a_cross_encoder_is_found(
    cross_encoder: Path, named: str | None, labels: int, activation: str, version: int
) -> None:
    change_json(cross_encoder / "config.json", id2label={index: str(index) for index in range(labels)})
    if version == 6:
        change_json(cross_encoder / CONFIG, activation_fn=named)
    else:
        (cross_encoder / "modules.json").unlink()
        (cross_encoder / CONFIG).unlink()
        of_5 = {"sentence_transformers": {"version": "5.1.0"} | ({"activation_fn": named} if named else {})}
        change_json(
            cross_encoder / "config.json", **of_5 if version == 5 else {"sbert_ce_default_activation_function": named}
        )
    assert find_checkpoint(cross_encoder).task() is Task.TEXT_CLASSIFICATION
    found = settings(cross_encoder)
    if version == 3 and named is None:
        # A classifier that transformers saved says as much.
        assert found is None
        return
    assert found is not None
    assert (found.kind, found.activation, found.max_seq_length) == ("cross-encoder", activation, BASE)


def test_an_activation_that_is_not_supported_is_refused(cross_encoder: Path) -> None:
    named = "torch.nn.modules.activation.Tanh"
    change_json(cross_encoder / CONFIG, activation_fn=named)
    with pytest.raises(ModelError, match=rf"{CONFIG} has activation_fn '{named}'; supported: torch.nn.Sigmoid, "):
        settings(cross_encoder)


@pytest.fixture
def chained(cross_encoder: Path) -> Path:
    """A CrossEncoder whose pooled vectors a Dense layer of two labels scores."""
    save_sentence_modules(cross_encoder, "Dense", pooling={"pooling_mode": ["mean", "max"], "include_prompt": False})
    change_json(cross_encoder / "2_Dense/config.json", out_features=2, in_features=64, module_output_name="scores")
    return cross_encoder


def test_a_cross_encoder_of_modules_pools_and_has_the_labels_of_its_last_layer(chained: Path) -> None:
    checkpoint = find_checkpoint(chained)
    assert checkpoint.task() is Task.TEXT_CLASSIFICATION
    assert checkpoint.run_as(Task.TEXT_CLASSIFICATION) is Task.FEATURE_EXTRACTION
    assert checkpoint.settings().num_labels == 2
    expected = {"activation": "identity", "max_seq_length": BASE, "pooling": ("mean", "max"), "include_prompt": False}
    assert settings(chained) == SentenceSettings(kind="cross-encoder", **expected)
    change_json(chained / "2_Dense/config.json", out_features=1)
    assert settings(chained) == SentenceSettings(kind="cross-encoder", **expected | {"activation": "sigmoid"})
    change_json(chained / CONFIG, activation_fn="torch.nn.modules.activation.Softmax")
    assert settings(chained) == SentenceSettings(kind="cross-encoder", **expected | {"activation": "softmax"})


@pytest.mark.parametrize(
    ("kinds", "values", "message"),
    [
        (["Transformer", "Dense"], {}, "is a CrossEncoder, and Dense, its last module, gives no scores; a"),
        (["Transformer", "Pooling", "Dense"], {}, "is a CrossEncoder, and Dense, its last module, gives no scores; a"),
        (["Transformer", "Pooling", "Dense"], {"out_features": "2", "module_output_name": "scores"}, "out_features "),
    ],
)
def test_a_cross_encoder_whose_modules_are_not_understood_is_refused(
    cross_encoder: Path, kinds: list[str], values: dict[str, object], message: str
) -> None:
    save_sentence_modules(cross_encoder, pooling={"pooling_mode": "cls"})
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in kinds]
    for kind, module in list(zip(kinds, modules, strict=True))[1:]:
        module["path"] = f"1_{kind}"
    (cross_encoder / "modules.json").write_text(json.dumps(modules))
    (cross_encoder / "1_Dense").mkdir()
    change_json(cross_encoder / "1_Dense/config.json", **values)
    with pytest.raises(ModelError, match=message):
        settings(cross_encoder)


@pytest.mark.parametrize("present", [None, NFD(), Lowercase()], ids=str)
def test_texts_are_lowercased_by_the_bundles_tokenizer(
    encoder: Path, tmp_path_factory: pytest.TempPathFactory, present: Any
) -> None:
    own = AutoTokenizer.from_pretrained(encoder)
    if present is not None:
        own.backend_tokenizer.normalizer = present
        own.save_pretrained(encoder)

    def written() -> dict[str, Any]:
        directory = tmp_path_factory.mktemp("bundle")
        write_tokenizer(find_checkpoint(encoder), directory)
        found: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text())
        return found

    plain = written()["normalizer"]
    change_json(encoder / TRANSFORMER, do_lower_case=True)
    assert _steps(written()["normalizer"]) == (
        _steps(plain) if "Lowercase" in str(present) else ["Lowercase", *_steps(plain)]
    )


def _steps(normalizer: dict[str, Any] | None) -> list[str]:
    """Types of the normalizers that follow each other."""
    if normalizer is None:
        return []
    return [step["type"] for step in normalizer.get("normalizers", [normalizer])]
