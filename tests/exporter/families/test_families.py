"""Every family and task answers as Hugging Face does, at every length, batch and padding, in both graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from hdexport import families
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.extend import ExtendOptions, extend
from hdexport.families import SUPPORTED_MODEL_TYPES, Family, family_of
from hdexport.model.surgery import number_of_token_types
from hdexport.model.task import encoder_of, supports_sdpa
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.answers import ATOL, assert_answers, assert_as_hugging_face, inputs_of
from support.comparators import assert_close, named_case
from support.family_tasks import tasks_of
from support.grids import EVERY_RUN_TYPES, TASKS_OF_EVERY_RUN, nightly_unless
from support.hugging_face import HuggingFace, first_real_tokens
from support.padded_batches import batches
from support.tiny_models import (
    BASE,
    COPIES,
    MANY_GLOBAL_TOKENS,
    PAD_TOKEN_ID,
    VOCAB_SIZE,
    WINDOWS,
    change_json,
    save_tiny_model,
)

# The checkpoints have 64 positions, the bundles 300; 211 is a prime.
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 211, 300)

DAILY_LENGTHS = (1, 2, 64, 65, 129)
"""Of families but the first two, in every run; all lengths of them are in `test_every_length_of_every_family`."""

HEAD_LENGTHS = (1, 65, 300)
"""Of other tasks than feature extraction, whose graphs are a head on the same encoder, and of other precisions."""

COSINE = 0.999


def counts_padding(family: Family) -> bool:
    return family.native_attention is not None and family.native_attention.attention_type in ("blocks", "lsh")


COUNTS_PADDING = [name for name in SUPPORTED_MODEL_TYPES if counts_padding(family_of(name))]
"""Model types whose answers depend on the padding, as in Hugging Face: see test_big_bird.py and test_reformer.py."""

OF_OTHER_TESTS = (
    Task.FEATURE_EXTRACTION,
    Task.SPARSE_SIMILARITY,
    Task.TOKEN_SIMILARITY,
    Task.HYBRID_SIMILARITY,
)
"""The last three are made of another task's model, by files beside it: test_sparse_encoder.py,
test_multi_vector_encoder.py and test_hybrid_similarity.py."""

TASKS_OF_MODEL_TYPE = [
    (name, task)
    for name in SUPPORTED_MODEL_TYPES
    for task in Task
    if task in tasks_of(name) and task not in OF_OTHER_TESTS and name not in COUNTS_PADDING
]


@pytest.mark.parametrize(
    "model_type", [nightly_unless(name in EVERY_RUN_TYPES, name) for name in SUPPORTED_MODEL_TYPES]
)
def test_both_graphs_answer_as_hugging_face(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    assert_as_hugging_face(bundle, LENGTHS if model_type in ("bert", "roberta") else DAILY_LENGTHS)
    assert_as_hugging_face(bundle, HEAD_LENGTHS, sizes=(1,))


@pytest.mark.parametrize(
    ("model_type", "task"),
    [nightly_unless(task in TASKS_OF_EVERY_RUN.get(name, ()), name, task) for name, task in TASKS_OF_MODEL_TYPE],
)
def test_both_graphs_of_a_task_answer_as_hugging_face(tiny_bundles, model_type: str, task: str) -> None:
    assert_as_hugging_face(tiny_bundles(model_type, task), HEAD_LENGTHS)


DISTINCT_TASKS = [
    # The head's pooling is ours.
    ("deberta-v2", "text-classification"),
    ("modernbert", "text-classification"),
    ("eurobert", "text-classification"),
    ("modernbert-decoder", "text-classification"),
    ("qwen3", "text-classification"),
    # Not of the class that is loaded for the encoder alone.
    ("mt5", "token-classification"),
]
"""Tasks of other families with code of ours, which every run tries before the trace."""

FEATURES = Task.FEATURE_EXTRACTION.value

EACH_ATTENTION = (
    *("bert", "roberta", "longformer", "big_bird", "t5", "deberta-v2", "esm", "modernbert", "modernbert-decoder"),
    *("qwen3", "xlnet", "longt5", "performer", "reformer", "nezha"),
)
"""A family for each attention type and each way to count positions: what padding changes is theirs."""


@pytest.mark.parametrize(
    ("model_type", "task"),
    [*((name, FEATURES) for name in SUPPORTED_MODEL_TYPES if name not in EVERY_RUN_TYPES), *DISTINCT_TASKS],
)
def test_what_is_traced_for_a_task_answers_as_hugging_face(traced_models, model_type: str, task: str) -> None:
    assert_as_hugging_face(traced_models(model_type, task), HEAD_LENGTHS)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_every_length_of_every_family(tiny_bundles, model_type: str) -> None:
    assert_as_hugging_face(tiny_bundles(model_type, Task.FEATURE_EXTRACTION.value), LENGTHS)


@pytest.mark.parametrize(
    ("model_type", "precision"),
    # What bfloat16 changes does not depend on the family, except for the bias of MPNet's scores. Blocks in float16 are
    # in test_converted_blocks.py.
    # Reformer's hashes are decided otherwise in float16: test_reformer.py follows what its graphs decide.
    [
        nightly_unless(name == "bert", name, "float16")
        for name in SUPPORTED_MODEL_TYPES
        if name not in COPIES and name != "reformer"
    ]
    + [nightly_unless(False, name, "bfloat16") for name in ("bert", "roberta", "mpnet", "mt5", "umt5")],
)
def test_half_precision_points_where_hugging_face_does(tiny_bundles, model_type: str, precision: str) -> None:
    # Half precision changes all windows alike, and layers that are alike are traced once.
    changes = {"attention_window": [WINDOWS[0]] * 2} if model_type in ("led", "longformer") else {}
    assert_as_hugging_face(tiny_bundles(model_type, precision=precision, **changes), HEAD_LENGTHS, cosine=COSINE)


@pytest.mark.nightly
@pytest.mark.parametrize(("model_type", "other"), COPIES.items())
def test_a_copy_of_a_family_has_its_graph(tiny_bundles, model_type: str, other: str) -> None:
    """Node for node, with weights of the same types and shapes."""
    graphs = [tiny_bundles(name).graph.graph for name in (model_type, other)]
    of_copy, of_other = (list(map(described, graph.all_nodes())) for graph in graphs)
    assert len(of_copy) > 60
    assert of_copy == of_other
    assert of_copy != list(map(described, tiny_bundles("bert").graph.graph.all_nodes()))


def described(node: ir.Node) -> tuple[object, ...]:
    """What a node does, and to what, without the values of weights."""
    attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
    inputs = [
        None if value is None else (value.name, value.dtype, str(value.shape), value.is_initializer())
        for value in node.inputs
    ]
    return node.domain, node.op_type, attributes, inputs, [value.name for value in node.outputs]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *(nightly_unless(name in EACH_ATTENTION, name, {}) for name in SUPPORTED_MODEL_TYPES),
        ("longformer", MANY_GLOBAL_TOKENS),
    ],
)
def test_content_of_padding_does_not_change_the_answer(tiny_bundles, model_type: str, options: dict[str, Any]) -> None:
    bundle = tiny_bundles(model_type, **options)
    input_ids = np.random.default_rng(0).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (1, 129))
    attention_mask = (np.arange(129) < 65).astype(np.int64)[None]
    feeds = inputs_of(bundle, input_ids, attention_mask)
    if "global_attention_mask" in feeds:
        feeds["global_attention_mask"][0, 40] = 1
    answers = []
    for filler in (PAD_TOKEN_ID, 7, VOCAB_SIZE - 1):
        # Marks and token types differ as well: at padding they mean nothing.
        noise = {
            name: np.where(attention_mask == 1, values, filler if name == "input_ids" else filler % 2)
            for name, values in feeds.items()
        }
        outputs = bundle.portable(**(noise | {"attention_mask": attention_mask}))
        answers.append(outputs["last_hidden_state"][:, :65])
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *(nightly_unless(name in EACH_ATTENTION, name, {}) for name in SUPPORTED_MODEL_TYPES),
        nightly_unless(False, "bert", {"attention": "window:16,global:5", "precision": "float16"}),
    ],
)
def test_a_row_answers_the_same_in_any_batch_even_beside_padding_alone(
    tiny_bundles, model_type: str, options: dict[str, Any]
) -> None:
    """With its own padding in both graphs; in the session without it as well, unless the model counts padding."""
    bundle = tiny_bundles(model_type, **options)
    index = np.arange(129)
    real = {"right": index < 65, "left": index >= 64, "none": index >= 0, "all but one": index < 1}
    attention_mask = np.stack([np.zeros(129, bool), *real.values()]).astype(np.int64)
    ids = np.random.default_rng(3).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, attention_mask.shape)
    feeds = inputs_of(bundle, np.where(attention_mask == 1, ids, PAD_TOKEN_ID), attention_mask)
    atol = ATOL if bundle.manifest.dtype == "float32" else 1e-2
    for graph in ("portable", "session"):
        run = getattr(bundle, graph)
        together = run(**feeds)["last_hidden_state"]
        assert np.isfinite(together).all(), graph
        for row, (padding, tokens) in enumerate(real.items(), start=1):
            of_row = {name: values[row : row + 1] for name, values in feeds.items()}
            with named_case(graph, f"padding: {padding}"):
                if padding in ("left", "right"):
                    assert_close(together[row, tokens], run(**of_row)["last_hidden_state"][0, tokens], atol=atol)
                if padding != "left" and graph == "session" and not options and model_type not in COUNTS_PADDING:
                    text = {name: values[:, tokens] for name, values in of_row.items()}
                    assert_close(together[row, tokens], run(**text)["last_hidden_state"][0], atol=atol)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "longformer"])
def test_one_token_more_than_the_table_is_an_error_and_no_answer(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    input_ids = np.full((1, bundle.manifest.max_len + 1), 5)
    with pytest.raises(Exception, match=r"(?i)invalid|out of (data )?bounds|broadcast"):
        bundle.portable(**inputs_of(bundle, input_ids, np.ones_like(input_ids)))
    with pytest.raises(ValueError, match="max_len=301"):
        bundle.session(input_ids=input_ids)


@pytest.mark.parametrize("model_type", ["longformer", "roberta"])
def test_padding_ids_inside_a_text_count_no_position(tiny_bundles, model_type: str) -> None:
    bundle = tiny_bundles(model_type)
    input_ids = np.random.default_rng(1).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (2, 129))
    input_ids[0, 3:9] = PAD_TOKEN_ID
    input_ids[1, [0, 64, 128]] = PAD_TOKEN_ID
    feeds = inputs_of(bundle, input_ids, np.ones_like(input_ids))
    assert_answers(bundle, feeds, bundle.hugging_face(**feeds))


@pytest.mark.parametrize(
    ("model_type", "max_len"), [nightly_unless(case == ("bert", 1), *case) for case in (("bert", 1), ("roberta", 63))]
)
def test_a_cut_table_serves_every_length_it_has(tiny_bundles, model_type: str, max_len: int) -> None:
    lengths = {1, max_len // 2, max_len} - {0}
    assert_as_hugging_face(tiny_bundles(model_type, max_len=max_len), lengths, sizes=(1, 3))


_LINEAR, _YARN = (
    {
        "full_attention": {"rope_type": kind, "factor": factor, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    }
    for kind, factor in (("linear", 4.0), ("yarn", 8.0))
)

VARIANTS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "distilbert with a size of BERT's": ("distilbert", HEAD_LENGTHS, {"type_vocab_size": 2}),
    "ernie with task types": ("ernie", HEAD_LENGTHS, {"use_task_id": True, "task_type_vocab_size": 3}),
    "albert with layers in groups": ("albert", HEAD_LENGTHS, {"num_hidden_groups": 2, "inner_group_num": 2}),
    "deberta-v2 with positions, a convolution and narrow embeddings, of contents and positions only": (
        "deberta-v2",
        HEAD_LENGTHS,
        {
            "position_biased_input": True,
            "share_att_key": False,
            "pos_att_type": "c2p",
            "conv_kernel_size": 3,
            "conv_act": "gelu",
            "embedding_size": 16,
            "type_vocab_size": 2,
        },
    ),
    "deberta-v2 of positions and contents only, without buckets": (
        "deberta-v2",
        HEAD_LENGTHS,
        {"position_buckets": -1, "share_att_key": False, "pos_att_type": ["p2c"], "norm_rel_ebd": "none"},
    ),
    "deberta of contents and positions only": ("deberta", HEAD_LENGTHS, {"pos_att_type": ["c2p"]}),
    "esm-1b, with a table of positions and a normalisation before the layers": (
        "esm",
        HEAD_LENGTHS,
        {"position_embedding_type": "absolute", "emb_layer_norm_before": True, "max_position_embeddings": BASE + 2},
    ),
    "x-mod with normalisations before the attention, and its own before the language": (
        "xmod",
        HEAD_LENGTHS,
        {"pre_norm": True, "adapter_layer_norm": True, "ln_before_adapter": False, "default_language": "de_DE"},
    ),
    "distilbert with sinusoidal positions": ("distilbert", HEAD_LENGTHS, {"sinusoidal_pos_embds": True}),
    "eurobert of a single head of keys, with biases": (
        "eurobert",
        (1, 65),
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "qwen3 on both sides, with biases": ("qwen3", HEAD_LENGTHS, {"is_causal": False, "attention_bias": True}),
    "qwen3 with windows of earlier tokens": (
        "qwen3",
        (1, 15, 16, 17, 131),
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "modernbert-decoder on both sides, of odd windows": (
        "modernbert-decoder",
        (1, 17, 131),
        {"is_causal": False, "local_attention": 11, "num_hidden_layers": 3},
    ),
    "nezha whose distances are farther than texts are long": ("nezha", HEAD_LENGTHS, {"max_relative_position": 400}),
    "roformer whose values turn, too, with narrow embeddings": (
        "roformer",
        HEAD_LENGTHS,
        {"rotary_value": True, "embedding_size": 16},
    ),
    "longformer of one window for all layers, wider than the texts": (
        "longformer",
        (17, 300),
        {"attention_window": 512},
    ),
    "t5 of gated networks, with many buckets": (
        "t5",
        (1, 17, 131, 300),
        {
            "feed_forward_proj": "gated-silu",
            "relative_attention_num_buckets": 64,
            "relative_attention_max_distance": 130,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "modernbert with every layer global, scaled cosines": (
        "modernbert",
        (1, 17, 131),
        {"num_hidden_layers": 2, "rope_parameters": _YARN, "global_attn_every_n_layers": 1},
    ),
    "modernbert with no global layer, windows of the token itself": (
        "modernbert",
        (1, 17, 131),
        {"layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2, "local_attention": 1},
    ),
    "modernbert with layers as listed, odd windows, interpolated positions, biases and details": (
        "modernbert",
        (1, 17, 131),
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "local_attention": 11,
            "rope_parameters": _LINEAR,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "hidden_activation": "silu",
            "norm_eps": 1e-3,
            "pad_token_id": VOCAB_SIZE - 1,
        },
    ),
}

each_variant = pytest.mark.parametrize(("model_type", "lengths", "changes"), VARIANTS.values(), ids=VARIANTS)


@each_variant
def test_what_is_traced_of_a_variant_answers_as_hugging_face(
    traced_models, model_type: str, lengths: tuple[int, ...], changes: dict[str, Any]
) -> None:
    assert_as_hugging_face(traced_models(model_type, **changes), lengths)


@pytest.mark.nightly
@each_variant
def test_variants_of_a_family_answer_as_hugging_face(
    tiny_bundles, model_type: str, lengths: tuple[int, ...], changes: dict[str, Any]
) -> None:
    assert_as_hugging_face(tiny_bundles(model_type, **changes), lengths)


@pytest.mark.parametrize("model_type", ["led", "t5"])
def test_an_encoder_has_no_task_that_needs_its_decoder(tmp_path: Path, model_type: str) -> None:
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION)
    checkpoint = find_checkpoint(tmp_path)
    # T5's library has a head for tokens that reads the encoder alone.
    of_tokens = () if model_type == "t5" else (Task.TOKEN_CLASSIFICATION,)
    for task in (Task.FILL_MASK, Task.TEXT_CLASSIFICATION, Task.QUESTION_ANSWERING, *of_tokens):
        message = rf"(?s)The task {task} of a {model_type} is not supported.*decoder.*task='feature-extraction'"
        with pytest.raises(ModelError, match=message):
            checkpoint.load(task)


@torch.inference_mode()
@pytest.mark.parametrize("model_type", ["big_bird", "led"])
def test_an_extended_checkpoint_answers_as_hugging_face_with_more_positions(tmp_path: Path, model_type: str) -> None:
    """At one of the lengths at which BigBird's attention looks at how many positions there are."""
    before, after, max_len = tmp_path / "before", tmp_path / "after", 1024
    original = save_tiny_model(before, model_type, Task.FEATURE_EXTRACTION)
    extend(ExtendOptions(model=before, output=after, max_len=max_len))
    model, report = transformers.AutoModel.from_pretrained(after, output_loading_info=True)
    assert not any(report.values()), report
    encoder = model.eval() if family_of(model_type).tasks is None else model.eval().encoder
    for tokens in (BASE, max_len):
        expected = HuggingFace(before, "feature-extraction", max_len=tokens)
        input_ids = np.random.default_rng(tokens).integers(PAD_TOKEN_ID + 1, VOCAB_SIZE, (1, tokens))
        feeds = {"input_ids": input_ids, "attention_mask": np.ones_like(input_ids)}
        if model_type == "led":
            feeds["global_attention_mask"] = first_real_tokens(feeds["attention_mask"])
        got = encoder(**{name: torch.from_numpy(values) for name, values in feeds.items()}).last_hidden_state
        # Not bit for bit: PyTorch's products depend on where in memory their operands are.
        assert_close(got.numpy(), expected(**feeds)["last_hidden_state"], atol=1e-5)
    rows = HuggingFace(after, "feature-extraction", max_len=max_len).checkpoint_rows
    trained = HuggingFace(before, "feature-extraction", max_len=BASE).checkpoint_rows
    assert rows[: len(trained)].tobytes() == trained.tobytes()
    assert len(rows) == family_of(model_type).first_row(model.config) + max_len
    if model_type == "led":
        assert torch.equal(model.decoder.embed_positions.weight, original.decoder.embed_positions.weight)


