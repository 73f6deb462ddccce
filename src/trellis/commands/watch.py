"""`trellis watch`."""

import argparse
from pathlib import Path

from trellis.commands.command import Command, whole
from trellis.errors import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis watch`."""
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--port", type=whole(), default=8321, metavar="N", help="the port; 0 takes a free one (default: 8321)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="0.0.0.0 makes it visible on the network (default: this machine only)",
    )
    parser.add_argument(
        "--every", type=whole(), default=10, metavar="SECONDS", help="how often the page reloads (default: 10)"
    )


def execute(args: argparse.Namespace) -> int:
    """`trellis watch`."""
    from trellis.pages.serve import serve, waits_for

    for name, value, least, most in (("port", args.port, 0, 65535), ("every", args.every, 1, 86400)):
        if not least <= value <= most:
            rule = f"`--{name}` must be from {least} to {most}."
            raise UserError(rule, seen=value, where=f"--{name}", fix="leave it out")
    server = serve(Path(args.folder), host=args.host, port=args.port, every=args.every)
    port, host = server.server_address[1], f"[{args.host}]" if ":" in args.host else args.host
    print(f"watching {args.folder} at http://{host}:{port}, until Ctrl-C")
    if waits := waits_for(Path(args.folder)):
        print(f"{waits}: the page waits for metrics.jsonl, which the first step writes")
    print(
        f"from another machine: ssh -N -L {port}:127.0.0.1:{port} THIS_MACHINE, then http://127.0.0.1:{port}",
        flush=True,
    )
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


COMMAND = Command(
    name="watch",
    summary="show the page of a run in a browser while it trains",
    description="Serves the page of a run, which reloads while it trains; other machines can use ssh.",
    arguments=arguments,
    execute=execute,
)
