"""The steps that run a bundle: by a TensorRT engine, and by ONNX Runtime on the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu import end_to_end
from benchmarks.gpu.job import Job, SkippedError, StepFailedError
from benchmarks.gpu.table import ALL_ON_CPU, ON_GPU, VECTORS
from hdexport.bench.baselines.baseline import Texts
from hdexport.bench.measure.calls import latency_of, time_runs, warm_up
from hdexport.checkpoint.checkpoint import sample_path
from hdexport.support.memory import GpuMemoryWatch
from hdexport.verify.comparison import compare
from hdruntime.backends.choice import unavailable_reason
from hdruntime.backends.registry import backend_named, this_machine
from hdruntime.bundle.manifest import Backend, Task
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import HdexportError, MissingDependencyError, OutOfMemoryError
from hdruntime.gpu.device_arrays import DeviceArray

_LENGTHS = (512, 2048, 4096, 128, 1024, 8192, 16384)
"""Those that the bundle takes are run."""

_MAX_LEN = 4096
_WINDOW = "window:256"
_LEAST_RUNS = 10
_LEAST_SECONDS = 0.3
_TINY = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_REHEARSED_TOKENS = 128
_CHECKED_TOKENS = 700
_GROWING_SHAPES = ((1, 4096), (1, 8192), (1, 16384), (8, 4096))
_MODEL_SHAPES = tuple((rows, tokens) for tokens in (512, 1024, 2048, 4096, 8192, 16384) for rows in (1, 8))


def run_engine(job: Job, variant: str, *, is_windowed: bool) -> None:
    """Load an engine, built here unless the bundle that was given has one, and run it against the CPU's answers.

    That a variant refuses this GPU is a result, word by word.

    Args:
        is_windowed: windowed attention, which is our plugin, instead of the model's.
    """
    import hdruntime
    from hdexport.graph.targets.tensorrt.packages import load_variant

    backend = Backend(variant)
    about = {"variant": variant, "windowed": is_windowed, "model": "engine"}
    try:
        load_variant(backend)
    except MissingDependencyError as error:
        raise SkippedError(str(error).partition("\n")[0]) from None
    except HdexportError as error:
        # That the package refuses to load here is a result.
        job.write(case="engine", **about, status="refused", reason=str(error))
        raise SkippedError(str(error).partition("\n")[0]) from None
    gpu, entry = this_machine().gpu, backend_named(backend)
    if gpu is not None and entry is not None and not entry.builds_for(gpu.architecture):
        # Before an engine is built, which takes the step's time.
        job.write(case="engine", **about, status="refused", reason=f"{variant} supports no GPU of {gpu.architecture}")
        return
    with _bundle(job, variant=backend, is_windowed=is_windowed) as bundle:
        about["model"] = bundle.manifest.name
        try:
            session = hdruntime.load(bundle, backend=backend)
        except HdexportError as error:
            job.write(case="engine", **about, status="refused", reason=str(error))
            return
        with session:
            _run_lengths(job, bundle, session, {"case": "engine", **about})


def run_onnxruntime(job: Job) -> None:
    """ONNX Runtime's graph for a GPU by its CUDA provider, against the CPU's answers; in a rehearsal by the CPU's."""
    import hdruntime

    backend = Backend.ONNXRUNTIME if job.rehearsal else Backend.ONNXRUNTIME_CUDA
    with _bundle(job, variant=None, is_windowed=False) as bundle:
        unavailable = unavailable_reason(bundle, backend)
        if unavailable is not None:
            raise SkippedError(unavailable.reason)
        about = {"case": "onnxruntime", "provider": backend, "model": bundle.manifest.name}
        with hdruntime.load(bundle, backend=backend) as session:
            _run_lengths(job, bundle, session, about)


