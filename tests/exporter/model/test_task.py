"""Tasks: named as optimum names them, and inferred from what a checkpoint was made for."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_PRETRAINING_MAPPING_NAMES,
)

from hdexport.checkpoint import heads, sentence_settings
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.model.family import Family, ModelClasses
from hdexport.model.task import AUTO_CLASS_OF_TASK, TASKS, infer_task, model_from_config, model_task, unread_head
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.task_formats import format_of
from hdruntime.errors import ModelError
from hdruntime.tasks.of_bundle import class_of


def test_every_task_is_in_all_tables_that_it_is_looked_up_in() -> None:
    for task in Task:
        assert hasattr(transformers, AUTO_CLASS_OF_TASK[model_task(task)]), task
        assert all(axes[0] == "batch" for axes in format_of(task).output_axes.values()), task
        assert class_of(task).name is task
        assert TASKS[task].made_of is None or task in heads._HEADS, task
        assert format_of(task).settings_kind == "encoder" or task in sentence_settings._SETTINGS_OF_TASK, task


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertModel", Task.FEATURE_EXTRACTION),
        ("RobertaForMaskedLM", Task.FILL_MASK),
        ("ElectraForPreTraining", Task.FEATURE_EXTRACTION),
        ("XLMRobertaForSequenceClassification", Task.TEXT_CLASSIFICATION),
        ("XLNetLMHeadModel", Task.FEATURE_EXTRACTION),
    ],
)
def test_the_architecture_decides_the_task(architecture: str, task: Task) -> None:
    assert infer_task([architecture], is_sentence_transformer=False) is task


# LED is pretrained to write text, which its encoder does not. transformers has no names of NEZHA's classes.
def test_what_a_family_is_pretrained_as_can_be_built() -> None:
    """The inferred task has a head of that family."""
    heads = MODEL_FOR_MASKED_LM_MAPPING_NAMES | MODEL_FOR_PRETRAINING_MAPPING_NAMES
    names = [
        name for name in SUPPORTED_MODEL_TYPES if family_of(name).tasks is None and family_of(name).classes is None
    ]
    assert len(names) > 20
    for model_type in names:
        task = infer_task([heads[model_type]], is_sentence_transformer=False)
        auto_class = getattr(transformers, AUTO_CLASS_OF_TASK[task])
        assert type(transformers.AutoConfig.for_model(model_type)) in auto_class._model_mapping, model_type


def test_the_first_architecture_with_a_head_counts() -> None:
    architectures = ["BertModel", "BertForSequenceClassification", "BertForMaskedLM"]
    assert infer_task(architectures, is_sentence_transformer=False) is Task.TEXT_CLASSIFICATION
    assert infer_task([], is_sentence_transformer=False) is Task.FEATURE_EXTRACTION


def test_a_head_that_no_task_reads_is_named() -> None:
    for architecture in ("Qwen3ForCausalLM", "XLNetLMHeadModel", "T5ForConditionalGeneration"):
        assert unread_head(["BertModel", architecture]) == architecture
    for architecture in ("BertModel", "T5EncoderModel", "BertForMaskedLM", "ElectraForPreTraining", "XLMRobertaLoRA"):
        assert unread_head([architecture]) is None
    assert unread_head(["Qwen3ForCausalLM", "Qwen3ForSequenceClassification"]) is None
    assert unread_head([]) is None


def test_sentence_transformers_files_come_before_the_architecture() -> None:
    assert infer_task(["BertForMaskedLM"], is_sentence_transformer=True) is Task.SENTENCE_SIMILARITY


class OfNoLibrary(transformers.PreTrainedConfig):
    """A configuration that only this test has."""

    model_type = "of-no-library"
    hidden_size: int = 3


class OfNoLibraryModel(transformers.PreTrainedModel):
    """Its model."""

    config_class = OfNoLibrary

    def __init__(self, config: OfNoLibrary) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(config.hidden_size, 1)
        self.post_init()


def test_auto_classes_load_what_was_registered(tmp_path) -> None:
    with pytest.raises(ValueError, match="of-no-library"):
        transformers.AutoConfig.for_model("of-no-library")
    classes = ModelClasses(config=OfNoLibrary, models={Task.FEATURE_EXTRACTION: OfNoLibraryModel})
    for _ in range(2):
        classes.register()
    saved = OfNoLibraryModel(transformers.AutoConfig.for_model("of-no-library", hidden_size=5))
    saved.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, OfNoLibraryModel)
    torch.testing.assert_close(loaded.layer.weight, saved.layer.weight)


def test_a_type_of_the_library_is_not_replaced() -> None:
    class Replacement(transformers.PreTrainedConfig):
        model_type = "bert"

    with pytest.raises(ModelError, match=r"has the model type bert, for which this hdexport has classes"):
        ModelClasses(config=Replacement, models={}).register()
    assert type(transformers.AutoConfig.for_model("bert")) is transformers.BertConfig


@pytest.mark.parametrize(
    ("task", "encoder_alone"), [(Task.FEATURE_EXTRACTION, True), (Task.TOKEN_CLASSIFICATION, False)]
)
def test_a_family_loads_its_encoders_alone_where_no_head_is_asked_for(task: Task, encoder_alone: bool) -> None:
    family = Family()
    config = transformers.T5Config(vocab_size=7, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=1)
    with torch.device("meta"):
        model = model_from_config(config, family=family, task=task, dtype=torch.float16)
        of_library = model_from_config(config, family=Family(is_generic=True), task=task)
    assert {weight.dtype for weight in model.parameters()} == {torch.float16}
    assert type(model) is (transformers.T5EncoderModel if encoder_alone else type(of_library))
    assert any(name.startswith("decoder.") for name in of_library.state_dict()) is encoder_alone
    assert not any("decoder." in name for name in model.state_dict())
    assert config.is_encoder_decoder
