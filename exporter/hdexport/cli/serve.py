"""Serve bundles over HTTP: embeddings, rerank and classes by the routes of OpenAI, Cohere, Jina, Voyage, vLLM, TEI.

One process, one bundle or several; the routes that fit their tasks. Texts of all requests to a bundle share batches of
similar lengths. /health, /ready, /metrics for Prometheus. SIGTERM answers what runs, then ends. Every option with a
value has a variable as its default: HDEXPORT_PORT of --port. See docs/serve.md and docs/hosting.md.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hdexport.cli.arguments import (
    PRECISIONS,
    add_max_seq_length_argument,
    add_precision_argument,
    local_path,
    path_or_url,
    sequence_length,
    whole_number,
)
from hdexport.cli.flags import flag
from hdexport.cli.variables import take_defaults
from hdruntime.backends.registry import backend_names
from hdruntime.errors import InputError, Setting
from hdruntime.os_errors import reason_of
from hdruntime.serve.options import OptionHelp, ServeOptions
from hdruntime.whole_files import read_bounded

SUMMARY = "serve bundles over HTTP: embeddings, rerank, classification"

_KEY = "HDEXPORT_API_KEY"
_BUNDLE = "HDEXPORT_BUNDLE"
_STORAGE = "AIP_STORAGE_URI"
_OF_PLATFORMS = {"port": ("AIP_HTTP_PORT", "SAGEMAKER_BIND_TO_PORT")}
"""Variables that Vertex AI and SageMaker set; docs/hosting.md says where they come from."""

_MAX_SESSIONS = 1024
"""Maximum of --sessions: sessions load one after the other, and a slip of the finger would load them for hours."""

_MAX_KEY_BYTES = 2**16


_NAME = r"[A-Za-z0-9][\w.:/-]*"
_NAMED = re.compile(rf"(?P<names>{_NAME}(?:,{_NAME})*)=(?P<value>.*)", re.ASCII | re.DOTALL)
"""A value with the names that it is for; a path that looks like this is written ``./a=b``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundles",
        nargs="*",
        metavar="[NAME=]BUNDLE",
        type=_named_bundle,
        help="directory of a bundle, organisation/name[@revision] on the Hugging Face Hub, or a folder in a store "
        "(gs://, s3://). Of several bundles, a request's model chooses one: by NAME, or by the name in the manifest. "
        f"NAME,OTHER=BUNDLE gives it two names (default: the variable {_BUNDLE})",
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=local_path,
        help=f"file with the API key that requests send as Authorization: Bearer KEY (default: the variable {_KEY}, "
        "else no key)",
    )
    backend = parser.add_argument_group("backend", "[NAME=]VALUE is for one bundle; repeatable.")
    backends = ["auto", *backend_names()]
    backend.add_argument(
        "--backend",
        metavar="BACKEND",
        help=f"backend that runs the bundle: {', '.join(backends)} (default: auto, the first that runs here)",
        **_of_bundle(_choice(backends)),
    )
    add_precision_argument(backend, metavar="PRECISION", choices=None, **_of_bundle(_choice(PRECISIONS)))
    backend.add_argument(
        "--device",
        metavar="DEVICE",
        help="device that runs the bundle: cpu, cuda, cuda:1, a device of OpenVINO; or several, separated by commas, "
        "which have --sessions each (default: the backend's)",
        **_of_bundle(str),
    )
    backend.add_argument(
        "--sessions",
        metavar="N",
        help="number of sessions that run batches at the same time; they share the CPU threads, and each holds the "
        f"weights. More than 1 for short texts; at most {_MAX_SESSIONS} (default: 1)",
        **_of_bundle(partial(whole_number, maximum=_MAX_SESSIONS)),
    )
    backend.add_argument(
        "--threads",
        metavar="N",
        help="number of CPU threads of all sessions of a bundle (default: one per usable core)",
        **_of_bundle(whole_number),
    )
    add_max_seq_length_argument(backend, **_of_bundle(sequence_length))
    backend.add_argument(
        "--ranges",
        metavar="FILE",
        help="minimum and maximum per dimension, by which int8 and uint8 embeddings are scaled: the output of a job "
        "with --output-dtype int8, or a .npy file of float32 [2, dimensions] (default: none, and requests for int8 and "
        "uint8 get 400)",
        **_of_bundle(path_or_url),
    )
    _add_server_options(parser)
    take_defaults(parser, os.environ, _OF_PLATFORMS)


def run(options: argparse.Namespace) -> int:
    from hdruntime.serve import BundleToServe, serve

    options.bundles = options.bundles or _bundles_of_variables()
    of_bundles: dict[str, dict[str | None, Any]] = {}
    named = {name for names, _ in options.bundles for name in names}
    for option in ("backend", "precision", "device", "sessions", "threads", "max_seq_length", "ranges"):
        by_name = dict(getattr(options, option))
        if unknown := [name for name in by_name if name is not None and name not in named]:
            raise InputError(
                f"{flag(Setting(option))} is for the bundle {unknown[0]}, and no bundle has this name.",
                hint=f"Name one of {', '.join(sorted(named))}." if named else "Give the bundle the name: NAME=BUNDLE.",
            )
        of_bundles[option] = by_name

    def bundle_of(names: tuple[str, ...], bundle: str) -> BundleToServe:
        settings = {option: _value(values, names) for option, values in of_bundles.items()}
        if (device := settings.pop("device")) is not None:
            settings["devices"] = device.split(",")
        return BundleToServe(
            bundle=bundle, names=names, **{option: value for option, value in settings.items() if value is not None}
        )

    values = {each.name: getattr(options, each.name) for each in fields(ServeOptions) if each.metadata}
    values["cors_origin"] = tuple(options.cors_origin)
    serve(
        *(bundle_of(names, bundle) for names, bundle in options.bundles),
        options=ServeOptions(api_key=_api_key(options.api_key_file), **values),
        on_ready=lambda lines: print(lines, file=sys.stderr, flush=True),
    )
    return 0


def _bundles_of_variables() -> list[tuple[tuple[str, ...], str]]:
    """The bundles that a container serves which is started with ``serve`` alone; spaces separate several."""
    if of_platform := os.environ.get(_STORAGE):
        return [((), of_platform)]
    if not (given := os.environ.get(_BUNDLE, "").split()):
        raise InputError(
            "There is no bundle to serve.",
            hint=f"Set the variable {_BUNDLE}, on Vertex AI {_STORAGE}, or name one: hdexport serve BUNDLE",
        )
    return [_named_bundle(each) for each in given]


def _named_bundle(text: str) -> tuple[tuple[str, ...], str]:
    """The names of a bundle, and its path or its name on the hub."""
    match = _NAMED.fullmatch(text)
    return ((), path_or_url(text)) if match is None else (tuple(match["names"].split(",")), path_or_url(match["value"]))


def _of_bundle(kind: Callable[[str], object]) -> dict[str, Any]:
    """How argparse reads an option that is for all bundles, or for one: ``--device rerank=cuda:1``."""

    def named(text: str) -> tuple[str | None, object]:
        match = _NAMED.fullmatch(text)
        return (None, kind(text)) if match is None else (match["names"], kind(match["value"]))

    return {"type": named, "action": "append", "default": []}


def _value(values: Mapping[str | None, Any], names: Sequence[str]) -> Any:
    """Value of an option for the bundle with these names, or for all bundles; None without a value."""
    return next((values[name] for name in (*names, None) if name in values), None)


def _choice(choices: Sequence[str]) -> Callable[[str], str]:
    def chosen(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r:.60} is none of {', '.join(choices)}")
        return text

    return chosen


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
