"""The resident memory of a build over its processor time, by step, as a picture.

Usage: python -m benchmarks.cpu.build_memory record TITLE [--checkout FOLDER] --output FILE -- MODEL [build options]
       python -m benchmarks.cpu.build_memory draw FILE PICTURE.svg

`record` runs ``hdexport build -v`` in a process of its own, and adds a line to the file; with --checkout it runs the
packages of another checkout, for a build before a change. `draw` draws all lines, one below the other. Processor time
is that of all threads, so a busy machine draws the same picture. On Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.cpu.feeding.timeline import save
from benchmarks.record import append, command_line, now

_HDEXPORT = "import sys; from hdexport.cli import main; sys.exit(main())"
_PACKAGES = ("exporter", "runtime", "plugins")

_POLL_SECONDS = 0.02
_POINTS = 300
"""Points of a curve; each is the largest of its part of the time, so that no peak is lost."""

_STEP = re.compile(r"hdexport\S*: (?P<title>.+): [\d.]+ s")
"""A line of the log at the end of a step."""

_MIN_LABELLED = 0.05
"""Share of the time from which a step is named in the picture."""


def recorded(command: Sequence[str], *, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a command that logs its steps, and sample its memory.

    Args:
        command: the command; its log is its standard error.
        environment: variables of the process.

    Returns:
        ``samples``: [processor seconds, bytes of resident memory] in order; ``steps``: [title, processor seconds at its
        end]; ``peak_bytes``, by the system's own high-water mark.
    """
    samples: list[tuple[float, int]] = []
    peak_bytes = 0
    steps: list[tuple[str, float]] = []
    with tempfile.TemporaryFile() as unread:
        process = subprocess.Popen(command, stdout=unread, stderr=subprocess.PIPE, text=True, env=dict(environment))
        assert process.stderr is not None
        log: list[str] = []
        reader = threading.Thread(target=_read_steps, args=(process.stderr, process.pid, steps, log))
        reader.start()
        while (sample := _sample(process.pid)) is not None:
            samples.append(sample)
            peak_bytes = max(peak_bytes, _high_water_mark(process.pid))
            time.sleep(_POLL_SECONDS)
        process.wait()
        reader.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit status {process.returncode}\n{''.join(log)}")
    return {"samples": largest(samples, _POINTS), "steps": steps, "peak_bytes": peak_bytes}


def largest(samples: Sequence[tuple[float, int]], points: int) -> list[tuple[float, int]]:
    """The largest sample of each of so many equal parts of the time."""
    end = samples[-1][0] or 1.0
    kept: dict[int, tuple[float, int]] = {}
    for seconds, size in samples:
        part = min(points - 1, int(seconds / end * points))
        kept[part] = max(kept.get(part, (seconds, 0)), (seconds, size), key=lambda sample: sample[1])
    return [kept[part] for part in sorted(kept)]


def _read_steps(lines: IO[str], pid: int, steps: list[tuple[str, float]], log: list[str]) -> None:
    for line in lines:
        log.append(line)
        found = _STEP.fullmatch(line.strip())
        if found is not None and (sample := _sample(pid)) is not None:
            steps.append((found["title"], sample[0]))


def _sample(pid: int) -> tuple[float, int] | None:
    """Processor seconds and resident bytes of a process; None once it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # From proc(5): state, user and system time in ticks, and resident pages.
    state, ticks, pages = fields[0], int(fields[11]) + int(fields[12]), int(fields[21])
    return None if state == "Z" else (ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGESIZE"))


def _high_water_mark(pid: int) -> int:
    """Most resident bytes until now; 0 once the process ended."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) * 1024 if found else 0


def picture(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The curves of builds, one below the other, with equal axes and the ends of steps."""
    import altair as alt

    seconds = max(row["samples"][-1][0] for row in rows)
    gigabytes = max(row["peak_bytes"] for row in rows) / 1e9
    x = alt.X("s:Q", title="processor seconds", scale=alt.Scale(domain=[0, seconds], nice=False))
    y = alt.Y("GB:Q", title="resident memory, GB", scale=alt.Scale(domain=[0, gigabytes]))
    panels = []
    for row in rows:
        points = [{"s": round(each, 2), "GB": round(size / 1e9, 3)} for each, size in row["samples"]]
        base = alt.Chart(alt.InlineData(values=points), width=680, height=200)
        ends = alt.Chart(alt.InlineData(values=[{"s": end} for _, end in row["steps"]]))
        names = alt.Chart(alt.InlineData(values=list(_labels(row["steps"], seconds, gigabytes))))
        text = names.mark_text(align="left", baseline="bottom", angle=90, dx=4, dy=-3, fontSize=11, limit=190)
        layers = (
            base.mark_area(opacity=0.35, interpolate="step-after").encode(x=x, y=y),
            ends.mark_rule(strokeDash=[3, 3], opacity=0.4).encode(x="s:Q"),
            text.encode(x="s:Q", y="GB:Q", text="title:N"),
        )
        panels.append(alt.layer(*layers).properties(title=f"{row['title']}: {row['peak_bytes'] / 1e9:.2f} GB at most"))
    return alt.vconcat(*panels).configure(background="white", font="'DejaVu Sans', sans-serif")


def _labels(steps: Sequence[tuple[str, float]], seconds: float, height: float) -> Iterator[dict[str, Any]]:
    began = 0.0
    for title, end in steps:
        if end - began >= _MIN_LABELLED * seconds:
            yield {"s": began, "GB": height, "title": title}
        began = end


def main() -> None:
    """Record a build, or draw recorded ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run a build, and add a line to a file")
    record.add_argument("title")
    record.add_argument("--checkout", type=Path, help="folder of another checkout; its packages build")
    record.add_argument("--output", type=Path, required=True)
    record.add_argument("build", nargs="+", metavar="MODEL", help="the model and options of hdexport build, after --")
    draw = commands.add_parser("draw", help="draw the lines of a file")
    draw.add_argument("file", type=Path)
    draw.add_argument("picture", type=Path)
    options = parser.parse_args()
    if options.command == "draw":
        rows = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
        save(picture(rows), options.picture)
        return
    environment = dict(os.environ)
    if options.checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join(str(options.checkout.resolve() / name) for name in _PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _HDEXPORT, "build", *options.build, "-v", "-o", str(Path(folder) / "bundle")]
        found = recorded(command, environment=environment)
    about = {"module": "benchmarks.cpu.build_memory", "date": now(), "title": options.title}
    append(options.output, {"command": command_line("benchmarks.cpu.build_memory"), **about, **found})
    print(f"{options.title}: {found['peak_bytes'] / 1e9:.2f} GB at most")


if __name__ == "__main__":
    main()
