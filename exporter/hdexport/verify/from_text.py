"""A bundle's answers to texts, compared with those of transformers or sentence-transformers by a plain call.

The other checks begin with ids, and PyTorch's model is given inputs by the bundle's settings. Mistakes in a
checkpoint's settings of texts show here alone: which end of a text is cut, and where; which tokens are global by
default; prompts, pooling, and the function that makes scores.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import hdruntime
from hdexport.model.task import TASKS
from hdexport.support.check import Check, Comparison
from hdexport.support.json_files import shown
from hdexport.support.process_settings import only_errors_of
from hdexport.support.progress import Progress
from hdexport.verify.checks import Verification, problem_of
from hdexport.verify.comparison import compare_output, different, tolerance_of
from hdexport.verify.float32_session import float32_session
from hdexport.verify.grid import Grid
from hdexport.verify.own_code import code_name
from hdexport.verify.pytorch_reference import Reference
from hdruntime.arrays import AnyArray, FloatArray
from hdruntime.backends.cpu_runner import give_memory_back
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, Manifest, Task
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.verification import Case, Skip, SkipCause, Tolerance
from hdruntime.bundle_model import BundleModel
from hdruntime.errors import BackendUnavailableError, InputError, NonFiniteOutputError
from hdruntime.tasks.of_bundle import class_of
from hdruntime.tasks.task import Encoder
from hdruntime.text.encoding import Overflow
from hdruntime.text.tokenization import TextTokenizer

_LONGEST = 128
"""Most tokens of the long text: how it is cut shows, and a build has time for it."""

_LONG_IDS = 4 * _LONGEST
"""Tokens that the long text is written from; some of them are one token when they are read."""

_SHORT = "What the lengths of two texts are."
_SCRIPTS = "ŒUVRE Größe Ελλάδα Москва שלום سلام नमस्ते ภาษาไทย 日本語 中文字 한국어 e\u0301 👩\u200d👧"
_PUNCTUATION = "  two  spaces,\ta tab\nand a line; don't… x² “quotes” [SEP] </s> 3.14-15 "

Texts = tuple[str, ...]
"""One text, or the two of a pair."""


class _Answers(NamedTuple):
    """The answers to a text or a pair: name of each output -> values without a batch axis. `got`, the bundle's, is None
    where the runtime rejected values that are not finite."""

    text: str
    tokens: int
    wanted: Mapping[str, AnyArray]
    got: Mapping[str, AnyArray] | None


def with_texts(
    verification: Verification,
    bundle: Bundle,
    reference: Reference,
    *,
    progress: Progress | None = None,
) -> Verification:
    """Compare answers to texts, too: long and short, empty, in other scripts, and pairs, in float32 on the CPU.

    Texts are run by sentence-transformers where it saved the checkpoint, else by transformers. Its model is the
    checkpoint's; where the bundle attends in another way on purpose, the reference's model takes its place.

    Args:
        verification: results for ids. With the quick grid sentence-transformers is not imported, because the import
            takes as long as all other checks.
        bundle: any bundle; one without a tokenizer has nothing to compare.
        reference: PyTorch's model, and the checkpoint.
        progress: takes each outcome.
    """
    manifest, task = bundle.manifest, bundle.manifest.task
    if manifest.tokenizer is None:
        return verification
    progress = progress or Progress()
    encoder = class_of(task).encoder_of(manifest)
    if encoder is None or encoder.call is None:
        theirs, name, answers = None, "text: transformers", _of_transformers
    else:
        theirs, name = encoder.library, f"text: {encoder.library}"
        answers = functools.partial(_of_sentence_transformers, encoder=encoder)
    checks: list[Check] = []
    skip = _skip(reference, theirs, task, verification.grid)
    if skip is None:
        try:
            for each in answers(bundle, reference):
                checks.append(_check(name, each, manifest))
                progress.check(checks[-1])
            if not checks:
                skip = Skip(cause=SkipCause.NO_TEXT_FITS, limit=manifest.max_len)
        except (BackendUnavailableError, _LibraryError) as error:
            skip = Skip(cause=SkipCause.LIBRARY, detail=problem_of(error))
    skipped = [] if skip is None else [dataclasses.replace(skip, graph=name)]
    code = reference.checkpoint.code(task)
    if code is not None and not reference.checkpoint.trust.trust_remote_code:
        skipped.append(Skip(cause=SkipCause.UNTRUSTED_CODE, graph=code_name(code)))
    for outcome in skipped:
        progress.check(outcome)
    return dataclasses.replace(verification, texts=tuple(checks), skipped=(*verification.skipped, *skipped))


class _LibraryError(Exception):
    """transformers or sentence-transformers cannot run a checkpoint by its plain call."""


def _skip(reference: Reference, theirs: str | None, task: Task, grid: Grid) -> Skip | None:
    """Why no texts are compared; None where they are."""
    if task is Task.TEXT_SCORING:
        return Skip(cause=SkipCause.LIBRARY, detail="transformers no longer has such a model")
    if reference.properties.discrete_outputs is not None:
        return Skip(cause=SkipCause.HIDDEN_DECISIONS)
    if theirs is not None and grid is Grid.QUICK:
        return Skip(cause=SkipCause.SLOW_IMPORT)
    return None


def _check(name: str, answers: _Answers, manifest: Manifest) -> Check:
    outputs = {}
    for output, wanted in answers.wanted.items():
        got = None if answers.got is None else answers.got[output]
        half_precision, of_tokens = manifest.dtype != "float32", wanted.ndim > 1
        if np.issubdtype(wanted.dtype, np.integer):
            outputs[output] = _same(got, wanted)
        elif got is None or got.shape != wanted.shape:
            outputs[output] = different(
                tolerance_of(output, half_precision=half_precision, precision=Precision.FLOAT32, of_tokens=of_tokens)
            )
        else:
            outputs[output] = compare_output(
                output,
                *(np.atleast_2d(got), np.atleast_2d(wanted)),
                half_precision=half_precision,
                precision=Precision.FLOAT32,
                of_tokens=of_tokens,
            )
    case = Case(tokens=answers.tokens, lengths=(answers.tokens,), padding="none")
    return Check(graph=name, precision=Precision.FLOAT32, case=case, outputs=outputs, text=answers.text)


def _same(got: AnyArray | None, wanted: AnyArray) -> Comparison:
    """Whether whole numbers, ids or lengths, are the same."""
    tolerance = Tolerance(atol=0.0)
    if got is None or not np.array_equal(got, wanted):
        return different(tolerance)
    return Comparison(max_abs_error=0.0, min_cosine=1.0, passed=True, tolerance=tolerance)


def _texts(bundle: Bundle, reference: Reference) -> dict[str, Texts]:
    """Name of each text -> the text; the long one has words of the whole vocabulary."""
    words = TextTokenizer.of(bundle, max_len=_LONGEST).whole
    long = words.decode(reference.text(0, _LONG_IDS).tolist(), skip_special_tokens=True)
    return {
        "short text": (_SHORT,),
        "long text": (long,),
        "empty text": ("",),
        "other scripts": (_SCRIPTS,),
        "punctuation": (_PUNCTUATION,),
        "pair": (_SHORT, _SCRIPTS),
        "pair with a long second text": (_SHORT, long),
        "pair with a long first text": (long, _SHORT),
        "pair with an empty second text": (_SHORT, ""),
    }


def _of_transformers(bundle: Bundle, reference: Reference) -> Iterator[_Answers]:
    """Answers of ``model(**tokenizer(text, truncation=True))``, and a session's."""
    import torch
    from transformers import AutoTokenizer

    manifest, reads_pairs = bundle.manifest, TASKS[bundle.manifest.task].reads_pairs
    tokenizer: Any = reference.checkpoint.tokenizer
    if reference.checkpoint.tokenizer_source == "library":
        # Without hdexport's conversions, whose mistakes would show here alone.
        tokenizer = AutoTokenizer.from_pretrained(
            reference.checkpoint.path,
            local_files_only=True,
            trust_remote_code=reference.checkpoint.trust.trust_remote_code,
        )
    limit = min(tokenizer.model_max_length, manifest.positions.base, manifest.max_len, _LONGEST)
    texts: dict[str, tuple[Any, int, dict[str, FloatArray] | None]] = {}
    reference.release()
    with float32_session(bundle) as session:
        own = session.tokenizer.limited(limit)
        for name, each in _texts(bundle, reference).items():
            if reads_pairs is None if len(each) > 1 else reads_pairs == "must":
                continue
            # As a batch, because a single call ignores an empty second text.
            batch = [[text] for text in each]
            if own.whole.num_special_tokens_to_add(len(each) > 1) > limit:
                # No text can be truncated to so few tokens, and transformers takes it whole then.
                continue
            with _failures_of_library(f"its own call fails on the {name}"):
                features = tokenizer(*batch, truncation=True, max_length=limit, return_tensors="pt")
            ids = features["input_ids"][0].numpy()
            if not len(ids):
                # No model runs without a token, and a session says so.
                continue
            encoding = _encoding(own, each)
            ids_alone = {"input_ids": np.array(encoding.input_ids)}
            if not np.array_equal(ids, ids_alone["input_ids"]):
                yield _Answers(text=name, tokens=len(ids), wanted={"input_ids": ids}, got=ids_alone)
                continue
            texts[name] = features, len(ids), _if_finite(functools.partial(session.infer, [encoding]))
    # Not beside the session: the weights of one model are in memory at a time.
    give_memory_back()
    for name, (features, tokens, got) in texts.items():
        with _failures_of_library(f"its own call fails on the {name}"), torch.inference_mode():
            answers = reference.model(**features)
        wanted = {spec.name: answers[spec.name][0].numpy() for spec in manifest.result_outputs}
        yield _Answers(text=name, tokens=tokens, wanted=wanted, got=got)


