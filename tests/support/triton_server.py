"""A Triton server from the wheel of nvidia-pytriton, which `make test` puts beside the other packages."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx2

import hdruntime
from support.waiting import wait_until

_WHEEL = Path(sys.prefix) / "triton-server"
_SERVER = _WHEEL / "pytriton" / "tritonserver"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def missing_triton() -> str | None:
    """Why there is no server; None if there is."""
    stub = _SERVER / "python_backend_stubs" / _PYTHON
    return None if stub.is_dir() else f"{stub} is missing: a wheel of a Triton server is for Linux on x86 alone"


@contextlib.contextmanager
def triton_server(repository: Path, folder: Path) -> Iterator[httpx2.Client]:
    """A server of these models, and a client of its HTTP interface.

    The wheel's server is of 2024: its Python backend reads arrays of numpy 1 alone, which an environment of its own
    has in front of ours. The backend takes the first python3 of the path.

    Args:
        repository: of models.
        folder: empty, for the environment, the backend and the log.
    """
    venv.create(folder / "environment")
    (packages,) = (folder / "environment" / "lib").glob("python*/site-packages")
    own = next(path for path in sys.path if path.endswith("site-packages"))
    # The backend ignores PYTHONPATH.
    runtime = Path(hdruntime.__file__).parents[1]
    (packages / "ours.pth").write_text(f"{_WHEEL}\n{runtime}\nimport site; site.addsitedir({own!r})\n")
    shutil.copytree(_SERVER / "backends" / "python", folder / "backends" / "python")
    stub = shutil.copy(
        _SERVER / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub", folder / "backends" / "python"
    )
    server = _SERVER / "bin" / "tritonserver"
    for program in (Path(stub), server):
        program.chmod(0o755)
    libraries = [_WHEEL / "nvidia_pytriton.libs", Path(sys.base_prefix) / "lib"]
    environment = os.environ | {
        "PATH": f"{folder / 'environment' / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [server, "--model-repository", repository, "--backend-directory", folder / "backends"]
    command += ["--http-address", "127.0.0.1", "--http-port", str(port)]
    command += ["--allow-grpc", "false", "--allow-metrics", "false"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            def is_ready() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                with contextlib.suppress(httpx2.TransportError):
                    return client.get("/v2/health/ready").status_code == 200
                return False

            wait_until(is_ready)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
