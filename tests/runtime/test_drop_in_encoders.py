"""Arguments, older names, devices and settings of the encoders are those of sentence-transformers."""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hdruntime
from hdruntime import CrossEncoder, MultiVectorEncoder, SentenceEncoder, SparseEncoder, bundle_model
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle_model import BundleModel, TorchDevice
from hdruntime.errors import HdexportError, InputError
from hdruntime.gpu.options import GpuOptions
from support.colbert_models import made_colbert
from support.comparators import assert_close, named_case
from support.splade_models import made_splade

sentence_transformers = pytest.importorskip("sentence_transformers")

ROOT = Path(__file__).parents[2]

TEXTS = ["w7 w8 w9 w10", "w11 W12", "", "w5 " * 90, "What is read, and by whom?"]

PAIRS = [(TEXTS[0], TEXTS[1]), ("", TEXTS[3]), (TEXTS[4], "")]

CLASSES: dict[str, type[BundleModel]] = {
    "SentenceTransformer": SentenceEncoder,
    "CrossEncoder": CrossEncoder,
    "SparseEncoder": SparseEncoder,
    "MultiVectorEncoder": MultiVectorEncoder,
}

Both = tuple[Any, Any]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_bundles: Callable[..., Any]) -> Iterator[Callable[[str], Both]]:
    """Name of a class of the library -> a model of it, and its bundle; a test leaves their settings as they are."""
    with contextlib.ExitStack() as stack:
        loaded: dict[str, Both] = {}

        def load(name: str) -> Both:
            if name not in loaded:
                if name in ("SparseEncoder", "MultiVectorEncoder"):
                    made = (made_splade, made_colbert)[name == "MultiVectorEncoder"]
                    folder = made(tmp_path_factory, {"SparseEncoder": "max", "MultiVectorEncoder": "classic"}[name])
                    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
                else:
                    task = "text-classification" if name == "CrossEncoder" else "sentence-similarity"
                    tiny = tiny_bundles("bert", task)
                    checkpoint, bundle = tiny.checkpoint, tiny.path
                theirs = getattr(sentence_transformers, name)(str(checkpoint), device="cpu")
                loaded[name] = theirs, stack.enter_context(CLASSES[name](bundle, backend="onnxruntime"))  # type: ignore[call-arg]
            return loaded[name]

        yield load


def test_a_name_that_nobody_has_is_refused_as_by_any_object(both: Callable[[str], Both]) -> None:
    _, ours = both("SentenceTransformer")
    with pytest.raises(AttributeError, match="'SentenceEncoder' object has no attribute 'encod'") as raised:
        ours.encod  # noqa: B018
    assert not isinstance(raised.value, HdexportError)
    copy = pickle.loads(pickle.dumps(ours))
    with copy:
        assert_close(copy.encode(TEXTS), ours.encode(TEXTS), atol=0)


# Arguments


@pytest.mark.parametrize("name", CLASSES)
def test_arguments_have_the_places_and_names_of_the_library(name: str) -> None:
    theirs, ours = getattr(sentence_transformers, name), CLASSES[name]
    for method in ("encode", "predict", "rank", "similarity", "similarity_pairwise", "preprocess", "tokenize"):
        if hasattr(theirs, method):
            with named_case(method):
                expected = [each for each in inspect.signature(getattr(theirs, method)).parameters if each != "kwargs"]
                found = [
                    each.replace("sentences", "inputs") for each in inspect.signature(getattr(ours, method)).parameters
                ]
                assert found[: len(expected)] == expected


