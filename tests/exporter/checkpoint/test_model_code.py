"""A checkpoint's own model code (auto_map): where it may run, a bundle is made of a class that answers as it does."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hdexport.checkpoint import Checkpoint, find_checkpoint
from hdexport.checkpoint.ignored_keys import ignored_keys
from hdexport.checkpoint.trust import Trust
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError, write
from support.chat_rerankers import save_chat_reranker
from support.tiny_models import change_json, save_tiny_model

TRUSTED = Trust(trust_remote_code=True)

BOTH_SIDES = """
from transformers import Qwen3Model
from transformers.masking_utils import create_bidirectional_mask

class BothSides(Qwen3Model):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.self_attn.is_causal = False

    def forward(self, input_ids=None, attention_mask=None, **options):
        states = self.embed_tokens(input_ids)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=states, attention_mask=attention_mask)
        return super().forward(inputs_embeds=states, attention_mask={"full_attention": mask}, use_cache=False)
"""


def changed(base: str, change: str, takes: str = "input_ids, attention_mask=None, token_type_ids=None") -> str:
    """A class of code that changes the first output of one of transformers."""
    return (
        f"import torch\nfrom transformers import {base}\nclass Theirs({base}):\n    def forward(self, {takes}):\n"
        "        options = {} if 'token_type_ids' not in locals() else {'token_type_ids': token_type_ids}\n"
        "        found = super().forward(input_ids=input_ids, attention_mask=attention_mask, **options)\n"
        f"        name = next(iter(found))\n        value = found[name]\n        found[name] = {change}\n"
        "        return found\n"
    )


def save(path: Path, model_type: str, code: str, *, task: Task = Task.FEATURE_EXTRACTION, **auto_map: str) -> Path:
    """A tiny checkpoint with a file ``theirs.py``, whose class ``Theirs`` is the model unless `auto_map` says else."""
    save_tiny_model(path, model_type, task)
    (path / "theirs.py").write_text(code)
    change_json(path / "config.json", auto_map=auto_map or {"AutoModel": "theirs.Theirs"})
    return path


def loaded(path: Path, task: Task = Task.FEATURE_EXTRACTION) -> list[str]:
    """Load a checkpoint whose code may run, and return what it reports."""
    lines: list[str] = []
    find_checkpoint(path, trust=TRUSTED).load(task, report=lines.append)
    return lines


def test_code_that_sees_both_sides_is_not_the_librarys_causal_model(tmp_path: Path) -> None:
    path = save(tmp_path, "qwen3", BOTH_SIDES, AutoModel="theirs.BothSides")
    with pytest.raises(ModelError) as refused:
        loaded(path)
    said = str(refused.value)
    assert "'theirs.BothSides' (auto_map of config.json), whose outputs for 64 tokens differ by " in said
    assert "from those of transformers' Qwen3Model" in said
    assert "leave trust_remote_code out" in said


def test_without_trust_the_code_does_not_run_and_the_build_says_whose_answers_it_gives(tmp_path: Path) -> None:
    path = save(tmp_path, "bert", "raise SystemExit('it ran')")
    checkpoint = find_checkpoint(path)
    checkpoint.load(Task.FEATURE_EXTRACTION)
    line = write(*ignored_keys(checkpoint, Task.FEATURE_EXTRACTION))
    assert "AutoModel: 'theirs.Theirs' (auto_map of config.json). It was not run" in line
    assert "the outputs are those of transformers' BertModel. trust_remote_code=True" in line


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("value + 1e-3", "a small difference"),
        ("torch.where(torch.arange(value.shape[1])[:, None] > 50, value * 2, value)", "far tokens alone"),
        ("value * (2 if value.shape[0] > 1 else 1)", "batches alone"),
        ("value * (2 if attention_mask.min() == 0 else 1)", "padding alone"),
        ("value * (2 if value.shape[1] == 1 else 1)", "one token alone"),
        ("value * (2 if attention_mask[:, 0].min() == 0 else 1)", "padding on the left alone"),
        ("value * float('nan')", "no number"),
        ("value[..., :8]", "another width"),
    ],
)
def test_code_that_answers_otherwise_is_refused(tmp_path: Path, change: str, why: str) -> None:
    path = save(tmp_path, "bert", changed("BertModel", change))
    with pytest.raises(ModelError, match=r"'theirs.Theirs'(.|\n)*(differ by|have the shape)"):
        loaded(path)


def test_code_that_differs_at_long_texts_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long"
    save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION, max_position_embeddings=3000)
    (path / "theirs.py").write_text(changed("BertModel", "value * (2 if value.shape[1] > 2048 else 1)"))
    change_json(path / "config.json", auto_map={"AutoModel": "theirs.Theirs"})
    with pytest.raises(ModelError, match=r"'theirs.Theirs'(.|\n)*outputs for 3000 tokens differ by"):
        loaded(path)


def test_code_that_answers_the_same_is_built(tmp_path: Path) -> None:
    path = save(tmp_path, "bert", changed("BertModel", "value + 1e-6"))
    assert any("'theirs.Theirs' (auto_map) are those of transformers' BertModel" in line for line in loaded(path))
    assert ignored_keys(find_checkpoint(path, trust=TRUSTED), Task.FEATURE_EXTRACTION) == []


def test_code_is_run_once_for_a_task(tmp_path: Path) -> None:
    path = save(tmp_path, "bert", changed("BertModel", "value"))
    checkpoint, lines = find_checkpoint(path, trust=TRUSTED), list[str]()
    for _ in range(2):
        checkpoint.load(Task.FEATURE_EXTRACTION, report=lines.append)
    assert sum("auto_map" in line for line in lines) == 1


def test_code_that_passes_over_the_types_of_tokens_is_refused(tmp_path: Path) -> None:
    takes = "input_ids, attention_mask=None"
    path = save(tmp_path, "bert", changed("BertModel", "value", takes))
    with pytest.raises(ModelError, match=r"'theirs.Theirs'(.|\n)*differ by"):
        loaded(path)


HEADS = {
    Task.TEXT_CLASSIFICATION: ("BertForSequenceClassification", "AutoModelForSequenceClassification"),
    Task.TOKEN_CLASSIFICATION: ("BertForTokenClassification", "AutoModelForTokenClassification"),
    Task.QUESTION_ANSWERING: ("BertForQuestionAnswering", "AutoModelForQuestionAnswering"),
    Task.FILL_MASK: ("BertForMaskedLM", "AutoModelForMaskedLM"),
}


@pytest.mark.parametrize("task", HEADS)
def test_code_of_a_head_is_compared_for_its_task(tmp_path: Path, task: Task) -> None:
    base, auto_class = HEADS[task]
    same, other = (
        save(tmp_path / name, "bert", changed(base, change), task=task, **{auto_class: "theirs.Theirs"})
        for name, change in (("same", "value"), ("other", "value * 2"))
    )
    assert any("auto_map" in line for line in loaded(same, task))
    with pytest.raises(ModelError, match=rf"{auto_class}: 'theirs.Theirs'(.|\n)*transformers' {base}"):
        loaded(other, task)
    # The library runs its own class for a task that auto_map does not name.
    assert not any("auto_map" in line for line in loaded(other))


def test_code_of_a_generator_whose_logits_are_a_score_is_compared(tmp_path: Path) -> None:
    save_chat_reranker(tmp_path / "model", template=None)
    code = changed("Qwen3ForCausalLM", "value * 2", "input_ids, attention_mask=None")
    (tmp_path / "model" / "theirs.py").write_text(code)
    change_json(tmp_path / "model" / "config.json", auto_map={"AutoModelForCausalLM": "theirs.Theirs"})
    with pytest.raises(ModelError, match=r"AutoModelForCausalLM: 'theirs.Theirs'(.|\n)*transformers' Qwen3ForCausalLM"):
        loaded(tmp_path / "model", Task.TEXT_CLASSIFICATION)


def test_a_configuration_of_its_own_is_compared(tmp_path: Path) -> None:
    code = "from transformers import BertConfig\nclass BertConfig(BertConfig):\n    hidden_act: str = '{}'\n"
    for name, activation in (("same", "gelu"), ("other", "relu")):
        path = save(tmp_path / name, "bert", code.format(activation), AutoConfig="theirs.BertConfig")
        values = json.loads((path / "config.json").read_text())
        del values["hidden_act"]
        (path / "config.json").write_text(json.dumps(values))
    assert any("auto_map" in line for line in loaded(tmp_path / "same"))
    with pytest.raises(ModelError, match=r"AutoConfig: 'theirs.BertConfig'(.|\n)*differ by"):
        loaded(tmp_path / "other")


def test_code_for_a_model_type_of_ours_runs_in_place_of_our_class(tmp_path: Path) -> None:
    code = "from hdexport.families.nezha.model import NezhaModel\n" + changed("NezhaModel", "value * 2").replace(
        "from transformers import NezhaModel\n", ""
    )
    with pytest.raises(ModelError, match=r"'theirs.Theirs'(.|\n)*hdexport's NezhaModel"):
        loaded(save(tmp_path, "nezha", code))


def test_code_that_remembers_what_it_was_asked_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path, "big_bird", changed("BigBirdModel", "value"))
    model = find_checkpoint(path, trust=TRUSTED).load(Task.FEATURE_EXTRACTION)
    # Texts of a few blocks make it dense for ever.
    assert model.attention_type == "block_sparse"


def test_an_encoder_of_a_larger_model_is_compared_alone(tmp_path: Path) -> None:
    code = "from transformers import T5EncoderModel\nclass Theirs(T5EncoderModel):\n    pass\n"
    assert any("auto_map" in line for line in loaded(save(tmp_path, "t5", code)))


def test_code_that_cannot_run_is_refused_with_its_error(tmp_path: Path) -> None:
    path = save(tmp_path, "bert", "import a_package_that_nobody_has\n")
    with pytest.raises(
        ModelError, match=r"cannot be run here: .*a_package_that_nobody_has(.|\n)*Install what it needs"
    ):
        loaded(path)


def test_a_namesake_of_the_librarys_class_that_cannot_run_is_built_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As code is that was published before transformers adopted it, and that asks for packages of its time."""
    path = save(tmp_path, "bert", "import a_package_that_nobody_has\n", AutoModel="theirs.BertModel")
    with caplog.at_level(logging.WARNING):
        loaded(path)
    assert "a_package_that_nobody_has" in caplog.text
    assert "those of transformers' BertModel, which was not compared" in caplog.text