def _encoding(tokenizer: TextTokenizer, texts: Texts) -> hdruntime.Encoding:
    first, *second = ([text] for text in texts)
    (encoding,) = tokenizer.encode(first, *second, overflow=Overflow.TRUNCATE)
    return encoding


def _of_sentence_transformers(bundle: Bundle, reference: Reference, *, encoder: Encoder) -> Iterator[_Answers]:
    """Answers of sentence-transformers' class and hdruntime's, both with their defaults but for the length."""
    import sentence_transformers
    import torch

    manifest, checkpoint = bundle.manifest, reference.checkpoint
    task, theirs = manifest.task, encoder.library
    # Modules as they were published are loaded without hdexport's arrangement of files.
    path = checkpoint.origin if (checkpoint.origin / "modules.json").is_file() else checkpoint.path
    with _failures_of_library(f"it does not load {path}"):
        library = getattr(sentence_transformers, theirs)(
            str(path),
            device="cpu",
            local_files_only=True,
            trust_remote_code=checkpoint.trust.trust_remote_code,
            model_kwargs={"dtype": torch.float32},
        ).eval()
    # Some models' attention depends on earlier calls, and a bundle of a model with a decoder holds the encoder alone.
    is_same = type(library[0].model) is type(reference.model) or (
        checkpoint.trust.trust_remote_code and checkpoint.code(task)
    )
    is_other = not (is_same or theirs == "CrossEncoder")
    if checkpoint.family.native_attention is not None or reference.is_changed or is_other:
        if theirs == "CrossEncoder" and not is_same:
            raise _LibraryError("it scores by all logits of a generator, whose attention the bundle changes")
        library[0].model = reference.model
    if checkpoint.tokenizer_source == "file":
        max_tokens = library.tokenizer.model_max_length
        library[0].processor = copy.deepcopy(checkpoint.tokenizer)
        library.tokenizer.model_max_length = max_tokens
    length = "max_length" if theirs == "CrossEncoder" else "max_seq_length"
    ours: BundleModel = getattr(hdruntime, encoder.name)(
        bundle, backend=Backend.ONNXRUNTIME, precision=Precision.FLOAT32, **{length: "model"}
    )
    # Texts are cut on purpose, of which this logger would warn.
    with ours, only_errors_of("hdruntime.tasks.text_inference"):
        max_tokens = min(library.max_seq_length or manifest.max_len, manifest.positions.base, manifest.max_len)
        yield _Answers(
            text="max_seq_length",
            tokens=max_tokens,
            wanted={"max_seq_length": np.array([max_tokens])},
            got={"max_seq_length": np.array([ours.max_seq_length])},
        )
        try:
            library.max_seq_length = ours.max_seq_length = min(max_tokens, _LONGEST)
        except InputError:
            # No text fits beside the special tokens, or beside the template.
            return
        output = manifest.result_outputs[-1].name
        counted = TextTokenizer.of(bundle, max_len=ours.max_seq_length, template=manifest.template)
        for name, each, method in _calls(theirs, _texts(bundle, reference)):
            try:
                tokens = len(_encoding(counted, each))
            except InputError:
                # No model runs without a token, which an empty text lacks where there are no special tokens.
                continue
            with _failures_of_library(f"its own call fails on the {name}"):
                (wanted,) = _answers(getattr(library, method), each, output)
            got = _if_finite(functools.partial(_answers, getattr(ours, method), each, output))
            yield _Answers(text=name, tokens=tokens, wanted=wanted, got=got)


