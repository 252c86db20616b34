"""Structured output: an answer that is JSON of a schema, one that is a choice, and a date.

Prints what each answer was parsed into.

    python examples/structured_output.py
"""

import argparse
import json

from octavo import LLM, SamplingParams, StructuredOutputsParams

PLANET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "moons": {"type": "integer", "minimum": 0, "maximum": 300},
        "kind": {"enum": ["rocky", "gas", "ice"]},
    },
    "required": ["name", "moons", "kind"],
    "additionalProperties": False,
}
FORMS = {
    "Describe the planet Mars as JSON.": StructuredOutputsParams(
        json=PLANET, disable_any_whitespace=True
    ),
    "Is Mars larger than Earth?": StructuredOutputsParams(choice=["yes", "no"]),
    "When was the first walk on the Moon?": StructuredOutputsParams(regex=r"\d{4}-\d\d-\d\d"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    llm = LLM(args.model)
    params = [
        SamplingParams(temperature=0, max_tokens=100, structured_outputs=form)
        for form in FORMS.values()
    ]
    outputs = llm.chat([[{"role": "user", "content": q}] for q in FORMS], params, use_tqdm=False)
    planet, larger, date = (output.outputs[0].text for output in outputs)
    found = json.loads(planet)
    print(f"planet: {found['name']}, {found['kind']}, {found['moons']} moons")
    print(f"larger: {larger}")
    print(f"date: {date}")


if __name__ == "__main__":
    main()
