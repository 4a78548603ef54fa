"""The pipeline, from a checkpoint to a verified bundle."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from pathlib import Path

from hdexport.checkpoint import Checkpoint, find_checkpoint
from hdexport.checkpoint.ignored_keys import ignored_keys
from hdexport.checkpoint.library_files import write_library_files
from hdexport.checkpoint.position_choice import choose_positions
from hdexport.checkpoint.sentence_settings import sentence_settings
from hdexport.checkpoint.tokenizer_files import write_tokenizer
from hdexport.engines.build import EngineBuilder
from hdexport.families import Family
from hdexport.graph.targets.registry import ONNX, targets_named
from hdexport.graph.targets.target import GraphRequest
from hdexport.model.task import TASKS
from hdexport.pipeline.needed_space import check_space
from hdexport.pipeline.options import BuildOptions
from hdexport.pipeline.portable_graph import manifest_of_graph, portable_graph
from hdexport.pipeline.prepared_model import attention_of_model, extended_positions, graph_module
from hdexport.support.bundle_writer import BUNDLE_DIRECTORY, seal, write_manifest
from hdexport.support.process_settings import rare_garbage_collection
from hdexport.support.progress import Progress, warn
from hdexport.verify import verify_bundle, with_texts
from hdexport.verify.checks import Verification
from hdexport.verify.float32_session import float32_session
from hdexport.verify.grid import Grid
from hdexport.verify.pytorch_reference import reference_of
from hdruntime.bundle.manifest import Manifest, PositionForm, Positions
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.bundle.sentence_settings import PairTemplate
from hdruntime.bundle.staging import staged_directory
from hdruntime.errors import InputError, Message, Setting, VerificationError, joined

logger = logging.getLogger(__package__)


def build(options: BuildOptions, progress: Progress | None = None) -> Manifest:
    """Build a bundle.

    The bundle appears at ``options.output`` when it is complete and verified; after an error, a bundle that was there
    before is still there.

    Returns:
        The bundle's manifest.

    Raises:
        HdexportError: one of `hdruntime.errors`.
    """
    progress = progress or Progress()
    engine_builder = EngineBuilder(options.engines)
    options.check()
    with (
        staged_directory(options.output, BUNDLE_DIRECTORY, force=options.force) as directory,
        rare_garbage_collection(),
    ):
        progress.step("Reading the checkpoint")
        checkpoint = _checkpoint(options)
        for remark in checkpoint.remarks:
            progress.result(remark)
        if options.task is None and checkpoint.task_remark is not None:
            progress.result(checkpoint.task_remark)
        grid = _grid(checkpoint, options)
        tokenizer = write_tokenizer(checkpoint, directory)
        if tokenizer is not None:
            tokenizer = dataclasses.replace(tokenizer, text_length=options.text_length)
        manifest = dataclasses.replace(
            _write_graphs(checkpoint, directory, options, engine_builder, progress),
            tokenizer=tokenizer,
            unverified=grid is None and checkpoint.family.is_generic,
        )
        write_library_files(checkpoint, manifest, directory)
        manifest = seal(directory, manifest)
        if options.int8 is not None:
            from hdexport.quantize.bundle import quantize_bundle

            manifest = quantize_bundle(Bundle(directory, manifest), options.int8, progress)
        if grid is not None:
            progress.step("Verifying against PyTorch")
            manifest = _verify(Bundle(directory, manifest), checkpoint, grid, options.verify_memory, progress)
        progress.step("Opening the bundle")
        _open(directory)
        progress.step("Writing the bundle")
    _warn_of_untrained_positions(manifest.positions, checkpoint.family)
    return manifest


def _open(directory: Path) -> None:
    """Load a finished bundle from its files, and run a text: a bundle that nothing can open is not published."""
    with float32_session(open_bundle(directory), threads=1) as session:
        manifest = session.manifest
        if manifest.tokenizer is None:
            return
        is_pair = isinstance(manifest.template, PairTemplate) or TASKS[manifest.task].reads_pairs == "must"
        # A tokenizer may know no such letter; its file is read all the same.
        with contextlib.suppress(InputError):
            session.infer(session.tokenize(["a"], ["a"] if is_pair else None))


def _checkpoint(options: BuildOptions) -> Checkpoint:
    # Not found again: on the hub, a branch may have moved since.
    checkpoint = options.model
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = find_checkpoint(checkpoint, trust=options.trust)
    return checkpoint.with_source(options.tokenizer).with_adapter(options.adapter)


def _grid(checkpoint: Checkpoint, options: BuildOptions) -> Grid | None:
    """The cases that a bundle is verified with; None for none. Without a family, they are proof and no option."""
    if not checkpoint.family.is_generic:
        return options.verify
    model_type = checkpoint.config["model_type"]
    if options.verify is not None:
        return Grid.FULL
    if not options.unverified:
        raise InputError(
            Setting("verify", None),
            f" leaves out the comparison with PyTorch, which is all that is known of a {model_type}: no family was "
            "written and tested for it.",
            hint=("Leave it out, or add ", Setting("unverified", True), ", which the bundle's manifest keeps."),
        )
    return None


def _write_graphs(
    checkpoint: Checkpoint,
    directory: Path,
    options: BuildOptions,
    engine_builder: EngineBuilder,
    progress: Progress,
) -> Manifest:
    """Write the graphs and engines; returns the manifest without tokenizer, files and verification."""
    from hdexport.attention.query_scale import LogScale
    from hdexport.model.half_weights import UpcastWeights

    task = options.task or checkpoint.task()
    # Before the weights are read: options that cannot be honoured are rejected at once.
    choice = choose_positions(
        checkpoint,
        task=task,
        max_len=options.max_len,
        scheme=options.scheme,
        alpha=options.alpha,
        attention_scale=options.attention_scale,
        attention=options.attention,
    )
    sentence = sentence_settings(checkpoint, task)
    expansion = sentence.multi_vector.expansion if sentence and sentence.multi_vector else None
    if expansion is not None and expansion.length > options.max_len:
        raise InputError(
            Setting("max_len", options.max_len),
            f" is too short: the model expands every query to {expansion.length} tokens.",
            hint=("Use ", Setting("max_len", expansion.length), " or more."),
        )
    sees_all = expansion is None or expansion.attend
    for line in ignored_keys(checkpoint, task):
        warn(logger, line)
    model = checkpoint.load(
        task,
        report=progress.result,
        keeps_half=not options.fp32_weights,
        check=functools.partial(check_space, options=options),
    )
    with UpcastWeights():
        positions = extended_positions(model, checkpoint, choice, options, progress)
        query_scale = LogScale.of_positions(positions)
        setups = attention_of_model(model, checkpoint, task, options, query_scale, progress)
    for setup in setups.values():
        setup.write(directory)
    progress.step(f"Tracing {checkpoint.config['model_type']} for {task}, {options.precision}")
    module = graph_module(
        model,
        checkpoint,
        task,
        setups,
        options,
        query_scale,
        pools_prompts=sentence is None or sentence.include_prompt,
        sees_all=sees_all,
    )
    parameters = sum(parameter.numel() for parameter in module.parameters())
    traced = portable_graph(
        module, directory, max_len=options.max_len, computes_in_float32=options.precision == "float32"
    )
    portable = traced.model
    manifest = manifest_of_graph(traced, module, checkpoint, positions, setups, options, parameters=parameters)
    progress.step("Lowering for ONNX Runtime")
    request = GraphRequest(options.precision, manifest.num_layers, options.ffn_chunk)
    lowered = [target.write(portable, directory, request) for target in targets_named([ONNX, *options.targets])]
    if options.ffn_chunk is not None and options.engines.variants:
        progress.result((Setting("ffn_chunk"), " is for ONNX Runtime; engines compute feed-forward networks whole."))
    engines = engine_builder.build(portable, directory, manifest=manifest, progress=progress)
    engine_builder.write_kernels(directory, manifest=manifest, progress=progress)
    graphs = (*manifest.graphs, *itertools.chain.from_iterable(lowered))
    return dataclasses.replace(manifest, graphs=graphs, engines=engines, sentence=sentence)


def _verify(
    bundle: Bundle, checkpoint: Checkpoint, grid: Grid, memory_bytes: int | None, progress: Progress
) -> Manifest:
    from hdexport.verify.fp16_overflow import check_fp16_overflow

    fp16_overflow = check_fp16_overflow(bundle)
    fp16_overflow.require_passed()
    reference = reference_of(bundle, checkpoint)
    verification = verify_bundle(bundle, reference, grid=grid, memory_bytes=memory_bytes, progress=progress)
    verification = with_texts(verification, bundle, reference, progress=progress)
    reference.release()
    record = verification.record()
    progress.verified(record, fp16_overflow.record)
    if not verification.passed:
        raise _verification_error(verification, checkpoint.family)
    manifest = dataclasses.replace(bundle.manifest, verification=record, fp16_overflow=fp16_overflow.record)
    write_manifest(bundle.path, manifest)
    return manifest


def _verification_error(verification: Verification, family: Family) -> VerificationError:
    anyway: Message = Setting("verify", None)
    if family.is_generic:
        anyway = (Setting("verify", None), " ", Setting("unverified", True))
    if not verification.failed:
        return VerificationError(
            "Nothing of the bundle could be compared with PyTorch.", hint=joined("Use ", anyway, " to write it anyway.")
        )
    first = verification.failed[0]
    return VerificationError(
        f"The bundle's outputs differ from PyTorch's in {len(verification.failed)} of {len(verification.all_checks)} "
        f"checks, so it was not written. First: {first.graph}, {first.case.batch} x {first.case.tokens} tokens, "
        f"padding {first.case.padding}: max abs error {first.max_abs_error:.2e}, min cosine {first.min_cosine:.6f}, "
        f"tolerance {first.tolerance}.{'' if first.error is None else f' {first.error}'}",
        hint=joined(
            *(verification.hints or ["Please report the model and the versions that `hdexport doctor` prints."]),
            " ",
            anyway,
            " writes it anyway.",
        ),
        failed=verification.failed,
    )


def _warn_of_untrained_positions(positions: Positions, family: Family) -> None:
    if positions.rows <= positions.base:
        return
    if positions.form == PositionForm.COMPUTED:
        logger.warning(
            "The bundle accepts positions %d to %d, which the model was not trained with.%s%s%s",
            positions.base,
            positions.rows - 1,
            *(
                (" ", Setting("rope_factor"), " scales the rotary frequencies.")
                if family.scales_rope and positions.rope_factor is None
                else ("", "", "")
            ),
        )
        return
    logger.warning(
        "The model was trained with %d positions, and the bundle accepts %d tokens: evaluate long texts before you "
        "rely on their outputs.",
        positions.trained,
        positions.rows,
    )
