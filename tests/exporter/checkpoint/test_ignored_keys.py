"""Each key of a checkpoint's files is honoured, known to change no answer, or named in a warning of the build."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.ignored_keys import ignored_keys
from hdexport.checkpoint.sentence_settings import sentence_settings
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError, write
from support.chat_rerankers import save_chat_reranker
from support.colbert_models import MODELS, save_colbert
from support.family_tasks import tasks_of
from support.grids import nightly_unless
from support.tiny_models import change_json, save_sentence_modules, save_tiny_model


def lines(path: Path, task: Task = Task.FEATURE_EXTRACTION) -> list[str]:
    return [write(line) for line in ignored_keys(find_checkpoint(path), task)]


PUBLISHED = {
    "albert": "classifier_dropout_prob down_scale_factor gap_size inner_group_num layers_to_keep net_structure_type "
    "num_hidden_groups num_memory_blocks",
    "bert": "adapters attention_probs_dropout_prob bos_token_id chunk_size_feed_forward classifier_dropout "
    "directionality do_sample eos_token_ids finetuning_task gradient_checkpointing is_decoder length_penalty "
    "max_length num_beams output_attentions output_hidden_states output_past pooler_fc_size "
    "pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type prefix problem_type "
    "pruned_heads repetition_penalty sbert_ce_default_activation_function sentence_transformers "
    "task_specific_params tie_word_embeddings torch_dtype torchscript transformers_version use_bfloat16 use_cache "
    "_name_or_path _num_labels",
    "big_bird": "attention_type gradient_checkpointing num_random_blocks rescale_embeddings sep_token_id use_bias",
    "bigbird_pegasus": "attention_type gradient_checkpointing num_random_blocks scale_embedding use_bias",
    "deberta": "max_relative_positions padding_idx pooler_dropout pos_att_type position_biased_input "
    "relative_attention",
    "deberta-v2": "attention_head_size conv_act conv_kernel_size legacy norm_rel_ebd pooler_dropout "
    "pooler_hidden_act pooler_hidden_size pos_att_type position_biased_input position_buckets share_att_key",
    "distilbert": "activation finetuning_task output_past qa_dropout seq_classif_dropout sinusoidal_pos_embds "
    "tie_weights_",
    "electra": "generator_hidden_size summary_activation summary_last_dropout summary_type summary_use_proj",
    "embedding_gemma2_text": "global_head_dim num_global_key_value_heads per_layer_config sliding_window_pattern",
    "ernie": "pool_act task_type_vocab_size use_task_id",
    "esm": "classifier_dropout emb_layer_norm_before esmfold_config is_folding_model token_dropout vocab_list",
    "eurobert": "attention_bias bos_token clf_pooling eos_token hidden_dropout mask_token mlp_bias pad_token "
    "pretraining_tp rms_norm_eps rope_scaling rope_theta use_cache",
    "gemma3_text": "_sliding_window_pattern attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar "
    "rope_local_base_freq rope_scaling rope_theta sliding_window_pattern use_bidirectional_attention use_cache",
    "gte": "layer_norm_type pack_qkv rope_scaling rope_theta unpad_inputs use_memory_efficient_attention",
    "led": "attention_window classif_dropout decoder_layerdrop encoder_layerdrop output_past prefix",
    "longformer": "attention_dilation attention_mode autoregressive ignore_attention_mask onnx_export sep_token_id",
    "longt5": "encoder_attention_type global_block_size local_radius n_positions output_past",
    "luke": "bert_model_name cls_entity_prediction entity_emb_size use_entity_aware_attention",
    "modernbert": "deterministic_flash_attn global_attn_every_n_layers global_rope_theta gradient_checkpointing "
    "layer_norm_eps local_rope_theta norm_eps position_embedding_type reference_compile repad_logits_with_grad "
    "sparse_pred_ignore_index sparse_prediction",
    "mpnet": "relative_attention_num_buckets",
    "nezha": "use_relative_position",
    "nomic_bert": "activation_function attn_pdrop causal dense_seq_output embd_pdrop fused_bias_fc "
    "fused_dropout_add_ln layer_norm_epsilon max_trained_positions mlp_fc1_bias mlp_fc2_bias n_embd n_head n_inner "
    "n_layer n_positions pad_vocab_size_multiple parallel_block parallel_block_tied_norm prenorm qkv_proj_bias "
    "reorder_and_upcast_attn resid_pdrop rotary_emb_base rotary_emb_fraction rotary_emb_interleaved "
    "rotary_emb_scale_base rotary_scaling_factor scale_attn_by_inverse_layer_idx scale_attn_weights "
    "summary_proj_to_labels use_flash_attn use_rms_norm use_xentropy",
    "qwen3": "is_causal layer_types max_window_layers rope_scaling rope_theta sliding_window use_sliding_window",
    "t5": "decoder_start_token_id dense_act_fn feed_forward_proj is_gated_act n_positions num_decoder_layers "
    "output_past relative_attention_num_buckets task_specific_params",
    "transfo-xl": "adaptive clamp_len dropatt ext_len init init_range init_std proj_share_all_but_first "
    "sample_softmax tgt_len tie_projs tie_weight untie_r",
    "xlnet": "bi_data end_n_top ff_activation init init_range mem_len reuse_len same_length start_n_top summary_type "
    "untie_r use_mems_eval use_mems_train",
    "xmod": "adapter_layer_norm adapter_reduction_factor default_language languages ln_before_adapter pre_norm",
}
"""Model type -> keys that ``config.json`` of its published checkpoints has."""


@pytest.mark.parametrize(
    "model_type",
    [
        nightly_unless(name in ("bert", "deberta-v2", "nezha", "nomic_bert", "t5"), name)
        for name in SUPPORTED_MODEL_TYPES
    ],
)
def test_an_ordinary_checkpoint_has_no_warnings_and_a_new_key_has_one(tmp_path: Path, model_type: str) -> None:
    save_tiny_model(tmp_path, model_type, tasks_of(model_type)[0])
    assert lines(tmp_path) == []
    change_json(tmp_path / "config.json", attends_to_the_left=False)
    (line,) = lines(tmp_path)
    assert "config.json has what neither " in line
    assert "attends_to_the_left False. The outputs are those of the model without it." in line


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_keys_of_published_checkpoints_are_known(tmp_path: Path, model_type: str, settings_alone) -> None:
    """Of a configuration alone: their values are not the tiny model's."""
    config = dict.fromkeys([*PUBLISHED[model_type].split(), "not_known"], "some value")
    assert settings_alone(model_type, config) == ["not_known"]


