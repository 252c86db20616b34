"""Start an LLM and stop at its first token: prints the seconds since the process started.

python -m benchmarks.first_token MODEL
"""

import sys
import time

from benchmarks.protocol import process_start


def main(model: str) -> None:
    begin = process_start()
    from octavo import LLM, SamplingParams

    llm = LLM(model, load_progress=False)
    for _ in llm.stream("The octavo is", SamplingParams(temperature=0.0, max_tokens=1)):
        print(round(time.time() - begin, 3))
        return


if __name__ == "__main__":
    main(sys.argv[1])
