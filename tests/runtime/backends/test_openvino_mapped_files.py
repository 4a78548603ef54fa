"""Pages of mapped weights: given back where nothing can be lost, and read again when they are needed."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from hdruntime.backends.openvino.runner import release_mapped_files
from support.resident_pages import resident_bytes_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's mappings")

SIZE = 2**20
CONTENT = bytes(range(256)) * (SIZE // 256)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights of a bundle.data"
    path.write_bytes(CONTENT)
    return path


def test_pages_are_given_back_and_hold_the_same_when_they_are_read_again(file: Path) -> None:
    other = file.with_name("other.data")
    other.write_bytes(CONTENT)
    with file.open("rb") as opened, other.open("rb") as opened_other:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        of_others = mmap.mmap(opened_other.fileno(), 0, access=mmap.ACCESS_READ)
    assert mapped[:] == of_others[:]
    assert resident_bytes_of(file) == resident_bytes_of(other) == SIZE
    link = file.with_name("link.data")
    link.symlink_to(file)
    assert release_mapped_files([link]) == SIZE
    assert (resident_bytes_of(file), resident_bytes_of(other)) == (0, SIZE)
    assert mapped[:] == CONTENT


def test_what_was_written_to_a_mapping_stays(file: Path) -> None:
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    mapped[:3] = b"new"
    assert release_mapped_files([file]) == 0
    assert mapped[:3] == b"new"


def test_a_file_that_is_not_mapped_is_no_error(file: Path) -> None:
    assert release_mapped_files([file, file.with_name("missing")]) == 0