def build_model(job: Job, bundle: str) -> None:
    """A bundle of a model's base shape, built on the CPU before anything is timed.

    Args:
        bundle: one of `benchmarks.gpu.steps.BUNDLES`.
    """
    model, is_windowed = bundle.removesuffix("-vectors").removesuffix("-windows"), "-windows" in bundle
    task = Task.SENTENCE_SIMILARITY if bundle.endswith("-vectors") else Task.FEATURE_EXTRACTION
    _model_bundle(job, model, task=task, is_windowed=is_windowed)
    job.write(case="bundle", model=model, windowed=is_windowed, task=task.value)


def run_model(job: Job, model: str) -> None:
    """A bundle of a model with random weights in ONNX Runtime on the GPU: right first, then latency and memory.

    The latency is of a session: ids come from the CPU, and all hidden states go back to it.
    """
    import hdruntime

    backend = Backend.ONNXRUNTIME if job.rehearsal else Backend.ONNXRUNTIME_CUDA
    bundle = _model_bundle(job, model)
    unavailable = unavailable_reason(bundle, backend)
    if unavailable is not None:
        raise SkippedError(unavailable.reason)
    about = {"case": "onnxruntime", "provider": backend, "model": model}
    batch = _batches(job)
    with hdruntime.load(bundle, backend=backend) as session:
        with hdruntime.load(bundle, backend="onnxruntime") as right:
            feeds = _padded(batch(2, _REHEARSED_TOKENS if job.rehearsal else _CHECKED_TOKENS))
            _check(job, session(**feeds), right(**feeds), model=model)
        for rows, tokens in ((1, _REHEARSED_TOKENS),) if job.times_nothing else _MODEL_SHAPES:
            _time_session(job, session, batch(rows, tokens), **about)


def compare_kernels(job: Job, model: str, *, peer: str | None = None) -> None:
    """A model's bundle in ONNX Runtime on the GPU, by its kernels and by the bodies of its functions, which are ONNX
    Runtime's own attention where it has one.

    Both sides' answers are compared with the CPU's, and the kernels' with the bodies', at every shape that is timed; a
    rehearsal runs the bodies twice.

    Args:
        model: one of `benchmarks.gpu.steps.BUNDLES`.
        peer: a way to run the model in PyTorch that is timed at the same shapes, as `end_to_end.measure` has them.
    """
    import hdruntime

    backend = Backend.ONNXRUNTIME if job.rehearsal else Backend.ONNXRUNTIME_CUDA
    bundle = _model_bundle(job, model)
    unavailable = unavailable_reason(bundle, backend)
    if unavailable is not None:
        raise SkippedError(unavailable.reason)
    if not job.rehearsal:
        _check_kernels_serve(bundle)
    without = Bundle(bundle.path, dataclasses.replace(bundle.manifest, kernel_nodes=()))
    batch, checked = _batches(job), _REHEARSED_TOKENS if job.rehearsal else _CHECKED_TOKENS
    calls = [_padded(batch(2, checked)), *(batch(rows, tokens) for rows, tokens in _kernel_shapes(job))]
    with hdruntime.load(without, backend="onnxruntime") as right:
        expected = right(**calls[0])
    of_bodies: list[Mapping[str, Any]] = []
    for attention, opened in (("bodies", without), ("kernels", bundle)):
        about = {"provider": backend, "model": model, "attention": attention}
        with hdruntime.load(opened, backend=backend) as session:
            answers = [session(**feeds) for feeds in calls]
            _check(job, answers[0], expected, **about, right="cpu")
            for found, bodies, feeds in zip(answers, of_bodies or (), calls, strict=False):
                _check(job, found, bodies, **about, right="bodies", shape=feeds["input_ids"].shape)
            of_bodies = answers
            for feeds in calls[1:]:
                for where, call in _answers(session, feeds, rehearsal=job.rehearsal).items():
                    _time_call(job, call, feeds["input_ids"].shape, case="onnxruntime", **about, answers=where)
    if peer is not None:
        end_to_end.measure(job, model, peer, shapes=_kernel_shapes(job))


