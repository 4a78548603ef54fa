"""A Hugging Face hub of one's own on 127.0.0.1, for the real client: models, their commits, and the requests."""

from __future__ import annotations

__all__ = ["HubServer"]

import hashlib
import http.server
import json
import re
import threading
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote


class HubServer:
    """Serves directories as commits of models, from ``with`` to its end.

    Attributes:
        commits: model -> revision (a branch or a commit) -> commit.
        directories: commit -> the files.
        asked: paths of all GET requests, in order.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, str]] = {}
        self.directories: dict[str, Path] = {}
        self.asked: list[str] = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def push(self, model: str, directory: Path, *, branch: str = "main") -> str:
        """Make a directory the newest commit of a branch; returns the commit."""
        commit = hashlib.sha1(f"{model} {directory}".encode()).hexdigest()
        self.commits.setdefault(model, {}).update({branch: commit, commit: commit})
        self.directories[commit] = directory
        return commit

    def downloaded(self) -> list[str]:
        """Names of the files that were downloaded, each as often as it was."""
        return sorted(path.rpartition("/")[2] for path in self.asked if "/resolve/" in path)

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append(self.path)
                self.do_HEAD()

            def do_HEAD(self) -> None:
                path = self.path.partition("?")[0]
                if path.startswith("/api/models/"):
                    name, what, revision = re.fullmatch(
                        r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path
                    ).groups()
                    commit = hub.commits.get(name, {}).get(unquote(revision or "main"))
                    describe = self._tree if what == "tree" else self._information
                    self._answer(None if commit is None else json.dumps(describe(name, commit)).encode())
                    return
                name, revision, file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path).groups()
                commit = hub.commits.get(name, {}).get(unquote(revision))
                found = None if commit is None else hub.directories[commit] / unquote(file)
                self._answer(found.read_bytes() if found is not None and found.is_file() else None, commit)

            def _information(self, name: str, commit: str) -> object:
                siblings = [{"rfilename": entry["path"]} for entry in self._tree(name, commit)]
                return {"id": name, "modelId": name, "sha": commit, "siblings": siblings}

            def _tree(self, name: str, commit: str) -> list[dict[str, object]]:
                root = hub.directories[commit]
                return [
                    {
                        "type": "file",
                        "path": path.relative_to(root).as_posix(),
                        "size": path.stat().st_size,
                        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
                    }
                    for path in sorted(root.rglob("*"))
                    if path.is_file()
                ]

            def _answer(self, content: bytes | None, commit: str | None = None) -> None:
                self.send_response(404 if content is None else 200)
                if content is None:
                    self.send_header("X-Error-Code", "RevisionNotFound")
                if commit is not None and content is not None:
                    self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
                    self.send_header("X-Repo-Commit", commit)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content or b"")

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler
