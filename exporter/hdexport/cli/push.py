"""Upload a bundle to the Hugging Face Hub, with a model card.

The card has the source checkpoint, the accepted lengths, the comparison with PyTorch, the code that loads the bundle,
and with --bench its measurements. All files go into one commit. Afterwards load the bundle by its name:
hdruntime.load("organisation/name") or hdexport run organisation/name. Log in with `hf auth login`, or set HF_TOKEN.
"""

from __future__ import annotations

import argparse

from hdexport.cli.arguments import local_path
from hdexport.cli.process import outlive_readers
from hdruntime.errors import InputError

SUMMARY = "upload a bundle to the Hugging Face Hub, with a model card"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=local_path, help="directory of a bundle")
    parser.add_argument("name", metavar="NAME", help="repository, organisation/name or organisation/name@branch")
    parser.add_argument("--private", action="store_true", help="create a private repository (default: public)")
    parser.add_argument(
        "--bench",
        metavar="DIR",
        type=local_path,
        help="directory of `hdexport bench -o DIR`, whose results go into the card",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace files of the same names in the repository, including the card"
    )


def run(options: argparse.Namespace) -> int:
    from hdexport.cli.inspect import summary
    from hdexport.publish import PushOptions, push
    from hdruntime.bundle.reader import open_bundle
    from hdruntime.hub import hub_name

    outlive_readers()
    name = hub_name(options.name)
    if name is None:
        raise InputError(f"{options.name!r} is no name on the Hugging Face Hub.", hint="Give organisation/name.")
    bundle = open_bundle(options.bundle)
    where = PushOptions(name=name, private=options.private, bench=options.bench, force=options.force)
    pushed = push(bundle, where, summary=summary(bundle.manifest))
    print(f"{pushed.url}: {len(bundle.manifest.files) + 2} files, {pushed.size_bytes / 1e6:.1f} MB")
    print(f'Load it: hdruntime.load("{name.name}@{pushed.commit[:12]}")')
    return 0
