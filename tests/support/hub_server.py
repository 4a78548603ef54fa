"""A Hugging Face hub of one's own on 127.0.0.1, for the real client: models, their commits, and the requests."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

import pytest


class HubServer:
    """Serves directories as commits of models, from ``with`` to its end.

    Commits of the client are taken where `uploads` is set.

    Attributes:
        commits: model -> revision (a branch or a commit) -> commit.
        directories: commit -> the files.
        asked: paths of all GET requests, in order.
        tokens: what they gave as their authorization.
        uploads: where commits of the client are written; None refuses them.
        made: what the client asked for when it made repositories.
    """

    def __init__(self) -> None:
        self.uploads: Path | None = None
        self.made: list[dict[str, object]] = []
        self.commits: dict[str, dict[str, str]] = {}
        self.directories: dict[str, Path] = {}
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def push(self, model: str, directory: Path, *, branch: str = "main") -> str:
        """Make a directory the newest commit of a branch; returns the commit."""
        commit = hashlib.sha1(f"{model} {directory}".encode()).hexdigest()
        self.commits.setdefault(model, {}).update({branch: commit, commit: commit})
        self.directories[commit] = directory
        return commit

    def committed(self, model: str, lines: list[dict[str, Any]], *, branch: str = "main") -> str:
        """Add the files of a commit, as the client sends them, to those of a branch; returns the commit."""
        assert self.uploads is not None
        directory = self.uploads / f"{len(self.directories)}"
        before = self.commits.get(model, {}).get(branch)
        if before is None:
            directory.mkdir()
        else:
            shutil.copytree(self.directories[before], directory)
        for line in lines:
            if line["key"] == "file":
                file = directory / line["value"]["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(base64.b64decode(line["value"]["content"]))
        return self.push(model, directory, branch=branch)

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
                hub.tokens.add(self.headers["Authorization"])
                self.do_HEAD()

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"] or 0))
                path = self.path.partition("?")[0]
                if hub.uploads is None:
                    self._answer(None)
                elif path == "/api/repos/create":
                    hub.made.append(json.loads(content))
                    name = f"{hub.made[-1].get('organization', 'me')}/{hub.made[-1]['name']}"
                    if name not in hub.commits:
                        hub.committed(name, [{"key": "file", "value": {"path": ".gitattributes", "content": ""}}])
                    self._answer(json.dumps({"url": f"{hub.address}/{name}", "id": name}).encode())
                elif path == "/api/validate-yaml":
                    self._answer(b'{"errors": [], "warnings": []}')
                else:
                    name, what, revision = re.fullmatch(
                        r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)", path
                    ).groups()
                    answer: dict[str, object] = {}
                    revision = unquote(revision)
                    if what == "preupload":
                        files = [
                            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                            for file in json.loads(content)["files"]
                        ]
                        answer = {"files": files}
                    elif what == "branch":
                        hub.commits[name][revision] = hub.commits[name]["main"]
                    else:
                        lines = [json.loads(line) for line in content.splitlines()]
                        commit = hub.committed(name, lines, branch=revision)
                        answer = {"commitUrl": f"{hub.address}/{name}/commit/{commit}", "commitOid": commit}
                    self._answer(json.dumps(answer).encode())

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
                if self.command in ("GET", "POST"):
                    self.wfile.write(content or b"")

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler


@contextlib.contextmanager
def served_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub without models for this process, an empty cache, and an empty current directory, both in a folder."""
    import huggingface_hub.constants as constants

    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HubServer() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        yield server
