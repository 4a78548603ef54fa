"""List the packages to copy to a machine without a network, and check their size.

Usage: python -m pip list --format=freeze > there.txt                (on that machine)
       python -m benchmarks.gpu.transfer --plan first --installed there.txt --wheels DIR [--also PATH ...]

Every package that a plan needs is there in an accepted version, or a wheel of DIR, or missing. The repository's files,
the wheels and the other paths together stay within the limit. The exit status is 1 where something is missing or too
large.
"""

from __future__ import annotations

import argparse
import email
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from benchmarks.gpu.plans import PLANS
from hdplugins.onnxruntime.operators import library_path

_ROOT = Path(__file__).parents[2]
_MIB = 2**20
_LARGEST = 5


@dataclass(frozen=True)
class Wheel:
    """A wheel: its version, and the requirements that it names."""

    path: Path
    version: str
    requirements: tuple[str, ...]


def wheels_in(folder: Path) -> dict[str, Wheel]:
    """Normalized name of the package -> its wheel."""
    found = {}
    for path in sorted(folder.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            (metadata,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
            headers = email.message_from_bytes(archive.read(metadata))
        found[str(name)] = Wheel(path, str(version), tuple(headers.get_all("Requires-Dist", [])))
    return found


def missing_packages(
    requirements: Sequence[str], installed: Mapping[str, str], wheels: Mapping[str, Wheel]
) -> Iterator[str]:
    """A line for each package that is neither there nor a wheel, and for each wheel of a version that is not accepted.

    What a package that is there requires is taken to be there; what a wheel requires is looked for.

    Args:
        requirements: as pip has them, with extras and markers.
        installed: normalized name -> version, of the other machine.
        wheels: as `wheels_in` finds them; they take the place of what is there.
    """
    waiting, seen = [(Requirement(line), "") for line in requirements], set[str]()
    while waiting:
        wanted, extra = waiting.pop(0)
        if str(wanted) in seen or (wanted.marker is not None and not wanted.marker.evaluate({"extra": extra})):
            continue
        seen.add(str(wanted))
        name = canonicalize_name(wanted.name)
        wheel = wheels.get(name)
        version = wheel.version if wheel is not None else installed.get(name)
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            is_there = "no version is there" if version is None else f"{version} is {'a wheel' if wheel else 'there'}"
            yield f"{wanted}: {is_there}"
        elif wheel is not None:
            waiting += [(Requirement(line), each) for line in wheel.requirements for each in ("", *wanted.extras)]


def sizes_of(paths: Sequence[Path]) -> dict[Path, int]:
    """Bytes of each file of the repository that is tracked or not ignored, and of each file of the paths."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    files = {_ROOT / name for name in listed.stdout.split("\0") if name}
    for path in paths:
        files |= {path.resolve()} if path.is_file() else {file.resolve() for file in path.rglob("*")}
    return {file: file.stat().st_size for file in files if file.is_file()}


def main(arguments: Sequence[str]) -> int:
    """Print what is missing and how large all is; the result is the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.transfer", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--plan", choices=PLANS, default="all", help="whose packages are looked for (default: all)")
    parser.add_argument("--installed", type=Path, required=True, help="`pip list --format=freeze` of the other machine")
    parser.add_argument("--wheels", type=Path, required=True, help="folder of the wheels that travel")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="other files and folders that travel")
    parser.add_argument("--limit-mib", type=float, default=64.0, help="what may travel, in MiB (default: 64)")
    options = parser.parse_args(arguments)
    if absent := [str(path) for path in (options.installed, options.wheels, *options.also) if not path.exists()]:
        parser.error(f"not found: {', '.join(absent)}")
    lines = (line.partition("==") for line in options.installed.read_text(encoding="utf-8").split())
    installed = {canonicalize_name(name): version for name, _, version in lines}
    missing = list(missing_packages(PLANS[options.plan].requires, installed, wheels_in(options.wheels)))
    library = library_path()
    if library is None:
        missing.append("the library that launches kernels: install hdexport here, where a C compiler is")
    travels = [options.wheels, *options.also, *([] if library is None else [Path(library)])]
    sizes = sizes_of(travels)
    total = sum(sizes.values())
    for line in missing:
        print(f"missing: {line}")
    for file in sorted(sizes, key=lambda file: -sizes[file])[:_LARGEST]:
        print(f"{sizes[file] / _MIB:8.1f} MiB  {file.name}")
    is_too_large = total > options.limit_mib * _MIB
    verdict = f"too large by {total / _MIB - options.limit_mib:.1f} MiB" if is_too_large else "fits"
    print(f"{total / _MIB:8.1f} MiB  {len(sizes)} files in all, limit {options.limit_mib:g}: {verdict}")
    return int(bool(missing) or is_too_large)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
