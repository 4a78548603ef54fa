"""What a result says of its machine: no paths, serial numbers, UUIDs and addresses; all else stays."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from hdexport.support.redaction import redact, redact_argument
from support.comparators import named_case

CUT = {
    "/opt/torch/.venv/bin/python3": "python3",
    "/usr/lib/libcudnn.so.9.14.0 and /tmp/x/": "libcudnn.so.9.14.0 and x",
    'File "/home/me/my models/x.py", line 3': 'File "x.py", line 3',
    "hdexport bench '/data/my models/b4' -o=/data/out": "hdexport bench 'b4' -o=out",
    "PATH=/usr/bin:/usr/local/bin": "PATH=bin:bin",
    "at ~/.cache/hdexport/kernels": "at kernels",
    "file:///data/x.txt": "file://x.txt",
    "of /home/somebody": "of (left out)",
    "    Serial Number      : 1653824161550": "    Serial Number      : (left out)",
    '{"serial": "1653824161550", "power": "700 W"}': '{"serial": "(left out)", "power": "700 W"}',
    "GPU UUID : GPU-53178a4d-4725-4fe0-8f3c-f1f4e91b33d4": "GPU UUID : (left out)",
    "GPU 0 (53178A4D-4725-4FE0-8F3C-F1F4E91B33D4)": "GPU 0 ((left out))",
    "MIG-53178a4d-4725-4fe0-8f3c-f1f4e91b33d4": "(left out)",
    "GPU-53178a4d,1": "(left out),1",
    "GPU PDI : 0x96fdb1d3584b439a": "GPU PDI : (left out)",
    "GPU 00000000:00:06.0 is lost": "GPU (left out) is lost",
    "0000:3b:00.0": "(left out)",
    "3b:00.0 3D controller": "(left out) 3D controller",
    "ether 00:1a:2b:3c:4d:5e": "ether (left out)",
    "00-1A-2B-3C-4D-5E": "(left out)",
    "hostname: gpu-01": "hostname: (left out)",
}
STAYS = (
    "NVIDIA H200 (sm90, 150.1 GB)", "580.159.04", "1980 MHz at the start, at most 1980 MHz", "700 W", "13.1.0.3",
    "Linux-6.18.44-x86_64-with-glibc2.39", "2026-11-27T01:00:48.5+00:00", "12:34:56", "1:9.18.49-1~deb12u3",
    "see https://github.com/hdexport/hdexport and http://localhost:8000/v1", "organisation/model@0123abc",
    "python -m benchmarks.cpu.dense --output benchmarks/results/cpu_dense.jsonl ../x ./y", "1700 tokens/s, 5 / 6",
    "tests/a/b.py::test[x/y]", "torch/_inductor/x.py", "</s>", "Chassis Serial Number : N/A", "c7d2d68e1cb3+changes",
    "384.3e-6", "336da65724faf1dc",
)  # fmt: skip


def test_what_names_a_machine_is_cut_and_nothing_else() -> None:
    for text, right in CUT.items():
        with named_case(text):
            assert redact(text) == right
            assert redact(right) == right
    for text in STAYS:
        with named_case(text):
            assert redact(text) == text


class Kind(StrEnum):
    OK = "ok"


@dataclasses.dataclass(frozen=True)
class Figures:
    kind: Kind
    reason: str
    parts: tuple[object, ...]


def test_it_looks_into_lists_mappings_and_dataclasses_and_leaves_numbers() -> None:
    value = Figures(Kind.OK, "/data/a", ({"gpu_uuid": "a4d", "serial": 1653824161550, "/data/b": ["/data/c", 2.5]}, 7))
    found = redact(value)
    assert found == Figures(Kind.OK, "a", ({"gpu_uuid": "(left out)", "serial": "(left out)", "b": ["c", 2.5]}, 7))
    assert found.kind is Kind.OK
    assert redact({"serial": None, "serialized_bytes": 5}) == {"serial": None, "serialized_bytes": 5}


def test_a_word_of_a_command_line_may_have_spaces_in_its_path() -> None:
    for argument, right in {
        "/data/my models/b4/": "b4",
        "--output=/data/my results": "--output=my results",
        "bigbird:mode=table,table=/data/my blocks/x.npy": "bigbird:mode=table,table=x.npy",
        "--url=https://hub/a/b": "--url=https://hub/a/b",
        "./model": "./model",
        "--device=GPU-53178a4d": "--device=(left out)",
    }.items():
        with named_case(argument):
            assert redact_argument(argument) == right
