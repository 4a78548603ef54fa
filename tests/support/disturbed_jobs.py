"""`hdexport run` as tests disturb it: it commits often, so that a job of half a second is disturbed in its middle."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

from hdexport.cli import main
from hdruntime.jobs import results, row_inference
from hdruntime.tasks import text_inference
from support.full_disks import mount_disk


def run_job(
    arguments: list[str],
    largest_file: int | None = None,
    computes_beside: bool = False,
    commit_seconds: float = 0.03,
) -> int:
    """The command, whose jobs do fewer rows at a time and commit more often.

    Args:
        arguments: of ``hdexport run``.
        largest_file: bytes of one that it may write.
        computes_beside: whether threads read ahead and write behind, as where a GPU computes.
        commit_seconds: between two commits, at least; 0 for a commit after every window.

    Returns:
        the exit code.
    """
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    results._COMMIT_SECONDS, results._COMMIT_SHARE, text_inference._WINDOW_TEXTS = commit_seconds, 0, 100
    if computes_beside:
        row_inference.needs_gpu = lambda name: True  # type: ignore[assignment]
    sys.argv = ["hdexport", "run", *arguments]
    return main(sys.argv[1:])


def run_job_on_a_small_disk_and_a_large_one(arguments: list[str], output: Path, sizes: tuple[int, int]) -> None:
    """Run the command twice, on a disk in place of the output's folder; print exit codes, and the files left there.

    Every window is committed: what a full disk leaves uncommitted is lost, which may be all of a job that is fast. The
    output is copied beside the folder, which only the owner can read.

    Args:
        arguments: of ``hdexport run``.
        output: in a folder that is not there yet.
        sizes: bytes of the disk at first and then.
    """
    for size in sizes:
        mount_disk(output.parent, str(size))
        print("exit code", run_job(arguments, commit_seconds=0))
    shutil.copy(output, output.parent.parent)
    print(os.listdir(output.parent))