def test_a_key_that_the_code_alone_reads_is_found_by_its_answers(tmp_path: Path) -> None:
    path = save(tmp_path, "bert", changed("BertModel", "value * self.config.our_scale"))
    change_json(path / "config.json", our_scale=3.0)
    with pytest.raises(ModelError, match="differ by"):
        loaded(path)
    lines = [write(line) for line in ignored_keys(find_checkpoint(path), Task.FEATURE_EXTRACTION)]
    assert len(lines) == 2
    assert "our_scale 3.0" in lines[1]


# Tokenizers

TOKENIZER = """
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

class Theirs(PreTrainedTokenizerFast):
"""
LOWERED_IN_ITS_FILE = TOKENIZER + (
    "    def __init__(self, vocab=None, post_processor=None, **options):\n"
    "        made = Tokenizer(models.WordLevel(vocab, unk_token='[UNK]'))\n"
    "        made.normalizer, made.pre_tokenizer = normalizers.Replace('W', 'w'), pre_tokenizers.Whitespace()\n"
    "        made.post_processor = post_processor\n"
    "        super().__init__(tokenizer_object=made, **options)\n"
)
LOWERED_IN_PYTHON = TOKENIZER + (
    "    def __call__(self, text, *args, **options):\n"
    "        return super().__call__(text.lower() if isinstance(text, str) else text, *args, **options)\n"
)


