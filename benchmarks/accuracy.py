"""What quantized weights or a quantized KV cache cost in accuracy, against the model in float32.

    python -m benchmarks.accuracy [--quantization int8] [--kv bfloat16] [--model FILE] [--save]

The reference is the same checkpoint decoded to float32, unless another one is named.
On the text of `benchmarks.prose`, in windows of 512 tokens: perplexity, the KL divergence of the
next-token distribution from the reference's (mean and 99th percentile, in nats), and the share of
positions with the same most likely token. Then 16 greedy answers of 64 tokens are made by the
reference and read by the other: the share of tokens before the first one that it would have chosen
differently. The cache is written and read as in service, in steps of up to 128 tokens. With
--save the result becomes a row in benchmarks/results/accuracy.jsonl. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.prose import TEXT
from benchmarks.rows import percentile, row, save, table
from octavo.config import EngineConfig
from octavo.core.plan import PlanRow, StepPlan
from octavo.models.files import resolve
from octavo.runner.model_runner import ModelRunner
from octavo.text.tokenizer import load_tokenizer

_WINDOW, _STEP = 512, 128
_PROMPT, _ANSWER, _ANSWERS = 64, 64, 16
_BLOCK = 16


def main() -> int:
    args = _arguments()
    options = {"model": args.model, "dtype": args.dtype, "kv_cache_dtype": args.kv}
    if args.quantization is not None:
        options["quantization"] = args.quantization
    options.update(option.split("=", 1) for option in args.option)
    reference = Reference.of(args.reference or args.model, TEXT)
    values = compared(reference, options)
    if args.save:
        save(values)
    print(table(("measure", "value"), [(k, v) for k, v in values.items() if k != "kind"]))
    print(json.dumps(values))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2", help="the model to test")
    parser.add_argument("--reference", help="unquantized model to compare with, if another")
    parser.add_argument("--dtype", default="bfloat16", help="type of activations")
    parser.add_argument("--quantization", help="as for `octavo serve`")
    parser.add_argument("--kv", default="auto", help="type of the KV cache")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=TEXT", help="further options"
    )
    parser.add_argument("--save", action="store_true", help="save a row in benchmarks/results/")
    return parser.parse_args()


@dataclass(frozen=True)
class Reference:
    """What a model in float32 says after each position of a text, and its greedy answers.

    answers: none where only the text is to be compared.
    """

    name: str
    ids: list[int]
    logits: list[torch.Tensor]
    answers: list[tuple[list[int], list[int]]]

    @classmethod
    def of(cls, model: str, text: str, answers: bool = True) -> "Reference":
        """Of a checkpoint, decoded."""
        runner = _runner(model=model, dtype="float32", quantization="none")
        ids = load_tokenizer(resolve(model).root).encode(text)
        logits = [part for window in _windows(ids) for part in _logits(runner, window)]
        return cls(Path(model).name, ids, logits, _answers(runner, ids) if answers else [])


def compared(reference: Reference, options: Mapping[str, Any]) -> dict[str, Any]:
    """A row: what a model with these options loses against the reference."""
    tested = _runner(**options)
    named = {**options, "model": Path(options["model"]).name}  # a row says no machine's paths
    return row(
        "accuracy", **named, reference=reference.name, **_on_text(tested, reference),
        **_on_answers(tested, reference),
    )  # fmt: skip


def _windows(ids: list[int]) -> Iterator[list[int]]:
    for begin in range(0, len(ids) - 1, _WINDOW):
        yield ids[begin : begin + _WINDOW]


def _runner(**options: Any) -> ModelRunner:
    return ModelRunner(
        EngineConfig(
            **options,
            block_size=_BLOCK,
            max_model_len=_WINDOW,
            num_gpu_blocks_override=_WINDOW // _BLOCK,
            max_num_seqs=1,
            load_progress=False,
        )
    )


def _logits(runner: ModelRunner, ids: list[int]) -> Iterator[torch.Tensor]:
    """float32 [up to 128, vocabulary], the logits after each of `ids`, at most a window of them."""
    table = tuple(range(1, _WINDOW // _BLOCK + 1))
    for start in range(0, len(ids), _STEP):
        yield _step(runner, ids[start : start + _STEP], start, table)


@torch.inference_mode()
def _step(runner: ModelRunner, ids: list[int], start: int, blocks: tuple[int, ...]) -> torch.Tensor:
    # A block id is of one KV group at a time, so each group has blocks of its own.
    tables = [
        tuple(block + group * len(blocks) for block in blocks)
        for group in range(len(runner.limits.kv_groups))
    ]
    inputs = runner.builder.build(StepPlan(0, (PlanRow("0", tuple(ids), start, tuple(tables)),)))
    hidden = runner.model.forward(
        inputs.token_ids, runner.cache.per_layer(inputs.metas), runner.cache.layers
    )
    return runner.model.logits(hidden).float()


def _on_text(tested: ModelRunner, reference: Reference) -> dict[str, Any]:
    losses, reference_losses, divergences, agreed = [], [], [], 0
    known = iter(reference.logits)
    following = iter(torch.split(torch.tensor(reference.ids[1:]), _STEP))
    for window in _windows(reference.ids):
        for one, other, target in zip(_logits(tested, window), known, following, strict=False):
            p, q = (x[: len(target)].log_softmax(-1) for x in (other, one))
            losses += torch.nn.functional.nll_loss(q, target, reduction="none").tolist()
            reference_losses += torch.nn.functional.nll_loss(p, target, reduction="none").tolist()
            divergences += (p.exp() * (p - q)).sum(-1).tolist()
            agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    return {
        "tokens": len(losses),
        "perplexity": _perplexity(losses),
        "reference_perplexity": _perplexity(reference_losses),
        "kl_mean": round(statistics.fmean(divergences), 8),
        "kl_p99": round(percentile(divergences, 0.99), 4),
        "same_top_token": round(agreed / len(losses), 4),
    }


def _perplexity(losses: list[float]) -> float:
    return round(float(torch.tensor(losses).double().mean().exp()), 3)


def _answers(runner: ModelRunner, ids: list[int]) -> list[tuple[list[int], list[int]]]:
    """Prompts from all over the text, with the greedy answer to each."""
    stride = (len(ids) - _PROMPT) // _ANSWERS
    prompts = [ids[begin : begin + _PROMPT] for begin in range(0, stride * _ANSWERS, stride)]
    return [(prompt, _greedy(runner, prompt)) for prompt in prompts]


def _on_answers(tested: ModelRunner, reference: Reference) -> dict[str, Any]:
    """Where greedy answers part: `tested` would part from them where its top token differs."""
    same = []
    for prompt, answer in reference.answers:
        logits = torch.cat(list(_logits(tested, prompt + answer[:-1])))
        found = logits[_PROMPT - 1 :].argmax(-1).tolist()
        parts = (i for i, (a, b) in enumerate(zip(answer, found, strict=True)) if a != b)
        same.append(next(parts, _ANSWER))
    if not same:
        return {}
    return {
        "answer_tokens_same": round(statistics.fmean(same) / _ANSWER, 4),
        "answers_same": sum(n == _ANSWER for n in same),
        "answers": len(same),
    }


def _greedy(runner: ModelRunner, prompt: list[int]) -> list[int]:
    blocks = tuple(range(1, _WINDOW // _BLOCK + 1))
    answer: list[int] = []
    fed, start = prompt, 0
    while len(answer) < _ANSWER:
        answer.append(int(_step(runner, fed, start, blocks)[-1].argmax()))
        start += len(fed)
        fed = answer[-1:]
    return answer


if __name__ == "__main__":
    sys.exit(main())
