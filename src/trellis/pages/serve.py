"""The page of a run, served while it trains."""

import http
import http.server
import socket
import sys
from pathlib import Path
from typing import Any

from trellis.errors import UserError
from trellis.figures.html import tag
from trellis.pages.read import read_folder
from trellis.pages.run import page, state
from trellis.run.folder import check_path, no_folder, was_left

_OF_A_RUN = ("run.yaml", "metrics.jsonl", ".lock")  # one of them is there as soon as a run has a folder


def serve(folder: Path, *, host: str, port: int, every: int) -> http.server.ThreadingHTTPServer:
    """A server of one page, made from the folder's files at each request; call its `serve_forever`.

    Args:
        folder: the run's folder. It may have no step yet.
        host: the address to listen on, of IPv4 or IPv6, or its name.
        port: its port; 0 takes a free one.
        every: seconds after which a browser reloads the page of a run that is training.

    Raises:
        UserError: there is no such folder, it is no run's or a URL, or the address cannot be used.
    """
    fix = "name the folder of a run, as in `trellis watch runs/NAME-DATE`"
    check_path(folder)
    if not folder.is_dir():
        raise UserError("A run to watch must have a folder.", seen=no_folder(folder), where=str(folder), fix=fix)
    if not any((folder / name).exists() for name in _OF_A_RUN):
        held = sorted(path.name for path in folder.iterdir())
        seen = f"none of {', '.join(_OF_A_RUN)}, but {', '.join(held[:5]) or 'nothing'}{', ...' * (len(held) > 5)}"
        raise UserError("A folder to watch must be a run's.", seen=seen, where=str(folder), fix=fix)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(http.HTTPStatus.NOT_FOUND)
                return
            body = _current(folder, every).encode()
            self.send_response(http.HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # a browser that left or reloaded is no error
                super().handle_error(request, client_address)

    try:
        return Server((host, port), Handler)
    except OSError as error:
        fix = "use --port 0, or another --host"
        seen = error.strerror or str(error)
        raise UserError(
            "The address must be free and belong to this machine.", seen=seen, where=f"{host}:{port}", fix=fix
        ) from None


def waits_for(folder: Path) -> str:
    """What the page of a run waits for before it shows anything; empty if the run has made a step."""
    if (folder / "metrics.jsonl").is_file():
        return ""
    return f"no step yet{', and no process trains here' if was_left(folder) else ''}"


def _current(folder: Path, every: int) -> str:
    again = tag("meta", http_equiv="refresh", content=every)
    try:
        run = read_folder(folder)
        text = page(run)
    except (UserError, OSError) as error:  # as of a file that may not be read, or of a disk that is gone
        if not folder.is_dir():
            said = f"{folder} is no longer a folder"
        elif waits := waits_for(folder):
            said = waits
        else:
            said = str(error)
        return f"<!doctype html><html><head>{again}</head><body>{tag('pre', said)}</body></html>"
    return text.replace("<head>", f"<head>{again}", 1) if state(run) == "training" else text
