"""Models whose type no family has: traced as their own code computes, proved, and refused where the proof fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

import hdruntime
from hdexport.attention.traced.model import _causal_of_all_pairs, _dense_modules
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.trust import Trust
from hdexport.families.any.behaviour import check_behaviour
from hdexport.families.any.model_info import infer_model_info
from hdexport.families.any.route import generic_family
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import ModelError
from support.code_models import save_slopes
from support.code_models.modeling_slopes import SlopesConfig, SlopesModel
from support.commands import run_here
from support.comparators import assert_close
from support.grids import nightly_unless
from support.needs import needs_openvino, needs_rtx
from support.tiny_models import BASE, change_json, save_sentence_modules, save_tiny_model

GROUPS = {"num_key_value_heads": 2}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": 120}
BART = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_layers": 3}
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 120}
HEADS = GROUPS | {"head_dim": 8}
OF_IMAGES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
OF_CODES = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []}

OF_ENCODERS = (Task.FILL_MASK, Task.SPARSE_SIMILARITY)
OF_ALL = (
    Task.FEATURE_EXTRACTION,
    Task.SENTENCE_SIMILARITY,
    Task.TEXT_CLASSIFICATION,
    Task.TOKEN_CLASSIFICATION,
    Task.QUESTION_ANSWERING,
)
"""The tasks that the library has classes for, whatever sees a token."""

FORMS = {"ibert": "folded", "flaubert": "folded", "bart": "folded", "qwen2": "computed", "llama": "computed"}
"""How positions are held: a table as it is, or rotary."""

BUILT = [
    # (type, sizes, layers of our dense operator, of which the rest are standard operators)
    ("qwen2", GROUPS, 2),
    ("roc_bert", {}, 2),
    ("gemma2", GROUPS | {"head_dim": 8, "sliding_window": 8}, 0),
    ("llama", GROUPS, 2),
    ("phi3", GROUPS, 2),
    ("olmo2", GROUPS, 2),
    ("esmc", {}, 2),
    ("splinter", {}, 2),
    ("bert-generation", {}, 2),
    ("clip_text_model", {}, 2),
    ("ibert", {"max_position_embeddings": BASE + 2}, 0),
    ("squeezebert", {"embedding_size": 32}, 0),
    ("layoutlm", {}, 0),
    ("flaubert", XLM, 0),
    ("xlm", XLM, 0),
    # Its decoder has more layers.
    ("bart", BART, 2),
    # Sizes in parts; seven tables of token types; weights that transformers splits; counts among the weights.
    ("modernvbert", {"text_config": TEXT | {"pad_token_id": 1}, "vision_config": OF_IMAGES}, 2),
    ("t5gemma", {"encoder": TEXT | HEADS, "decoder": TEXT | HEADS}, 0),
    ("tapas", {}, 0),
    ("molmo2_text", HEADS, 2),
    (
        "emu3",
        {"text_config": TEXT | GROUPS | {"pad_token_id": 1}, "vq_config": OF_CODES, "vocabulary_map": {"<image>": 3}},
        2,
    ),
]


def tiny(model_type: str, **sizes: object) -> torch.nn.Module:
    sizes = {
        "vocab_size": 120,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": BASE,
        "pad_token_id": 1,
        "initializer_range": 0.3,
        "num_key_value_heads": 2,
        **sizes,
    }
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(model_type, **sizes)).eval()


def built(path: Path, *options: object) -> tuple[int, str]:
    ran = run_here("build", path / "model", "-o", path / "bundle", "--target", "onnx", *options)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("model_type", "sizes", "dense"),
    [nightly_unless(name in ("qwen2", "ibert", "modernvbert"), name, sizes, dense) for name, sizes, dense in BUILT],
)
def test_a_type_without_a_family_is_built_and_proved(
    tmp_path: Path, model_type: str, sizes: dict[str, object], dense: int
) -> None:
    save_tiny_model(tmp_path / "model", model_type, Task.FEATURE_EXTRACTION, **sizes)
    code, said = built(tmp_path, "--task", "feature-extraction", "--verify", "quick")
    assert code == 0, said
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert manifest.verification is not None
    assert manifest.verification.passed
    assert manifest.verification.grid == "full", "without a family it is proof and no choice"
    assert "text: transformers" in manifest.verification.graphs
    assert manifest.operators.get("hdexport::DenseAttention", 0) == dense
    records = {record["type"]: record["layers"] for record in manifest.attention}
    assert records == {kind: layers for kind, layers in (("dense", dense), ("traced", 2 - dense)) if layers}
    assert manifest.positions.form == FORMS.get(model_type, manifest.positions.form)
    shown = run_here("inspect", tmp_path / "bundle").stdout
    assert ("memory grows with the square of the tokens" in shown) == (dense < 2)


@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        nightly_unless((model_type, task) == ("qwen2", Task.QUESTION_ANSWERING), model_type, task)
        for model_type in ("qwen2", "llama", "flaubert")
        for task in (*OF_ALL, *(OF_ENCODERS if model_type == "flaubert" else ()))
    ],
)
def test_a_bundle_has_every_task_whose_head_the_library_has(tmp_path: Path, model_type: str, task: Task) -> None:
    made = {Task.SENTENCE_SIMILARITY: Task.FEATURE_EXTRACTION, Task.SPARSE_SIMILARITY: Task.FILL_MASK}.get(task, task)
    save_tiny_model(tmp_path / "model", model_type, made, **(XLM if model_type == "flaubert" else GROUPS))
    if task is Task.SENTENCE_SIMILARITY:
        pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True}
        save_sentence_modules(tmp_path / "model", "Normalize", pooling=pooling)
    code, said = built(tmp_path, "--task", task.value)
    assert code == 0, said
    bundle = tmp_path / "bundle"
    assert open_bundle(bundle).manifest.task is task
    ran = run_here("inspect", bundle).stdout
    assert "verification   passed, full grid" in ran, ran


@needs_rtx
@needs_openvino
@pytest.mark.nightly
@pytest.mark.parametrize(("model_type", "sizes"), [("llama", GROUPS), ("flaubert", XLM)])
def test_every_backend_and_command_takes_such_a_bundle(
    tmp_path: Path, model_type: str, sizes: dict[str, object]
) -> None:
    """With our operator, and with standard operators alone."""
    save_tiny_model(tmp_path / "model", model_type, Task.FEATURE_EXTRACTION, **sizes)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    save_sentence_modules(tmp_path / "model", "Normalize", pooling=pooling)
    targets = ("--target", "openvino", "--target", "tensorrt-rtx", "--sm", "86", "--force")
    code, said = built(tmp_path, *targets)
    assert code == 0, said
    bundle, whole, texts = tmp_path / "bundle", tmp_path / "int8", tmp_path / "texts.txt"
    assert (bundle / "engines" / "tensorrt_rtx.engine").exists()
    texts.write_text("w1 w2 w3\nw4\n" + "w5 w6 " * 20 + "\n")
    vectors = {}
    for words in (
        ("rebuild", bundle, "--int8", "-o", whole),
        ("verify", whole, "--grid", "quick", "--model", tmp_path / "model", "--precision", "float32"),
        ("inspect", whole),
        ("bench", whole, "--lengths", "16", "--rounds", "1", "--baselines", "torch", "-o", tmp_path / "bench"),
        ("package", whole, "--for", "triton", "-o", tmp_path / "triton" / "any"),
    ):
        ran = run_here(*words)
        assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
    for name, backend, precision in (
        ("onnxruntime", "onnxruntime", "float32"),
        ("openvino", "openvino", "float32"),
        ("int8", "openvino", "int8"),
    ):
        output = tmp_path / f"{name}.jsonl"
        ran = run_here("run", whole, texts, "-o", output, "--backend", backend, "--precision", precision)
        assert ran.returncode == 0, ran.stderr
        vectors[name] = np.array([json.loads(line)["embedding"] for line in output.read_text().splitlines()])
    assert_close(vectors["openvino"], vectors["onnxruntime"], atol=1e-5)
    # Random weights round more than trained ones.
    assert (vectors["int8"] * vectors["onnxruntime"]).sum(-1).min() > 0.95


def test_a_reranker_of_any_type_scores_as_the_library(tmp_path: Path) -> None:
    """One label is a score: sentence-transformers' CrossEncoder, from pairs of texts."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    one = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    save_tiny_model(tmp_path / "model", "llama", Task.TEXT_CLASSIFICATION, **GROUPS, **one)
    code, said = built(tmp_path)
    assert code == 0, said
    pairs = [("w1 w2", "w3 w4 w5"), ("w1 w2", "w9"), ("w7", "w7 w8 " * 20)]
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "model"), device="cpu").predict(pairs)
    with hdruntime.CrossEncoder(tmp_path / "bundle", backend="onnxruntime") as ours:
        assert_close(ours.predict(pairs), theirs, atol=1e-6)
        with pytest.raises(AssertionError):
            assert_close(ours.predict([(document, query) for query, document in pairs]), theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "task", "why"),
    [
        (
            "llama",
            Task.FILL_MASK,
            "no class of the model for the task. Supported tasks: feature-extraction, sentence-similarity",
        ),
        ("llama", Task.SPARSE_SIMILARITY, "no class of the model for the task. Supported tasks: feature-extraction, "),
        ("llama", Task.TEXT_SCORING, "no class of the model for the task. Supported tasks: feature-extraction, "),
        ("flaubert", Task.TEXT_SCORING, "no class of the model for the task. Supported tasks: feature-extraction, "),
        ("bart", Task.TEXT_CLASSIFICATION, "hdexport builds encoders. Supported tasks: feature-extraction, "),
    ],
)
def test_a_task_that_the_library_has_no_class_for_is_refused(
    tmp_path: Path, model_type: str, task: Task, why: str
) -> None:
    AutoConfig.for_model(model_type, pad_token_id=1).save_pretrained(tmp_path)
    message = rf"The task {task.value} of a {model_type} is not supported\. .*{why}(.|\n)*Build one of these"
    with pytest.raises(ModelError, match=message):
        find_checkpoint(tmp_path).load(task)


