"""The client of test_ray_launcher_netns.py, beside the server: 200 streams, and a look at engines.

`python tests/netns_client.py URL`
"""

import asyncio
import sys

import httpx

from serving import parse_events

SLOW = 6  # of the 200; their steps take a while, so that all are in the middle when it happens


async def wait_ready(http: httpx.AsyncClient, engines: int) -> None:
    """Wait until so many engines answer."""
    while True:
        try:
            metrics = (await http.get("/metrics")).text
            ready = (await http.get("/health")).status_code == 200
        except httpx.TransportError:
            ready, metrics = False, ""
        up = sum(
            line.startswith("octavo:engine_up{") and line.endswith(" 1.0")
            for line in metrics.splitlines()
        )
        if ready and up >= engines:
            return
        await asyncio.sleep(0.2)


async def whole(http: httpx.AsyncClient, number: int) -> bool:
    slow = number < SLOW
    count = 80 if slow else 20 + number % 41
    body = {
        "prompt": f"{'!slow ' if slow else ''}number {number}",
        "max_tokens": count, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    reply = await http.post("/v1/completions", json=body)
    reply.raise_for_status()
    choices = [event["choices"][0] for event in parse_events(reply.content)]
    text = "".join(choice["text"] for choice in choices)
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return text == "".join(chr(97 + i % 26) for i in range(count)) and ends == ["length"]


async def main(url: str) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=90, limits=limits) as http:
        await wait_ready(http, 2)
        answers = [asyncio.ensure_future(whole(http, i)) for i in range(200)]
        for answer in asyncio.as_completed(answers[SLOW:60]):
            assert await answer
            break
        print("in the middle", flush=True)
        found = sum(await asyncio.gather(*answers))
        print("answers are whole" if found == 200 else "answers lack something", flush=True)
        await wait_ready(http, 2)
        assert await whole(http, 199)
        print("both engines answer", flush=True)


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(main(sys.argv[1]), 240))