def time_answers(job: Job, model: str, *, is_windowed: bool = False) -> None:
    """A model's bundle in ONNX Runtime on the GPU, by its kernels: hidden states to the CPU, hidden states left on the
    GPU, and one vector per text in their place. Right first; a rehearsal has the CPU's answers alone.

    Args:
        model: one whose bundle with vectors is in `benchmarks.gpu.steps.BUNDLES`.
        is_windowed: windows in place of its attention, and longer texts, whose memory is to be linear in tokens.
    """
    import hdruntime

    backend = Backend.ONNXRUNTIME if job.rehearsal else Backend.ONNXRUNTIME_CUDA
    bundle = _model_bundle(job, model, task=Task.SENTENCE_SIMILARITY, is_windowed=is_windowed)
    model += ", windows" * is_windowed
    unavailable = unavailable_reason(bundle, backend)
    if unavailable is not None:
        raise SkippedError(unavailable.reason)
    if not job.rehearsal:
        _check_kernels_serve(bundle)
    batch, checked = _batches(job), _REHEARSED_TOKENS if job.rehearsal else _CHECKED_TOKENS
    feeds = _padded(batch(2, checked))
    with hdruntime.load(bundle, backend="onnxruntime") as right:
        expected = right(**feeds)
    with hdruntime.load(bundle, backend=backend) as session:
        for answers, call in _answers(session, feeds, rehearsal=job.rehearsal).items():
            found = call()
            _check(job, found, {name: expected[name] for name in found}, model=model, answers=answers)
        # Shapes come in the order of their tokens, because a session keeps the memory that it has reserved.
        for rows, tokens in _GROWING_SHAPES if is_windowed and not job.rehearsal else _kernel_shapes(job):
            feeds = batch(rows, tokens)
            for answers, call in _answers(session, feeds, rehearsal=job.rehearsal).items():
                about = {"case": "onnxruntime", "provider": backend, "model": model, "answers": answers}
                _time_call(job, call, (rows, tokens), **about)


def _answers(session: Any, feeds: dict[str, Any], *, rehearsal: bool) -> dict[str, Callable[[], Mapping[str, Any]]]:
    """Which answers are asked for, and where they go -> a call that returns the answers once they are there."""
    import torch

    from hdruntime.inference.inputs import checked_inputs

    calls: dict[str, Callable[[], Mapping[str, Any]]] = {ALL_ON_CPU: functools.partial(session, **feeds)}
    if rehearsal:
        return calls
    arrays = checked_inputs(feeds, session.manifest)
    given = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}

    def on_gpu() -> Mapping[str, Any]:
        left = session.run_on_device(outputs=["last_hidden_state"], **given)
        _ = left["last_hidden_state"].__cuda_array_interface__  # waits for the values
        return left

    def vectors() -> Mapping[str, Any]:
        left = session.run_on_device(outputs=["sentence_embedding"], **given)
        return {name: array.to_numpy() for name, array in left.items()}

    if any(spec.name == "sentence_embedding" for spec in session.manifest.outputs):
        calls[VECTORS] = vectors
    return {**calls, ON_GPU: on_gpu}


def _kernel_shapes(job: Job) -> tuple[tuple[int, int], ...]:
    return ((1, _REHEARSED_TOKENS),) if job.rehearsal else ((1, 4096), (8, 4096))


def _check_kernels_serve(bundle: Bundle) -> None:
    """Raise where a session would run the bodies: then there is nothing to compare."""
    import onnxruntime

    from hdruntime.backends.onnxruntime import CUDA_PROVIDER
    from hdruntime.backends.onnxruntime.kernels import use_kernels

    gpu = this_machine().gpu
    assert gpu is not None  # the backend is available
    architecture = int(gpu.architecture.removeprefix("sm"))
    options = onnxruntime.SessionOptions()
    if not use_kernels(bundle, options, architecture=architecture, provider=CUDA_PROVIDER):
        raise StepFailedError("no kernels for this GPU, or nothing that launches them: see hdexport doctor")


