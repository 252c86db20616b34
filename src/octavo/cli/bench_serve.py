"""`octavo bench serve`: load an OpenAI-compatible server and time its answers."""

import argparse
import json
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.arguments import Parser
from octavo.cli.bench_datasets import add_dataset_flags, check_dataset, read_samples
from octavo.errors import ConfigError, OctavoError
from octavo.log import openai_key_from_environment
from octavo.utils.flags import flag_name

if TYPE_CHECKING:
    from octavo.bench.datasets import Tokens
    from octavo.bench.load import Api, Target
    from octavo.bench.serve import Reporting, Traffic

# vLLM's names of the two interfaces; "vllm" is completions there, too.
_BACKENDS: "Mapping[str, Api]" = {
    "openai": "completions",
    "vllm": "completions",
    "openai-chat": "chat",
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
             "repetition_penalty")  # fmt: skip

# vLLM's flags that ask for what is done anyway.
_WITHOUT_EFFECT = {
    "--skip-chat-template": "prompts are sent as they are",
    "--trust-remote-code": "tokenizers are read without running code",
}


def add_arguments(parser: Parser) -> None:
    _server_flags(parser)
    add_dataset_flags(parser)
    _traffic_flags(parser)
    _result_flags(parser)


def _server_flags(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=tuple(_BACKENDS), default=None,
                       help="interface (default: by --endpoint, else openai)")  # fmt: skip
    group.add_argument("--base-url", metavar="URL", help="such as https://example.org; default: "
                       "http://HOST:PORT")  # fmt: skip
    group.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    group.add_argument("--endpoint", metavar="PATH", help="path of the requests (default: "
                       "/v1/completions, or /v1/chat/completions for openai-chat)")  # fmt: skip
    group.add_argument("--model", metavar="NAME", help="model in the requests (default: the first "
                       "that the server lists)")  # fmt: skip
    group.add_argument("--served-model-name", metavar="NAME", help="model in the requests, if "
                       "--model only says which tokenizer")  # fmt: skip
    group.add_argument("--tokenizer", metavar="MODEL", help="Hugging Face id, folder, .gguf file "
                       "or embedded name of the tokenizer (default: the model's)")  # fmt: skip
    group.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY")
    group.add_argument("--header", action="append", default=[], metavar="NAME=VALUE",
                       help="a further header (may be given several times)")  # fmt: skip
    group.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON",
                       help='further fields of each request, such as {"priority": 1}')  # fmt: skip
    for flag, why in _WITHOUT_EFFECT.items():
        group.add_argument(flag, action="store_true", help=f"accepted, as vLLM has it: {why}")


def _traffic_flags(parser: Parser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument("--request-rate", type=float, default=float("inf"), metavar="RPS",
                       help="requests per second (default: inf, all at once)")  # fmt: skip
    group.add_argument("--burstiness", type=float, default=1.0, metavar="SHAPE",
                       help="1 (default): Poisson; below: bursts; above: more even")  # fmt: skip
    group.add_argument("--max-concurrency", type=int, metavar="N",
                       help="most requests in flight; others wait, untimed")  # fmt: skip
    group.add_argument("--num-warmups", type=int, default=0, metavar="N",
                       help="requests before the measurement (default: 0)")  # fmt: skip
    group.add_argument("--ready-check-timeout-sec", type=float, default=0, metavar="SECONDS",
                       help="wait so long for a first success (default: 0, no check)")  # fmt: skip
    group.add_argument("--timeout", type=float, default=6 * 3600.0, metavar="SECONDS",
                       help="a request that takes longer has failed (default: 21600)")  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    group.add_argument("--ignore-eos", action="store_true", help="ask for answers of exactly the "
                       "given length; a shorter one has failed")  # fmt: skip
    group.add_argument("--request-id-prefix", default="", metavar="TEXT",
                       help="send X-Request-Id: TEXT0, TEXT1, ...")  # fmt: skip
    for name in _SAMPLING:
        default = 0.0 if name == "temperature" else None
        shown = " (default: 0, greedy)" if name == "temperature" else ""
        kind = int if name == "top_k" else float
        group.add_argument(flag_name(name), type=kind, default=default,
                           metavar=kind.__name__.upper(), help=f"sampling{shown}")  # fmt: skip


def _result_flags(parser: Parser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES",
                       help="metrics to report (default: ttft,tpot,itl,e2el)")  # fmt: skip
    group.add_argument("--metric-percentiles", default="99", metavar="P,P",
                       help="their percentiles (default: 99)")  # fmt: skip
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS",
                       help="count requests that meet all: ttft:200 e2el:3000")  # fmt: skip
    group.add_argument("--save-result", action="store_true", help="save the figures as JSON")
    group.add_argument("--save-detailed", action="store_true",
                       help="save times, texts and errors of each request, too")  # fmt: skip
    group.add_argument("--append-result", action="store_true", help="append to the file")
    group.add_argument("--result-dir", type=Path, default=Path(), metavar="FOLDER",
                       help="default: the current one")  # fmt: skip
    group.add_argument("--result-filename", metavar="NAME",
                       help="default: BACKEND-RATEqps-MODEL-DATE.json")  # fmt: skip
    group.add_argument("--label", metavar="TEXT", help="in place of BACKEND in that name")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE",
                       help="to be saved with the figures")  # fmt: skip
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Exit code 1 if any request failed."""
    check_dataset(args)
    if not isinstance(args.extra_body, dict):
        raise ConfigError(f"--extra-body must be a JSON object, not {args.extra_body!r}")
    backend, path = interface(args.backend, args.endpoint)
    traffic, reporting = _traffic(args), _reporting(args)
    metadata = _pairs("metadata", args.metadata)
    saves = args.save_result or args.save_detailed or args.append_result
    if saves:
        _make_folder(args.result_dir)

    from octavo.bench import serve
    from octavo.bench.http import Address

    address = Address.parse(args.base_url or f"http://{args.host}:{args.port}")
    headers = _headers(args)
    model = args.served_model_name or args.model or serve.find_model(address, headers)
    source = args.tokenizer or args.model or model
    tokens = _tokenizer(source, required=args.dataset_name != "custom")
    samples = read_samples(args, tokens, args.seed)
    figures, outcomes = serve.bench(
        address, headers, _target(args, model, backend, path), samples, traffic, reporting,
        progress=sys.stderr.isatty() and not args.disable_tqdm,
    )  # fmt: skip
    if saves:
        now = datetime.now(timezone.utc).astimezone()
        head = {"date": f"{now:%Y%m%d-%H%M%S}", "backend": backend, "endpoint_type": backend,
                "label": args.label, "model_id": model, "tokenizer_id": source}  # fmt: skip
        name = serve.result_name(args.label or backend, model, traffic, now)
        file = args.result_dir / (args.result_filename or name)
        values = {**head, **metadata, **figures}
        serve.save(file, values, outcomes, args.save_detailed, args.append_result)
        print(f"saved: {file}", file=sys.stderr)
    return 1 if figures["failed"] else 0


def _make_folder(folder: Path) -> None:
    """Made before anything is measured that could then not be saved. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--result-dir {folder}: {error.strerror or error}") from error