class TestDenseAttentionIsProved:
    """By the mask's function and by numbers, not by a name in a list."""

    def modules(self, model_type: str, max_len: int = BASE, **sizes: object) -> list[bool]:
        return list(_dense_modules(tiny(model_type, **sizes), max_len).values())

    def test_of_causal_models_and_of_encoders(self) -> None:
        assert self.modules("llama") == [True, True]
        assert self.modules("bert") == [False, False]
        assert self.modules("llama", is_causal=False) == [False, False]

    def test_a_window_is_dense_only_where_no_text_reaches_its_end(self) -> None:
        assert self.modules("mistral", sliding_window=BASE, max_len=BASE) == [True, True]
        assert self.modules("mistral", sliding_window=BASE - 1, max_len=BASE) == []

    def test_a_cap_of_scores_is_seen(self) -> None:
        assert self.modules("gemma2", head_dim=8, sliding_window=BASE) == []
        capless = {"attn_logit_softcapping": None, "head_dim": 8, "sliding_window": BASE}
        assert self.modules("gemma2", **capless) == [True, True]

    def test_a_sink_is_seen(self) -> None:
        sizes = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": BASE}
        assert self.modules("gpt_oss", **sizes) == []

    @pytest.mark.parametrize("tokens", [1, 2, 1023, 1025])
    def test_masks_are_judged_by_every_pair(self, tokens: int) -> None:
        def last_pair_hidden(_: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & ~((query == tokens - 1) & (key == 0))

        assert _causal_of_all_pairs(lambda _, __, query, key: key <= query, tokens)
        assert _causal_of_all_pairs(lambda _, __, query, key: (key >= 0) & (query >= 0), tokens) is (tokens == 1)
        assert _causal_of_all_pairs(last_pair_hidden, tokens) is None
        assert _causal_of_all_pairs(lambda *_: torch.ones(1, 1, dtype=torch.bool), 2) is None


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("leak", r"a text of 8 tokens with 13 of padding on the right and the text alone differ by"),
        ("left", r"a text of 8 tokens with 13 of padding on the left and with other padding there differ by"),
        ("padding", r"the answer to a text of 8 tokens with 13 of padding on the right has values that are no numbers"),
        ("numbers", r"the answer to a text of 21 tokens has values that are no numbers"),
        ("dropout", r"two calls with the same 21 tokens differ by .*dropout"),
        ("calls", r"two calls with the same 21 tokens differ by .*keep something of the call before"),
        ("short", r"a text of 1024 tokens, before and after the code was given shorter texts, differs by"),
        ("batch", r"a text of 21 tokens alone and in a batch of three copies differ by"),
    ],
)
def test_answers_that_depend_on_more_than_the_text_are_refused(fault: str, how: str) -> None:
    torch.manual_seed(0)
    model = SlopesModel(SlopesConfig(fault=fault, pad_token_id=1)).eval()
    with pytest.raises(ModelError, match=how):
        check_behaviour(model)
    check_behaviour(SlopesModel(SlopesConfig(pad_token_id=1)).eval())


