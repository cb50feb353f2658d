"""A model hub on the loopback: as much of its interface as a download needs, over directories of this machine.

`FakeHub.environment` is for a process that is to believe in it; huggingface_hub reads it once, when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any


class FakeHub:
    """Serves `repos`: name -> directory. `gated`: repositories that show what they have, and give none of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.repos: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.requests: Counter[str] = Counter()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> FakeHub:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """From now on there is no connection."""
        self.server.shutdown()
        self.server.server_close()

    def environment(self, **more: str) -> dict[str, str]:
        """Of a process whose hub is this one, with an empty cache at first."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        port = self.server.server_address[1]
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        return {**kept, **own, "HF_HUB_DISABLE_TELEMETRY": "1", **more}

    def commit(self, repo: str) -> str:
        return hashlib.sha1(repo.encode()).hexdigest()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        words = request.path.partition("?")[0].strip("/").split("/")
        self.requests[f"{request.command} {'/'.join(words)}"] += 1
        api = words[:2] == ["api", "models"]
        repo, kind, revision, *rest = "/".join(words[2:4] if api else words[:2]), *words[4 if api else 2 :], "", ""
        if repo not in self.repos:
            self._refuse(request, 404, "RepoNotFound")
        elif kind and revision not in {"main", self.commit(repo)}:
            self._refuse(request, 404, "RevisionNotFound")
        elif api:
            self._send(request, json.dumps(self._describe(repo, kind)).encode(), {"Content-Type": "application/json"})
        elif repo in self.gated:
            self._refuse(request, 403, "GatedRepo")
        else:
            data = (self.repos[repo] / "/".join(filter(None, rest))).read_bytes()
            self._send(request, data, {"ETag": f'"{_git_id(data)}"', "X-Repo-Commit": self.commit(repo)})

    def _describe(self, repo: str, kind: str) -> Any:
        root = self.repos[repo]
        files = sorted(path for path in root.rglob("*") if path.is_file())
        names = [path.relative_to(root).as_posix() for path in files]
        if kind == "tree":
            return [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _git_id(path.read_bytes())}
                for name, path in zip(names, files, strict=True)
            ]
        siblings = [{"rfilename": name} for name in names]
        return {"_id": repo, "id": repo, "sha": self.commit(repo), "siblings": siblings}

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self._send(request, b"{}", {"X-Error-Code": code}, status)

    def _send(self, request: BaseHTTPRequestHandler, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
