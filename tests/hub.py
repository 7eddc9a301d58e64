"""A stand-in for the Hugging Face Hub on this machine: repositories of files, each at one commit and one branch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The stand-in. models: bytes by file, by name of the repository. asked: method and path of every request."""

    models: Mapping[str, Mapping[str, bytes]]
    asked: list[str] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    """Files that are listed and answer 404."""

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body, as the Hub's API and its `resolve` pages have them."""
        self.asked.append(f"{method} {path}")
        parts = path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and (files := self.models.get("/".join(parts[2:4]))) is not None:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            name = "/".join(parts[2:4])
            if len(parts) > 4 and parts[5] not in ("main", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            document = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(document).encode()
        if parts[2:4] == ["resolve", COMMIT] and (files := self.models.get("/".join(parts[:2]))) is not None:
            name = "/".join(parts[4:])
            if name in files and name not in self.missing:
                etag = hashlib.sha256(files[name]).hexdigest()
                return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, files[name]
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        return 404, {"X-Error-Code": "RepoNotFound"}, b""


@contextlib.contextmanager
def serving(models: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[Hub, str]]:
    """Runs a stand-in for the block; gives it and its URL."""
    hub = Hub(models)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.command, self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the name that http.server asks for

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the files of a model's folder by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Makes the client of this process ask a stand-in, and keep what comes in `cache`."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
