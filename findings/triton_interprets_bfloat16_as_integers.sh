#!/usr/bin/env bash
# Library: triton 3.9.0 (its interpreter, TRITON_INTERPRET=1)
# Guess: a kernel that the interpreter runs gives the numbers that a GPU would, or an error where it cannot.
# Happens: bfloat16 values are 16-bit integers for it, without a message: 1.5 * 2 is 0, 1.5 + 2 is NaN, and `tl.dot` of such
#   blocks of 16 x 16 is 4278190080 in place of 48. Loads, stores and casts are right, so a kernel that casts its operands
#   to float32 is right. 3.7.1 does this, too. Triton's page on debugging names it as a limitation.
# Minded: tests/support/kernel_cases.py, tests/plugins/kernels/test_distance_kernel.py
# Seen: 2026-11-29
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
install() {
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$@" torch==2.13.0+cpu triton==3.9.0 numpy==2.4.6
}
# The build for CPUs, from wherever pip is told to look, or from PyTorch's own index.
install 2> "$folder/errors" || install --extra-index-url https://download.pytorch.org/whl/cpu
cat > "$folder/kernels.py" <<'PYTHON'
import math

import torch
import triton
import triton.language as tl


@triton.jit
def multiply(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out_ptr + places, tl.load(x_ptr + places) * tl.load(y_ptr + places))


@triton.jit
def add(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out_ptr + places, tl.load(x_ptr + places) + tl.load(y_ptr + places))


@triton.jit
def multiply_upcast(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    product = tl.load(x_ptr + places).to(tl.float32) * tl.load(y_ptr + places).to(tl.float32)
    tl.store(out_ptr + places, product)


@triton.jit
def dot(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    places = rows[:, None] * SIZE + rows[None, :]
    tl.store(out_ptr + places, tl.dot(tl.load(x_ptr + places), tl.load(y_ptr + places)))


def first(kernel, dtype):
    x, y, out = torch.full((16, 16), 1.5, dtype=dtype), torch.full((16, 16), 2.0, dtype=dtype), torch.zeros(16, 16)
    kernel[(1,)](x, y, out, 16)
    return out[0, 0].item()


kernels = (multiply, add, dot, multiply_upcast)
found = {dtype: [first(kernel, dtype) for kernel in kernels] for dtype in (torch.float16, torch.bfloat16)}
print("triton", triton.__version__, "1.5 * 2, 1.5 + 2, dot, product of upcasts:")
for dtype, values in found.items():
    print(dtype, *values)
assert found[torch.float16] == [3, 3.5, 48, 3]
product, total, dotted, upcast = found[torch.bfloat16]
assert upcast == 3 and product != 3 and total != 3.5 and not math.isclose(dotted, 48)
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/kernels.py"