@pytest.fixture
def settings_alone(tmp_path: Path):
    """(model type, content of ``config.json``) -> the keys that nothing reads."""
    from hdexport.checkpoint.ignored_keys import _unread_of_config

    def unread(model_type: str, config: dict[str, object]) -> list[str]:
        from transformers import AutoConfig

        family_of(model_type)
        # Some types have no such values by default, or others that are refused.
        values = {"vocab_size": 300000, "pad_token_id": 1, "position_biased_input": False, "relative_attention": True}
        AutoConfig.for_model(model_type, **values).save_pretrained(tmp_path)
        checkpoint = find_checkpoint(tmp_path)
        return _unread_of_config(config, checkpoint)

    return unread


def test_a_key_that_the_librarys_model_reads_is_known_for_that_model_alone(tmp_path: Path) -> None:
    """A base of rotary positions is of models that have them."""
    for model_type in ("qwen3", "bert"):
        save_tiny_model(tmp_path / model_type, model_type, Task.FEATURE_EXTRACTION)
        change_json(tmp_path / model_type / "config.json", rope_theta=1e4)
    assert lines(tmp_path / "qwen3") == []
    assert "rope_theta 10000.0" in "".join(lines(tmp_path / "bert"))


def test_a_value_that_says_nothing_is_no_declaration(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "bert", Task.FEATURE_EXTRACTION)
    change_json(tmp_path / "config.json", rope_scaling=None, our_options={}, our_layers=[])
    assert lines(tmp_path) == []


def test_programs_that_transformers_would_run_are_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "bert", Task.FEATURE_EXTRACTION)
    change_json(tmp_path / "config.json", custom_pipelines={"ours": {"impl": "ours.Pipeline"}})
    change_json(tmp_path / "processor_config.json", auto_map={"AutoProcessor": "ours.Processor"})
    pipelines, processor = lines(tmp_path)
    assert "config.json names Python code that no bundle runs: custom_pipelines" in pipelines
    assert "processor_config.json names Python code that no bundle runs: auto_map" in processor


@pytest.mark.parametrize(
    ("name", "what"),
    [("BothSides", r"no model of transformers \d"), ("RobertaModel", "a roberta:"), ("pipeline", "no m")],
)
def test_an_architecture_of_another_model_is_named(tmp_path: Path, name: str, what: str) -> None:
    save_tiny_model(tmp_path, "bert", Task.FEATURE_EXTRACTION)
    change_json(tmp_path / "config.json", architectures=[name])
    (line,) = lines(tmp_path)
    assert f"architecture {name!r}, which is " in line
    assert "the outputs are those of BertModel, by the model_type bert." in line
    assert re.search(what, line)


