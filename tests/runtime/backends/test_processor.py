"""What the processor has instructions for, as Linux lists them."""

from pathlib import Path

import pytest

from hdruntime.backends.openvino import backend as processor
from support.comparators import named_case

KNOWN = [
    ("flags\t\t: fpu avx2 fma\n", False, False),
    ("flags\t\t: fpu avx512_vnni\nflags\t\t: fpu avx512_bf16\n", True, False),
    ("processor\t: 0\nflags\t\t: amx_bf16 avx_vnni\nbugs\t\t: none\n", True, True),
    ("model name\t: avx512_vnni\nflags\t\t: xavx512_vnni\nvmx flags\t: avx512_bf16\n", False, False),
]
UNKNOWN = [(content, True, True) for content in (None, "", "Processor: of another system\n")]


def test_the_first_processors_flags_tell_and_one_without_known_flags_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (content, int8, bfloat16) in enumerate(KNOWN + UNKNOWN):
        cpuinfo = tmp_path / str(number)
        if content is not None:
            cpuinfo.write_text(content)
        monkeypatch.setattr(processor, "_CPUINFO", cpuinfo)
        with named_case(content):
            assert (processor.has_int8(), processor.has_bfloat16()) == (int8, bfloat16)
