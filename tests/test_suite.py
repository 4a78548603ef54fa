"""The suite itself: what it does to the processes that its tests start."""

from __future__ import annotations

import signal
import subprocess
import sys

_ASKS = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_ctrl_c_reaches_what_a_test_starts() -> None:
    """Run by the test beneath, where it is ignored around the whole suite."""
    child = subprocess.run([sys.executable, "-c", _ASKS], capture_output=True, text=True, check=True)
    assert child.stdout == "True\n"


def test_ctrl_c_reaches_it_in_the_background_of_a_shell_too() -> None:
    suite = [sys.executable, "-m", "pytest", "-q", f"{__file__}::{test_ctrl_c_reaches_what_a_test_starts.__name__}"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(suite, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
