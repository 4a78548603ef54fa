#!/usr/bin/env bash
# Library: triton 3.6.0, 3.9.0
# Guess: a kernel's registers are a matter of its blocks and of the GPU: a newer Triton, with a newer assembler, needs no
#   more, so that a block size that spills nothing stays good. And to see them takes a GPU, or at least PyTorch.
# Happens: Triton compiles for any GPU with neither, and `ptxas` reports registers and spills. Of one attention with a head of
#   128, 3.9.0 spills less than 3.6.0 for sm_80 (blocks of 128 x 128: 4 bytes for 32) and more for sm_120 (256 x 32: 76 bytes
#   for 20). Blocks of 128 x 64 spill nothing in either.
# Minded: plugins/hdplugins/kernels/block_config.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat > "$folder/registers.py" <<'PYTHON'
import contextlib
import io
import os
import re
import sys

os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def attend(q_ptr, k_ptr, v_ptr, out_ptr, tokens, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    rows, columns, keys = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D), tl.arange(0, N)
    q = tl.load(q_ptr + rows[:, None] * D + columns[None, :])
    top, total = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for start in range(0, tokens, N):
        k = tl.load(k_ptr + (start + keys)[None, :] * D + columns[:, None])
        scores = tl.dot(q, k)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, factor = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        v = tl.load(v_ptr + (start + keys)[:, None] * D + columns[None, :])
        acc = acc * factor[:, None] + tl.dot(weights.to(v.dtype), v)
        total, top = total * factor + tl.sum(weights, 1), new_top
    tl.store(out_ptr + rows[:, None] * D + columns[None, :], (acc / total[:, None]).to(q.dtype))


def used(architecture, rows, keys):
    """Registers of a thread, and bytes that are spilled."""
    source = ASTSource(
        attend,
        signature={**dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*fp16"), "tokens": "i32",
                   **dict.fromkeys("DMN", "constexpr")},
        constexprs={"D": 128, "M": rows, "N": keys},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(5)},
    )
    with contextlib.redirect_stdout(io.StringIO()) as report:
        triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 8, "num_stages": 3})
    text = report.getvalue()
    return int(re.search(r"Used (\d+) registers", text)[1]), int(re.search(r"(\d+) bytes spill stores", text)[1])


assert "torch" not in sys.modules
is_old = triton.__version__ == "3.6.0"
found = {case: used(*case) for case in ((80, 128, 128), (120, 256, 32), (80, 128, 64), (120, 128, 64))}
for (architecture, rows, keys), (registers, spilled) in found.items():
    print(f"triton {triton.__version__} sm_{architecture}, {rows} x {keys}: {registers} registers, {spilled} bytes spilled")
assert found[80, 128, 64][1] == found[120, 128, 64][1] == 0
assert (found[80, 128, 128][1], found[120, 256, 32][1]) == ((32, 20) if is_old else (4, 76))
PYTHON
for version in 3.6.0 3.9.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "triton==$version"
    TRITON_CACHE_DIR="$folder/$version" "$folder/venv/bin/python" -W ignore "$folder/registers.py"
done
