"""`octavo doctor`: look at a running server twice, or at a file with such looks, and say what is
wrong.

Exit codes: 0 healthy; 1 symptoms; 2 no diagnosis, since the server does not answer, is no Octavo
server, or the command line or the file is wrong. What is judged, and how, is `octavo.doctor`.
"""

import argparse
import ipaddress
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from octavo.cli.arguments import Parser
from octavo.cli.server_connection import ServerConnection
from octavo.doctor.machine import read_machine
from octavo.doctor.report import as_json, as_text
from octavo.doctor.rules import diagnose, is_healthy
from octavo.doctor.snapshot import Look, Snapshot
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.log import api_keys_from_environment

URL = "http://127.0.0.1:8000"
# Long enough for the rates of a slow model, short enough to wait for.
INTERVAL = 5.0
_MOST_SECONDS = 86400.0
_READ_SECONDS = 20.0
_WIDTHS = (60, 100)  # lines are no shorter, and no longer


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "source", nargs="?", metavar="URL|FILE",
        help=f"a running server, or a file that --save wrote; default: {URL}",
    )  # fmt: skip
    parser.add_argument(
        "--interval", type=_seconds, metavar="SECONDS",
        help=f"time between the two looks, over which rates are taken; default: {INTERVAL:g}",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", metavar="KEY", help="the server's key; better set in OCTAVO_API_KEY"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE",
        help="also write what was seen, to be judged later or elsewhere: octavo doctor FILE",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    try:
        snapshot = _snapshot(args)
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 2
    findings = diagnose(snapshot)
    if args.json:
        print(json.dumps(as_json(snapshot, findings), indent=2))
    else:
        low, high = _WIDTHS
        width = max(low, min(high, shutil.get_terminal_size().columns))
        print(as_text(snapshot, findings, width))
    return 0 if is_healthy(findings) else 1


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"must be seconds above 0, up to {_MOST_SECONDS:.0f}, not {text!r}"
        )
    return value


def _snapshot(args: argparse.Namespace) -> Snapshot:
    if args.source is not None and _is_file(args.source):
        given = {"--interval": args.interval, "--api-key": args.api_key, "--save": args.save}
        if unused := [flag for flag, value in given.items() if value is not None]:
            raise ConfigError(
                f"{args.source} is a file, whose looks are taken; leave out {', '.join(unused)}"
            )
        return Snapshot.load(Path(args.source))
    if args.save is not None and not os.path.isdir(args.save.parent):
        raise ConfigError(f"--save: there is no folder {args.save.parent}")
    keys = (args.api_key,) if args.api_key is not None else api_keys_from_environment()
    snapshot = look_twice(
        URL if args.source is None else args.source,
        keys[0] if keys else None,
        args.interval or INTERVAL,
    )
    if args.save is not None:
        snapshot.save(args.save)
    return snapshot


def _is_file(source: str) -> bool:
    """Whether it is meant as a file: it exists, or looks like one and not like a host."""
    if not source or "://" in source or source.startswith("unix:"):
        return False
    return os.path.exists(source) or source.endswith(".json") or source.startswith((".", "/", "~"))


def look_twice(url: str, key: str | None, seconds: float) -> Snapshot:
    """Raises RequestError or ConfigError where there is no Octavo server that can be looked at."""
    server = ServerConnection(url, key, "octavo-doctor", _READ_SECONDS)
    local = _is_local(server.host)
    before = _look(server, local)
    Snapshot(server.url, before, before)  # no wait for a page that is not Octavo's
    time.sleep(seconds)
    return Snapshot(server.url, before, _look(server, local))


def _look(server: ServerConnection, local: bool) -> Look:
    metrics = _metrics(server)
    now = time.time()  # of the counters
    status, health = _get(server, "/health")
    return Look(
        time=now,
        metrics=metrics,
        status=status,
        health=health,
        version=str(_field(server, "/version", "version") or ""),
        window=_window(server),
        in_flight=_field(server, "/load", "server_load"),
        machine=read_machine() if local else None,
    )


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _metrics(server: ServerConnection) -> str:
    where = f"{server.url}/metrics"
    status, text = _get(server, "/metrics")
    if status in (401, 403):
        raise RequestError(f"{where} wants another key; give it with --api-key or OCTAVO_API_KEY")
    if status == 404:
        raise RequestError(f"{where} does not exist: this is no Octavo server, or not its address")
    if status != 200:
        raise RequestError(f"{where} says HTTP {status}, so nothing can be judged")
    return text


def _get(server: ServerConnection, path: str) -> tuple[int, str]:
    with server.request("GET", path) as response:
        return response.status, response.read().decode(errors="replace")


def _json(server: ServerConnection, path: str) -> Any:
    """What a path answers; None where it does not, as all do while a server ends."""
    status, text = _get(server, path)
    try:
        return json.loads(text) if status == 200 else None
    except (ValueError, RecursionError):
        return None


def _field(server: ServerConnection, path: str, name: str) -> Any:
    found = _json(server, path)
    return found.get(name) if isinstance(found, dict) else None


def _window(server: ServerConnection) -> int | None:
    cards = _field(server, "/v1/models", "data")
    card = cards[0] if isinstance(cards, list) and cards else None
    window = card.get("max_model_len") if isinstance(card, dict) else None
    return window if isinstance(window, int) else None
