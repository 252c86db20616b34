"""What a JSON schema on every request costs: workload W1 with and without one, same lengths.

    python -m benchmarks.structured_output [--pairs 3] [--save]

One engine; runs alternate. The schema is an array that has to be longer than any answer, so that
each answer has exactly the length that W1 gives it, in both forms. Greedy, as W1 is. The first
run of each form is not counted: it compiles the grammar and builds the table of tokens, whose time
is reported by itself. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.engines import model_file
from benchmarks.rows import row, save
from benchmarks.workloads import Job, mixed
from octavo import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "kind": {"enum": ["person", "place", "thing"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "kind", "score", "tags"],
        "additionalProperties": False,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    form = StructuredOutputsParams(json=SCHEMA)
    model = str(model_file(args.model))
    with LLM(model, swap_space=0, max_model_len=2048, load_progress=False) as llm:
        first = _first_token(llm, form)
        jobs = mixed()
        _run(llm, jobs, form), _run(llm, jobs, None)
        pairs = [(_run(llm, jobs, form), _run(llm, jobs, None)) for _ in range(args.pairs)]
    ratios = [plain / formed for formed, plain in pairs]
    tokens = sum(job.max_tokens for job in jobs)
    values = {
        "throughput_share": round(statistics.median(ratios), 3),
        "shares": [round(ratio, 3) for ratio in ratios],
        "tokens_per_s": {
            name: round(tokens / statistics.median(pair[i] for pair in pairs), 1)
            for i, name in enumerate(("schema", "free"))
        },
        "first_token_s": first,
        "model": args.model,
    }
    if args.save:
        save(row("structured_output", **values))
    print(f"throughput with a schema on every request: {values['throughput_share']:.3f} of that "
          f"without, pairs {values['shares']}")  # fmt: skip
    print(json.dumps(values))
    return 0


def _run(llm: LLM, jobs: Sequence[Job], form: StructuredOutputsParams | None) -> float:
    """Seconds for all jobs at once."""
    params = [
        SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True,
                       structured_outputs=form)
        for job in jobs
    ]  # fmt: skip
    began = time.perf_counter()
    outputs = llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    for output, job in zip(outputs, jobs, strict=True):
        assert len(output.outputs[0].token_ids) == job.max_tokens, output.outputs[0].finish_reason
    return seconds


def _first_token(llm: LLM, form: StructuredOutputsParams) -> dict[str, float]:
    """Seconds to the first token: without a form, of the first one, and of another new one."""

    def one(form: StructuredOutputsParams | None) -> float:
        began = time.perf_counter()
        params = SamplingParams(max_tokens=1, structured_outputs=form)
        llm.generate([[7] * 8], params, use_tqdm=False)
        return time.perf_counter() - began

    one(None)
    free = one(None)
    cold = one(form)
    other = StructuredOutputsParams(json={**SCHEMA, "minItems": 9_999})
    return {"free": round(free, 4), "first_form": round(cold, 4), "new_form": round(one(other), 4)}


if __name__ == "__main__":
    sys.exit(main())