def interface(backend: str | None, endpoint: str | None) -> tuple[str, str]:
    """(vLLM's name of the interface, path). Raises ConfigError if they contradict each other."""
    from octavo.bench.load import PATHS

    if backend is None:
        backend = "openai-chat" if (endpoint or "").endswith("chat/completions") else "openai"
    path = endpoint or PATHS[_BACKENDS[backend]]
    is_chat = path.endswith("chat/completions")
    if not path.startswith("/") or not path.endswith("completions"):
        raise ConfigError(
            f"--endpoint must be a path such as {', '.join(PATHS.values())}, not {path!r}"
        )
    if is_chat != (_BACKENDS[backend] == "chat"):
        raise ConfigError(f"--backend {backend} does not go with --endpoint {path}")
    return backend, path


def _traffic(args: argparse.Namespace) -> "Traffic":
    from octavo.bench.serve import Traffic

    return Traffic(
        args.request_rate,
        args.burstiness,
        args.max_concurrency,
        args.num_warmups,
        args.ready_check_timeout_sec,
        args.seed,
    )


def _reporting(args: argparse.Namespace) -> "Reporting":
    from octavo.bench.report import goodput_goals, metric_names, percentile_list
    from octavo.bench.serve import Reporting

    return Reporting(
        metric_names(args.percentile_metrics),
        percentile_list(args.metric_percentiles),
        goodput_goals(args.goodput),
    )


def _target(args: argparse.Namespace, model: str, backend: str, path: str) -> "Target":
    from octavo.bench.load import Target

    sampling = {name: getattr(args, name) for name in _SAMPLING}
    given = {name: value for name, value in sampling.items() if value is not None}
    return Target(
        model,
        _BACKENDS[backend],
        path,
        args.ignore_eos,
        args.timeout,
        {**given, **args.extra_body},
        args.request_id_prefix,
    )


def _headers(args: argparse.Namespace) -> dict[str, str]:
    key = args.api_key or openai_key_from_environment()
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    return {**authorization, **_pairs("header", args.header)}


def _pairs(flag: str, texts: list[str]) -> dict[str, Any]:
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"--{flag} must be NAME=VALUE, not {text!r}")
    return dict(text.split("=", 1) for text in texts)


def _tokenizer(source: str, required: bool) -> "Tokens | None":
    """The tokenizer that counts and makes prompts; None where it cannot be had and need not be."""
    from octavo.models.files import resolve_tokenizer
    from octavo.text.tokenizer import load_tokenizer

    try:
        return load_tokenizer(resolve_tokenizer(source, None, source))
    except OctavoError as error:
        if not required:
            return None
        raise ConfigError(
            f"prompts are made with the model's tokenizer, and {source!r} has none here ({error}); "
            "name one with --tokenizer"
        ) from error
