"""The pipeline: a checkpoint becomes a bundle."""

from __future__ import annotations

__all__ = ["BuildOptions", "build"]

import dataclasses
import datetime
import importlib.metadata
import logging
import platform
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hdexport.attention.kind import OperatorNode, Setup, Subject
from hdexport.attention.kinds import attention_records, attention_setups, check_unseen_tokens
from hdexport.checkpoint import Checkpoint, find_checkpoint
from hdexport.checkpoint.extension import read_extension
from hdexport.checkpoint.position_choice import PositionChoice, choose_positions
from hdexport.checkpoint.sentence_settings import sentence_settings
from hdexport.checkpoint.tokenizer_files import first_special_id, write_tokenizer
from hdexport.engines.build import EngineBuilder, EngineOptions
from hdexport.families import Family, convertible_model_types
from hdexport.model.memories import counts_tokens
from hdexport.model.positions import LONGEST, Form, Scheme
from hdexport.model.tasks import Task
from hdexport.quantize.options import Int8Options
from hdexport.support.garbage_collection import rare_garbage_collection
from hdexport.support.progress import Progress
from hdexport.verify.grid import Grid
from hdplugins import ONNX_DOMAIN
from hdruntime.bundle.manifest import (
    AttentionScale,
    Dtype,
    GraphFile,
    Manifest,
    Positions,
    Role,
    TensorDtype,
    TensorSpec,
)
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.writer import seal, staged_bundle, write_manifest
from hdruntime.constants import (
    CPU_LOWERING,
    CUDA_LOWERING,
    FORMAT_VERSION,
    PORTABLE_LOWERING,
)
from hdruntime.errors import ExportError, InputError, VerificationError

if TYPE_CHECKING:
    import onnx_ir
    from transformers import PreTrainedModel

    from hdexport.attention.query_scale import LogScale
    from hdexport.model.graph_module import GraphModule

logger = logging.getLogger(__name__)

_PORTABLE_FILE = "model.onnx"
_WEIGHTS_FILE = "model.onnx.data"
_CPU_FILE = "onnxruntime_cpu.onnx"
_CUDA_FILE = "onnxruntime_cuda.onnx"

