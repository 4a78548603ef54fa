"""Our candidate for windows on Hopper, compiled without one: nothing is spilled, and products and softmax overlap."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.cases.window import WindowCase
from benchmarks.gpu.job import SkippedError
from benchmarks.gpu.peers import PEERS

pytest.importorskip("triton", reason="the kernel is written in Triton's Gluon, which has no wheel for this platform")

ROOT = Path(__file__).parents[2]
TRITONS = [None, *sorted(Path(sys.prefix, "tritons").glob("*"))]
"""Folders of other versions; None is the installed one."""

_COMPILE = """
import json, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from benchmarks.gpu.hopper_window import ARCHITECTURE, TILES, attend

head, folder = int(sys.argv[1]), Path(sys.argv[2])
block_queries, block_keys, warps = TILES[head]
constants = {"head": head, "block_queries": block_queries, "block_keys": block_keys}
tensors = ("query", "key", "value", "out")
types = {name: "*fp16" if name in tensors else "fp32" if name == "scale" else "i32" for name in attend.arg_names}
aligned = [place for place, name in enumerate(attend.arg_names) if name in tensors or name.startswith("stride")]
source = GluonASTSource(
    fn=attend,
    signature=types | dict.fromkeys(constants, "constexpr"),
    constexprs=constants,
    attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
)
kernel = triton.compile(source, target=GPUTarget("cuda", ARCHITECTURE, 32), options={"num_warps": warps})
tools = Path(triton.__file__).parent / "backends/nvidia/bin"
cubin = folder / "kernel.cubin"
cubin.write_bytes(kernel.asm["cubin"])
usage = subprocess.run([tools / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True)
code = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True)
print(json.dumps([usage.stdout, code.stdout]))
"""


@pytest.mark.parametrize(
    "triton_folder",
    [
        pytest.param(found, marks=pytest.mark.nightly if found else (), id=found.name if found else "")
        for found in TRITONS
    ],
)
@pytest.mark.parametrize("head", [64, 128])
def test_the_softmax_stands_between_the_products_and_the_wait_for_their_sums(
    head: int, triton_folder: Path | None, tmp_path: Path
) -> None:
    """In the loop's machine code, where ptxas moves the wait up unless something holds it."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, (triton_folder, ROOT))))
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", _COMPILE, str(head), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    usage, code = json.loads(done.stdout)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    assert (stack, local) == (0, 0), "registers are spilled"
    assert registers <= 255
    assert overlaps(code)
    assert not overlaps(code.replace("gsb0, 0x1", "gsb0, 0x0")), "a wait for all products before the softmax"


def overlaps(code: str) -> bool:
    """Whether products of values are under way in a softmax: exponentials stand between the wait for all products but
    the last, and the wait for the last."""
    steps = re.findall(r"MUFU\.EX2|HGMMA|WARPGROUP\.DEPBAR\.LE gsb0, 0x[01]", code)
    one, last = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    if one not in steps:
        return False
    behind = steps[steps.index(one) + 1 :]
    return behind[: behind.index(last)].count("MUFU.EX2") >= 32 and "HGMMA" not in behind[: behind.index(last)]


def test_another_device_is_refused_in_words() -> None:
    case = WindowCase(batch=1, heads=2, tokens=20, head_dim=64, dtype="float16", left=4, right=4)
    with pytest.raises(SkippedError, match="it is for sm_90 alone, and this is sm_80"):
        PEERS["candidate"].prepare(case, case.tensors("cpu"))