def test_the_comparison_sees_positions(traced_models) -> None:
    """Were all positions alike to the tiny models, these tests could not tell a wrong table from a right one."""
    bundle = traced_models("bert")
    other = HuggingFace(bundle.checkpoint, "feature-extraction", max_len=300, alpha=0.3)
    _, input_ids, attention_mask = next(batches(65))
    right = bundle.hugging_face(input_ids, attention_mask)["last_hidden_state"]
    wrong = other(input_ids, attention_mask)["last_hidden_state"]
    assert np.abs(right - wrong).max() > 100 * ATOL
    feeds = inputs_of(bundle, input_ids, attention_mask)
    assert_answers(bundle, feeds, bundle.hugging_face(**feeds))
    with pytest.raises(AssertionError, match="traced"):
        assert_answers(bundle, feeds, other(**feeds))


def test_windows_with_gaps_are_refused(tmp_path: Path) -> None:
    """transformers ignores the key, and answers as if there were none."""
    save_tiny_model(tmp_path, "longformer", Task.FEATURE_EXTRACTION)
    change_json(tmp_path / "config.json", attention_dilation=[1, 2])
    options = BuildOptions(model=tmp_path, output=tmp_path / "bundle", max_len=64)
    with pytest.raises(ModelError, match=r"attention_dilation \[1, 2\].*\n.*attention='window:256,dilation:2"):
        build(options)
    assert not options.output.exists()


