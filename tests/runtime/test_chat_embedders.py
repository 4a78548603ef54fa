"""Embedders whose texts are written in a chat template: the ids and the vectors of sentence-transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import hdruntime
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.sentence_settings import sentence_settings
from hdruntime import SentenceEncoder
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import InputError, ModelError
from hdruntime.text.encoding import Overflow
from hdruntime.text.tokenization import TextTokenizer
from support.chat_rerankers import POSITIONS, small_tokenizer
from support.comparators import assert_close
from support.made_once import made_once
from support.sentence_bundles import with_settings_of

sentence_transformers = pytest.importorskip("sentence_transformers")

ATOL = 1e-5

MAX_LEN = 200

LONG = "The Spree flows through Berlin, past museums, and 3.8 million people live there. " * 12
TEXTS = [
    *("How many people live in Berlin?", "", LONG[:150], LONG, " spaces ", "\n\n", "e\u0301t\u00e9 \u4e2d\U0001f642"),
    *("<|im_end|>", "{{ messages }}", "yes"),
]

NOT_EMPTY = [text for text in TEXTS if text]
"""Without a template and special tokens, an empty text has no token."""

INSTRUCTED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}<|endoftext|>"
)
"""As Qwen3's; last-token pooling reads the token at its end."""

STRUCTURED = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|im_start|>{{ message.content[0].text }}<|im_end|>{% endfor %}"
)
"""Messages that are lists, without a prompt."""

TRIMMED = "{% for message in messages %}[{{ message.role }}] {{ message.content | trim }} [end]\n{% endfor %}!"
"""As Llama's and Gemma's: the spaces around texts are left out."""

TEMPLATES: dict[str, tuple[str, dict[str, Any]]] = {
    "instructed": (INSTRUCTED, {"add_generation_prompt": True}),
    "structured": (STRUCTURED, {}),
    "trimmed": (TRIMMED, {}),
}
"""Name -> the template, and the options that the checkpoint renders it with."""

PROMPTS = {"query": "Find the page", "document": "", "spaced": " Answer: "}


