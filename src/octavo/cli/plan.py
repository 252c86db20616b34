"""`octavo plan`: what of a model fits on a device, without loading either."""

import argparse
import json
from typing import Any

from octavo import hardware
from octavo.cli.arguments import Parser, add_engine_flags, engine_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError, shown
from octavo.log import configure

_HERE = ("auto", "cpu", "cuda")


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("plan")
    add_device_flags(group)
    group.add_argument("--lengths", type=_lengths, action="append", default=[],
                       metavar="PROMPT,OUTPUT",
                       help="tokens of requests to count, such as 1000,200 (may be given several "
                            "times)")  # fmt: skip
    group.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_engine_flags(parser, skip=("device",))


def add_device_flags(group: argparse._ActionsContainer) -> None:
    """The flags of a device that need not be here."""
    known = ", ".join(hardware.CARDS)
    group.add_argument("--device", type=_device, default="auto", metavar="NAME",
                       help=f"this machine (auto, cpu, cuda), a card ({known}), or "
                            f"{hardware.DESCRIBED} (default: auto)")  # fmt: skip
    group.add_argument("--memory", type=_memory, metavar="SIZE",
                       help="its memory, such as 40GiB (default: what it has)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    given = {"model": args.model, **engine_options(args, ("model", "device"))}
    config = EngineConfig.from_options(given)
    # Imported late: wrong flags are reported without torch.
    from octavo.planner.plan import make_plan
    from octavo.planner.target import target
    from octavo.planner.text import table

    configure("error")  # the plan says what the log of a start would
    plan = make_plan(config, target(config, args.device, args.memory), args.lengths, given)
    print(json.dumps(plan.as_dict(), indent=2) if args.json else table(plan))
    return 0


def _device(text: str) -> str:
    if text not in (*_HERE, hardware.DESCRIBED):
        _checked(hardware.find, text)
    return text


def _memory(text: str) -> int:
    size: int = _checked(hardware.memory_size, text)
    return size


def _checked(read: Any, text: str) -> Any:
    try:
        return read(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _lengths(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if (
        len(parts) != 2
        or not all(part.strip().isdecimal() and len(part) < 20 for part in parts)
        or (int(parts[0]) < 1 or int(parts[1]) < 1)
    ):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} must be tokens of a prompt and of its answer, such as 1000,200"
        )
    return int(parts[0]), int(parts[1])