def with_tokenizer(path: Path, code: str) -> Path:
    save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION)
    (path / "theirs.py").write_text(code)
    change_json(path / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "theirs.Theirs"]})
    return path


def ids(checkpoint: Checkpoint, text: str) -> list[int]:
    found: list[int] = checkpoint.tokenizer.backend_tokenizer.encode(text).ids
    return found


def test_a_tokenizer_of_its_own_gives_the_ids_where_it_may_run(tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path, LOWERED_IN_ITS_FILE)
    known, trusted = find_checkpoint(path), find_checkpoint(path, trust=TRUSTED)
    assert ids(trusted, "W3 w4") == ids(known, "w3 w4") != ids(known, "W3 w4")
    assert ignored_keys(trusted, Task.FEATURE_EXTRACTION) == []
    line = write(*ignored_keys(known, Task.FEATURE_EXTRACTION))
    assert "tokenizer_config.json names Python code" in line
    assert "'theirs.Theirs'" in line


def test_a_tokenizer_whose_ids_no_file_gives_is_refused(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(with_tokenizer(tmp_path, LOWERED_IN_PYTHON), trust=TRUSTED)
    with pytest.raises(ModelError, match=r"is its own Theirs, a program of Python(.|\n)*tokenizer=None"):
        _ = checkpoint.tokenizer


def test_a_tokenizer_that_cannot_run_is_refused_with_its_error(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(with_tokenizer(tmp_path, "import a_package_that_nobody_has\n"), trust=TRUSTED)
    with pytest.raises(
        ModelError, match=r"'theirs.Theirs'(.|\n)*a_package_that_nobody_has(.|\n)*trust_remote_code out"
    ):
        _ = checkpoint.tokenizer