def save(path: Path, template: str, options: dict[str, Any]) -> None:
    import torch
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    tokenizer = small_tokenizer(POSITIONS)
    tokenizer.chat_template, tokenizer.padding_side = template, "left"
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=16, max_position_embeddings=POSITIONS,
        initializer_range=0.3, pad_token_id=tokenizer.pad_token_id, **sizes,
    )  # fmt: skip
    base = path.with_name(f"{path.name}-base")
    transformers.Qwen3Model(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    encoder = Transformer(str(base), processing_kwargs={"chat_template": options} if options else None)
    modules = [encoder, Pooling(32, "lasttoken"), Normalize()]
    sentence_transformers.SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu").save_pretrained(
        str(path), create_model_card=False
    )
    assert "message" in json.loads((path / "sentence_bert_config.json").read_text())["modality_config"]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a template -> a folder with a ``checkpoint`` and its ``bundle``; the models are one."""

    def folder(name: str) -> Path:
        def make(directory: Path) -> None:
            from hdexport.build import BuildOptions, build

            save(directory / "checkpoint", *TEMPLATES[name])
            if name == "instructed":
                options = BuildOptions(
                    model=directory / "checkpoint", output=directory / "bundle", max_len=MAX_LEN, verify=None
                )
                build(options)
            else:
                with_settings_of(directory / "checkpoint", folder("instructed") / "bundle", directory / "bundle")

        return made_once(tmp_path_factory, f"chat embedder {name}", make)

    return folder


def in_library(directory: Path) -> Any:
    return sentence_transformers.SentenceTransformer(str(directory / "checkpoint"), device="cpu")


def takes_prompts(name: str) -> bool:
    return name != "structured"


@pytest.mark.parametrize("name", TEMPLATES)
def test_vectors_are_those_of_sentence_transformers(saved: Callable[[str], Path], name: str) -> None:
    theirs = in_library(saved(name))
    with SentenceEncoder(saved(name) / "bundle", backend="onnxruntime") as ours:
        assert ours.max_seq_length == theirs.max_seq_length == POSITIONS
        assert_close(ours.encode(TEXTS), theirs.encode(TEXTS), atol=ATOL)
        assert_close(ours.encode_document(TEXTS), theirs.encode_document(TEXTS), atol=ATOL)
        plain = hdruntime.load(saved(name) / "bundle").tokenizer.with_template(None).encode(TEXTS[:1])[0].input_ids
        assert ours.tokenize(TEXTS[:1])["input_ids"][0].tolist() != plain
        if not takes_prompts(name):
            with pytest.raises(InputError, match=r"chat template that this bundle's texts are written by takes none"):
                ours.encode_query(TEXTS)
            return
        assert_close(ours.encode_query(TEXTS), theirs.encode_query(TEXTS), atol=ATOL)
        for options in ({"prompt_name": "spaced"}, {"prompt": LONG}, {"prompt": "a"}, {"prompt": ""}):
            assert_close(ours.encode(TEXTS, **options), theirs.encode(TEXTS, **options), atol=ATOL)
        with pytest.raises(AssertionError):
            assert_close(ours.encode_query(TEXTS), theirs.encode(TEXTS), atol=100 * ATOL)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_sentence_transformers_at_every_length(saved: Callable[[str], Path], name: str) -> None:
    """What is cut ends as the template does, or with as much of its end as fits."""
    theirs, bundle = in_library(saved(name)), open_bundle(saved(name) / "bundle")
    whole = TextTokenizer.of(bundle, max_len=MAX_LEN, template=bundle.manifest.template)
    first = len(whole.encode(TEXTS[:1])[0])
    for max_len in (1, 7, first - 1, first, first + 1, POSITIONS):
        theirs.max_seq_length = max_len
        ours = whole.limited(max_len)
        for prompt in ("", *(PROMPTS.values() if takes_prompts(name) else ())):
            encodings = ours.encode(TEXTS, overflow="truncate", prompt=prompt)
            for text, encoding in zip(TEXTS, encodings, strict=True):
                expected = theirs.preprocess([text], prompt=prompt)["input_ids"][0].tolist()
                assert encoding.input_ids == expected, (max_len, prompt, text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_sessions_answer_as_the_encoder(saved: Callable[[str], Path], name: str) -> None:
    bundle = saved(name) / "bundle"
    with hdruntime.load(bundle) as session, SentenceEncoder(bundle) as encoder:
        assert_close(session.embed(TEXTS, overflow="truncate"), encoder.encode(TEXTS), atol=ATOL)
        if takes_prompts(name):
            vectors = session.embed(TEXTS, overflow="truncate", prompt_name="query")
            assert_close(vectors, encoder.encode_query(TEXTS), atol=ATOL)
        with pytest.raises(InputError, match="its chat template has one text"):
            session.tokenize(["a"], ["b"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_pieces_of_a_long_text_are_written_in_the_template_each(saved: Callable[[str], Path], name: str) -> None:
    with hdruntime.load(saved(name) / "bundle") as session:
        (split,) = session.split(["  " + LONG])
        assert len(split.chunks) > 1
        assert len({(chunk.input_ids[0], chunk.input_ids[-1]) for chunk in split.chunks}) == 1
        for prompt in ("", "Find it: ") if takes_prompts(name) else ("",):
            # Offsets count the prompt's characters, as without a template.
            given = f"{prompt}  {LONG}"
            (whole,) = session.tokenizer.encode([f"  {LONG}"], overflow=Overflow.SPLIT, prompt=prompt)
            own = [token for token, text in enumerate(whole.sequence_ids) if text == 0]
            assert "".join(given[slice(*whole.offsets[token])] for token in own).strip() == LONG.strip()


def test_a_template_that_sentence_transformers_does_not_use_is_left_out(saved: Callable[[str], Path], tmp_path) -> None:
    """Of a model that an earlier version has saved, whose settings name no messages."""
    directory = saved("instructed")
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(directory / "checkpoint", checkpoint)
    (checkpoint / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": POSITIONS}))
    bundle = with_settings_of(checkpoint, directory / "bundle", tmp_path / "bundle")
    theirs = in_library(tmp_path)
    with SentenceEncoder(bundle) as ours:
        assert_close(ours.encode(NOT_EMPTY), theirs.encode(NOT_EMPTY), atol=ATOL)
        assert_close(ours.encode_query(NOT_EMPTY), theirs.encode_query(NOT_EMPTY), atol=ATOL)


def test_token_vectors_are_of_plain_texts_and_encoders_write_them_in_the_template(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without modules.json sentence-transformers takes the template; transformers' plain call does not."""
    from hdexport.build import BuildOptions, build

    base = saved("instructed") / "checkpoint-base"
    build(BuildOptions(model=base, output=tmp_path / "bundle", max_len=POSITIONS, verify=None))
    theirs = sentence_transformers.SentenceTransformer(str(base), device="cpu")
    texts = TEXTS[:3]
    with SentenceEncoder(tmp_path / "bundle") as ours, hdruntime.load(tmp_path / "bundle") as session:
        assert_close(ours.encode(texts), theirs.encode(texts), atol=ATOL * 10)
        found = [encoding.input_ids for encoding in session.tokenize(["yes", "a b"])]
        assert found == transformers.AutoTokenizer.from_pretrained(base)(["yes", "a b"])["input_ids"]


UNEVEN = {
    "a template that cuts": "{{ messages[-1].content[:99] }}",
    "a text twice": "{{ messages[-1].content }} {{ messages[-1].content }}",
    "queries in another way": "{% if task == 'query' %}?{% endif %}{{ messages[-1].content }}",
}


@pytest.mark.parametrize("name", UNEVEN)
def test_a_template_that_no_bundle_can_write_is_refused_with_one_that_fits(
    saved: Callable[[str], Path], tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(saved("instructed") / "checkpoint", checkpoint)
    (checkpoint / "chat_template.jinja").write_text(UNEVEN[name])
    with pytest.raises(ModelError, match=r"chat template(.|\n)*A template that fits has the text once, as it is: \{\{"):
        sentence_settings(find_checkpoint(checkpoint), Task.SENTENCE_SIMILARITY)
    advised = '{{ messages | selectattr("role", "eq", "user") | map(attribute="content") | first }}'
    (checkpoint / "chat_template.jinja").write_text(advised)
    bundle = with_settings_of(checkpoint, saved("instructed") / "bundle", tmp_path / "bundle")
    with SentenceEncoder(bundle) as ours:
        assert_close(ours.encode(NOT_EMPTY), in_library(tmp_path).encode(NOT_EMPTY), atol=ATOL)
    # Without modules.json there are token vectors, which need none.
    (checkpoint / "modules.json").unlink()
    (checkpoint / "chat_template.jinja").write_text(UNEVEN[name])
    settings = sentence_settings(find_checkpoint(checkpoint), Task.FEATURE_EXTRACTION)
    assert settings is not None
    assert settings.text_template is None
    assert "SentenceEncoder's embeddings will be those of plain texts" in caplog.text
