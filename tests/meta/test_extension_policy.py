"""A scheduling policy with a number of its own is one new file, and a name where it is chosen.

The file is written here. The policy's gauge is in `engine.stats` and on /metrics without another
line anywhere.
"""

import re
import sys
import textwrap
from pathlib import Path

import pytest
from tests.core.harness import Bench, alone, make

import octavo
import serving
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.core.policy_registry import create_policy
from octavo.engine.fake import FakeRunner
from octavo.text.tokenizer import load_tokenizer

CHOSEN = "toy_policy:LongestFirst"
NEW_FILE = '''
    """The longest prompt first."""

    from octavo.schedulers import FIFOScheduler, Gauge


    class LongestFirst(FIFOScheduler):
        name = "toy"
        orders = 0

        def order(self, waiting, now):
            self.orders += 1
            return sorted(waiting, key=lambda request: -request.num_prompt_tokens)

        def gauges(self):
            return [
                Gauge("depth", "How deep it is.", 2.5),
                Gauge("orders", "How often it was asked.", self.orders, counter=True),
            ]
'''


@pytest.fixture
def new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the new file, on the path of this process and of those that it starts."""
    (tmp_path / "toy_policy.py").write_text(textwrap.dedent(NEW_FILE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{serving.PYTHONPATH}")
    monkeypatch.delitem(sys.modules, "toy_policy", raising=False)
    return tmp_path


def test_it_schedules(new_file: Path) -> None:
    bench = Bench(blocks=60, seqs=2, policy=create_policy(CHOSEN))
    requests = [make(f"r{i}", [i] * (5 + 9 * i), 4) for i in range(6)]
    wanted = {request.request_id: alone(request)[0] for request in requests}
    bench.run(requests)
    assert {key[0]: outcome.token_ids for key, outcome in bench.outcomes.items()} == wanted
    assert next(row.request_id for plan in bench.plans for row in plan.rows) == "r5"


def test_its_gauge_is_in_the_statistics(new_file: Path, tmp_path: Path) -> None:
    folder = serving.write_model(tmp_path / "model")
    config = EngineConfig(model=str(folder), scheduler=CHOSEN)
    runner, tokenizer = FakeRunner(), load_tokenizer(folder)
    llm = LLM.over(runner, tokenizer, config, create_policy(CHOSEN))
    llm.generate([[1, 2], [3]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert llm.engine.stats.policy["depth"] == 2.5
    assert llm.engine.stats.policy["orders"] > 0


def test_its_gauge_is_on_metrics(new_file: Path, tmp_path: Path) -> None:
    folder = serving.write_model(tmp_path / "model")
    with serving.Server(folder, {}, scheduler=CHOSEN) as server:
        server.assert_alive()
        text = server.http.get("/metrics").text
        assert "# HELP octavo:toy_depth How deep it is.\n# TYPE octavo:toy_depth gauge\n" in text
        assert server.metric("octavo:toy_depth") == 2.5
        serving.wait_until(lambda: server.metric("octavo:toy_orders_total") > 0)


@pytest.mark.parametrize("part", ["server", "engine/stats.py", "engine/capabilities.py"])
def test_no_policy_is_named_where_all_are_served_alike(part: str) -> None:
    root = Path(octavo.__file__).parent / part
    named = re.compile(r"\b(fifo|slo|FIFOScheduler|PriorityScheduler|SLOScheduler|SLOState)\b")
    for path in [root] if root.is_file() else root.rglob("*.py"):
        assert not named.search(path.read_text()), path