# Smaller constants stay in the graph file, where shape inference of every tool finds them.
_INLINE_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Which bundle is built, and how.

    Attributes:
        model: a checkpoint's directory, ``organisation/name[@revision]`` on the Hugging Face hub, or what
            `find_checkpoint` found.
        output: the bundle's directory.
        max_len: the longest input, in tokens.
        precision: ``float32``, ``float16`` or ``bfloat16``, the type of weights and activations.
        task: None infers it from the checkpoint.
        adapter: name of the checkpoint's adapter that is merged into its weights; None for none.
        scheme: source of the positions after the checkpoint's.
        alpha: weight of the coarse position in the hierarchical scheme; None chooses, see `choose_positions`.
        attention_scale: ``logn`` multiplies queries by max(1, ln n / ln positions of the checkpoint), for n tokens that
            they see; ``none`` leaves them; None chooses.
        rope_factor: of the base of rotary positions in layers that attend to the whole text, above 1; None leaves it.
        attention: requests to kinds of attention, by the kinds' names, as `attention_from_spec` reads them; empty
            keeps the model's attention.
        recurrence: tokens of earlier calls that the model remembers, at least 2; None for what its checkpoint says.
        ffn_chunk: most tokens of a batch, at least 1, that a feed-forward network computes at once in ONNX Runtime;
            None for all.
        openvino: whether the bundle gets graphs for OpenVINO, too.
        int8: how graphs for CPUs with int8 weights are made; None makes none.
        engines: engines beside the ONNX graphs.
        verify: cases in which the bundle is compared with PyTorch before it appears; None skips the comparison.
        force: replace a bundle at `output`.
        allow_pickle: also read pickled weights.
        command: the command line, for the record.
    """

    model: str | Path | Checkpoint
    output: Path
    max_len: int
    precision: Dtype = "float32"
    task: Task | None = None
    adapter: str | None = None
    scheme: Scheme = Scheme.HIERARCHICAL
    alpha: float | None = None
    attention_scale: AttentionScale | None = None
    rope_factor: float | None = None
    attention: Mapping[str, Any] = field(default_factory=dict)
    recurrence: int | None = None
    ffn_chunk: int | None = None
    openvino: bool = False
    int8: Int8Options | None = None
    engines: EngineOptions = field(default_factory=EngineOptions)
    verify: Grid | None = Grid.QUICK
    force: bool = False
    allow_pickle: bool = False
    command: str = ""


def build(options: BuildOptions, progress: Progress | None = None) -> Manifest:
    """Build a bundle.

    The bundle appears at ``options.output`` when it is complete and verified; after an error, what was there before is
    still there.

    Returns:
        The bundle's manifest.

    Raises:
        HdexportError: one of `hdruntime.errors`.
    """
    progress = progress or Progress()
    engine_builder = EngineBuilder(options.engines)
    _check_ffn_chunk(options.ffn_chunk)
    _check_recurrence(options.recurrence)
    with staged_bundle(options.output, force=options.force) as directory, rare_garbage_collection():
        progress.step("Reading the checkpoint")
        checkpoint = _checkpoint(options)
        for remark in checkpoint.remarks:
            progress.result(remark)
        tokenizer = write_tokenizer(checkpoint, directory)
        manifest = dataclasses.replace(
            _write_graphs(checkpoint, directory, options, engine_builder, progress), tokenizer=tokenizer
        )
        shutil.copyfile(checkpoint.path / "config.json", directory / "config.json")
        manifest = seal(directory, manifest)
        if options.int8 is not None:
            from hdexport.quantize.bundle import quantize_bundle

            manifest = quantize_bundle(Bundle(directory, manifest), options.int8, progress)
        if options.verify:
            progress.step("Verifying against PyTorch")
            manifest = _verify(Bundle(directory, manifest), checkpoint, options, options.verify, progress)
        progress.step("Writing the bundle")
    _warn_of_untrained_positions(manifest.positions, checkpoint.family)
    return manifest


def _check_ffn_chunk(tokens: int | None) -> None:
    if tokens is not None and not 1 <= tokens <= LONGEST:
        raise InputError(
            f"--ffn-chunk is {tokens}; a chunk has 1 to {LONGEST} tokens.\n"
            "Give a number such as 256, or leave it out: feed-forward networks then compute all tokens at once."
        )


def _check_recurrence(tokens: int | None) -> None:
    # A graph for one token could not be told from a graph for any number of them.
    if tokens is not None and not 2 <= tokens <= LONGEST:
        raise InputError(
            f"--recurrence is {tokens}; a model remembers 2 to {LONGEST} tokens.\n"
            "Give a number such as 512, or leave it out."
        )


def _checkpoint(options: BuildOptions) -> Checkpoint:
    # Not found again: on the hub, a branch may have moved since.
    found = options.model
    if not isinstance(found, Checkpoint):
        found = find_checkpoint(found, allow_pickle=options.allow_pickle)
    return found.with_adapter(options.adapter)


def _write_graphs(
    checkpoint: Checkpoint,
    directory: Path,
    options: BuildOptions,
    engine_builder: EngineBuilder,
    progress: Progress,
) -> Manifest:
    """Write the graphs and engines; returns the manifest without tokenizer, files and verification."""
    task = options.task or checkpoint.task()
    # Before the weights are read: what cannot be honoured is said at once.
    sentence = sentence_settings(checkpoint, task)
    expansion = sentence.multi_vector.expansion if sentence and sentence.multi_vector else None
    if expansion is not None and expansion.length > options.max_len:
        raise InputError(
            f"--max-len is {options.max_len}, and the model expands every query to {expansion.length} tokens.\n"
            f"Give {expansion.length} or more."
        )
    sees_all = expansion is None or expansion.attend
    choice = choose_positions(
        checkpoint,
        task=task,
        max_len=options.max_len,
        scheme=options.scheme,
        alpha=options.alpha,
        attention_scale=options.attention_scale,
        attention=options.attention,
    )
    model = checkpoint.load(task, allow_pickle=options.allow_pickle, report=progress.result)
    positions = _extend(model, checkpoint, choice, options, progress)
    _stretch(model, checkpoint, positions, options)
    positions = dataclasses.replace(positions, rope_factor=options.rope_factor)
    query_scale = _query_scale(positions)
    setups = _attention(model, checkpoint, task, options, query_scale, progress)
    for setup in setups.values():
        setup.write(directory)
    progress.step(f"Tracing {checkpoint.config['model_type']} for {task.value}, {options.precision}")
    module = _graph_module(
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
    portable = _export(module, directory, options)
    progress.step("Lowering for ONNX Runtime")
    graphs = _lower(portable, directory, options, layers=module.model.config.num_hidden_layers)
    if options.ffn_chunk is not None and options.engines.flavours:
        progress.result("--ffn-chunk is for ONNX Runtime; engines compute feed-forward networks whole.")
    manifest = _describe(portable, module, checkpoint, positions, setups, options, parameters=parameters)
    engines = engine_builder.build(portable, directory, manifest=manifest, progress=progress)
    return dataclasses.replace(manifest, graphs=graphs, engines=engines, sentence=sentence)


def _stretch(model: PreTrainedModel, checkpoint: Checkpoint, positions: Positions, options: BuildOptions) -> None:
    from hdexport.model.rotary import check_rope_factor, stretch_rotary

    if options.rope_factor is not None:
        model_type = checkpoint.config["model_type"]
        lengths = {"max_len": positions.rows, "base": positions.base}
        check_rope_factor(options.rope_factor, checkpoint.family, model_type=model_type, **lengths)
        stretch_rotary(model, options.rope_factor)


def _query_scale(positions: Positions) -> LogScale | None:
    """The factor of the queries; None where no text is long enough for another than 1."""
    from hdexport.attention.query_scale import LogScale

    query_scale = LogScale.of_positions(positions)
    return None if query_scale is None or not query_scale.changes(positions.rows) else query_scale


def _attention(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    task: Task,
    options: BuildOptions,
    query_scale: LogScale | None,
    progress: Progress,
) -> dict[str, Setup]:
    """The model's attention, its own or the requested one; reports what the latter does to the answers."""
    subject = Subject(
        model=model,
        family=checkpoint.family,
        task=task,
        max_len=options.max_len,
        recurrence=options.recurrence,
        query_scale=query_scale,
        asks_for_scale=options.attention_scale is not None,
        first_special_id=lambda: first_special_id(checkpoint),
        convertible=convertible_model_types,
    )
    extension = read_extension(checkpoint.config, checkpoint.path / "config.json")
    if extension is not None and extension.attention is not None and not options.attention:
        logger.warning(
            "The checkpoint's positions were tuned with --attention %s, and this bundle attends as the model did "
            "before: build with that option.",
            extension.attention,
        )
    setups = attention_setups(options.attention, subject)
    for setup in setups.values():
        if setup.remark is not None:
            progress.result(setup.remark)
    return setups


