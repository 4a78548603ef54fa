"""A wheel with the machine code of one GPU architecture, for where only some MiB may travel.

Usage: python -m benchmarks.gpu.thin_wheel WHEEL OUTPUT_FOLDER --architecture 90

In each library of the wheel, the code for this architecture and PTX move to the front of their fat binary, whose header
gets their size, and zeros follow, which compress to nothing: every fat binary begins where it began. NVIDIA does not
document this layout: ``cuobjdump --list-elf`` shows what is left.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_MIB = 2**20
_FATBIN = struct.pack("<IH", 0xBA55ED50, 1)
_FATBIN_HEADER = struct.Struct("<IHHQ")
"""Magic number, version, size of this header, and bytes of the entries."""

_ENTRY_HEADER = struct.Struct("<HHIQ12xI")
"""Kind, version, size of this header, size of the payload, ..., architecture."""

_MACHINE_CODE = 2
_KINDS = (1, _MACHINE_CODE)
"""PTX and machine code."""


@dataclass(frozen=True)
class Entry:
    """Code for one architecture in a fat binary: whether it is machine code, and where it is, with its header."""

    is_machine_code: bool
    architecture: int
    begin: int
    end: int


def fatbins_of(library: bytes | bytearray) -> Iterator[tuple[int, list[Entry]]]:
    """Where each fat binary begins, and its entries. Bytes that only look like one, whose entries have another kind or
    size, are passed over."""
    place = library.find(_FATBIN)
    while place >= 0:
        _, _, header_size, size = _FATBIN_HEADER.unpack_from(library, place)
        begin, end = place + header_size, place + header_size + size
        found = []
        while begin + _ENTRY_HEADER.size <= min(end, len(library)):
            kind, _, entry_header, payload, architecture = _ENTRY_HEADER.unpack_from(library, begin)
            if kind not in _KINDS or entry_header < _ENTRY_HEADER.size:
                break
            found.append(Entry(kind == _MACHINE_CODE, architecture, begin, begin + entry_header + payload))
            begin = found[-1].end
        if found and begin == end:
            yield place, found
        place = library.find(_FATBIN, end if begin == end else place + len(_FATBIN))


def thin(library: bytearray, architecture: int, *, without_lone: bool = False) -> Counter[int]:
    """Remove machine code of other architectures, in place; the result is bytes of each architecture before.

    Args:
        without_lone: empty the fat binaries too that have code for this architecture alone. Kernels in them fail when
            they are launched.
    """
    sizes = Counter[int]()
    for place, entries in list(fatbins_of(library)):
        *about, header_size, size = _FATBIN_HEADER.unpack_from(library, place)
        begin = place + header_size
        kept, is_lone = bytearray(), len({(entry.is_machine_code, entry.architecture) for entry in entries}) == 1
        for entry in entries:
            if entry.is_machine_code:
                sizes[entry.architecture] += entry.end - entry.begin
            is_kept = entry.architecture == architecture if entry.is_machine_code else True
            if is_kept and not (is_lone and without_lone):
                kept += library[entry.begin : entry.end]
        _FATBIN_HEADER.pack_into(library, place, *about, header_size, len(kept))
        library[begin : begin + size] = kept + bytes(size - len(kept))
    return sizes


def thin_wheel(
    wheel: Path, folder: Path, architecture: int, *, without_lone: bool = False
) -> tuple[Path, Counter[int]]:
    """Write a wheel of the same name, whose RECORD has the new hashes.

    Raises:
        ValueError: the wheel has no machine code for the architecture.
    """
    output, found, hashes = folder / wheel.name, Counter[int](), dict[str, str]()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(output, "w", zipfile.ZIP_LZMA) as target:
        *files, record = sorted(source.infolist(), key=lambda info: info.filename.endswith(".dist-info/RECORD"))
        for info in files:
            content = bytearray(source.read(info))
            if ".so" in Path(info.filename).suffixes:
                found += thin(content, architecture, without_lone=without_lone)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            hashes[info.filename] = f"sha256={digest.decode()}"
            info.compress_type = zipfile.ZIP_LZMA
            target.writestr(info, bytes(content))
        lines = csv.reader(io.StringIO(source.read(record).decode()))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [name, hashes.get(name, old), size] for name, old, size in lines
        )
        target.writestr(record, text.getvalue())
    if not found[architecture]:
        output.unlink()
        held = ", ".join(f"sm_{each}" for each in sorted(found) if found[each]) or "no architecture"
        raise ValueError(f"{wheel.name} has machine code for {held}, and none for sm_{architecture}")
    return output, found


def main(arguments: Sequence[str]) -> int:
    """Write the wheel and print what it had; the result is the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.thin_wheel", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path, help="where the smaller wheel is written; not the folder of the other")
    parser.add_argument("--architecture", type=int, default=90, help="as of sm_90 (default: 90)")
    parser.add_argument(
        "--without-lone",
        action="store_true",
        help="leave out kernels that were compiled for this architecture alone: in onnxruntime-gpu 1.31.1, for sm_90, "
        "GEMMs of experts and of FP8 weights, which a float16 encoder does not run",
    )
    options = parser.parse_args(arguments)
    if options.folder.resolve() == options.wheel.resolve().parent:
        parser.error(f"{options.folder} holds the wheel itself: name another folder")
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        output, found = thin_wheel(
            options.wheel, options.folder, options.architecture, without_lone=options.without_lone
        )
    except ValueError as error:
        parser.error(str(error))
    for architecture, size in sorted(found.items()):
        print(f"{size / _MIB:8.1f} MiB of sm_{architecture}")
    before, after = (path.stat().st_size / _MIB for path in (options.wheel, output))
    print(f"{before:8.1f} MiB before, {after:.1f} MiB now: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
