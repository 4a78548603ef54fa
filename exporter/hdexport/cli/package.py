"""Write a bundle as the files that another system loads, run them by that system's rules, and compare the outputs with
the bundle's: cosine at least 0.99999, or 0.97 with 8-bit weights, for texts of 1, 20, 600 and 3000 words, or nothing is
written. docs/targets.md has a row for each system."""

from __future__ import annotations

import argparse
import shlex

from hdexport.cli.arguments import local_path, options_as, whole_number
from hdexport.cli.process import outlive_readers
from hdruntime.backends.registry import backend_names

SUMMARY = "write a bundle as the files that another system loads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from hdexport.package.graph import IR_VERSIONS, OPSETS
    from hdexport.package.targets import names

    parser.add_argument("bundle", metavar="BUNDLE", type=local_path, help="directory that `hdexport build` made")
    parser.add_argument(
        "--for",
        dest="target",
        metavar="SYSTEM",
        choices=list(names()),
        required=True,
        help=f"the system: {', '.join(names())}",
    )
    parser.add_argument("-o", "--output", metavar="FOLDER", type=local_path, required=True, help="directory to write")
    parser.add_argument("--force", action="store_true", help="replace a package that this command wrote")
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="write the package without running and comparing it"
    )
    parser.add_argument(
        "--max-seq-length",
        metavar="N",
        type=whole_number,
        help="tokens to which the package's tokenizer truncates (default: the bundle's number)",
    )
    parser.add_argument("--name", help="name of the model in the system (default: the bundle's)")
    parser.add_argument(
        "--no-prompts",
        dest="prompts",
        action="store_false",
        help="texts have no prompts, or have them already: the package names none of the model's",
    )
    graph = parser.add_argument_group("the graph (defaults: what the system reads)")
    graph.add_argument(
        "--opset", metavar="N", type=whole_number, help=f"opset of ONNX's operators, {OPSETS[0]} to {OPSETS[-1]}"
    )
    graph.add_argument(
        "--ir-version",
        metavar="N",
        type=whole_number,
        help=f"version of ONNX's format, {IR_VERSIONS[0]} to {IR_VERSIONS[-1]}",
    )
    graph.add_argument(
        "--dtype",
        choices=["float32", "float16", "int8"],
        help="float32, float16: type of the arithmetic, weights stay as the bundle stores them; int8: matmuls and "
        "tables with 8-bit weights (default: float32; for transformers.js a file for each)",
    )
    graph.add_argument(
        "--single-file",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="weights inside the file, or outside it (default: inside up to 2 GB)",
    )
    graph.add_argument(
        "--token-type-ids",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="an input token_type_ids, which is ignored if the model has none",
    )
    graph.add_argument(
        "--pooled",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the pooled embedding as every token's state, for readers that pool themselves",
    )
    parser.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="prompt that the graph puts before every text, where the system passes texts (default: the model's)",
    )
    parser.add_argument(
        "--accept-differences",
        metavar="KIND[,KIND]",
        type=lambda value: tuple(value.split(",")),
        default=(),
        help="kinds of texts whose token ids may differ from the bundle's tokenizer, where the system tokenizes; the "
        "command names those that differ",
    )
    parser.add_argument(
        "--backend",
        choices=["auto", *backend_names()],
        default="auto",
        help="what runs the bundle, where hdexport's runtime is the system's model (default: auto)",
    )


def run(options: argparse.Namespace) -> int:
    from hdexport.package.write import PackageOptions, package_bundle
    from hdruntime.bundle.reader import open_bundle

    outlive_readers()
    packaged = package_bundle(open_bundle(options.bundle), options_as(PackageOptions, options))
    for each in packaged.compared:
        print(f"{each.words:5} words, {each.dtype}: {each.output} has the cosine {each.cosine:.7f} with the bundle's")
    if packaged.not_compared:
        print(f"Not compared with the bundle: {packaged.not_compared}.")
    for note in packaged.notes:
        print(f"{note}.")
    print(f"{packaged.path}: for {packaged.target.system}")
    print(f"Next: {packaged.target.next_step.replace('FOLDER', shlex.quote(str(packaged.path)))}")
    return 0