def _extend(
    model: PreTrainedModel, checkpoint: Checkpoint, choice: PositionChoice, options: BuildOptions, progress: Progress
) -> Positions:
    from hdexport.model.precision import Precision
    from hdexport.model.surgery import extend_positions

    if checkpoint.family.learned_positions:
        progress.step(f"Extending positions to {options.max_len} ({choice.describe()})")
    if choice.remark:
        progress.result(choice.remark)
    if choice.force:
        progress.result(f"Positions: {choice.describe()}: {choice.reason}. Or: {choice.force}.")
    positions = extend_positions(
        model,
        checkpoint.family,
        max_len=options.max_len,
        scheme=choice.scheme,
        alpha=choice.alpha,
        itemsize=Precision(options.precision).bytes_per_value,
    )
    return dataclasses.replace(
        positions, attention_scale=choice.attention_scale, trained=choice.trained, reason=choice.reason
    )


def _warn_of_untrained_positions(positions: Positions, family: Family) -> None:
    if positions.rows <= positions.base:
        return
    if positions.form == Form.COMPUTED.value:
        logger.warning(
            "Positions are computed, not learned: %d to %d are served, but the model never saw them.%s",
            positions.base,
            positions.rows - 1,
            " --rope ntk:FACTOR stretches those of training."
            if family.stretches_rotary and positions.rope_factor is None
            else "",
        )
        return
    logger.warning(
        "The model was trained with %d positions, and this bundle takes up to %d tokens: measure its answers to long "
        "texts before you rely on them.",
        positions.trained,
        positions.rows,
    )


