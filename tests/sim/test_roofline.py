"""The roofline: times by hand, its corners, ranks, captures; rates that are not known."""

import itertools
import math
from dataclasses import replace

import pytest

from octavo import hardware
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.planner.plan import make_plan
from octavo.planner.target import target
from octavo.sim.cost import StepShape
from octavo.sim.devices import Rates, roofline, step_cost
from octavo.sim.roofline import Model, Product, Reached, RooflineCost

PEAKS = Reached(
    bandwidth=1.0, kv_bandwidth=1.0, flops=1.0, prompt_flops=1.0, link=1.0, pcie=1.0, kernel=0.0,
    launch=0.0, replay=0.0, reduce=0.0, host_step=0.0, host_row=0.0,
)  # fmt: skip
CARD = hardware.Card(
    "toy", 2**30, bandwidth=10**9, flops={"bfloat16": 10**12}, link=10**8, host=10**7
)
# A product of 1 MB, and nothing else that takes time.
MODEL = Model(
    products=(Product(500, 1000, 1_000_000, 1),), head=Product(0, 0, 0, 1), layers={None: 1},
    token_bytes=0.0, attention=0, width=0, inner=0, itemsize=2, logits=0, block_bytes=10_000,
)  # fmt: skip


def decode(rows, context=0, captured=True):
    return StepShape(rows, rows, rows * context, 0, 0, rows, captured, 0)


def prompt(tokens):
    return StepShape(tokens, 1, 0, tokens, tokens * (tokens + 1) // 2, 1, False, 0)


def cost(model=MODEL, reached=PEAKS, captures=(), card=CARD, **options):
    return RooflineCost(model, card, captures, reached=reached, **options)


def test_few_rows_take_the_time_of_the_bytes_and_many_of_the_operations():
    # One row: 1 MB of weights and 1500 values of 2 bytes, at 1 GB/s; its tile: 16 MFLOP.
    assert cost().seconds(decode(1)) == pytest.approx((1_000_000 + 3_000) / 1e9)
    # 16,000 rows of 1 MFLOP: the bytes, 49 MB, take 49 ms.
    slow = replace(CARD, flops={"bfloat16": 10**11})
    assert cost(card=slow).seconds(decode(16_000)) == pytest.approx(16_000 * 1e6 / 1e11)


def test_a_tile_is_computed_whole():
    slow = replace(CARD, flops={"bfloat16": 10**9})
    one, tile, more = (cost(card=slow).seconds(decode(rows)) for rows in (1, 16, 17))
    assert one == tile == pytest.approx(16 * 1e6 / 1e9)
    assert more == pytest.approx(2 * tile)


def test_attention_reads_contexts_and_multiplies_prompts():
    model = replace(MODEL, products=(), layers={None: 2, 10: 3}, token_bytes=1000, attention=64)
    assert cost(model).seconds(decode(4, 100)) == pytest.approx(
        (2 * 400 + 3 * 40) * 1000 / 1e9 + 5 * 2 * 4 * (64 + 2 * 500) * 2 / 1e9
    )
    pairs = 2 * 100 * 101 / 2 + 3 * 100 * 10
    between = 5 * 2 * 100 * (64 + 2 * 500) * 2 / 1e9
    assert cost(model).seconds(prompt(100)) == pytest.approx(4 * pairs * 64 / 1e12 + between)


def test_kernels_have_a_least_time_and_launches_may_take_longer():
    few = replace(PEAKS, kernel=1e-3)
    model = replace(MODEL, products=(Product(1, 1, 1, 5),))
    # 5 products, attention, 5 others of the layer, the head, 12 before and after.
    assert cost(model, few).seconds(decode(1)) == pytest.approx(24e-3)
    launched = replace(few, launch=2e-3, replay=1e-3)
    assert model.launches == 24
    assert cost(model, launched).seconds(decode(1)) == pytest.approx(48e-3)
    assert cost(model, launched, captures=(1,)).seconds(decode(1)) == pytest.approx(24e-3)
    assert cost(model, launched, captures=(1,)).seconds(decode(2)) == pytest.approx(48e-3)
    assert cost(model, launched, (1,), ahead=False).seconds(decode(1)) == pytest.approx(25e-3)
    eager = decode(1, captured=False)
    assert cost(model, launched, captures=(1,)).seconds(eager) == pytest.approx(48e-3)


def test_a_captured_step_is_padded():
    slow = replace(CARD, flops={"bfloat16": 10**9})
    padded = cost(card=slow, captures=(16, 64)).seconds(decode(17))
    assert padded == pytest.approx(64 * 1e6 / 1e9)


def test_ranks_add_sums_up():
    model = replace(MODEL, width=1000, ranks=4)
    alone = cost(replace(MODEL, width=1000)).seconds(decode(8))
    # Two sums of 8 x 1000 values, of which each rank sends 2 x 3/4.
    moved = 2 * (2 * 3 / 4) * 8 * 1000 * 2
    assert cost(model).seconds(decode(8)) == pytest.approx(alone + moved / 1e8)
    late = replace(PEAKS, reduce=1e-3)
    # The logits are gathered, too.
    assert cost(model, late).seconds(decode(8)) == pytest.approx(alone + moved / 1e8 + 3e-3)


def test_swaps_go_over_the_bus():
    swap = StepShape(0, 0, 0, 0, 0, 0, False, 5)
    assert cost().seconds(swap) == pytest.approx(5 * 10_000 / 1e7)


def test_few_tokens_read_few_experts():
    one = replace(MODEL, products=(Product(500, 1000, 8_000_000, 1, experts=8, choices=2),))
    seconds = cost(one).seconds(decode(1))
    assert seconds == pytest.approx((2_000_000 + 2 * 3_000) / 1e9)
    assert cost(one).seconds(decode(64)) == pytest.approx((8_000_000 + 128 * 3_000) / 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth": None}, "the bandwidth of toy is not known; give --bandwidth in GB/s"),
        ({"bandwidth": 0}, "the bandwidth of toy is 0; it must be above 0"),
        ({"flops": {}}, "the rate of bfloat16 products of toy is not known; give --flops"),
        ({"link": None}, "the link between cards of toy is not known; give --link in GB/s"),
    ],
)
def test_a_rate_that_is_not_known_is_asked_for(change, message):
    with pytest.raises(ConfigError, match=message):
        cost(replace(MODEL, ranks=2), card=replace(CARD, **change))


