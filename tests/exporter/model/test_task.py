"""Tasks: named as optimum names them, and inferred from what a checkpoint was made for."""

from __future__ import annotations

import pytest
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_PRETRAINING_MAPPING_NAMES,
)

from hdexport.checkpoint import heads, sentence_settings
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.model.task import AUTO_CLASS_OF_TASK, TASKS, infer_task, model_task, unread_head
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.task_formats import format_of
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
