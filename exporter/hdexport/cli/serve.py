"""Serve a bundle over HTTP: OpenAI's /v1/embeddings, /rerank as Cohere and Jina have it, /embed_sparse, /predict.

One process, one bundle; the routes that fit its task. Texts of all requests share batches of similar lengths.
/health, /ready, /metrics for Prometheus. SIGTERM answers what runs, then ends. See docs/serve.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from hdexport.cli.arguments import (
    add_max_seq_length_argument,
    add_precision_argument,
    local_path,
    path_or_url,
    whole_number,
)
from hdruntime.backends.registry import backend_names
from hdruntime.errors import InputError
from hdruntime.os_errors import reason_of
from hdruntime.whole_files import read_bounded

SUMMARY = "serve a bundle over HTTP: embeddings, rerank, classification"

_KEY = "HDEXPORT_API_KEY"
_MOST_KEY_BYTES = 2**16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle",
        metavar="BUNDLE",
        type=path_or_url,
        help="directory of a bundle, or organisation/name[@revision] on the Hugging Face Hub",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument(
        "--port", metavar="N", type=_port, default=8000, help="port to listen on; 0 chooses a free port (default: 8000)"
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
    limits = parser.add_argument_group("limits")
    add_max_seq_length_argument(limits)
    limits.add_argument(
        "--max-wait-ms",
        metavar="MS",
        type=float,
        default=2.0,
        help="maximum wait of a text for other texts of its batch, in ms (default: 2)",
    )
    limits.add_argument(
        "--max-queue-tokens",
        metavar="N",
        type=whole_number,
        help="maximum tokens in the queue; further requests get 429 (default: 1000000, fewer if less than 1 GB of "
        "memory is free)",
    )
    limits.add_argument(
        "--max-texts", metavar="N", type=whole_number, default=2048, help="maximum texts per request (default: 2048)"
    )
    limits.add_argument(
        "--max-body-mb",
        metavar="N",
        type=whole_number,
        default=32,
        help="maximum size of a request body in MiB (default: 32)",
    )
    limits.add_argument(
        "--max-text-characters",
        metavar="N",
        type=whole_number,
        default=2**20,
        help="maximum characters of a text that must be tokenized in full: a split text, or one without spaces. "
        "A truncated text has no such limit (default: 1048576)",
    )
    limits.add_argument(
        "--truncate",
        choices=["error", "end", "split"],
        help="default of the request key truncate, for texts longer than --max-seq-length: error answers 400, end "
        "truncates, split runs chunks and pools their outputs; set it for clients that cannot send the key (default: "
        "error, for rerank end)",
    )
    limits.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        default=120.0,
        help="maximum time to a response in seconds; a request that would take longer gets 429 (default: 120)",
    )
    around = parser.add_argument_group("proxies and browsers")
    around.add_argument(
        "--keep-alive",
        metavar="S",
        type=float,
        default=120.0,
        help="seconds until an idle connection, or one with an incomplete request head, is closed; choose more than "
        "the proxy's timeout (default: 120)",
    )
    around.add_argument(
        "--forwarded-allow-ips",
        metavar="IPS",
        help="comma-separated addresses and networks of trusted proxies, whose X-Forwarded-For names the client, or "
        "'*' (default: the variable FORWARDED_ALLOW_IPS, else this machine)",
    )
    around.add_argument(
        "--root-path", metavar="PATH", default="", help="prefix of every route behind a proxy (default: none)"
    )
    around.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="origin whose scripts may read responses, such as https://example.com, or '*'; repeatable (default: none)",
    )


def run(options: argparse.Namespace) -> int:
    from hdruntime.serve import ServeOptions, serve

    limits = ServeOptions(
        api_key=_api_key(options.api_key_file),
        max_wait_ms=options.max_wait_ms,
        max_queue_tokens=options.max_queue_tokens,
        max_texts=options.max_texts,
        max_body_bytes=options.max_body_mb * 2**20,
        max_text_characters=options.max_text_characters,
        truncate=options.truncate,
        timeout_s=options.timeout,
        cors_origins=tuple(options.cors_origin),
        root_path=options.root_path,
    )
    serve(
        options.bundle,
        host=options.host,
        port=options.port,
        backend=options.backend,
        threads=options.threads,
        precision=options.precision,
        max_seq_length=options.max_seq_length,
        options=limits,
        keep_alive_s=options.keep_alive,
        forwarded_allow_ips=options.forwarded_allow_ips,
        on_ready=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return 0


def _port(text: str) -> int:
    return whole_number(text, least=0, most=65535)


def _api_key(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(_KEY)
    try:
        return read_bounded(file, most_bytes=_MOST_KEY_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        said = reason_of(error) if isinstance(error, OSError) else str(error)
        raise InputError(
            f"--api-key-file {file} cannot be read: {said}.", hint="Name a file with one line, the key."
        ) from None
