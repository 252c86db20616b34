"""A minute of clients that stream, hang up, time out, send garbage, and read slowly or nothing."""

import asyncio

import pytest
from benchmarks.soak import growth, soak, summary

from serving import Process


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_srv_01_and_05_a_minute_of_bad_clients_leaves_nothing_behind(folder, engine_path):
    with Process(folder, "--stall-timeout", "5") as server:
        server.wait_ready()
        seen = asyncio.run(soak(server.url, server.process.pid, seconds=60, clients=24))
        assert server.status() == 200
    assert seen.broken == []
    assert seen.outcomes["answered"] > 50
    assert sum(seen.outcomes[f"left by {how}"] for how in ("fin", "rst", "half")) > 20
    assert seen.descriptors[-1] <= seen.descriptors[0] + 4
    # The tokenizer's own cache of words still fills here; what leaks would be far more.
    assert growth(seen.web_mb) < 40
    assert growth(seen.engine_mb) < 10
    assert summary(seen)["probes"] > 100
