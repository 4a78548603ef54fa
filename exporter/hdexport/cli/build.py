"""Build a bundle from a checkpoint: extend positions, export ONNX graphs and engines, compare them with PyTorch.

The bundle appears at the output when it is complete. After an error, the output is unchanged.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.cli.arguments import (
    add_attention_arguments,
    add_attention_scale_argument,
    add_engine_arguments,
    add_int8_arguments,
    add_position_arguments,
    add_revision_argument,
    add_tokenizer_argument,
    add_trust_arguments,
    add_verify_memory_argument,
    engine_options,
    int8_options,
    local_path,
    options_as,
    path_or_url,
    reject_engine_options,
    rope_factor,
    trust_of,
    whole_number,
)
from hdexport.cli.process import outlive_readers, whole_or_nothing
from hdexport.support.process_settings import let_threads_sleep

if TYPE_CHECKING:
    from hdexport.build import BuildOptions
    from hdexport.cli.progress import TerminalProgress
    from hdruntime.bundle.manifest import Dtype, Manifest

SUMMARY = "build a bundle from a Hugging Face checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from hdexport.graph.targets.registry import target_names, targets
    from hdruntime.bundle.manifest import Task

    tasks = [str(task) for task in Task]
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=path_or_url,
        nargs="?",
        help="directory of a checkpoint, or organisation/name on the Hugging Face Hub (default: the current directory "
        "if it has a config.json, else the sample model all-MiniLM-L6-v2)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="BUNDLE",
        type=local_path,
        help="directory to write (default: ./<model name>-<max_len>-<dtype>)",
    )
    parser.add_argument("--force", action="store_true", help="replace the bundle at the output")
    parser.add_argument(
        "--task",
        metavar="TASK",
        choices=["auto", *tasks],
        default="auto",
        help=f"{', '.join(tasks)}, or auto (default): the task of the checkpoint's configuration and "
        "sentence-transformers modules",
    )
    add_revision_argument(parser)
    add_trust_arguments(parser)
    types = parser.add_mutually_exclusive_group()
    types.add_argument("--fp16", action="store_true", help="weights and activations in float16 (default: float32)")
    types.add_argument("--bf16", action="store_true", help="weights and activations in bfloat16")
    types.add_argument(
        "--fp32-weights",
        action="store_true",
        help="store weights in float32 that the checkpoint has in half precision (default: a model of 256 MB or more "
        "keeps the checkpoint's dtype, and its graphs upcast the weights; outputs are equal)",
    )
    parser.add_argument(
        "--adapter",
        metavar="NAME",
        help="LoRA adapter of the checkpoint to merge into the weights, such as retrieval.passage of "
        "jina-embeddings-v3; for X-MOD a language, such as en_XX (default: as transformers loads the model)",
    )
    tokenizer = parser.add_mutually_exclusive_group()
    add_tokenizer_argument(tokenizer)
    tokenizer.add_argument(
        "--no-tokenizer",
        action="store_const",
        const=None,
        dest="tokenizer",
        help="build a bundle that accepts token ids only, and ignore the checkpoint's tokenizer",
    )
    parser.add_argument(
        "--recurrence",
        metavar="TOKENS",
        type=whole_number,
        help="tokens of earlier segments in the recurrent state, so that a document of any length streams through the "
        "model in bounded memory (default: mem_len of an XLNet or Transformer-XL checkpoint; none for other models)",
    )
    parser.add_argument(
        "--ffn-chunk",
        metavar="TOKENS",
        type=whole_number,
        help="maximum tokens of a feed-forward chunk in ONNX Runtime, which bounds its memory; 256 costs no time, and "
        "outputs differ by rounding only (default: no chunks). Graphs for OpenVINO and engines ignore it",
    )
    add_int8_arguments(parser)
    parser.add_argument(
        "--verify",
        choices=["quick", "full", "none"],
        default="quick",
        help="comparison with PyTorch before the bundle is written: quick (default), about ten cases per graph; full, "
        "all cases of hdexport verify; none. A model type without a family is always compared in full",
    )
    parser.add_argument("--no-verify", action="store_const", dest="verify", const="none", help="same as --verify none")
    add_verify_memory_argument(parser)
    parser.add_argument(
        "--unverified",
        action="store_true",
        help="allow --verify none for a model type without a family; the manifest records it",
    )
    positions = parser.add_argument_group("positions")
    positions.add_argument(
        "--max-len", metavar="TOKENS", type=whole_number, help="maximum input length (default: that of the checkpoint)"
    )
    add_position_arguments(positions, alpha="0.05 for embeddings and 0.4 for other tasks")
    add_attention_scale_argument(positions)
    positions.add_argument(
        "--rope",
        dest="rope_factor",
        metavar="ntk:FACTOR",
        type=rope_factor,
        help="NTK scaling of rotary positions, for --max-len above the trained length: multiply the RoPE base by "
        "FACTOR, above 1, in layers with full attention. Outputs for short texts change too (default: no scaling)",
    )
    add_attention_arguments(
        parser.add_argument_group("attention"),
        effect="attention with cost and memory linear in tokens that replaces the dense attention of a BERT-like "
        "model. Weights are kept and outputs change: fine-tune the model or measure it (default: the model's "
        "attention).",
    )
    engines = parser.add_argument_group("engines")
    add_engine_arguments(engines)
    engines.add_argument(
        "--target",
        action="append",
        choices=target_names(),
        help=f"what to build; repeatable. {'; '.join(target.help for target in targets())}; auto (default): everything "
        "that the installed packages can build here. --target onnx builds no engine",
    )


def run(options: argparse.Namespace) -> int:
    from hdexport.cli.progress import TerminalProgress
    from hdruntime.bundle.verification import Status

    outlive_readers()
    let_threads_sleep()
    with TerminalProgress(listed=tuple(Status) if options.verbose else (Status.FAIL,)) as progress:
        # The first line shows before heavy imports.
        progress.step("Starting")
        from hdexport.build import build

        build_options = _build_options(options, progress)
        with whole_or_nothing(build_options.output):
            manifest = build(build_options, progress)
    _print_summary(build_options.output, manifest, graphs=build_options.targets)
    return 0


def _build_options(options: argparse.Namespace, progress: TerminalProgress) -> BuildOptions:
    from hdexport.attention.registry import attention_from_spec
    from hdexport.build import BuildOptions
    from hdexport.checkpoint import default_model, find_checkpoint
    from hdexport.graph.targets.registry import chosen_targets, graph_targets, variants_of
    from hdexport.verify.grid import Grid
    from hdruntime.bundle.manifest import Scheme, Task

    int8 = int8_options(options)
    model = options.model
    if model is None:
        model, reason = default_model()
        progress.result(f"Model: {model.resolve()} (no MODEL was given: {reason})")
    checkpoint = find_checkpoint(model, revision=options.revision, trust=trust_of(options))
    precision: Dtype = "float16" if options.fp16 else "bfloat16" if options.bf16 else "float32"
    max_len = options.max_len or checkpoint.usual_len
    task = None if options.task == "auto" else Task(options.task)
    targets = chosen_targets(options.target or ["auto"])
    variants = variants_of(targets)
    if not variants:
        why = "--target asks for ONNX only" if options.target else "none can be built here, see: hdexport doctor"
        reject_engine_options(options, why=why, kernels=("sm", "attention_impl"))
    return options_as(
        BuildOptions,
        options,
        model=checkpoint,
        output=Path(options.output or f"{checkpoint.name}-{max_len}-{precision}"),
        max_len=max_len,
        text_length=options.max_len,
        precision=precision,
        task=task,
        scheme=Scheme(options.positions),
        attention_scale=None if options.attention_scale == "auto" else options.attention_scale,
        attention=attention_from_spec(options.attention, vars(options)),
        targets=graph_targets(targets),
        int8=int8,
        engines=engine_options(
            options, variants, max_len=max_len, one_profile=checkpoint.family.shares_layers, previous=None
        ),
        verify=None if options.verify == "none" else Grid(options.verify),
        trust=trust_of(options),
        command=options.command_line,
    )


def _text_length(manifest: Manifest) -> str | None:
    """Default maximum length of a text and how to change it; None if texts may be as long as the bundle accepts."""
    from hdruntime.tasks.of_bundle import class_of
    from hdruntime.text.lengths import checked_length, model_length

    role = class_of(manifest.task).role
    own = model_length(manifest, role)
    if own >= manifest.max_len:
        return None
    used = checked_length(None, manifest, max_tokens=manifest.max_len, role=role)
    if used == own:
        return f"{own} tokens, the checkpoint's limit; --max-seq-length bundle raises it to {manifest.max_len}"
    return f"{used} tokens, from --max-len; --max-seq-length model lowers it to {own}, the checkpoint's limit"


def _print_summary(output: Path, manifest: Manifest, *, graphs: Sequence[str]) -> None:
    """Print what was built and the next commands; `graphs` are the targets that wrote graphs."""
    from hdexport.model.task import TASKS

    size_bytes = sum(record.size_bytes for record in manifest.files.values())
    print(
        f"Bundle:      {output}, {size_bytes / 1e6:.1f} MB, {manifest.dtype}, {manifest.task}, 1 to "
        f"{manifest.max_len} tokens"
    )
    without = " ".join(f"--target {name}" for name in ("onnx", *graphs))
    for engine in manifest.engines:
        size_mb = manifest.files[engine.file].size_bytes / 1e6
        print(f"Engine:      {engine.file}, {size_mb:.1f} MB, for NVIDIA GPUs only; to build without it: {without}")
    if length := _text_length(manifest):
        print(f"Text length: {length}")
    place = shlex.quote(str(output))
    print(f"Inspect:     hdexport inspect {place}")
    if manifest.tokenizer is not None:
        print(f"Run:         hdexport run {place} INPUT -o OUTPUT")
    positions = manifest.positions
    # Only embeddings can be evaluated without labels, and texts need a tokenizer.
    embeds_texts = manifest.tokenizer is not None and TASKS[manifest.task].vectors == "texts"
    if embeds_texts and positions.rows > positions.base:
        print(f"Evaluate:    hdexport quality {place} --texts FILE")
