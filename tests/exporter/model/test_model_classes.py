"""Models that transformers does not know: its Auto classes find ours, and never in place of its own."""

from __future__ import annotations

import pytest
import torch
import transformers

from hdexport.model.family import Family, ModelClasses
from hdexport.model.model_classes import model_from_config
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError


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

    with pytest.raises(ModelError, match=r"has the model type bert, and this hdexport has classes of its own"):
        ModelClasses(config=Replacement, models={}).register()
    assert type(transformers.AutoConfig.for_model("bert")) is transformers.BertConfig


@pytest.mark.parametrize(
    ("task", "encoder_alone"), [(Task.FEATURE_EXTRACTION, True), (Task.TOKEN_CLASSIFICATION, False)]
)
def test_a_family_loads_its_encoders_alone_where_no_head_is_asked_for(task: Task, encoder_alone: bool) -> None:
    family = Family(model_types=("t5",), encoder_classes={"t5": "T5EncoderModel"})
    config = transformers.T5Config(vocab_size=7, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=1)
    with torch.device("meta"):
        model = model_from_config(config, family=family, task=task, dtype=torch.float16)
        of_library = model_from_config(config, family=Family(model_types=("t5",)), task=task)
    assert {weight.dtype for weight in model.parameters()} == {torch.float16}
    assert type(model) is (transformers.T5EncoderModel if encoder_alone else type(of_library))
    assert any(name.startswith("decoder.") for name in of_library.state_dict()) is encoder_alone
    assert not any("decoder." in name for name in model.state_dict())
    assert config.is_encoder_decoder