def _graph_module(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    task: Task,
    setups: Mapping[str, Setup],
    options: BuildOptions,
    query_scale: LogScale | None,
    *,
    pools_prompts: bool,
    sees_all: bool,
) -> GraphModule:
    from hdexport.attention.interface import use_operators
    from hdexport.checkpoint.heads import task_head
    from hdexport.model.activations import fuse_gelu
    from hdexport.model.graph_module import GraphModule, graph_inputs
    from hdexport.model.precision import Precision, cast_model
    from hdexport.model.surgery import continue_positions, fold_positions, fold_token_types

    family = checkpoint.family
    memories = next((setup.memories for setup in setups.values() if setup.memories is not None), None)
    has_token_types = family.has_token_types(model.config, task)
    folded_token_types = not has_token_types and fold_token_types(model, family)
    if memories is not None and counts_tokens(memories.specs):
        continue_positions(model, family, memories)
    folded_positions = fold_positions(model, family)
    cast_model(model, Precision(options.precision))
    fuse_gelu(model)
    if not any(setup.is_own for setup in setups.values()):
        family.adapt(model)
    for setup in setups.values():
        setup.adapt(model, family)
    use_operators(model, query_scale)
    return GraphModule(
        model,
        task,
        inputs=graph_inputs(
            has_token_types=has_token_types,
            token_type_separator_id=family.token_type_separator_id(model.config, task),
            pools_prompts=pools_prompts,
            sees_all=sees_all,
            others=[spec for setup in setups.values() for spec in setup.inputs],
        ),
        folded_token_types=folded_token_types,
        folded_positions=folded_positions,
        head=task_head(checkpoint.path, task, hidden_size=family.token_width(model.config)),
        memories=memories,
    ).eval()


def _export(module: GraphModule, directory: Path, options: BuildOptions) -> onnx_ir.Model:
    """Trace, complete and write the portable graph; reads it back, its weights on disk, and frees `module`'s."""
    import onnx_ir as ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    from hdexport.graph.passes.attach_functions import attach_functions
    from hdexport.graph.passes.lay_out_weights import lay_out_weights
    from hdexport.graph.passes.pool_in_blocks import pools_products
    from hdexport.graph.tracing import trace

    model = trace(module, max_len=options.max_len, vocab_size=module.model.config.vocab_size)
    attach_functions(model)
    ClearMetadataAndDocStringPass()(model)
    lay_out_weights(model)
    if module.head is not None and module.head.pools_wide_values and not pools_products(model):
        raise ExportError(
            f"The graph of a {module.model.config.model_type} pools no product of tokens with a weight, so that logits "
            "of all tokens would be in memory at once.\n"
            "Please report the model and the versions that `hdexport doctor` prints."
        )
    model.producer_name = "hdexport"
    path = directory / _PORTABLE_FILE
    ir.save(model, path, external_data=_WEIGHTS_FILE, size_threshold_bytes=_INLINE_BYTES)
    _let_go_of_weights(module, model)
    return ir.load(path)


def _let_go_of_weights(module: GraphModule, model: onnx_ir.Model) -> None:
    """Free the weights, which are on the disk, although the module and the graph may still be referenced.

    The rewrite rules of onnxscript live as long as the process and keep everything in the last graph alive.
    """
    for value in model.graph.initializers.values():
        value.const_value = None
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.new_empty(0)


def _lower(portable: onnx_ir.Model, directory: Path, options: BuildOptions, *, layers: int) -> tuple[GraphFile, ...]:
    """Write the graphs for ONNX Runtime and OpenVINO, which share the portable graph's weights.

    That for ONNX Runtime on a GPU and that for texts without padding are only written where they differ.
    """
    import onnx_ir as ir

    from hdexport.graph.lowering.onnxruntime_cpu import lower_for_onnxruntime_cpu
    from hdexport.graph.lowering.onnxruntime_cuda import lower_for_onnxruntime_cuda
    from hdexport.graph.lowering.openvino.graph_files import write_openvino_graphs
    from hdexport.graph.passes.chunk_feed_forward import chunk_feed_forward
    from hdexport.graph.passes.pool_in_blocks import pool_in_blocks

    dtype = options.precision
    graphs = [GraphFile(file=_PORTABLE_FILE, lowering=PORTABLE_LOWERING, dtype=dtype)]
    for_gpu, chunked = portable.clone(), 0
    if options.ffn_chunk is not None:
        chunked = chunk_feed_forward(for_gpu, tokens=options.ffn_chunk, layers=layers)
    ir.save(lower_for_onnxruntime_cpu(for_gpu.clone()), directory / _CPU_FILE)
    graphs.append(GraphFile(file=_CPU_FILE, lowering=CPU_LOWERING, dtype="float32"))
    pooled = pool_in_blocks(for_gpu)
    if lower_for_onnxruntime_cuda(for_gpu) or chunked or pooled:
        ir.save(for_gpu, directory / _CUDA_FILE)
        graphs.append(GraphFile(file=_CUDA_FILE, lowering=CUDA_LOWERING, dtype=dtype))
    if options.openvino:
        graphs += write_openvino_graphs(portable, directory)
    return tuple(graphs)


