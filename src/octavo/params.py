"""`SamplingParams`: the sampling options of a request.

Names, defaults and meanings are vLLM's where vLLM has them; `docs/` lists the differences.
A value is frozen and validated when it is created. Checks that need the model (vocabulary, window)
are made when the request is added.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property, wraps
from typing import Any, TypeVar

from octavo.errors import RequestError, RequestTypeError, advise_on_assignment, nearest
from octavo.structured_outputs import StructuredOutputsParams
from octavo.vllm_names import Kind, find, same

MAX_LOGPROBS = 20
MAX_N = 1024
MAX_STOP_STRINGS = 64
MAX_STRING_LENGTH = 1024  # of a stop string or a bad word; matching takes memory in proportion
_INT64 = 2**63


class RequestOutputKind(Enum):
    """What each output contains: all so far, only what is new, or nothing until the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


KindT = TypeVar("KindT", bound=type)


def _takes_vllm_names(kind: KindT) -> KindT:
    """Decorates a dataclass: vLLM's other names are accepted with neutral values."""
    known = {item.name for item in fields(kind)}
    initialize = kind.__init__  # type: ignore[misc]

    @wraps(initialize)
    def init(self: Any, *args: Any, **options: Any) -> None:
        if not options.keys() <= known:
            options = _ours(options, known)
        initialize(self, *args, **options)

    kind.__init__ = init  # type: ignore[misc]
    return kind


