"""Chat templates of pairs: what they write around the texts is found, and one that changes texts is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.chat_template import pair_template
from hdexport.checkpoint.extended_files import is_copied
from hdexport.checkpoint.sentence_settings import sentence_settings
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.sentence_settings import PairTemplate, TemplatePart
from hdruntime.errors import ModelError
from support.chat_rerankers import DIGRESSING, INSTRUCTED, NO_SYSTEM
from support.tiny_models import BASE, VOCAB_SIZE, change_json, save_tiny_model


def content(role: str, then: str = "first") -> str:
    """What writes the text of a role, and does something with it."""
    return f'{{{{ messages | selectattr("role", "eq", "{role}") | map(attribute="content") | {then} }}}}'


QUERY, DOCUMENT = content("query"), content("document")
SYSTEM = content("system", 'first | default("rank")')

TRANSFORMER = "sentence_bert_config.json"
CALL = {"method": "forward", "method_output_name": "logits"}
SETTINGS = {
    "transformer_task": "text-generation",
    "modality_config": {"text": CALL, "message": {**CALL, "format": "flat"}},
    "module_output_name": "causal_logits",
}


def template_of(text: str | None, **options: Any) -> PairTemplate:
    tokenizer: Any = transformers.Qwen2Tokenizer()
    tokenizer.chat_template = text
    given = {"message_format": "flat", "options": {}, "prompts": (), **options}
    return pair_template(tokenizer, file=Path("settings.json"), **given)


def slots(template: PairTemplate) -> list[list[str]]:
    wordings = (template.plain, template.prompted)
    return [[part.slot for part in wording.parts] for wording in wordings if wording is not None]


def test_what_stands_around_the_texts_is_found() -> None:
    instructed = template_of(INSTRUCTED)
    assert slots(instructed) == [["query", "document"], ["prompt", "query", "document"]]
    assert instructed.plain.parts[1] == TemplatePart(before="\n<Document>: ", slot="document")
    assert instructed.plain.parts[0].before.endswith("<Instruct>: Find passages that answer the query\n<Query>: ")
    text = instructed.write("q", "d", prompt="Judge").text
    assert text.endswith("<Instruct>: Judge\n<Query>: q\n<Document>: d" + instructed.plain.after)
    assert instructed.plain.after == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    digressing = template_of(DIGRESSING)
    assert slots(digressing) == [["document", "query"]] * 2, "prompts are left out"
    written = digressing.write("what", "all of it")
    assert [written.text[slice(*written.places[slot])] for slot in ("query", "document")] == ["what", "all of it"]
    for options, ending in (({}, ""), ({"add_generation_prompt": True}, "Score?<|endoftext|>")):
        structured = template_of(NO_SYSTEM, message_format="structured", options=options)
        assert structured.plain.after == "<|endoftext|>" + ending
        assert structured.prompted is None


def test_a_template_that_does_something_else_with_texts_is_refused() -> None:
    templates = [
        content("query", "first | trim") + DOCUMENT,
        QUERY + content("document", "first | truncate(500)"),
        QUERY + "{{ messages[-1].content.split() | join(' ') }}",
        QUERY + DOCUMENT + "{% if messages[-1].content | length > 20000 %}{{ raise_exception('no') }}{% endif %}",
        content("system", "first | default('rank') | title") + QUERY + DOCUMENT,
        "{% if messages[0].role == 'system' and ' ' in messages[0].content %}!{% endif %}" + QUERY + DOCUMENT,
    ]
    said = r"chat template (does not write all texts in the same way|writes the \w+ of)"
    for text in templates:
        with pytest.raises(ModelError, match=said):
            pytest.fail(f"{text} gives {template_of(text)}")


def test_a_template_without_a_place_for_each_text_is_refused() -> None:
    refused: list[tuple[str | None, dict[str, Any], str]] = [
        (f"{QUERY} {QUERY} {DOCUMENT}", {}, "writes the query of a pair 2 times; it must be there once"),
        (QUERY, {}, r"writes the document of a pair 0 times; .*\nA template that fits"),
        ("{{ raise_exception('roles must alternate') }}", {}, "cannot write a pair: roles must alternate"),
        (
            f"{QUERY} {DOCUMENT}",
            {"options": {"max_length": 5}},
            r"settings\.json has processing_kwargs\.chat_template\.max_length 5, which a bundle cannot honour",
        ),
    ]
    for text, options, message in refused:
        with pytest.raises(ModelError, match=message):
            pytest.fail(f"{text} gives {template_of(text, **options)}")


def test_a_template_that_writes_the_date_is_refused() -> None:
    message = r"writes today's date \(strftime_now\), so that .* gives other scores each day.*\nWrite a date into"
    with pytest.raises(ModelError, match=message):
        template_of('{{ strftime_now("%Y-%m-%d") }}' + INSTRUCTED)
    assert template_of('{% if not 1 %}{{ strftime_now("%Y") }}{% endif %}' + INSTRUCTED) == template_of(INSTRUCTED)


def test_a_tokenizer_that_cuts_the_beginning_is_refused(reranker: Path) -> None:
    change_json(reranker / "tokenizer_config.json", truncation_side="left")
    with pytest.raises(
        ModelError, match=r"truncation_side 'left'; pairs in a chat template are truncated at the end\.\nSet"
    ):
        sentence_settings(find_checkpoint(reranker), Task.TEXT_CLASSIFICATION)


def test_the_prompts_of_a_checkpoint_are_tried() -> None:
    special = f"{{% if messages[0].content == 'Unusual' %}}!{{% endif %}}{SYSTEM} {QUERY} {DOCUMENT}"
    assert slots(template_of(special)) == [["query", "document"], ["prompt", "query", "document"]]
    with pytest.raises(ModelError, match="the prompt 'Unusual' are written as"):
        template_of(special, prompts=["", "Unusual"])


@pytest.fixture
def reranker(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, "qwen3", Task.TEXT_SCORING)
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}
    modules = [{"type": f"sentence_transformers.{kind}", "path": folder} for folder, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    change_json(tmp_path / "1_LogitScore" / "config.json", true_token_id=5, false_token_id=6)
    change_json(tmp_path / "config_sentence_transformers.json", model_type="CrossEncoder")
    change_json(tmp_path / TRANSFORMER, **SETTINGS)
    (tmp_path / "chat_template.jinja").write_text(f"{SYSTEM} {QUERY} {DOCUMENT}")
    return tmp_path


def test_a_generator_with_a_logit_score_is_a_classifier_of_one_label(reranker: Path) -> None:
    checkpoint = find_checkpoint(reranker)
    assert checkpoint.task() is Task.TEXT_CLASSIFICATION
    found = sentence_settings(checkpoint, Task.TEXT_CLASSIFICATION)
    assert found is not None
    assert (found.kind, found.activation, found.max_seq_length) == ("cross-encoder", "sigmoid", BASE)
    assert found.pair_template is not None
    assert slots(found.pair_template) == [["query", "document"], ["prompt", "query", "document"]]
    change_json(reranker / TRANSFORMER, modality_config={"text": CALL})
    found = sentence_settings(find_checkpoint(reranker), Task.TEXT_CLASSIFICATION)
    assert found is not None
    assert found.pair_template is None
    lines: list[str] = []
    model: Any = checkpoint.load(Task.TEXT_CLASSIFICATION, report=lines.append)
    generator = transformers.Qwen3ForCausalLM.from_pretrained(reranker)
    rows = generator.lm_head.weight.detach()
    row = model.get_output_embeddings().weight
    assert row.shape == (1, rows.shape[1])
    assert (row[0] == rows[5] - rows[6]).all()
    assert lines == [], "every weight is needed"
    assert is_copied(reranker / "chat_template.jinja")


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("1_LogitScore/config.json", {"true_token_id": VOCAB_SIZE}, rf"the logit of the token {VOCAB_SIZE}, and the"),
        (
            TRANSFORMER,
            {"transformer_task": "sequence-classification"},
            "'transformer_task' 'sequence-classification', wh",
        ),
        (
            TRANSFORMER,
            {"modality_config": {"text": CALL, "message": {**CALL, "method": "generate", "format": "flat"}}},
            "'modality_config' .*generate.*, which a bundle cannot honour",
        ),
    ],
)
def test_what_a_bundle_cannot_honour_is_refused(
    reranker: Path, file: str, values: dict[str, object], message: str
) -> None:
    change_json(reranker / file, **values)
    options = BuildOptions(model=reranker, output=reranker / "bundle", max_len=BASE)
    with pytest.raises(ModelError, match=message):
        build(options)