@contextlib.contextmanager
def _failures_of_library(failure: str) -> Iterator[None]:
    """Turns errors of transformers' or sentence-transformers' code into a `_LibraryError`, which is no fault of the
    bundle: the code may know no token for a letter, or fail in itself."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise _LibraryError(f"{failure}: {shown(error)}") from error


def _calls(theirs: str, texts: Mapping[str, Texts]) -> Iterator[tuple[str, Texts, str]]:
    """Yields the name of a text, the text or the pair, and the method that answers it."""
    is_of_pairs = theirs == "CrossEncoder"
    for name, each in texts.items():
        if is_of_pairs == (len(each) > 1):
            yield name, each, "predict" if is_of_pairs else "encode"
    if not is_of_pairs:
        for method, side in (("encode_query", "query"), ("encode_document", "document")):
            for name in ("short text", "long text"):
                yield f"{name} as a {side}", texts[name], method


def _if_finite(answers: Callable[[], list[dict[str, FloatArray]]]) -> dict[str, FloatArray] | None:
    """The only answer; None where values are not finite."""
    try:
        return answers()[0]
    except NonFiniteOutputError:
        return None


def _answers(method: Callable[..., Any], texts: Texts, output: str) -> list[dict[str, FloatArray]]:
    """The answer to one text or pair, without the axis of texts: dense, sparse, or a vector for each token."""
    answer = method([texts if len(texts) > 1 else texts[0]])[0]
    for dense in ("to_dense", "dense"):
        if hasattr(answer, dense):
            answer = getattr(answer, dense)()
            break
    return [{output: np.atleast_1d(np.asarray(answer, np.float32))}]