def _batches(job: Job) -> Callable[[int, int], dict[str, Any]]:
    """Makes ids, [rows, tokens]."""
    import numpy as np

    from benchmarks.gpu.models import sizes_of

    generator, vocab_size = np.random.default_rng(0), sizes_of(rehearsal=job.rehearsal).vocab_size
    return lambda rows, tokens: {"input_ids": generator.integers(5, vocab_size, (rows, tokens))}


def _padded(feeds: dict[str, Any]) -> dict[str, Any]:
    """The same, whose second text ends after 40 tokens."""
    import numpy as np

    mask = np.ones_like(feeds["input_ids"])
    mask[1, 40:] = 0
    return {**feeds, "attention_mask": mask}


def _check(job: Job, outputs: Mapping[str, Any], expected: Mapping[str, Any], **about: Any) -> None:
    outputs = {name: array.to_numpy() if isinstance(array, DeviceArray) else array for name, array in outputs.items()}
    found = [compare(outputs[name], expected[name], half_precision=True) for name in expected]
    job.write(case="answers", **about, **asdict(found[0]))
    if not all(one.passed for one in found):
        raise StepFailedError(f"a wrong answer: cosine {found[0].min_cosine:.4f}")


def _time_session(job: Job, session: Any, feeds: dict[str, Any], **about: Any) -> None:
    """A row: latency, and the GPU's memory at its peak; running out of it is a result."""
    _time_call(job, functools.partial(session, **feeds), feeds["input_ids"].shape, **about)


def _time_call(job: Job, call: Callable[[], Any], shape: tuple[int, int], **about: Any) -> None:
    """As `_time_session`, of a call for a batch of a shape."""
    (rows, tokens), watch = shape, GpuMemoryWatch()
    try:
        with watch:
            call()
            times = time_runs(call, min_runs=_LEAST_RUNS, min_seconds=job.least_s(_LEAST_SECONDS))
            watch.look()
    except OutOfMemoryError as error:
        job.write(**about, status="OOM", reason=str(error)[:300], batch=rows, tokens=tokens)
        return
    latency = latency_of([times], is_stable=True)
    job.write(
        **about, status="ok", batch=rows, tokens=tokens, p50_ms=latency.p50_ms, p95_ms=latency.p95_ms,
        vram_bytes=watch.peak_bytes,
    )  # fmt: skip


def _model_bundle(job: Job, model: str, *, task: Task = Task.FEATURE_EXTRACTION, is_windowed: bool = False) -> Bundle:
    """With every kernel that there is. Built once, beside the output; steps that run side by side may build it twice,
    and one of the two stays."""
    from benchmarks.gpu.models import add_pooling, save_checkpoint
    from hdexport.attention.registry import attention_from_spec
    from hdexport.build import BuildOptions, build
    from hdexport.engines.build import EngineOptions
    from hdexport.graph.targets.tensorrt.lowering import AttentionImpl

    name = f"{model}-rehearsed" if job.rehearsal else model
    name += "" if task is Task.FEATURE_EXTRACTION else f"-{task.value}"
    name += "-windows" * is_windowed
    folder = job.folder
    if not (folder / name).exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:
            sizes = save_checkpoint(model, Path(own) / "checkpoint", rehearsal=job.rehearsal)
            if task is Task.SENTENCE_SIMILARITY:
                add_pooling(Path(own) / "checkpoint", sizes)
            attention = attention_from_spec(f"window:{sizes.window}" if is_windowed else None)
            options = {"max_len": sizes.max_len, "precision": "float16", "verify": None, "task": task}
            options |= {"attention": attention, "engines": EngineOptions(attention_impl=AttentionImpl.PLUGIN)}
            build(BuildOptions(model=Path(own) / "checkpoint", output=Path(own) / "bundle", **options))
            with contextlib.suppress(OSError):
                os.rename(Path(own) / "bundle", folder / name)
    return open_bundle(folder / name)


