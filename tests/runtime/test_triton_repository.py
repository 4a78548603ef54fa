"""A bundle becomes a model that Triton Inference Server takes; config.pbtxt is read by Triton's own protobuf."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from hdexport.support.bundle_writer import seal
from hdexport.triton_repository import package_for_triton
from hdexport.triton_repository.config import most_rows, triton_config
from hdexport.triton_repository.protobuf_text import Message, protobuf_text
from hdruntime.bundle.manifest import EngineFile, ProfileShape, TensorSpec
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendUnavailableError, BundleCorruptError, InputError, OutputExistsError
from support.comparators import named_case
from support.recurrent_bundle import MEMORY, NEW_MEMORY, make_recurrent_bundle, make_streaming_bundle

ENGINE = b"a plan that only TensorRT can read"


def profile(batch: tuple[int, int, int], tokens: tuple[int, int, int] = (1, 16, 16)) -> ProfileShape:
    return ProfileShape(batch=batch, tokens=tokens)


def engine_of(*profiles: ProfileShape, flavour: str = "tensorrt") -> EngineFile:
    return EngineFile(
        file=f"engines/{flavour}.engine",
        passport=f"engines/{flavour}.json",
        flavour=flavour,
        version="11.4.0.106",
        precision="float16",
        architectures=("sm89",),
        profiles=profiles,
    )


def with_engine(path: Path, engine: EngineFile, plugins: dict[str, int]) -> Bundle:
    """The bundle, with an engine that no machine could run, and its passport."""
    (path / "engines").mkdir()
    (path / engine.file).write_bytes(ENGINE)
    built_on = {"platform": "Linux", "driver": None, "gpu": None, "date": "2026-11-21"}
    passport = {"plugins": plugins, "engine_sha256": "0", "onnx_sha256": {}, "built_on": built_on}
    (path / engine.passport).write_text(json.dumps(passport))
    manifest = open_bundle(path).manifest
    seal(path, dataclasses.replace(manifest, engines=(engine,)))
    return open_bundle(path)


@pytest.fixture
def bundle(new_bundle: Callable[..., Path]) -> Bundle:
    """A graph for CPUs that reads token types, and no engine."""
    return open_bundle(new_bundle(cpu_graph=True, token_types=True))


@pytest.fixture
def engine_bundle(new_bundle: Callable[..., Path]) -> Bundle:
    """The same with an engine of three profiles."""
    profiles = (profile((1, 4, 8), (1, 4, 4)), profile((1, 4, 8), (1, 8, 8)), profile((1, 1, 2), (1, 16, 16)))
    return with_engine(new_bundle("with-engine", cpu_graph=True), engine_of(*profiles), {})


def config_at(model: Path) -> model_config_pb2.ModelConfig:
    return text_format.Parse((model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def parsed(message: Message) -> model_config_pb2.ModelConfig:
    return text_format.Parse(protobuf_text(message), model_config_pb2.ModelConfig())


def tensors_of(items: Any) -> list[tuple[str, int, list[int]]]:
    return [(item.name, item.data_type, list(item.dims)) for item in items]


def files_below(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_a_graph_is_served_on_a_cpu_with_the_bundles_inputs_and_outputs(bundle: Bundle, tmp_path: Path) -> None:
    model = package_for_triton(bundle, tmp_path / "models")
    assert files_below(tmp_path / "models") == {"tiny/config.pbtxt", "tiny/1/model.onnx", "tiny/tokenizer.json"}
    config = config_at(model.path)
    assert (config.name, config.platform, config.backend) == ("tiny", "onnxruntime_onnx", "onnxruntime")
    assert config.default_model_filename == "model.onnx"
    assert config.max_batch_size == model.max_batch_size == 8
    int64, float32 = model_config_pb2.TYPE_INT64, model_config_pb2.TYPE_FP32
    names = ("input_ids", "attention_mask", "token_type_ids")
    assert tensors_of(config.input) == [(name, int64, [-1]) for name in names]
    assert tensors_of(config.output) == [("last_hidden_state", float32, [-1, 4])]
    assert [group.kind for group in config.instance_group] == [model_config_pb2.ModelInstanceGroup.KIND_CPU]
    assert not config.instance_group[0].profile
    assert config.parameters["enable_mem_pattern"].string_value == "0"
    assert list(config.dynamic_batching.preferred_batch_size) == [8]


def test_onnx_runtime_loads_the_packaged_graph_and_computes_what_the_bundle_does(
    bundle: Bundle, tmp_path: Path, model: Callable[..., np.ndarray]
) -> None:
    packaged = package_for_triton(bundle, tmp_path / "models").path
    session = onnxruntime.InferenceSession(str(packaged / "1" / "model.onnx"))
    assert [item.name for item in session.get_inputs()] == [item.name for item in config_at(packaged).input]
    assert [item.name for item in session.get_outputs()] == [item.name for item in config_at(packaged).output]
    ids = np.array([[2, 4, 5, 3], [2, 6, 7, 3]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    np.testing.assert_allclose(session.run(None, feeds)[0], model(ids), rtol=1e-6)


@pytest.mark.parametrize("engine", [None, engine_of(profile((1, 4, 8)))], ids=["graph", "engine"])
def test_a_memory_is_served_as_float32_of_its_sizes(tmp_path: Path, engine: EngineFile | None) -> None:
    """Triton's client gives it back what it got; the server holds nothing between calls."""
    bundle = open_bundle(make_recurrent_bundle(tmp_path / "recurrent"))
    config = parsed(triton_config(bundle, engine, name="tiny", file="model"))
    assert tensors_of(config.input) == [
        ("input_ids", model_config_pb2.TYPE_INT64, [-1]),
        ("attention_mask", model_config_pb2.TYPE_INT64, [-1]),
        (MEMORY, model_config_pb2.TYPE_FP32, [1, 4, 4]),
    ]
    assert tensors_of(config.output) == [
        ("last_hidden_state", model_config_pb2.TYPE_FP32, [-1, 4]),
        (NEW_MEMORY, model_config_pb2.TYPE_FP32, [1, 4, 4]),
    ]