def test_pools_of_processes_are_refused_with_what_replaces_them(both: Callable[[str], Both]) -> None:
    message = r"pool is of type dict; it must be None\. One encoder uses all cores\.\nFor .*--ray"
    pool = {"input": None, "output": None, "processes": []}
    for name in CLASSES:
        _, ours = both(name)
        calls = (
            [(ours.predict, [PAIRS])]
            if name == "CrossEncoder"
            else [(ours.encode, [TEXTS]), (ours.encode_query, [TEXTS])]
        )
        for call, arguments in calls:
            with named_case(call.__qualname__):
                call(*arguments, pool=None, chunk_size=2)
                with pytest.raises(InputError, match=message):
                    call(*arguments, pool=pool)
    with pytest.raises(InputError, match=r"token_pooling is of type function; it must be None\."):
        both("MultiVectorEncoder")[1].encode(TEXTS, token_pooling=lambda vectors: vectors)


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_no_list_of_texts_is_refused_by_every_class(both: Callable[[str], Both], name: str) -> None:
    _, ours = both(name)
    for call in (ours.predict if name == "CrossEncoder" else ours.encode, ours.preprocess):
        for given in (b"read", None, {"read": "long"}, {"read"}, ["read", None], np.array("read")):
            with named_case(f"{call.__name__} of {given}"), pytest.raises(InputError, match=r"^(inputs|sentences)\b"):
                call(given)


def test_older_names_of_arguments_are_taken(both: Callable[[str], Both]) -> None:
    _, sparse = both("SparseEncoder")
    for method in (sparse.encode, sparse.encode_query, sparse.encode_document):
        assert len(method(sentences=TEXTS)) == len(TEXTS)
    _, pairs = both("CrossEncoder")
    expected = pairs.predict(PAIRS, activation_fn="softmax")
    assert_close(pairs.predict(sentences=PAIRS, activation_fct="softmax"), expected, atol=0)


# What works


def unpadded(tokens: Any) -> list[list[int]]:
    """The ids of each text, of the library's tensors or of our arrays, wherever there is padding."""
    # Tokens that are added to a query and not seen are masked in the library, and have a mask of their own here.
    mask = tokens.get("attended_mask", tokens["attention_mask"])
    pairs = zip(np.asarray(tokens["input_ids"]), np.asarray(mask), strict=True)
    return [ids[mask == 1].tolist() for ids, mask in pairs]


@pytest.mark.parametrize("name", CLASSES)
def test_tokens_are_those_of_the_library(both: Callable[[str], Both], name: str) -> None:
    theirs, ours = both(name)
    inputs: Any = PAIRS if name == "CrossEncoder" else TEXTS
    of_texts: list[dict[str, Any]] = [{}, {"prompt": "w20 read: "}]
    if name == "MultiVectorEncoder":
        of_texts += [{"task": "query"}, {"task": "document", "prompt": "w20 "}]
    for options in of_texts:
        with named_case(options):
            expected, found = theirs.preprocess(inputs, **options), ours.preprocess(inputs, **options)
            assert unpadded(found) == unpadded(expected)
            assert {(each.dtype, each.shape) for each in found.values()} == {
                (np.dtype(np.int64), found["input_ids"].shape)
            }
            assert unpadded(ours.tokenize(inputs, **options)) == unpadded(found)
            if options.get("task") == "query":
                assert (found["input_ids"] == np.asarray(expected["input_ids"])).all()
            if {"token_type_ids"} <= set(found) & set(expected):
                assert (found["token_type_ids"] == np.asarray(expected["token_type_ids"])).all()
    assert max(map(len, unpadded(ours.preprocess(inputs)))) <= ours.max_seq_length
    assert unpadded(ours.preprocess(inputs)) != unpadded(theirs.preprocess(inputs[::-1]))
    assert ours.preprocess([]) == theirs.preprocess([]) == {}
    with pytest.raises(InputError, match="inputs is one string; it must be a list of"):
        ours.tokenize("read")


def test_tokens_are_what_a_session_takes(both: Callable[[str], Both]) -> None:
    _, ours = both("SentenceTransformer")
    with hdruntime.load(ours._path, backend="onnxruntime") as session:
        vectors = session(**ours.preprocess(TEXTS[:3]))["sentence_embedding"]
    assert_close(vectors, ours.encode(TEXTS[:3], prompt=""), atol=1e-6)


def test_one_pair_is_no_list_of_pairs_where_tokens_are_asked_for(both: Callable[[str], Both]) -> None:
    with pytest.raises(InputError, match="inputs is one pair; it must be a list of pairs"):
        both("CrossEncoder")[1].preprocess(PAIRS[0])