class TestCodeThatFailsOnATextIsRefusedByWhatItWasGiven:
    def refusal(self, tokens: int) -> str:
        """Of code that fails on texts of so many tokens."""
        model = SlopesModel(SlopesConfig(pad_token_id=1)).eval()
        right = model.forward

        def forward(input_ids: torch.Tensor, **named: object) -> object:
            if input_ids.shape[1] == tokens:
                raise ValueError("no such size")
            return right(input_ids=input_ids, **named)

        model.forward = forward
        with pytest.raises(ModelError) as refused:
            check_behaviour(model)
        return str(refused.value)

    @pytest.mark.parametrize(("tokens", "given"), [(21, "a text of 21 tokens"), (1, "a text of 1 token")])
    def test_a_text_s_length(self, tokens: int, given: str) -> None:
        first, remedy = self.refusal(tokens).splitlines()
        assert first == f"The code of this slopes does not run with ids and a mask alone, on {given}: no such size"
        assert "takes texts of any length" in remedy


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", r"model.onnx +float32 +PASS +\d+ "),
        ("lengths", "FAIL .*batch 1, 61 tokens, padding none .* failed: last_hidden_state"),
        nightly_unless(False, "multiples", "FAIL .*batch 1, 77 tokens, padding none .* failed: last_hidden_state"),
        nightly_unless(False, "batches", "takes another branch for batches of 9 rows than for smaller batches"),
        nightly_unless(False, "frozen", "FAIL .* 1 tokens, .* failed: last_hidden_state .*error: .*Reshape"),
    ],
)
def test_code_of_the_checkpoint_s_own_is_built_or_refused(tmp_path: Path, fault: str, said: str) -> None:
    """ALiBi; and a length that Python compares, which a trace leaves out: the first wrong one is named."""
    save_slopes(tmp_path / "model", fault=fault)
    code, lines = built(tmp_path, "--no-tokenizer", "--max-len", 100, "--trust-remote-code")
    assert code == (1 if fault else 0), lines
    assert re.search(said, lines), lines
    assert (tmp_path / "bundle").exists() == (not fault)
    assert fault in ("", "batches") or "--no-verify --unverified writes it anyway" in lines