def _describe(
    portable: onnx_ir.Model,
    module: GraphModule,
    checkpoint: Checkpoint,
    positions: Positions,
    setups: Mapping[str, Setup],
    options: BuildOptions,
    *,
    parameters: int,
) -> Manifest:
    from hdexport.graph.passes.graph_nodes import attributes_of, operator_nodes, operator_of

    config, task = module.model.config, module.task
    nodes = [OperatorNode(operator_of(node).name, attributes_of(node)) for node in operator_nodes(portable)]
    if any(spec.role is Role.ATTENDED for spec in module.inputs):
        check_unseen_tokens(setups, nodes, model_type=checkpoint.config["model_type"])
    labelled = task in (Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION)
    return Manifest(
        format_version=FORMAT_VERSION,
        name=checkpoint.name,
        model_type=checkpoint.config["model_type"],
        task=task.value,
        max_len=options.max_len,
        dtype=options.precision,
        hidden_size=_token_width(portable, default=checkpoint.family.token_width(config)),
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        parameters=parameters,
        positions=positions,
        operators=dict(Counter(f"{ONNX_DOMAIN}::{node.operator}" for node in nodes)),
        attention=tuple(attention_records(setups, nodes)),
        inputs=module.inputs,
        outputs=tuple(_tensor_spec(value) for value in portable.graph.outputs),
        graphs=(),
        engines=(),
        tokenizer=None,
        padding=next((setup.padding for setup in setups.values() if setup.padding is not None), None),
        labels=tuple(config.id2label[index] for index in sorted(config.id2label)) if labelled else (),
        verification=None,
        made_by=_made_by(checkpoint, options),
        ffn_chunk=options.ffn_chunk,
        document_tokens=options.max_len if counts_tokens(module.inputs) else None,
        adapter=checkpoint.adapter,
        files={},
    )


def _token_width(portable: onnx_ir.Model, *, default: int) -> int:
    """Width of the vectors that a graph gives for tokens; the default where it gives none."""
    shapes = {str(value.name): value.shape for value in portable.graph.outputs}
    shape = shapes.get("last_hidden_state")
    return default if shape is None else int(shape[2])


def _tensor_spec(value: onnx_ir.Value) -> TensorSpec:
    assert value.name is not None
    assert value.dtype is not None
    assert value.shape is not None
    return TensorSpec(
        name=value.name,
        dtype=cast(TensorDtype, str(value.dtype.numpy())),
        shape=tuple(axis if isinstance(axis, int) else str(axis) for axis in value.shape),
    )


def _made_by(checkpoint: Checkpoint, options: BuildOptions) -> dict[str, str]:
    packages = ("hdexport", "torch", "transformers", "onnx", "onnxruntime")
    return {
        "command": options.command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "source": checkpoint.source,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def _verify(bundle: Bundle, checkpoint: Checkpoint, options: BuildOptions, grid: Grid, progress: Progress) -> Manifest:
    from hdexport.verify import verify_bundle
    from hdexport.verify.half_range import check_half_range
    from hdexport.verify.pytorch_reference import reference_of

    half_range = check_half_range(bundle, report=progress.result)
    if half_range.problem is not None:
        raise VerificationError(half_range.problem)
    reference = reference_of(bundle, checkpoint, allow_pickle=options.allow_pickle)
    found = verify_bundle(bundle, reference, grid=grid, report=progress.check)
    for line in found.summary():
        progress.result(line)
    if not found.passed:
        raise VerificationError(
            "The bundle's answers differ from PyTorch's in the checks marked FAILED above, so it was not written.\n"
            "Please report the model and the versions that `hdexport doctor` prints; --verify none writes it anyway."
        )
    manifest = dataclasses.replace(bundle.manifest, verification=found.record(), half_range=half_range.record)
    write_manifest(bundle.path, manifest)
    return manifest
