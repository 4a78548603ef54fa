"""The servers that are measured, each a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.serving.models import MAX_LEN, Model

OURS, OURS_IN_BFLOAT16, SENTENCE_TRANSFORMERS = (
    "hdexport serve", "hdexport serve, OpenVINO in bfloat16", "sentence-transformers",
)  # fmt: skip
INFINITY: Mapping[str, str] = {"infinity, PyTorch": "torch", "infinity, ONNX Runtime": "optimum"}
"""Name -> its ``--engine``."""

# infinity runs long batches first; with 0.0.78, neither its flag nor its variable against that works.
_START_SECONDS = 300

_TWENTY_LINES = """
import sys
import uvicorn
from sentence_transformers import SentenceTransformer
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route

model = SentenceTransformer(sys.argv[1], device="cpu")
model.max_seq_length = int(sys.argv[3])

async def embed(request):
    vectors = await run_in_threadpool(model.encode, [(await request.json())["input"]], show_progress_bar=False)
    return JSONResponse({"data": [{"object": "embedding", "index": 0, "embedding": vectors[0].tolist()}]})

async def health(request):
    return JSONResponse({})

routes = [Route("/v1/embeddings", embed, methods=["POST"]), Route("/health", health)]
uvicorn.run(Starlette(routes=routes), port=int(sys.argv[2]), log_level="warning")
"""


class Server(NamedTuple):
    """A server that runs: its port, and its process."""

    name: str
    port: int
    process: psutil.Process

    def pause(self) -> None:
        """Take no CPU while another server is measured."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on."""
        self.process.send_signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """The CPU time of the process so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    def forget_peak(self) -> None:
        """Measure the peak of resident memory from now on."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The peak of resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))

    def vector(self, text: str) -> np.ndarray:
        """The server's embedding of a text, scaled to length 1."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body, headers = json.dumps({"input": text}), {"Content-Type": "application/json"}
        connection.request("POST", "/v1/embeddings", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        vector = np.array(json.loads(content)["data"][0]["embedding"])
        return vector / np.linalg.norm(vector)


def command_of(name: str, model: Model, port: int, infinity: Path | None) -> list[str | Path]:
    """The command of a server, with its defaults but for the length of texts.

    Args:
        infinity: the environment that has infinity-emb.
    """
    if name in (OURS, OURS_IN_BFLOAT16):
        bundle = [model.bundle] if name == OURS else [model.openvino_bundle, "--precision", "bfloat16"]
        return [sys.executable, "-m", "hdexport", "serve", *bundle, "--port", str(port), "--truncate", "end"]
    if name == SENTENCE_TRANSFORMERS:
        return [sys.executable, "-c", _TWENTY_LINES, model.checkpoint, str(port), str(MAX_LEN)]
    assert infinity is not None, "infinity is measured where it is installed"
    address = ["--host", "127.0.0.1", "--port", str(port), "--url-prefix", "/v1", "--log-level", "error"]
    # "." is the working directory, see `started`. The ONNX engine takes the first token's embedding unless it is told
    # otherwise, whatever the model's files say.
    model_options = ["--model-id", ".", "--device", "cpu", "--engine", INFINITY[name], "--pooling-method", "mean"]
    return [infinity / "bin" / "infinity_emb", "v2", *model_options, *address]


@contextlib.contextmanager
def started(name: str, model: Model, infinity: Path | None, log: Path) -> Iterator[Server]:
    """A server that is ready; its output goes to a file, which an error shows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = None
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    if name in INFINITY:
        # Its environment has other versions of the same packages. Models come from folders, and nothing is reported.
        environment.pop("PYTHONPATH", None)
        environment |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        # infinity passes the ONNX file's path on, and optimum 2.1 takes one that is relative to the model alone.
        folder = model.checkpoint
    command = list(map(str, command_of(name, model, port, infinity)))
    options: dict[str, Any] = {"env": environment, "cwd": folder}
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, **options) as process:
        try:
            _wait_until_ready(name, port, process, log)
            yield Server(name, port, psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def largest_difference(servers: Sequence[Server], texts: Sequence[str]) -> dict[str, float]:
    """Server -> the largest difference of a number in its vectors from the first server's."""
    expected = np.stack([servers[0].vector(text) for text in texts])
    return {
        server.name: float(np.abs(np.stack([server.vector(text) for text in texts]) - expected).max())
        for server in servers[1:]
    }


def _wait_until_ready(name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + _START_SECONDS
    while time.monotonic() < ends and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{name} is not ready:\n{log.read_text(errors='replace')[-2000:]}")