@pytest.mark.parametrize("name", CLASSES)
def test_what_has_a_meaning_gives_what_the_library_gives(both: Callable[[str], Both], name: str) -> None:
    theirs, ours = both(name)
    assert ours.eval() is ours.cpu() is ours.to("cpu") is ours.to(torch.device("cpu")) is ours.train(False) is ours
    assert ours.to(device=None) is ours
    assert (ours.device, ours.device.type, ours.device.index) == ("cpu", theirs.device.type, theirs.device.index)
    assert torch.zeros(1).to(ours.device).device == theirs.device
    assert ours.training is theirs.eval().training
    assert ours.modalities == [each for each in theirs.modalities if isinstance(each, str) and each != "message"]
    for modality in ("text", "image"):
        assert ours.supports(modality) is theirs.supports(modality)
    assert ours.get_max_seq_length() == theirs.get_max_seq_length() == ours.max_seq_length
    assert ours.get_backend() == "onnxruntime"


WHERE_IT_IS_NOT: list[tuple[Callable[[Any], Any], str]] = [
    (lambda ours: ours.to("cuda"), r"device is 'cuda', and .* on cpu \(onnxruntime\)\.\n.*\(bundle, device='cuda'\)"),
    (lambda ours: ours.cuda(), r"\(bundle, device='cuda'\)"),
    (lambda ours: ours.cuda(1), r"device is '1', and .*\n.*\(bundle, device='cuda:1'\)"),
    (lambda ours: ours.to(torch.device("cuda:1")), r"\(bundle, device='cuda:1'\)"),
    (lambda ours: ours.to("mps"), r"device is 'mps', and the bundle was loaded on cpu .*\nLeave it out\.$"),
    (lambda ours: ours.to(torch.float16), r"dtype is torch\.float16; the dtype of a bundle .*\nBuild with fp16=True"),
    (lambda ours: ours.to("cpu", torch.bfloat16), r"dtype is torch\.bfloat16; the dtype of a bundle"),
    (lambda ours: ours.train(), r"cannot be trained\.\nTrain the checkpoint .* hdexport build"),
]


@pytest.mark.parametrize("name", CLASSES)
def test_what_a_bundle_cannot_become_is_refused(both: Callable[[str], Both], name: str) -> None:
    _, ours = both(name)
    for call, message in WHERE_IT_IS_NOT:
        with named_case(message), pytest.raises(InputError, match=message):
            call(ours)


def test_an_encoder_of_a_gpu_is_on_the_gpu_that_was_asked_for(
    both: Callable[[str], Both], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = both("SentenceTransformer")
    monkeypatch.setattr(ours._session, "_backend", Backend.ONNXRUNTIME_CUDA)
    assert ours.device == "cuda:0"
    assert ours.to("cuda") is ours.to("cuda:0") is ours.cuda() is ours.cuda(0) is ours
    monkeypatch.setattr(ours, "_gpu_number", 1)
    assert (ours.device, ours.device.type, ours.device.index) == ("cuda:1", "cuda", 1)
    for other in ("cuda:0", "cpu", 0):
        with (
            named_case(other),
            pytest.raises(InputError, match=r"the bundle was loaded on cuda:1 \(onnxruntime_cuda\)"),
        ):
            ours.to(other)
    with pytest.raises(InputError, match="device is 'cuda:0', and the bundle was loaded on cuda:1"):
        ours.encode(TEXTS, device="cuda:0")


@pytest.mark.parametrize(
    ("options", "number"),
    [({}, 0), ({"device": "cuda:1"}, 1), ({"device": "cuda"}, 0), ({"gpu": GpuOptions(device=2)}, 2)],
)
def test_the_number_of_the_gpu_is_that_of_the_options(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], number: int
) -> None:
    monkeypatch.setattr(bundle_model, "load", lambda bundle, **options: hdruntime.load(bundle, "onnxruntime"))
    with SentenceEncoder(bundle_path, **options) as encoder:
        monkeypatch.setattr(encoder._session, "_backend", Backend.ONNXRUNTIME_CUDA)
        assert encoder.device == f"cuda:{number}"


