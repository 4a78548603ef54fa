"""Serve a bundle over HTTP: OpenAI's /v1/embeddings, /rerank as Cohere and Jina have it, /embed_sparse, /predict.

One process, one bundle; the routes that fit its task. Texts of all requests share batches of similar lengths.
/health, /ready, /metrics for Prometheus. SIGTERM answers what runs, then ends. See docs/serve.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hdexport.cli.arguments import (
    add_max_seq_length_argument,
    add_precision_argument,
    local_path,
    path_or_url,
    whole_number,
)
from hdexport.cli.flags import flag
from hdruntime.backends.registry import backend_names
from hdruntime.errors import InputError, Setting
from hdruntime.os_errors import reason_of
from hdruntime.serve.options import OptionHelp, ServeOptions
from hdruntime.whole_files import read_bounded

SUMMARY = "serve a bundle over HTTP: embeddings, rerank, classification"

_KEY = "HDEXPORT_API_KEY"
_MAX_KEY_BYTES = 2**16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle",
        metavar="BUNDLE",
        type=path_or_url,
        help="directory of a bundle, or organisation/name[@revision] on the Hugging Face Hub",
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=local_path,
        help=f"file with the API key that requests send as Authorization: Bearer KEY (default: the variable {_KEY}, "
        "else no key)",
    )
    backend = parser.add_argument_group("backend")
    backend.add_argument(
        "--backend",
        choices=["auto", *backend_names()],
        default="auto",
        help="backend that runs the bundle (default: auto, the first that runs here)",
    )
    add_precision_argument(backend)
    backend.add_argument(
        "--threads", metavar="N", type=whole_number, help="number of CPU threads (default: one per usable core)"
    )
    add_max_seq_length_argument(backend)
    _add_server_options(parser)


def run(options: argparse.Namespace) -> int:
    from hdruntime.serve import serve

    values = {each.name: getattr(options, each.name) for each in fields(ServeOptions) if each.metadata}
    values["cors_origin"] = tuple(options.cors_origin)
    serve(
        options.bundle,
        backend=options.backend,
        threads=options.threads,
        precision=options.precision,
        max_seq_length=options.max_seq_length,
        options=ServeOptions(api_key=_api_key(options.api_key_file), **values),
        on_ready=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return 0


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for each field of `ServeOptions` that has a help."""
    types, groups = get_type_hints(ServeOptions), dict[str, Any]()
    for each in fields(ServeOptions):
        shown = each.metadata.get("help")
        if shown is None:
            continue
        if shown.group not in groups:
            groups[shown.group] = parser.add_argument_group(shown.group) if shown.group else parser
        default = shown.default or str(each.default).removesuffix(".0")
        name, text = flag(Setting(each.name)), f"{shown.text} (default: {default})"
        if shown.choices:
            how: dict[str, Any] = {"choices": shown.choices, "default": each.default}
        elif types[each.name] == tuple[str, ...]:
            how = {"metavar": shown.metavar, "action": "append", "default": []}
        else:
            how = {"metavar": shown.metavar, "type": _parser_of(types[each.name], shown), "default": each.default}
        groups[shown.group].add_argument(name, dest=each.name, help=text, **how)


def _parser_of(kind: Any, shown: OptionHelp) -> Callable[[str], object]:
    if int not in (kind, *get_args(kind)):
        return float if kind is float else str
    least = int(shown.minimum or 0)
    if shown.maximum is None:
        return partial(whole_number, minimum=least)
    return partial(whole_number, minimum=least, maximum=int(shown.maximum))


def _api_key(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(_KEY)
    try:
        return read_bounded(file, most_bytes=_MAX_KEY_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise InputError(
            f"--api-key-file {file} cannot be read: {reason}.", hint="Name a file with one line, the key."
        ) from None
