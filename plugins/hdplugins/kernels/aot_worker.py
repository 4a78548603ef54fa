"""The compiler process of `hdplugins.kernels.aot`: reads one job per line, writes its files, and answers "done"."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

_REGISTERS_OF_SM = 65536
_MAX_REGISTERS = 255
"""Maximum registers of a thread, which are allocated in eights (CUDA C++ Programming Guide, compute capabilities 8.0 to
12.0)."""

_Value = TypeVar("_Value")


def main() -> None:
    """Serve jobs from standard input until it ends; the first failure ends the process with a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        # Triton reads these at its import. Line information would put this machine's paths into every kernel.
        os.environ.update(TRITON_CACHE_DIR=folder, TRITON_DUMP_PTXAS_LOG="1", TRITON_DISABLE_LINE_INFO="1")
        for line in sys.stdin:
            job = json.loads(line)
            # Triton prints the assembler's report, so only the answers may reach standard output.
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                _compile(job["source"], Path(job["stem"]), printed)
            print("done", flush=True)


def with_tuples(arguments: Mapping[str, _Value]) -> dict[str, _Value | tuple[_Value, ...]]:
    """Group the elements of tuple arguments: the values of "strides.batch" and "strides.head" become one `strides`."""
    grouped: dict[str, _Value | tuple[_Value, ...]] = {}
    for name, value in arguments.items():
        argument, is_element, _ = name.partition(".")
        if is_element:
            elements = grouped.get(argument, ())
            assert isinstance(elements, tuple)
            grouped[argument] = (*elements, value)
        else:
            grouped[name] = value
    return grouped


def _compile(source: dict[str, Any], stem: Path, printed: io.StringIO) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _check_assembler(source["architecture"])
    function = getattr(importlib.import_module(source["module"]), source["function"])
    arguments = [name for name in function.arg_names if name not in source["constants"]]
    signature = with_tuples(source["signature"])
    if arguments != list(signature):
        raise ValueError(f"The signature has {list(signature)}; {function.__name__} takes {arguments}.")
    # (index of the argument,), or (index of a tuple, index of its element).
    paths = {name: (function.arg_names.index(name),) for name in signature}
    for name, elements in with_tuples({name: name for name in source["signature"]}).items():
        if isinstance(elements, tuple):
            paths |= {element: (*paths[name], index) for index, element in enumerate(elements)}
    alignment = {paths[name]: [["tt.divisibility", 16]] for name in source["aligned"]}
    ast = ASTSource(
        fn=function,
        signature={**signature, **dict.fromkeys(source["constants"], "constexpr")},
        constexprs=source["constants"],
        attrs=alignment,
    )
    target = GPUTarget("cuda", source["architecture"], 32)
    options = {"num_warps": source["num_warps"], "num_stages": source["num_stages"]}

    def compiled(maxnreg: int | None) -> tuple[Any, dict[str, Any]]:
        printed.truncate(printed.seek(0))
        kernel = triton.compile(ast, target=target, options=options | ({"maxnreg": maxnreg} if maxnreg else {}))
        return kernel, _resources(printed.getvalue())

    kernel, resources = compiled(source["maxnreg"])
    if resources["spilled_bytes"] and source["maxnreg"]:
        kernel, resources = compiled(None)
    # The assembler spills some registers so that more CTAs fit on a multiprocessor, each version in other kernels: give
    # it the registers of one CTA less, and so on.
    for limit in register_limits(resources["registers"], source["num_warps"]):
        if not resources["spilled_bytes"]:
            break
        kernel, resources = compiled(limit)
    metadata = kernel.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise ValueError(f"{function.__name__} needs scratch memory that Triton allocates; a launch has none for it.")
    cubin, ptx = kernel.asm["cubin"], kernel.asm["ptx"]
    stem.with_suffix(".cubin").write_bytes(cubin)
    stem.with_suffix(".ptx").write_text(ptx, encoding="utf-8")
    described = {
        "name": metadata.name,
        "function": source["function"],
        "architecture": source["architecture"],
        "arguments": list(source["signature"].items()),
        "scratch_pointers": _parameters(ptx) - len(source["signature"]),
        "constants": source["constants"],
        "num_warps": metadata.num_warps,
        "shared_bytes": metadata.shared,
        **resources,
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "triton": triton.__version__,
    }
    stem.with_suffix(".json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def register_limits(registers: int, num_warps: int) -> list[int]:
    """Return the registers of a thread with which one CTA less fits on a multiprocessor, two CTAs less, and so on."""
    threads = 32 * num_warps
    ctas = _REGISTERS_OF_SM // (threads * registers)
    limits = [min(_MAX_REGISTERS, _REGISTERS_OF_SM // (threads * fewer) // 8 * 8) for fewer in range(1, ctas)]
    return sorted({limit for limit in limits if limit > registers})


def _check_assembler(architecture: int) -> None:
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        get_ptxas(architecture)
    except RuntimeError as error:
        raise FileNotFoundError(
            f"Triton's assembler for sm_{architecture} is missing ({error}). It comes with Triton's wheel for Linux: "
            "pip install --force-reinstall triton"
        ) from error


def _parameters(ptx: str) -> int:
    declaration = re.search(r"\.entry[^(]*\(([^)]*)\)", ptx)
    if declaration is None:
        raise ValueError("The PTX has no entry function.")
    return declaration[1].count(".param")


def _resources(report: str) -> dict[str, Any]:
    """Parse registers, spills and warnings of slow code from the report of `ptxas -v`."""
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    registers = re.findall(r"Used (\d+) registers", report)
    if len(spills) != 2 or len(registers) != 1:
        raise ValueError(f"The assembler's report cannot be parsed:\n{report}")
    resources: dict[str, Any] = {"registers": int(registers[0]), "spilled_bytes": sum(map(int, spills))}
    warnings = re.findall(r"\((C75\d\d)\)", report)
    return resources | ({"warnings": sorted(set(warnings))} if warnings else {})


if __name__ == "__main__":
    main()
