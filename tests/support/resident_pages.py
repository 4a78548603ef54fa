"""How much of a mapped file is in this process's memory."""

from __future__ import annotations

import re
from pathlib import Path

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S{4}) \S+ \S+ \d+ +(.+)$")


def resident_bytes_of(path: Path) -> int:
    """Bytes of the pages that the mappings of a file to be read have in memory, as Linux counts them."""
    found, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mapping = _MAPPING.match(line)
            is_of_file = mapping is not None and mapping.groups() == ("r--s", str(path.resolve()))
        elif is_of_file and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found
