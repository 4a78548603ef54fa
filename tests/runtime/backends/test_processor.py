"""What the processor has instructions for, as Linux lists them."""

from pathlib import Path

import pytest

from hdruntime.backends import processor


@pytest.mark.parametrize(
    ("content", "int8", "bfloat16"),
    [
        ("flags\t\t: fpu avx2 fma\n", False, False),
        ("flags\t\t: fpu avx512_vnni\nflags\t\t: fpu avx512_bf16\n", True, False),
        ("processor\t: 0\nflags\t\t: amx_bf16 avx_vnni\nbugs\t\t: none\n", True, True),
        ("model name\t: avx512_vnni\nflags\t\t: xavx512_vnni\nvmx flags\t: avx512_bf16\n", False, False),
        ("flags\t\t:\n", False, False),
    ],
)
def test_the_first_processors_flags_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, int8: bool, bfloat16: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(content)
    monkeypatch.setattr(processor, "_CPUINFO", cpuinfo)
    assert (processor.has_int8(), processor.has_bfloat16()) == (int8, bfloat16)


@pytest.mark.parametrize("content", [None, "", "Processor: of another system\n"])
def test_a_processor_whose_flags_are_not_known_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if content is not None:
        cpuinfo.write_text(content)
    monkeypatch.setattr(processor, "_CPUINFO", cpuinfo)
    assert processor.has_int8()
    assert processor.has_bfloat16()
