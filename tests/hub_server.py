"""A server on the loopback that speaks the part of the hub's protocol with which `huggingface_hub` downloads files."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/(?P<kind>models|datasets)/(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<what>\w[\w-]*)/(?P<rest>.*))?")
_FILE = re.compile(r"/(?P<kind>datasets/)?(?P<name>[\w.-]+/[\w.-]+)/resolve/\w+/(?P<file>.+)")
_CHUNK = 1 << 16


@dataclass
class Hub:
    """What the server has, and how it behaves.

    Attributes:
        models, datasets: repository -> file -> content.
        pause_s: seconds before each 64 KiB of a file.
        break_after: bytes after which answers with a file are broken off; None: none.
        broken: end of the names of these files.
        requests: method and path of each request.
        address: value of HF_ENDPOINT.
    """

    models: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    datasets: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    pause_s: float = 0.0
    break_after: int | None = None
    broken: str = ""
    requests: list[str] = field(default_factory=list)
    address: str = ""

    def start(self) -> ThreadingHTTPServer:
        """Serve on a free port."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{server.server_port}"
        return server


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Let this process download from a server, in pieces of 64 KiB, into a folder."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", _CHUNK)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *values: object) -> None:
        """Stay silent."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(with_body=True, body=body)

    def _answer(self, with_body: bool, body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if (api := _API.fullmatch(path)) is not None:
            files = getattr(self.hub, api["kind"]).get(api["name"])
            if files is None:
                return self._refuse("RepoNotFound")
            return self._send_json(self._described(api, files, body))
        if (place := _FILE.fullmatch(path)) is not None:
            files = (self.hub.datasets if place["kind"] else self.hub.models).get(place["name"])
            if files is None:
                return self._refuse("RepoNotFound")
            if place["file"] not in files:
                return self._refuse("EntryNotFound")
            breaks = place["file"].endswith(self.hub.broken)
            return self._send_file(files[place["file"]], with_body, self.hub.break_after if breaks else None)
        return self._refuse("EntryNotFound")

    def _described(self, api: re.Match[str], files: Mapping[str, bytes], body: bytes) -> object:
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]
        if api["what"] == "tree":
            folder = api["rest"].partition("/")[2]
            return [entry for entry in entries if not folder or str(entry["path"]).startswith(f"{folder}/")]
        if api["what"] == "paths-info":
            asked = json.loads(body)["paths"]
            return [entry for entry in entries if entry["path"] in asked]
        return {"id": api["name"], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files], "tags": []}

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _send_file(self, content: bytes, with_body: bool, break_after: int | None) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not with_body:
            return
        for start in range(first, len(content), _CHUNK):
            time.sleep(self.hub.pause_s)
            if break_after is not None and start - first >= break_after:
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(content[start : start + _CHUNK])