def test_code_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    save_slopes(tmp_path)
    with pytest.raises(ModelError, match=r"'modeling_slopes.SlopesModel' \(auto_map.*use trust_remote_code=True"):
        find_checkpoint(tmp_path)
    checkpoint = find_checkpoint(tmp_path, trust=Trust(trust_remote_code=True))
    assert type(checkpoint.load(Task.FEATURE_EXTRACTION)).__name__ == "SlopesModel"
    (tmp_path / "modeling_slopes.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ModelError, match=r"cannot be loaded here: .*a_package_that_is_not_there(.|\n)*Install"):
        find_checkpoint(tmp_path, trust=Trust(trust_remote_code=True))


def test_float16_is_built_where_its_range_holds_and_refused_elsewhere(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen2", Task.FEATURE_EXTRACTION, **GROUPS)
    code, said = built(tmp_path, "--fp16")
    assert code == 0, said
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert manifest.fp16_overflow is not None
    assert manifest.fp16_overflow.largest < manifest.fp16_overflow.limit
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    for name in ("up_proj", "down_proj"):
        weights[f"layers.0.mlp.{name}.weight"] *= 3000
    save_file(weights, file, {"format": "pt"})
    code, said = built(tmp_path, "--fp16", "--force")
    assert code == 1
    assert re.search(r"goes beyond float16, .*layers\.0\.mlp", said), said


def test_what_changes_a_model_needs_a_family(tmp_path: Path) -> None:
    needs = "No family has been written for this model type (CONTRIBUTING.md, Add a model family)."
    save_tiny_model(tmp_path / "model", "roc_bert", Task.FEATURE_EXTRACTION)
    model = tmp_path / "model"
    for words, said in {
        ("build", model, "--attention", "window:16", "--max-len", 32): "cannot be converted to windowed attention. ",
        (
            "build",
            model,
            "--max-len",
            BASE + 1,
        ): f"above the {BASE} positions of this roc_bert, which cannot be extended. ",
        ("build", model, "--attention-scale", "logn"): "does not fit this roc_bert. ",
        ("build", model, "--rope", "ntk:4"): "--rope ntk:4 cannot scale the positions of roc_bert. ",
        ("extend", model, "--max-len", 100): f"The positions of {model}, a roc_bert, cannot be changed. ",
        ("tune", model, "--texts", model / "config.json", "--max-len", 100): "a roc_bert, cannot be changed. ",
    }.items():
        ran = run_here(*words, "-o", tmp_path / "made")
        assert ran.returncode == 1
        assert said + needs in ran.stderr, ran.stderr
    assert not (tmp_path / "made").exists()


def test_the_proof_is_left_out_only_where_that_is_said(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen2", Task.FEATURE_EXTRACTION, **GROUPS)
    code, said = built(tmp_path, "--verify", "none")
    assert code == 1
    assert "all that is known of a qwen2" in said
    assert "add --unverified" in said
    code, said = built(tmp_path, "--verify", "none", "--unverified")
    assert code == 0, said
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text())["unverified"]
    assert "none (--unverified), though no family was written" in run_here("inspect", tmp_path / "bundle").stdout


@pytest.mark.parametrize(
    ("model_type", "sizes", "said"),
    [
        ("perceiver", {"num_blocks": 1}, r"reads no ids of texts: PerceiverModel takes inputs, attention_mask"),
        (
            "llama4",
            {"text_config": TEXT, "vision_config": OF_IMAGES},
            r"gives scores of the next token, and no vectors",
        ),
    ],
)
def test_code_without_ids_or_vectors_is_refused(model_type: str, sizes: dict[str, object], said: str) -> None:
    config = AutoConfig.for_model(model_type, **sizes).to_dict()
    with pytest.raises(ModelError, match=said):
        infer_model_info(config, generic_family())


def test_positions_that_the_code_does_not_know_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", Task.FEATURE_EXTRACTION, **GROUPS)
    change_json(tmp_path / "config.json", position_embedding_type="alibi")
    with pytest.raises(ModelError, match=r"asks for 'alibi' positions, and LlamaModel has no code for them"):
        find_checkpoint(tmp_path)


def test_floats_that_json_has_no_words_for_are_read() -> None:
    """As transformers writes them."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mamba_d_ssm": 32, "mamba_n_heads": 2}
    config = AutoConfig.for_model("falcon_h1", **sizes, mamba_d_head=16, vocab_size=120)
    written = json.loads(config.to_json_string())
    assert written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert infer_model_info(written, generic_family()).max_positions == config.max_position_embeddings