@pytest.fixture(scope="module")
def llama():
    """The cost of LLaMA-13B's steps on A100s, by ranks."""

    def made(ranks=1, **options):
        config = EngineConfig(model="llama-13b", tensor_parallel_size=ranks, **options)
        plan = make_plan(config, target(config, "a100-40gb", None))
        return step_cost(config, "a100-40gb", plan, Rates()), config, plan

    return made


def test_a_model_by_name(llama):
    found, config, plan = llama()
    model = roofline(config, hardware.find("a100-40gb"), plan).model
    assert [(each.outputs, each.inputs, each.count) for each in model.products] == [
        (5120, 5120, 40), (5120, 13824, 40), (15360, 5120, 40), (27648, 5120, 40),
    ]  # fmt: skip
    assert model.token_bytes * 40 == 819_200
    # 26 GB of weights but for the embedding.
    weights = 25.70e9 / (Reached().bandwidth * 1555e9)
    assert weights < found.seconds(decode(1, 1)) < 1.1 * weights


def test_ranks_share_the_work(llama):
    one, eight = llama()[0], llama(8)[0]
    assert 4 < one.seconds(decode(64, 256)) / eight.seconds(decode(64, 256)) < 8
    # A sum over ranks takes its time however few the rows are.
    assert 3 < one.seconds(decode(1, 1)) / eight.seconds(decode(1, 1)) < 5


def test_captures_help_where_launches_take_longer_than_kernels(llama):
    captured, eager = llama(8)[0], llama(8, enforce_eager=True)[0]
    gains = [eager.seconds(decode(n, 256)) / captured.seconds(decode(n, 256)) for n in (1, 64, 256)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2
    assert gains[-1] == pytest.approx(1, abs=0.1)


def test_a_described_device(llama):
    _, config, plan = llama()
    slow, fast = (
        step_cost(config, "described", plan, Rates(bandwidth=b, flops=300)) for b in (1000, 2000)
    )
    assert slow.seconds(decode(1, 1)) == pytest.approx(2 * fast.seconds(decode(1, 1)), rel=0.05)
    with pytest.raises(ConfigError, match="the bandwidth of described is not known"):
        step_cost(config, "described", plan, Rates(flops=300))


def test_no_time_is_lost_between_many_sizes(llama):
    found = llama()[0]
    times = [found.seconds(decode(rows, 100)) for rows in range(1, 600)]
    assert all(later >= earlier for earlier, later in itertools.pairwise(times))
    assert all(math.isfinite(time) for time in times)


@pytest.mark.parametrize(
    ("model", "card", "ranks", "published"),
    [
        # https://github.com/pytorch-labs/gpt-fast: one request, graphs.
        ("llama-2-7b", "a100-80gb", 1, 104.9),
        ("llama-2-7b", "a100-80gb", 8, 328.4),
        ("llama-2-70b", "a100-80gb", 8, 62.5),
        # https://github.com/sgl-project/sglang/issues/2271
        ("llama-3.1-8b", "h100-80gb", 1, 147.0),
    ],
)
def test_published_figures(model, card, ranks, published):
    config = EngineConfig(model=model, tensor_parallel_size=ranks)
    found = step_cost(config, card, make_plan(config, target(config, card, None)), Rates())
    assert 1 / found.seconds(decode(1, 128)) == pytest.approx(published, rel=0.1)