def test_a_key_of_a_tokenizer_that_nothing_reads_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "bert", Task.FEATURE_EXTRACTION)
    change_json(
        tmp_path / "tokenizer_config.json",
        add_bos_token=False,
        clean_up_tokenization_spaces=True,
        padding_side="left",
        model_max_length=64,
        truncation_side="left",
        do_lower_case=False,
        image_token="<image>",
        tokenizer_class="BertTokenizer",
    )
    (of_ids,) = lines(tmp_path)
    assert "transformers' BertTokenizer give other ids" in of_ids
    change_json(tmp_path / "tokenizer_config.json", reads_backwards=True)
    line, _ = lines(tmp_path)
    assert "tokenizer_config.json has what neither " in line
    assert "reads_backwards True" in line


def embedder(path: Path) -> Path:
    save_tiny_model(path, "bert", Task.FEATURE_EXTRACTION)
    save_sentence_modules(path, "Normalize", pooling={"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
    change_json(
        path / "config_sentence_transformers.json",
        __version__={"sentence_transformers": "6.2.0"},
        prompts={"query": "w1 "},
        default_prompt_name=None,
        similarity_fn_name="cosine",
        truncate_dim=8,
        model_type="SentenceTransformer",
    )
    change_json(path / "sentence_bert_config.json", max_seq_length=32, do_lower_case=False, unpad_inputs=False)
    return path


FILES = {
    "1_Pooling/config.json": "weighs_first_token",
    "2_Normalize/config.json": "p",
    "config_sentence_transformers.json": "scales_vectors",
    "sentence_bert_config.json": "adds_eos",
}


@pytest.mark.parametrize("file", FILES)
def test_a_key_of_sentence_transformers_files_that_nothing_reads_is_named(tmp_path: Path, file: str) -> None:
    path = embedder(tmp_path)
    assert lines(path, Task.SENTENCE_SIMILARITY) == []
    change_json(path / file, **{FILES[file]: False})
    (line,) = lines(path, Task.SENTENCE_SIMILARITY)
    assert f"{file.rpartition('/')[2]} has what neither sentence-transformers nor hdexport reads: " in line
    assert f"{FILES[file]} False" in line


def change_module(path: Path, number: int, **values: object) -> None:
    chain = json.loads((path / "modules.json").read_text())
    chain[number] |= values
    (path / "modules.json").write_text(json.dumps(chain))


def test_a_key_of_a_module_that_nothing_reads_is_named(tmp_path: Path) -> None:
    change_module(embedder(tmp_path), 1, weight=0.5)
    (line,) = lines(tmp_path, Task.SENTENCE_SIMILARITY)
    assert "modules.json, module 1, has what neither " in line
    assert "weight 0.5" in line


def test_a_first_module_of_its_own_is_named_where_the_encoder_is_built_without_it(tmp_path: Path) -> None:
    change_module(embedder(tmp_path), 0, type="theirs.Transformer")
    (line,) = lines(tmp_path)
    assert "modules.json begins with 'theirs.Transformer', which is not run" in line


def test_a_cross_encoder_whose_first_module_is_its_own_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "bert", Task.TEXT_CLASSIFICATION)
    save_sentence_modules(tmp_path, pooling={})
    chain = json.loads((tmp_path / "modules.json").read_text())[:1]
    (tmp_path / "modules.json").write_text(json.dumps(chain))
    change_json(tmp_path / "config_sentence_transformers.json", model_type="CrossEncoder")
    assert sentence_settings(find_checkpoint(tmp_path), Task.TEXT_CLASSIFICATION) is not None
    change_module(tmp_path, 0, type="theirs.Reranker")
    with pytest.raises(ModelError, match=r"CrossEncoder that begins with 'theirs.Reranker'"):
        sentence_settings(find_checkpoint(tmp_path), Task.TEXT_CLASSIFICATION)


def test_the_pooling_of_published_eurobert_classifiers_is_followed(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "eurobert", Task.TEXT_CLASSIFICATION)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["classifier_pooling"]
    (tmp_path / "config.json").write_text(json.dumps(values | {"clf_pooling": "mean"}))
    assert find_checkpoint(tmp_path).settings().classifier_pooling == "mean"


@pytest.mark.parametrize("name", [nightly_unless(name == "pylate", name) for name in MODELS])
def test_models_of_late_interaction_have_no_warnings(tmp_path: Path, name: str) -> None:
    save_colbert(tmp_path / "model", name)
    assert lines(tmp_path / "model", Task.TOKEN_SIMILARITY) == []


@pytest.mark.parametrize("score", [nightly_unless(score == "logits", score) for score in ("logits", "classifier")])
def test_rerankers_have_no_warnings(tmp_path: Path, score: str) -> None:
    save_chat_reranker(tmp_path / "model", template=None, score=score)
    assert lines(tmp_path / "model", Task.TEXT_CLASSIFICATION) == []