def _run_lengths(job: Job, bundle: Bundle, session: Any, about: dict[str, Any]) -> None:
    """A row a length; raises at the end if any answer was wrong."""
    import hdruntime

    wrong, texts = [], Texts(bundle)
    with hdruntime.load(bundle, backend="onnxruntime") as right:
        for tokens in (_REHEARSED_TOKENS,) if job.rehearsal else _LENGTHS:
            if tokens > bundle.manifest.max_len:
                continue
            feeds = texts.batch(1, tokens)
            outputs, expected = session(**feeds), right(**feeds)
            # Float32 engines may multiply in TF32, so that they are held to half precision's tolerance.
            found = [compare(outputs[name], expected[name], half_precision=True) for name in expected]
            if not all(one.passed for one in found):
                wrong.append(tokens)
            call = functools.partial(session, **feeds)
            is_stable = True if job.times_nothing else warm_up(call)
            times = time_runs(call, min_runs=_LEAST_RUNS, min_seconds=job.least_s(_LEAST_SECONDS))
            latency = latency_of([times], is_stable=is_stable)
            job.write(
                **about,
                status="ok",
                batch=1,
                tokens=tokens,
                p50_ms=latency.p50_ms,
                p95_ms=latency.p95_ms,
                min_cosine=min(one.min_cosine for one in found),
                max_abs_error=max(one.max_abs_error for one in found),
                passed=all(one.passed for one in found),
            )
    if wrong:
        raise StepFailedError(f"wrong answers at {', '.join(map(str, wrong))} tokens")


@contextmanager
def _bundle(job: Job, *, variant: Backend | None, is_windowed: bool) -> Iterator[Bundle]:
    """The given bundle, if it has such an engine and attention, or one that is built for the block."""
    if job.bundle is not None:
        given = open_bundle(job.bundle)
        has_engine = variant is None or any(engine.variant == variant for engine in given.manifest.engines)
        if has_engine and ("window" in {record["type"] for record in given.manifest.attention}) == is_windowed:
            yield given
            return
    with tempfile.TemporaryDirectory() as folder:
        yield _built(Path(folder), job, variant=variant, is_windowed=is_windowed)


def _built(folder: Path, job: Job, *, variant: Backend | None, is_windowed: bool) -> Bundle:
    from hdexport.attention.registry import attention_from_spec
    from hdexport.build import BuildOptions, build
    from hdexport.engines.build import EngineOptions
    from hdexport.graph.targets.tensorrt.profiles import profiles_from_options

    max_len = _REHEARSED_TOKENS if job.rehearsal else _MAX_LEN
    options = EngineOptions()
    if variant is not None:
        profiles = profiles_from_options(max_len, batch="1", one_profile=job.rehearsal)
        options = EngineOptions(variants=(variant,), profiles=profiles)
    build(
        BuildOptions(
            model=_checkpoint(folder / "checkpoint", job),
            output=folder / "bundle",
            max_len=max_len,
            precision="float16",
            attention=attention_from_spec(("window:16" if job.rehearsal else _WINDOW) if is_windowed else None),
            engines=options,
            verify=None,
        )
    )
    return open_bundle(folder / "bundle")


def _checkpoint(folder: Path, job: Job) -> Path:
    """The sample model where it is installed; else, and in a rehearsal, random weights of its shape."""
    import torch
    import transformers

    sample = None if job.rehearsal else sample_path()
    if sample is not None:
        return sample
    torch.manual_seed(0)
    sizes = _TINY if job.rehearsal else _MINILM
    config = transformers.BertConfig(**sizes, vocab_size=1000, max_position_embeddings=128, initializer_range=0.06)
    transformers.BertModel(config).save_pretrained(folder)
    return folder