def test_a_memory_of_tokens_may_have_any_size(tmp_path: Path) -> None:
    bundle = open_bundle(make_streaming_bundle(tmp_path / "bundle"))
    config: Any = triton_config(bundle, None, name="encoder", file="model.onnx")
    dims = {tensor["name"]: tensor["dims"] for tensor in (*config["input"], *config["output"])}
    assert dims["mems.0"] == dims["new_mems.0"] == [-1, 4]
    assert dims["mems.mask"] == dims["new_mems.mask"] == [-1]


def test_an_engine_is_served_on_gpus_with_all_its_profiles(engine_bundle: Bundle, tmp_path: Path) -> None:
    model = package_for_triton(engine_bundle, tmp_path, name="encoder")
    assert model.engine == engine_bundle.manifest.engines[0]
    assert files_below(tmp_path / "encoder") == {"config.pbtxt", "1/model.plan", "tokenizer.json"}
    assert (tmp_path / "encoder" / "1" / "model.plan").read_bytes() == ENGINE
    config = config_at(tmp_path / "encoder")
    assert (config.name, config.platform, config.backend) == ("encoder", "tensorrt_plan", "tensorrt")
    assert config.default_model_filename == "model.plan"
    # The longest texts have a profile for two rows only, and a batch that fits no profile fails.
    assert config.max_batch_size == 2
    assert list(config.dynamic_batching.preferred_batch_size) == [2]
    assert [group.kind for group in config.instance_group] == [model_config_pb2.ModelInstanceGroup.KIND_GPU]
    assert list(config.instance_group[0].profile) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("profiles", "preferred"),
    [
        ([profile((1, 1, 8))], [8]),
        ([profile((1, 4, 8))], [4, 8]),
        ([profile((1, 2, 8)), profile((1, 4, 8), (1, 8, 8))], [2, 4, 8]),
        ([profile((1, 64, 64), (1, 4, 4)), profile((1, 2, 4))], [2, 4]),
    ],
    ids=["single", "tuned", "several", "tuned for more than all take"],
)
def test_batches_that_profiles_are_tuned_for_are_preferred(
    new_bundle: Callable[..., Path], profiles: list[ProfileShape], preferred: list[int]
) -> None:
    bundle = open_bundle(new_bundle())
    config = parsed(triton_config(bundle, engine_of(*profiles), name="tiny", file="model.plan"))
    assert list(config.dynamic_batching.preferred_batch_size) == preferred
    assert max(preferred) == config.max_batch_size


profiles_of_any_shape = st.lists(
    st.builds(
        lambda batch, tokens: ProfileShape(batch=tuple(sorted(batch)), tokens=tuple(sorted(tokens))),
        st.tuples(*[st.integers(1, 6)] * 3),
        st.tuples(*[st.integers(1, 9)] * 3),
    ),
    min_size=1,
    max_size=4,
)


def rows_by_trying(profiles: Sequence[ProfileShape]) -> int:
    """What `most_rows` says, by trying every batch and length."""

    def served(rows: int, tokens: int) -> bool:
        return any(p.batch[0] <= rows <= p.batch[2] and p.tokens[0] <= tokens <= p.tokens[2] for p in profiles)

    lengths = [tokens for tokens in range(1, 10) if any(served(rows, tokens) for rows in range(1, 7))]
    return len(list(itertools.takewhile(lambda rows: all(served(rows, n) for n in lengths), range(1, 8))))


