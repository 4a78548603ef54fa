"""What must travel to a GPU's machine: packages that are missing there, and the limit."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import transfer
from benchmarks.gpu.plans.plan import REQUIRES


def write_wheel(folder: Path, name: str, version: str, *requires: str, size: int = 0) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        headers = "".join(f"Requires-Dist: {line}\n" for line in requires)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\n{headers}\n")
        archive.writestr("data", b"0" * size)


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ({"torch": "2.11.0", "kernels": "2.0"}, []),
        ({"torch": "2.11.0+cu130", "kernels": "2.0rc1"}, []),
        ({"torch": "1.0", "kernels": "2.0"}, ["torch>=2: 1.0 is there"]),
        ({"torch": "2.11.0"}, ["kernels>=1.5: no version is there"]),
        ({}, ["torch>=2: no version is there", "kernels>=1.5: no version is there"]),
    ],
)
def test_a_package_is_there_or_a_wheel_with_all_that_it_requires_or_missing(
    installed: dict[str, str], missing: list[str], tmp_path: Path
) -> None:
    write_wheel(
        tmp_path, "Flash_Attn", "4.0.0b36", "kernels>=1.5", 'docs; extra == "docs"', "old; python_version < '3'"
    )
    found = transfer.missing_packages(["flash-attn>=4.0.0b36", "torch>=2"], installed, transfer.wheels_in(tmp_path))
    assert list(found) == missing


def test_extras_are_looked_for_and_a_wheel_takes_the_place_of_what_is_there(tmp_path: Path) -> None:
    write_wheel(tmp_path, "runtime", "1.0", 'cudnn-libs; extra == "cudnn"', 'docs; extra == "docs"')
    wheels = transfer.wheels_in(tmp_path)
    assert list(transfer.missing_packages(["runtime[cudnn]>=1"], {"runtime": "2.0"}, wheels)) == [
        'cudnn-libs; extra == "cudnn": no version is there'
    ]
    assert list(transfer.missing_packages(["runtime>=2"], {"runtime": "2.0"}, wheels)) == ["runtime>=2: 1.0 is a wheel"]


def test_all_that_travels_is_summed_and_a_limit_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheels, cache, there = tmp_path / "wheels", tmp_path / "cache", tmp_path / "there.txt"
    for folder in (wheels, cache):
        folder.mkdir()
    write_wheel(wheels, "large", "1.0", size=3 * 2**20)
    (cache / "kernel.cubin").write_bytes(b"0" * 2**20)
    there.write_text("\n".join(f"{line.split('>=')[0].split('[')[0]}==999" for line in REQUIRES))
    given = ["--installed", str(there), "--wheels", str(wheels), "--also", str(cache)]
    assert transfer.main([*given, "--limit-mib", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("missing: numpy") and line.endswith(": 999 is there") for line in lines)
    total = float(lines[-1].split()[0])
    assert lines[-1].endswith(f"limit 1: too large by {total - 1:.1f} MiB")
    assert {"large-1.0-py3-none-any.whl", "kernel.cubin"} <= {line.split()[-1] for line in lines}
    transfer.main([*given, "--limit-mib", f"{total + 1:.1f}"])
    assert capsys.readouterr().out.splitlines()[-1].endswith(": fits")
    with pytest.raises(SystemExit):
        transfer.main([*given, str(tmp_path / "nothing")])
    assert "not found: " in capsys.readouterr().err
