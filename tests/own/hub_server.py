"""A model hub on loopback: serves the files of folders under the addresses that the Hugging Face hub has for them."""

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "0123456789" * 4


@contextlib.contextmanager
def hub_server(models: dict[str, Path]):
    """Serve {"owner/name": folder}; yields the value for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(with_body=True)

        def do_HEAD(self):
            self._answer(with_body=False)

        def log_message(self, *_):
            pass

        def _answer(self, with_body):
            about = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.*)?", self.path)
            of_file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path)
            name = (about or of_file or ["", ""])[1]
            if name not in models:
                return self._send(404, b"", with_body, {"X-Error-Code": "RepoNotFound"})
            if about:
                description = {"id": name, "modelId": name, "sha": REVISION, "siblings": [], "tags": []}
                return self._send(200, json.dumps(description).encode(), with_body, {})
            file = models[name] / of_file[2]
            if not file.is_file():
                return self._send(404, b"", with_body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION})
            content = file.read_bytes()
            return self._send(200, content, with_body, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

        def _send(self, status, body, with_body, headers):
            self.send_response(status)
            for key, value in {"X-Repo-Commit": REVISION, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
