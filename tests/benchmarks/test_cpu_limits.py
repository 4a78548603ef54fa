"""The benchmark of a container's limits says what it needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.cpu import cpu_limits


@pytest.mark.parametrize("is_version_2", [False, True])
def test_a_quota_that_cannot_be_set_ends_the_case(is_version_2: bool, tmp_path: Path) -> None:
    if is_version_2:
        (tmp_path / "cgroup.controllers").write_text("cpu\n")
        # A group that another process of this number has left.
        (tmp_path / f"hdexport-cpu-limits-{os.getpid()}").write_text("")
    message = r"No control group with a quota can be made in .*\nRun it as root"
    with pytest.raises(SystemExit, match=message), cpu_limits.quota(0.5, tmp_path):
        pytest.fail("the case would be measured without its quota")
