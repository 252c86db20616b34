"""A batch file: requests in OpenAI's batch format, answered by one command.

Writes a file of requests, runs `octavo run-batch` over it, and prints each answer with the id of
its request. The command writes every answer as soon as it has it: run it again after a crash, and
it goes on where it ended.

    python examples/batch_file.py

By hand: octavo run-batch smollm2 -i requests.jsonl -o answers.jsonl
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from octavo.cli.main import main as octavo

QUESTIONS = {
    "sky": "Why is the sky blue? Answer in one sentence.",
    "sea": "Why is the sea salty? Answer in one sentence.",
    "sum": "What is 12 + 30?",
}


def request(name: str, question: str) -> dict[str, object]:
    """One line of the file. The body is that of a request over HTTP."""
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 40,
            "temperature": 0.0,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "requests.jsonl", Path(folder) / "answers.jsonl"
        lines = [json.dumps(request(name, question)) for name, question in QUESTIONS.items()]
        source.write_text("\n".join(lines) + "\n")

        # The same as the command line above.
        code = octavo(["run-batch", args.model, "-i", str(source), "-o", str(target)])
        if code:
            sys.exit(code)

        # Answers are in the order in which they were ready.
        for line in target.read_text().splitlines():
            answer = json.loads(line)
            message = answer["response"]["body"]["choices"][0]["message"]
            print(f"{answer['custom_id']}: {message['content'].strip()}")


if __name__ == "__main__":
    main()
