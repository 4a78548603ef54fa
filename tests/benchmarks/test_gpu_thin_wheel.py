"""Wheels with the machine code of one architecture: what stays, what becomes zeros, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import os
import struct
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import thin_wheel

CODE = {number: os.urandom(3000) for number in (75, 80, 90, 120)}
PTX = os.urandom(500)
NAME = "kernels-1.0-py3-none-any.whl"


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """Of (kind, architecture, payload), as nvcc 13 writes it: headers of 64 bytes."""
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 8, 1, architecture).ljust(64, b"\0") + payload
        for kind, architecture, payload in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def machine_code(*architectures: int) -> bytes:
    return fatbin(*((2, number, CODE[number]) for number in architectures))


LIBRARY = (
    b"\x7fELF host code" + machine_code(75, 80, 90) + b"between" + fatbin((1, 80, PTX), (2, 90, CODE[90])) + b"end"
)


def test_code_of_one_architecture_and_ptx_stay_and_each_fat_binary_where_it_began() -> None:
    library = bytearray(LIBRARY)
    assert thin_wheel.thin(library, 90) == {75: 3064, 80: 3064, 90: 6128}
    first, second = machine_code(90), fatbin((1, 80, PTX), (2, 90, CODE[90]))
    zeros = bytes(2 * 3064)
    assert bytes(library) == b"\x7fELF host code" + first + zeros + b"between" + second + b"end"
    found = [[entry.architecture for entry in entries] for _, entries in thin_wheel.fatbins_of(library)]
    assert found == [[90], [80, 90]]


def test_kernels_for_one_architecture_alone_are_left_out_where_asked() -> None:
    library = bytearray(machine_code(90) + machine_code(80, 90))
    thin_wheel.thin(library, 90)
    assert library.count(CODE[90]) == 2
    thin_wheel.thin(library := bytearray(machine_code(90) + machine_code(80, 90)), 90, without_lone=True)
    assert bytes(library) == fatbin() + bytes(3064) + machine_code(90) + bytes(3064)


def test_bytes_that_only_look_like_a_fat_binary_stay() -> None:
    odd = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 2**40) + b"\xff" * 64
    library = bytearray(odd + machine_code(75, 90))
    thin_wheel.thin(library, 90)
    assert library.startswith(odd)
    assert CODE[75] not in library
    assert CODE[90] in library


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / NAME, "w") as archive:
        archive.writestr("kernels/lib.so.1", LIBRARY)
        archive.writestr("kernels/__init__.py", "answer = 42\n")
        archive.writestr("kernels-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n")
        record = "kernels/lib.so.1,sha256=old,1\nkernels/__init__.py,,12\nkernels-1.0.dist-info/RECORD,,\n"
        archive.writestr("kernels-1.0.dist-info/RECORD", record)
    return tmp_path / NAME


def test_a_wheel_keeps_its_name_and_files_and_records_the_new_hash(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert thin_wheel.main([str(wheel), str(tmp_path / "thin")]) == 0
    assert "0.0 MiB of sm_90" in capsys.readouterr().out
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(tmp_path / "thin" / NAME) as after:
        assert sorted(after.namelist()) == sorted(before.namelist())
        assert after.read("kernels/__init__.py") == b"answer = 42\n"
        library = after.read("kernels/lib.so.1")
        assert len(library) == len(LIBRARY)
        digest = base64.urlsafe_b64encode(hashlib.sha256(library).digest()).rstrip(b"=").decode()
        lines = after.read("kernels-1.0.dist-info/RECORD").decode().splitlines()
        assert f"kernels/lib.so.1,sha256={digest},1" in lines
    assert (tmp_path / "thin" / NAME).stat().st_size < wheel.stat().st_size


def test_an_architecture_that_the_wheel_does_not_have_is_refused_with_those_that_it_has(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        thin_wheel.main([str(wheel), str(tmp_path / "thin"), "--architecture", "100"])
    assert "has machine code for sm_75, sm_80, sm_90, and none for sm_100" in capsys.readouterr().err
    assert not (tmp_path / "thin" / NAME).exists()
    with pytest.raises(SystemExit):
        thin_wheel.main([str(wheel), str(tmp_path)])
    assert "name another folder" in capsys.readouterr().err