def test_a_device_is_a_string_as_pytorch_spells_it() -> None:
    for name in ("cpu", "cuda", "cuda:3"):
        ours, theirs = TorchDevice(name), torch.device(name)
        assert (ours, ours.type, ours.index) == (str(theirs), theirs.type, theirs.index)


def test_dimensions_are_truncated_in_a_block(both: Callable[[str], Both]) -> None:
    theirs, ours = both("SentenceTransformer")
    for name in ("truncate_embeddings", "truncate_sentence_embeddings"):
        with getattr(theirs, name)(5), getattr(ours, name)(5):
            assert_close(ours.encode(TEXTS), theirs.encode(TEXTS), atol=1e-6)
            assert ours.get_embedding_dimension() == 5
        with contextlib.suppress(KeyError), getattr(ours, name)(3):
            raise KeyError
        assert ours.truncate_dim is theirs.truncate_dim is None


def evaluators() -> dict[str, Any]:
    """Name of a class -> an evaluator of the library for it."""
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderClassificationEvaluator
    from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorTripletEvaluator
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    rotated, quiet = TEXTS[1:] + TEXTS[:1], {"show_progress_bar": False}
    scores = [0.0, 0.5, 1.0, 0.2, 0.1]
    return {
        "SentenceTransformer": EmbeddingSimilarityEvaluator(TEXTS, rotated, scores, **quiet),
        "CrossEncoder": CrossEncoderClassificationEvaluator(PAIRS, [0, 1, 1], **quiet),
        "MultiVectorEncoder": MultiVectorTripletEvaluator(TEXTS, rotated, TEXTS[::-1], **quiet),
    }


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "SparseEncoder"])
def test_evaluators_get_the_encoder_and_a_folder(both: Callable[[str], Both], tmp_path: Path, name: str) -> None:
    evaluator = evaluators()[name]
    folders = [tmp_path / "theirs" / "files", tmp_path / "ours" / "files"]
    expected, found = (each.evaluate(evaluator, str(folder)) for each, folder in zip(both(name), folders, strict=True))
    assert found == pytest.approx(expected, abs=1e-4)
    assert [each.name for each in folders[1].iterdir()] == [each.name for each in folders[0].iterdir()] != []


def test_evaluators_of_sparse_tensors_are_rejected(both: Callable[[str], Both]) -> None:
    with pytest.raises(InputError, match=r"need sparse tensors; .*\nConvert the vectors"):
        both("SparseEncoder")[1].evaluate(lambda model, folder: {})


def test_tokens_that_sparse_vectors_share_are_those_of_the_library(both: Callable[[str], Both]) -> None:
    theirs, ours = both("SparseEncoder")
    query, documents = "What is read?", ["Nobody reads what is written.", "", "Museums!"]
    expected = theirs.intersection(theirs.encode_query(query), theirs.encode_document(documents)).to_dense().numpy()
    found = ours.intersection(ours.encode_query(query), ours.encode_document(documents))
    assert_close(np.stack([each.dense() for each in found]), expected, atol=1e-4)
    assert len(found[0]) > 0
    alone = ours.intersection(ours.encode_query(query), ours.encode_document(documents[0]))
    assert_close(alone.dense(), expected[0], atol=1e-4)
    words = ours.decode(alone, top_k=3)
    assert [word for word, _ in words] == [word for word, _ in theirs.decode(torch.from_numpy(expected[0]), top_k=3)]
    with pytest.raises(InputError, match="embeddings_1 is of type list; it must be one SparseVector"):
        ours.intersection([ours.encode(query)], ours.encode(query))
    assert ours.get_sentence_embedding_dimension() == theirs.get_embedding_dimension()


def test_the_length_of_pairs_has_its_older_name(tiny_bundles: Callable[..., Any]) -> None:
    with CrossEncoder(tiny_bundles("bert", "text-classification").path) as encoder:
        encoder.max_length = 12
        assert encoder.max_length == encoder.max_seq_length == 12