@given(profiles=profiles_of_any_shape)
@settings(max_examples=300, deadline=None)
def test_the_largest_batch_is_one_that_every_length_has_a_profile_for(profiles: list[ProfileShape]) -> None:
    assert most_rows(engine_of(*profiles)) == rows_by_trying(profiles)


@pytest.mark.parametrize(
    ("engine", "plugins", "reason"),
    [
        (
            engine_of(profile((1, 1, 8))),
            {"SlidingWindowAttention": 6},
            r"needs our plugins \(SlidingWindowAttention in 6 la",
        ),
        (engine_of(profile((1, 1, 8)), flavour="tensorrt_rtx"), {}, "its engine is for tensorrt_rtx"),
        (engine_of(profile((4, 4, 8))), {}, "at some length no profile takes a single row"),
    ],
    ids=["plugins", "TensorRT-RTX", "no single row"],
)
def test_an_engine_that_triton_cannot_serve_is_refused_and_the_way_out_is_named(
    new_bundle: Callable[..., Path], tmp_path: Path, engine: EngineFile, plugins: dict[str, int], reason: str
) -> None:
    bundle = with_engine(new_bundle(cpu_graph=True), engine, plugins)
    message = f"{reason}(.|\n)*--attention-impl native(.|\n)*--backend onnxruntime"
    with pytest.raises(BackendUnavailableError, match=message):
        package_for_triton(bundle, tmp_path / "models", backend="tensorrt")
    assert not (tmp_path / "models").exists()
    automatic = package_for_triton(bundle, tmp_path / "models")
    assert automatic.engine is None
    assert re.search(reason, automatic.reason)


def test_a_bundle_without_a_graph_for_cpus_is_refused(new_bundle: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(BundleCorruptError, match=r"no ONNX graph for a CPU.\nRebuild it"):
        package_for_triton(open_bundle(new_bundle()), tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_backend_that_triton_does_not_serve_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Use auto, tensorrt or onnxruntime"):
        package_for_triton(bundle, tmp_path / "models", backend="tensorrt_rtx")


def test_a_name_that_is_no_plain_directory_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    for name in ["", "..", "../up", "/etc", "two words", "-flag", "naïve", "a\n"]:
        with named_case(name):
            with pytest.raises(InputError, match="Give one with --name"):
                package_for_triton(bundle, tmp_path / "models", name=name)
            assert files_below(tmp_path) == files_below(bundle.path.parent)


def test_an_invalid_name_of_a_bundle_is_reported_as_the_bundles(bundle: Bundle, tmp_path: Path) -> None:
    renamed = Bundle(bundle.path, dataclasses.replace(bundle.manifest, name="org/model"))
    with pytest.raises(InputError, match="The name of the bundle, 'org/model' is not valid"):
        package_for_triton(renamed, tmp_path / "models")


def test_a_model_of_ours_is_replaced_by_force_only(bundle: Bundle, engine_bundle: Bundle, tmp_path: Path) -> None:
    package_for_triton(engine_bundle, tmp_path / "models")
    with pytest.raises(OutputExistsError, match="--force"):
        package_for_triton(bundle, tmp_path / "models")
    assert (tmp_path / "models" / "tiny" / "1" / "model.plan").is_file()
    package_for_triton(bundle, tmp_path / "models", force=True)
    assert files_below(tmp_path / "models" / "tiny") == {"config.pbtxt", "1/model.onnx", "tokenizer.json"}


def test_a_model_that_hdexport_did_not_write_is_never_replaced(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.pbtxt").write_text('name: "tiny"')
    with pytest.raises(OutputExistsError, match="is not a Triton model of hdexport"):
        package_for_triton(bundle, tmp_path / "models", force=True)


def test_what_was_added_to_a_model_of_ours_is_not_deleted(bundle: Bundle, tmp_path: Path) -> None:
    package_for_triton(bundle, tmp_path / "models")
    (tmp_path / "models" / "tiny" / "2").mkdir()
    (tmp_path / "models" / "tiny" / "2" / "model.onnx").write_bytes(b"a version of somebody's own")
    with pytest.raises(OutputExistsError, match=r"2/model\.onnx"):
        package_for_triton(bundle, tmp_path / "models", force=True)


def test_a_tensor_that_triton_cannot_describe_is_refused(bundle: Bundle) -> None:
    for dtype, shape in (("complex64", ("batch", "tokens")), ("float32", ("tokens", "batch"))):
        outputs = (TensorSpec(name="x", dtype=dtype, shape=shape),)
        odd = Bundle(bundle.path, dataclasses.replace(bundle.manifest, outputs=outputs))
        with pytest.raises(BundleCorruptError, match=r"lists x as .* Triton needs \[batch, ...\]"):
            triton_config(odd, None, name="tiny", file="model.onnx")