def _ours(options: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """The known options. Raises RequestTypeError for an unknown one, RequestError for one of
    vLLM's with a value that is not supported."""
    for name, value in options.items():
        if name in known:
            continue
        entry = find(Kind.SAMPLING, name)
        if entry is None:
            raise RequestTypeError(
                f"unknown sampling parameter {name!r}{nearest(name, known)}", name
            )
        repeats_n = name == "best_of" and same(value, options.get("n", 1))
        if not repeats_n and not entry.is_neutral(value):
            raise RequestError(f"{name} is not supported: {entry.refusal()}", name)
    return {name: value for name, value in options.items() if name in known}


@advise_on_assignment(
    "requests in flight may share it. Make another one: params = params.with_({name}=...)"
)
@_takes_vllm_names
@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    n: choices per prompt. Choice i draws with (seed, i), so n=2 is a prefix of n=4.
    temperature: 0 is greedy; otherwise in (0, 2], used as given.
    top_p: in (0, 1]. top_k: 0 or -1 is off. min_p: in [0, 1], relative to the best token.
    presence_penalty, frequency_penalty: in [-2, 2]; count output tokens only.
    repetition_penalty: above 0; counts prompt and output, each distinct id once.
    seed: None chooses a random one. The same seed gives the same draws in any batch.
    stop: strings that end the text; matched across token boundaries; not included in the text
        unless `include_stop_str_in_output`.
    stop_token_ids: ids that end it, even under `ignore_eos`.
    min_tokens: output tokens before which no end-of-text, stop id or stop string acts.
    max_tokens: maximum number of output tokens; None is up to the model's window.
    logprobs: None is off; k gives the k likeliest and the sampled token (0: sampled only).
    prompt_logprobs: the same for every prompt position after the first.
    logit_bias: token id -> number in [-100, 100] added to its logit.
    allowed_token_ids: only these may be generated.
    bad_words: texts that must not appear, with and without a leading space.
    structured_outputs: the form that the text must have (`StructuredOutputsParams`, or an object
        of its fields).
    thinking_token_budget: reasoning tokens after which the model's end marker is forced; markers do
        not count. 0: no reasoning; None: no limit. For models that mark their reasoning.
    detokenize: False leaves `text` empty and allows no stop strings.

    Raises RequestTypeError or RequestError, naming the field, the value and what would be valid.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_flags()
        # The one place where a frozen value is filled in: lists become tuples, once.
        settle = self.__dict__.__setitem__
        settle("stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
        settle("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        settle("bad_words", _strings("bad_words", self.bad_words, 1024))
        settle("logit_bias", _bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            settle("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids is empty; give at least one id, or leave it out",
                    "allowed_token_ids",
                )
        if self.structured_outputs is not None:
            form = StructuredOutputsParams.of(self.structured_outputs)
            settle("structured_outputs", form)
        self._check_together()

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _real("temperature", self.temperature, 0.0, 2.0)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, _INT64 - 1)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 1e10, open_low=True)
        _integer("min_tokens", self.min_tokens, 0, _INT64 - 1)
        lowest = {"seed": -_INT64, "max_tokens": 1, "thinking_token_budget": 0}
        for name, low in lowest.items():
            if (value := getattr(self, name)) is not None:
                _integer(name, value, low, _INT64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                if value == -1 and value is not True:
                    raise RequestError(
                        f"{name} must be between 0 and {MAX_LOGPROBS}, not -1: the whole "
                        "vocabulary at every position would be more data than tokens",
                        name,
                    )
                _integer(name, value, 0, MAX_LOGPROBS)

    def _check_flags(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize",
                     "skip_special_tokens"):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise RequestTypeError(
                    f"{name} must be true or false, not {_show(getattr(self, name))}", name
                )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestTypeError(
                f"output_kind must be a RequestOutputKind, not {_show(self.output_kind)}",
                "output_kind",
            )

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", "stop")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @cached_property
    def needs_history(self) -> bool:
        """Whether sampling looks at the tokens so far (penalties, bad words)."""
        return bool(
            self.bad_words
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )

    def with_(self, **changes: Any) -> "SamplingParams":
        """A new value with some fields changed."""
        return replace(self, **changes)

    def clone(self) -> "SamplingParams":
        """A copy, as vLLM has it; since values are frozen, `with_` is what makes changed ones."""
        return replace(self)

    @classmethod
    def from_optional(cls, **options: Any) -> "SamplingParams":
        """As the constructor, but None is the default of every field, and the ids of `logit_bias`
        may be strings."""
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = {_id(key): amount for key, amount in bias.items()}
        if "max_tokens" in options:
            given["max_tokens"] = options["max_tokens"]  # of which None is a value
        return cls(**given)


def _id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= 10 else key


def _show(value: object) -> str:
    """At most 60 characters of a value, without writing out a large one first."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"  # Python may refuse to write it
    if isinstance(value, (str, bytes)):
        value = value[:60]
    elif isinstance(value, (list, tuple, Mapping)) and len(value) > 60:
        return f"a {type(value).__name__} of {len(value)} items"
    try:
        text = repr(value)
    except ValueError:  # it holds such an integer
        return f"a {type(value).__name__} that cannot be written out"
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestTypeError(f"{name} must be an integer, not {_show(value)}", name)
    if not low <= value <= high:
        open_ended = high == _INT64 - 1 and value <= high
        bounds = f"at least {low}" if open_ended else f"between {low} and {high}"
        if low == -_INT64:
            bounds = "a 64-bit signed integer"
        raise RequestError(f"{name} must be {bounds}, not {_show(value)}", name)


def _real(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestTypeError(f"{name} must be a number, not {_show(value)}", name)
    # A chained comparison is false for NaN, so NaN and both infinities are refused here.
    inside = low < value <= high if open_low else low <= value <= high
    if not inside:
        left = "(" if open_low else "["
        raise RequestError(f"{name} must be in {left}{low:g}, {high:g}], not {_show(value)}", name)


def _strings(name: str, value: object, most: int) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (
        [value] if isinstance(value, str) else _listed(name, value, "a string or a list of them")
    )
    for item in items:
        if not isinstance(item, str):
            raise RequestTypeError(f"{name} must hold strings, not {_show(item)}", name)
        if not item:
            raise RequestError(f"{name} must not hold an empty string", name)
        if len(item) > MAX_STRING_LENGTH:
            raise RequestError(
                f"{name} must hold strings of at most {MAX_STRING_LENGTH} characters, "
                f"not {len(item)}",
                name,
            )
    if len(items) > most:
        raise RequestError(f"{name} must hold at most {most} strings, not {len(items)}", name)
    return tuple(items)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    items = _listed(name, value, "a list of token ids")
    for item in items:
        _integer(name, item, 0, 2**31 - 1)
    return tuple(items)


def _listed(name: str, value: object, what: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise RequestTypeError(f"{name} must be {what}, not {_show(value)}", name)
    return list(value)


def _bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestTypeError(
            f"logit_bias must map token ids to numbers, not {_show(value)}", "logit_bias"
        )
    bias: dict[int, float] = {}
    for key, amount in value.items():
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**31:
            raise RequestError(
                f"logit_bias keys must be token ids (integers from 0), not {_show(key)}",
                "logit_bias",
            )
        if isinstance(amount, bool) or not isinstance(amount, (int, float)):
            raise RequestTypeError(
                f"logit_bias[{key}] must be a number, not {_show(amount)}", "logit_bias"
            )
        if not -100 <= amount <= 100:  # NaN is refused too
            raise RequestError(
                f"logit_bias[{key}] must be in [-100, 100], not {_show(amount)}", "logit_bias"
            )
        bias[key] = float(amount)
    return bias
