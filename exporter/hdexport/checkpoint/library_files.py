"""The files by which transformers and sentence-transformers read a bundle as a model of theirs, without its weights.

``SentenceTransformer(bundle, backend="onnx")`` runs the bundle's ``model.onnx``; servers find poolings and limits.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path

from hdexport.checkpoint import Checkpoint
from hdexport.checkpoint.extended_files import rewrite_json
from hdexport.checkpoint.sentence_modules import module_folders, scored_labels, sentence_modules
from hdexport.checkpoint.tokenizer_files import settings_of_file
from hdexport.support.json_files import read_json, read_object
from hdruntime.bundle.manifest import Manifest, Role, Side, Task, TokenizerInfo
from hdruntime.text.lengths import checked_length

_OF_A_MODEL = ("config.json", "LICENSE*", "NOTICE*")
_OF_TEXTS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "*.jinja")
_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "*.model")
"""Files of a tokenizer that has no ``tokenizer.json`` in the checkpoint; the bundle's own has all that is in them."""

_OF_SENTENCES = ("modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "*.py")

_FIRST_MODULES = {
    Task.SENTENCE_SIMILARITY: "Pooling",
    Task.FEATURE_EXTRACTION: "Pooling",
    Task.FILL_MASK: "SpladePooling",
}
"""Task -> the module that takes the outputs of ``model.onnx``, from which sentence-transformers computes the rest."""

_PACKAGES_OF_MODULES = ("sentence_transformers.base.modules.", "sentence_transformers.sentence_transformer.modules.")
"""Packages of the sixth version; before, all these modules were in one package."""

_LIBRARY_INPUTS = {Role.IDS, Role.MASK, Role.TOKEN_TYPES}


def write_library_files(checkpoint: Checkpoint, manifest: Manifest, directory: Path) -> None:
    """Write these files into a bundle's directory.

    Every file that limits texts has one number: the tokens to which `SentenceEncoder` and `Session` truncate by
    default. The files of sentence-transformers are left out where sentence-transformers would compute something else
    from the graph's outputs, or does not know its inputs.
    """
    source, positions, reads_texts = checkpoint.path, manifest.positions, checkpoint.tokenizer is not None
    is_as_published = reads_texts and checkpoint.tokenizer_source == "file"
    is_of_sentences = reads_texts and _fits_sentence_transformers(checkpoint, manifest)
    patterns = [*_OF_A_MODEL, *(_OF_TEXTS if reads_texts else ()), *(_OF_SENTENCES if is_of_sentences else ())]
    if reads_texts and not (source / "tokenizer.json").is_file():
        patterns += _VOCABULARIES
    for file in sorted(source.iterdir()):
        if file.is_file() and any(fnmatch.fnmatchcase(file.name, pattern) for pattern in patterns):
            shutil.copyfile(file, directory / file.name)
    for folder in module_folders(source) if is_of_sentences else ():
        # One module's folder may be inside another's.
        shutil.copytree(source / folder, directory / folder, dirs_exist_ok=True)
    if reads_texts and not (directory / "special_tokens_map.json").is_file():
        # transformers 5 does not write this file; fastembed and older versions of transformers read it.
        named = json.dumps(checkpoint.tokenizer.special_tokens_map, indent=2, ensure_ascii=False, default=str)
        (directory / "special_tokens_map.json").write_text(named + "\n", encoding="utf-8")
    changes: dict[str, dict[str, object]] = {}
    # Also where it has fewer: the graph of a shorter bundle has no rows for the checkpoint's other positions.
    if positions.rows != positions.base:
        changes["config.json"] = {checkpoint.family.positions_key: positions.first_row + positions.rows}
    length = checked_length(None, manifest, max_tokens=manifest.max_len)
    if manifest.tokenizer is not None:
        changes["tokenizer_config.json"] = _of_tokenizer(source) | {"model_max_length": length}
        _limit_tokenizer(directory, manifest.tokenizer, length, padding_side=checkpoint.tokenizer.padding_side)
    for name in (file.name for file in directory.glob("sentence_*_config.json")):
        changes[name] = {"max_seq_length": length}
        if is_as_published:
            changes[name] |= {"do_lower_case": False}
    added = {"tokenizer_config.json": settings_of_file(checkpoint.tokenizer)} if is_as_published else {}
    for name, values in changes.items():
        rewrite_json(source / name, directory / name, values, added=added.get(name))
    if (directory / "modules.json").is_file():
        _name_as_before(directory / "modules.json")


def _limit_tokenizer(directory: Path, info: TokenizerInfo, length: int, *, padding_side: Side) -> None:
    """Write truncation and padding into ``tokenizer.json``, by which readers without hdexport tokenize.

    The checkpoint's own numbers, such as padding of every text to 128 tokens, are those of its training.
    """
    from tokenizers import Tokenizer

    file = str(directory / info.file)
    tokenizer = Tokenizer.from_file(file)
    tokenizer.enable_truncation(length, direction=info.truncation_side)
    tokenizer.enable_padding(
        direction=padding_side,
        pad_id=info.pad_token_id,
        pad_token=info.pad_token or tokenizer.id_to_token(info.pad_token_id) or "",
    )
    tokenizer.save(file, pretty=False)


def _of_tokenizer(source: Path) -> dict[str, object]:
    """The name of the class in transformers 4, which the fifth version reads as well."""
    named = read_object(source / "tokenizer_config.json", missing_ok=True).get("tokenizer_class")
    return {"tokenizer_class": "PreTrainedTokenizerFast"} if named == "TokenizersBackend" else {}


def _name_as_before(file: Path) -> None:
    """Name modules as sentence-transformers before version 6 does, which optimum's ONNX export needs; all versions read
    that."""
    modules = read_json(file)
    for module in modules:
        if module["type"].startswith(_PACKAGES_OF_MODULES):
            module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    file.write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")


def _fits_sentence_transformers(checkpoint: Checkpoint, manifest: Manifest) -> bool:
    path, task = checkpoint.path, manifest.task
    if not {spec.role for spec in manifest.inputs} <= _LIBRARY_INPUTS:
        return False
    if task is Task.TEXT_CLASSIFICATION:
        return checkpoint.logit_score is None and scored_labels(path) is None
    following = [module.kind for module in sentence_modules(path)[1:]]
    return following[:1] == [_FIRST_MODULES.get(task)]
