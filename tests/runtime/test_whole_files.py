"""A file is the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hdexport.support.bundle_writer import BUNDLE_DIRECTORY, seal
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.staging import staged_directory
from hdruntime.whole_files import is_partial, read_bounded, whole_file, write_whole


def test_a_block_that_raises_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, "ä")
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines([b"half", "no bytes"])
    assert path.read_bytes() == "ä".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_no_part_of_a_bundle(bundle_path: Path) -> None:
    manifest = open_bundle(bundle_path).manifest
    die = "from hdruntime.whole_files import whole_file; import os, pathlib, sys; path = pathlib.Path(sys.argv[1])\n"
    die += "with whole_file(path) as file: os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", die, str(bundle_path / "manifest.json")], check=False)
    (left,) = filter(is_partial, bundle_path.iterdir())
    assert seal(bundle_path, manifest) == manifest
    assert left.exists()
    with staged_directory(bundle_path, BUNDLE_DIRECTORY, force=True) as directory:
        (directory / "manifest.json").write_text("{}")
    assert not left.exists()


def test_a_name_may_have_all_the_bytes_that_names_can(tmp_path: Path) -> None:
    write_whole(tmp_path / ("ä" * 127), "a")
    assert (tmp_path / ("ä" * 127)).read_text() == "a"


def test_reading_within_bounds_takes_files_and_pipes_and_never_waits(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    assert read_bounded(tmp_path / "file", most_bytes=4) == b"1234"
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_bounded(tmp_path / "file", most_bytes=3)
    with pytest.raises(OSError, match="no file"):
        read_bounded(Path("/dev/zero"), most_bytes=4)
    os.mkfifo(tmp_path / "pipe")
    assert read_bounded(tmp_path / "pipe", most_bytes=4) == b"", "no program writes to it"
