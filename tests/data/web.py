"""A real web server of a folder, with byte ranges, that can be told to misbehave."""

import contextlib
import http.server
import pathlib
import re
import socket
import threading


class Web:
    """Serves ``folder`` at ``url``.

    Attributes:
        ranges: honour byte ranges; otherwise the whole file is sent.
        drop: called with the number of each request; if true, the connection is closed after half of the body.
        requests: (path, range header) of every request.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder, self.ranges, self.drop, self.requests = folder, True, lambda number: False, []
        self.connections: list[socket.socket] = []
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def _handler(web):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                web.connections.append(self.connection)

            def do_HEAD(self):
                self._answer(body=False)

            def do_GET(self):
                self._answer(body=True)

            def _answer(self, *, body):
                web.requests.append((self.path, self.headers.get("Range")))
                number = len(web.requests)
                path = web.folder / self.path.split("?")[0].lstrip("/")
                if not path.is_file():
                    self.send_error(404)
                    return
                data, status = path.read_bytes(), 200
                asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
                if asked and web.ranges:
                    start, stop = int(asked[1]), int(asked[2] or len(data) - 1) + 1
                    self.range = f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"
                    data, status = data[start:stop], 206
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                if web.ranges:
                    self.send_header("Accept-Ranges", "bytes")
                if status == 206:
                    self.send_header("Content-Range", self.range)
                self.end_headers()
                if not body:
                    return
                if web.drop(number):
                    self.wfile.write(data[: len(data) // 2])
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.shutdown(2)
                    return
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.wfile.write(data)

            def log_message(self, *args):
                pass

        return Handler


@contextlib.contextmanager
def serve(folder: pathlib.Path):
    """A `Web` that runs as long as the context."""
    web = Web(folder)
    web.server.daemon_threads = True
    thread = threading.Thread(target=web.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield web
    finally:
        web.server.shutdown()
        for connection in web.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        web.server.server_close()
        thread.join()
