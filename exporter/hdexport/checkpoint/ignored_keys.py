"""Config keys and weights of a checkpoint that a build ignores, one warning line each.

Every key of a checkpoint's JSON files is either read, known to change no output, or named in a warning. transformers
and sentence-transformers read most keys; graphs are traced from their code and compared with it. So the tables below
hold the other keys.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdexport.checkpoint import Checkpoint, multi_vector, sentence_modules, sentence_settings
from hdexport.checkpoint.config import HIERARCHICAL_KEY
from hdexport.checkpoint.extended_files import EXTENSION_KEY
from hdexport.checkpoint.pooling import MODULES_OF_MODELS, SPLADE_KEYS
from hdexport.checkpoint.tokenizer_files import TOKENIZER_CONFIG, code_of_tokenizer, tokenizer_remarks
from hdexport.checkpoint.unread_weights import unread_weights
from hdexport.model.task import model_class, model_task
from hdexport.support.json_files import listing, read_json, read_object, shown
from hdruntime.bundle.manifest import Task
from hdruntime.errors import Message, Setting

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_READ_HERE = frozenset({
    *("architectures", "auto_map", "model_type", "num_labels", "position_embedding_type", "tokenizer_class"),
    *("is_causal", "is_decoder", "lora_adaptations", "quantization_config", "transformers_weights", "pad_token_id"),
    *("custom_pipelines", "sbert_ce_default_activation_function", "sentence_transformers"),
    *(EXTENSION_KEY, HIERARCHICAL_KEY),
})  # fmt: skip
"""Keys of ``config.json`` that hdexport reads or rejects, or that name no setting of a model."""

_OF_TRAINING = frozenset({
    *("finetuning_task", "gradient_checkpointing", "mask_token_prob", "problem_type"),
    *("layer_norm_type", "loss_type", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index"),
    *("sparse_prediction", "tie_weights_", "deterministic_flash_attn", "embedding_gradient_scale"),
})  # fmt: skip
"""Keys that matter while a model is trained, or choose between programs of the same answers."""

_OF_RUNNING = frozenset({
    *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "attn_implementation"),
    *("_flash_attn_2_enabled", "use_memory_efficient_attention", "unpad_inputs", "use_flash_attn", "use_bfloat16"),
    *("use_cache", "output_past", "output_attentions", "torchscript", "pruned_heads", "tf_legacy_loss", "torch_dtype"),
    *("add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "tie_word_embeddings"),
    *("bos_token_id", "cls_token_id", "eos_token_id", "mask_token_id", "sep_token_id", "unk_token_id"),
    *("bos_token", "eos_token", "mask_token", "pad_token", "padding_idx"),
    *("eos_token_ids", "decoder_start_token_id", "prefix", "task_specific_params", "tokenizer_name"),
    *("_commit_hash", "_name_or_path", "_num_labels", "name_or_path", "transformers.js_config", "vocab_file"),
    *("adapters", "language", "languages", "license", "matryoshka_dimensions", "save_step", "transformers_version"),
    *("vocab_size_or_config_json_file", "auto_mapping", "use_tpu", "output_hidden_states", "output_mems"),
})  # fmt: skip
"""Keys of how a model is run, stored and named, which change no vector."""

_OF_OLD_CODE = frozenset({
    # Google's BERT, ALBERT and ELECTRA.
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "down_scale_factor", "gap_size", "net_structure_type"),
    *("num_memory_blocks", "layers_to_keep", "generator_size", "generator_hidden_size", "discriminator_size"),
    # transformers' XLNet, Longformer, ESM and DeBERTa of earlier versions.
    *("ff_activation", "layer_norm", "untie_r", "init", "init_range", "init_std", "ignore_attention_mask"),
    *("onnx_export", "attention_mode", "attention_dilation", "autoregressive", "emb_layer_norm_before"),
    *("is_folding_model", "esmfold_config", "vocab_list", "pool_act", "pooler_hidden_act", "pooler_hidden_size"),
    *("legacy", "sinusoidal_pos_embds", "n_positions", "bert_model_name", "cls_entity_prediction"),
})  # fmt: skip
"""Keys of heads and programs that are gone, which transformers passes over."""

_OF_ROPE = frozenset({
    *("rope_scaling", "rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta"),
    *("original_max_position_embeddings", "partial_rotary_factor"),
})  # fmt: skip
"""Keys of earlier versions of transformers for ``rope_parameters``, which still reads them."""

_WITHOUT_EFFECT = re.compile(r"summary_.*|.*dropout.*|.*_pdrop")
"""Keys of heads that no task here has, and of parts that only training uses."""

_MODULE_ENTRY = frozenset({"idx", "name", "path", "type", "kwargs"})

_POOLING = frozenset({"word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt"})
_READS_AND_WRITES = frozenset({"module_input_name", "module_output_name"})

_OF_MODULES: Mapping[str, frozenset[str]] = {
    "Pooling": _POOLING | frozenset(sentence_modules.LEGACY_POOLING_FLAGS),
    "Normalize": _READS_AND_WRITES,
    "SpladePooling": SPLADE_KEYS,
    "LogitScore": frozenset(field.name for field in dataclasses.fields(sentence_modules.LogitScore)),
    "MultiVectorMask": multi_vector.MASK_KEYS,
}
"""Module whose settings are read here -> its keys. The library loads the others, and rejects a key it does not know."""

_OF_TOKENIZERS = frozenset({
    *("auto_map", "backend", "clean_up_tokenization_spaces", "device_map", "do_basic_tokenize", "do_lower_case"),
    *("errors", "from_slow", "full_tokenizer_file", "is_local", "keep_accents", "legacy", "local_files_only"),
    *("mask_time", "max_len", "max_length", "model_input_names", "name_or_path", "never_split", "pad_to_multiple_of"),
    *("pad_token_type", "pad_token_type_id", "padding", "processor_class", "remove_space", "sp_model_kwargs"),
    *("special_tokens_map_file", "split_by_punct", "strip_accents", "stride", "tokenize_chinese_chars"),
    *("tokenizer_class", "tokenizer_file", "tokenizer_type", "transformers_version", "trim_offsets", "truncation"),
    *("truncation_strategy", "use_default_system_prompt", "use_fast", "vocab_type", "wordpieces_prefix"),
    # PreTrainedTokenizerBase and its subclasses take these among their keyword arguments.
    *("add_bos_token", "add_eos_token", "added_tokens_decoder", "add_prefix_space", "chat_template"),
    *("extra_special_tokens", "fix_mistral_regex", "model_max_length", "model_specific_special_tokens"),
    *("response_schema", "split_special_tokens", "truncation_side", "unk_id", "vocab_file"),
    *("task", "sep_token_extra", "additional_special_tokens", "lowercase", "vocab_size", "padding_side"),
})  # fmt: skip
"""Keys of ``tokenizer_config.json`` that transformers passes over, or that matter to padding and decoding alone."""


def ignored_keys(checkpoint: Checkpoint, task: Task) -> list[Message]:
    """A warning for each config key that a bundle for a task ignores, and for weights that it does not have."""
    return [
        *_of_code(checkpoint, task),
        *_of_architectures(checkpoint, task),
        *_of_keys(checkpoint, task),
        *tokenizer_remarks(checkpoint),
        *unread_weights(checkpoint, task),
    ]


def _of_code(checkpoint: Checkpoint, task: Task) -> Iterator[Message]:
    code = checkpoint.code(task)
    if code is not None and not checkpoint.trust.trust_remote_code:
        yield code.not_run
    for file, key in (("config.json", "custom_pipelines"), ("processor_config.json", "auto_map")):
        named = read_object(checkpoint.path / file, missing_ok=True).get(key)
        if named:
            yield f"{file} names Python code that no bundle runs: {key} {shown(named)}."
    modules = sentence_modules.sentence_modules(checkpoint.path)
    if modules and modules[0].kind not in MODULES_OF_MODELS:
        yield (
            f"modules.json begins with {shown(modules[0].kind)}, which is not run: the outputs are those of the model "
            "of config.json alone."
        )
    if (
        checkpoint.tokenizer is not None
        and not checkpoint.trust.trust_remote_code
        and (named := code_of_tokenizer(checkpoint.path))
    ):
        yield (
            f"{TOKENIZER_CONFIG} names Python code for the tokenizer: {shown(named)} (auto_map). It was not run: the "
            "ids are those of transformers' class. ",
            Setting("trust_remote_code", True),
            " takes the ids of the code.",
        )


def _of_architectures(checkpoint: Checkpoint, task: Task) -> Iterator[str]:
    import transformers

    kind, model_type = _class(checkpoint, task), checkpoint.config["model_type"]
    classes = checkpoint.family.classes
    ours = {model.__name__ for model in classes.models.values()} if classes else set()
    named_code = checkpoint.config.get("auto_map")
    references = named_code.values() if isinstance(named_code, dict) else ()
    by_code = {name.rpartition(".")[2] for name in references if isinstance(name, str)}
    for name in checkpoint.config.get("architectures") or []:
        if name in ours or name == multi_vector.STANFORD or (name in by_code and checkpoint.code(task) is not None):
            continue
        named = getattr(transformers, name, None)
        of_type = getattr(getattr(named, "config_class", None), "model_type", None)
        if of_type != model_type:
            what = f"no model of transformers {transformers.__version__}" if of_type is None else f"a {of_type}"
            yield (
                f"config.json names the architecture {shown(name)}, which is {what}: the outputs are those of "
                f"{kind.__name__}, by the model_type {model_type}."
            )


def _of_keys(checkpoint: Checkpoint, task: Task) -> Iterator[str]:
    path, readers = checkpoint.path, f"{type(checkpoint.settings()).__name__} of transformers"
    line = functools.partial(_line, checkpoint=checkpoint)
    config = read_object(path / "config.json")
    yield from line(path / "config.json", config, _unread_of_config(config, checkpoint), readers)
    if checkpoint.tokenizer is not None:
        values = read_object(path / TOKENIZER_CONFIG, missing_ok=True)
        kind = type(checkpoint.tokenizer)
        # Each key with this suffix is a special token.
        known = _OF_TOKENIZERS | _tokenizer_keys(checkpoint.tokenizer)
        unread = [key for key in values if key not in known and not key.endswith("_token")]
        yield from line(path / TOKENIZER_CONFIG, values, unread, f"{kind.__name__} of transformers")
    if not (path / "modules.json").is_file():
        return
    library = "sentence-transformers"
    for number, entry in enumerate(read_json(path / "modules.json")):
        yield from line(path / "modules.json", entry, set(entry) - _MODULE_ENTRY, library, f", module {number},")
    for module in sentence_modules.sentence_modules(path):
        if module.kind in _OF_MODULES:
            file = path / module.folder / "config.json"
            values = read_object(file, missing_ok=True) if module.folder else {}
            yield from line(file, values, set(values) - _OF_MODULES[module.kind], library)
    for file, known in (
        (path / sentence_settings.SENTENCE_CONFIG, sentence_settings.SENTENCE_KEYS | multi_vector.SENTENCE_KEYS),
        (sentence_settings.transformer_file(path), sentence_settings.TRANSFORMER_KEYS),
    ):
        values = read_object(file, missing_ok=True)
        yield from line(file, values, set(values) - known, library)


def _line(
    file: Path,
    values: Mapping[str, Any],
    unread: Iterable[str],
    readers: str,
    where: str = "",
    *,
    checkpoint: Checkpoint,
) -> Iterator[str]:
    """The line about the keys of a file that nothing reads; empty values are left out."""
    unread_keys = [key for key in values if key in set(unread) and values[key] not in (None, {}, [])]
    listed = [f"{key} {shown(values[key])}" for key in unread_keys]
    # The folder of a model of the hub is named by its commit.
    folder = checkpoint.name if file.parent == checkpoint.path else file.parent.name
    if listed:
        yield (
            f"{folder}/{file.name}{where} has what neither {readers} nor hdexport reads: "
            f"{listing(listed, limit=6)}. The outputs are those of the model without it."
        )


def _unread_of_config(config: Mapping[str, Any], checkpoint: Checkpoint) -> list[str]:
    from transformers import GenerationConfig

    known = _config_keys(type(checkpoint.settings()))
    if "rope_parameters" in known:
        known |= _OF_ROPE
    known |= _READ_HERE | _OF_TRAINING | _OF_RUNNING | _OF_OLD_CODE | checkpoint.family.known_config_keys
    # Before version 5, config.json had settings of generation, which encoders do not do.
    known |= {*GenerationConfig().to_dict()}
    return [key for key in config if key not in known and not _WITHOUT_EFFECT.fullmatch(key)]


def _config_keys(kind: type[PreTrainedConfig]) -> set[str]:
    """The keys that a configuration class declares, computes or takes."""
    names = {field.name for field in dataclasses.fields(kind)} | {*kind.attribute_map}
    for base in kind.__mro__:
        # The base classes of transformers have keys of many model types.
        if base.__module__.startswith(("transformers.models.", "transformers_modules.", "hdexport.")):
            names |= {*vars(base), *inspect.signature(base).parameters}
            if init := vars(base).get("__post_init__"):
                # Code alone names the keys of earlier versions, such as ModernBERT's global_attn_every_n_layers.
                constants = inspect.unwrap(init).__code__.co_consts
                names |= {each for each in constants if isinstance(each, str)}
    try:
        return names | {*vars(kind())}
    except Exception:
        # Classes of a checkpoint's code may have no default.
        return names


def _tokenizer_keys(tokenizer: Any) -> set[str]:
    """The keys that a tokenizer's class takes or sets."""
    bases = [base for base in type(tokenizer).__mro__ if base is not object]
    return {*vars(tokenizer)}.union(*(inspect.signature(base).parameters for base in bases))


def _class(checkpoint: Checkpoint, task: Task) -> Any:
    """The class that a bundle is made of; the encoder's, where the task has none."""
    settings, family = checkpoint.settings(), checkpoint.family
    try:
        return model_class(settings, family=family, task=model_task(checkpoint.run_as(task)))
    except KeyError:
        return model_class(settings, family=family, task=Task.FEATURE_EXTRACTION)