@pytest.mark.pinned  # names models of the newest transformers
def test_every_family_has_a_model_type_of_transformers_or_classes() -> None:
    folder = Path(families.__file__).parent
    files = {file for file in folder.rglob("*.py") if "\nFAMILY = " in file.read_text()}
    modules = {".".join(file.relative_to(folder).with_suffix("").parts) for file in files}
    assert modules == set(families._MODULE_OF_MODEL_TYPE.values())
    assert all(family_of(name) and name in CONFIG_MAPPING for name in SUPPORTED_MODEL_TYPES)


def test_the_number_of_token_types_is_that_of_the_rows_of_their_table(tmp_path: Path) -> None:
    """Whatever config.json says of a model without a table. XLNet compares types, and has none."""
    found = {}
    for model_type in SUPPORTED_MODEL_TYPES:
        for number in (1, 3):
            sizes = {"type_vocab_size": number}
            model = save_tiny_model(tmp_path / f"{model_type}-{number}", model_type, Task.FEATURE_EXTRACTION, **sizes)
            family = family_of(model_type)
            model = encoder_of(model, Task.FEATURE_EXTRACTION)
            rows = [len(table) for name, table in model.named_parameters() if "token_type_embeddings" in name]
            expected = 2**24 if model_type == "xlnet" else rows[0] if rows and number > 1 else 0
            found[model_type] = number_of_token_types(model, family, Task.FEATURE_EXTRACTION)
            with named_case(model_type, number):
                assert found[model_type] == expected
    assert (found["bert"], found["distilbert"], found["roberta"]) == (3, 0, 3)


@pytest.mark.parametrize(
    ("model_type", "has_sdpa"), [("bert", True), ("mpnet", False), ("nezha", False), ("mt5", True)]
)
def test_the_class_says_whether_pytorch_s_attention_is_called(tmp_path: Path, model_type: str, has_sdpa: bool) -> None:
    """Of the library's classes, of ours, and of an encoder's alone."""
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION)
    assert supports_sdpa(CONFIG_MAPPING[model_type](), family=family_of(model_type)) == has_sdpa
    loaded = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
    assert loaded.config._attn_implementation == ("sdpa" if has_sdpa else "eager")
