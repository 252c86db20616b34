"""The sampler against a slow, plain reference written here from the documented rules."""

import functools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from tests import kit

from octavo.core.plan import SampleSpec
from octavo.core.scheduler import _certain
from octavo.errors import EngineError
from octavo.params import SamplingParams
from octavo.runner import sampler

CPU = kit.cpu_device()
sample = functools.partial(sampler.sample, CPU)
prompt_logprobs = functools.partial(sampler.prompt_logprobs, CPU)
MASK = 2**64 - 1
CHAIN = (0.5, 0.3, 0.15, 0.05)


def spec(seed=1, index=0, position=0, prompt=(), output=(), stop=(), left=0, bad=(), **params):
    params.setdefault("temperature", 0.0)
    return SampleSpec(
        SamplingParams(**params), seed, index, position, tuple(prompt), tuple(output), left,
        tuple(stop), tuple(tuple(word) for word in bad),
    )  # fmt: skip


def draw(logits, specs, **options):
    return [s.token_id for s in sample(logits, specs, **options)]


def one(logits, **options):
    return draw(torch.as_tensor(logits, dtype=torch.float32)[None], [spec(**options)])[0]


def chain(values=CHAIN, size=300, low=-40.0):
    """Logits whose softmax is `values` on the first tokens and nothing on the others."""
    logits = torch.full((size,), low)
    logits[: len(values)] = torch.tensor(values).log()
    return logits


def many(logits, count, **params):
    """`count` draws at successive output positions."""
    return draw(logits.expand(count, -1), [spec(position=i, **params) for i in range(count)])


# --- the reference -----------------------------------------------------------------------------


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def split_mix(state, n):
    """Output n of SplitMix64 from a state."""
    return mix((state + (n + 1) * 0x9E3779B97F4A7C15) & MASK)


def exponential(s, token):
    state = split_mix(split_mix(split_mix(s.seed & MASK, 0), s.index), s.position)
    return -math.log1p(-((split_mix(state, token) >> 11) + 0.5) * 2.0**-53)


def processed(logits, s):
    """Float64 logits after every processor before the temperature."""
    p, x = s.params, np.asarray(logits, np.float64).copy()
    if p.allowed_token_ids is not None:
        x[[i for i in range(x.size) if i not in p.allowed_token_ids]] = -np.inf
    for word in s.bad_words:
        if s.output_ids[len(s.output_ids) - len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    for i, amount in p.logit_bias.items():
        x[i] += amount
    for i in set(s.prompt_ids) | set(s.output_ids):
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i, count in Counter(s.output_ids).items():
        x[i] -= p.frequency_penalty * count + p.presence_penalty
    if s.min_tokens_left:
        x[list(s.stop_ids)] = -np.inf
    return x


def kept(x, p):
    """The tokens that may be drawn, likeliest first; equal ones by id."""
    order = sorted((i for i in range(x.size) if x[i] > -np.inf), key=lambda i: (-x[i], i))
    if p.top_k > 0:
        order = order[: p.top_k]
    weights = np.exp((x[order] - x[order[0]]) / p.temperature)
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]]) / weights.sum()
    return [
        i for i, w, b in zip(order, weights, before, strict=True) if b < p.top_p and w >= p.min_p
    ]


def reference(logits, s):
    x = processed(logits, s)
    if s.params.greedy:
        return int(np.argmax(x))
    best = x.max()
    with np.errstate(divide="ignore"):
        return min(
            sorted(kept(x, s.params)),
            key=lambda i: exponential(s, i) / np.exp((x[i] - best) / s.params.temperature),
        )


def reference_logprobs(logits):
    x = np.asarray(logits, np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


# --- draws -------------------------------------------------------------------------------------

SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"temperature": 1e-6},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 1.0, "top_k": 200},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 300, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 0.95, "min_p": 0.01},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize(("size", "spread"), [(5, 1.0), (64, 2.0), (333, 3.0), (1000, 0.5)])
def test_draws_are_the_references(params, size, spread):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(12, size, generator=generator) * spread
    specs = [spec(seed=row * 7919, index=row % 3, position=row, **params) for row in range(12)]
    expected = [reference(row, s) for row, s in zip(logits.numpy(), specs, strict=True)]
    assert draw(logits, specs) == expected


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_p": 0.5, "min_p": 0.2},
        {"top_k": 3000},
        {"top_k": 3000, "top_p": 0.6},
        {"top_k": 20},
        {"min_p": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_draws_of_a_wide_vocabulary(params, spread):
    """Large enough for every short cut: narrow and wide nuclei, small and large k."""
    logits = torch.randn(6, 12_345, generator=torch.Generator().manual_seed(3)) * spread
    specs = [spec(seed=row, position=5, temperature=1.0, **params) for row in range(6)]
    expected = [reference(row, s) for row, s in zip(logits.numpy(), specs, strict=True)]
    assert draw(logits, specs) == expected


def critical(freedom, z=4.753):
    """Chi-square exceeded with probability 1e-6 (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + z * math.sqrt(spread)) ** 3


def assert_fits(counts, expected):
    chi = sum((counts.get(i, 0) - e) ** 2 / e for i, e in enumerate(expected))
    assert chi < critical(len(expected) - 1), (chi, counts)


def test_draws_follow_the_distribution():
    count = 10_000
    assert_fits(Counter(many(chain(), count, temperature=1.0)), [p * count for p in CHAIN])
    squared = np.array(CHAIN) ** 2
    counts = Counter(many(chain(), count, temperature=0.5))
    assert_fits(counts, squared / squared.sum() * count)
    kept = np.array(CHAIN[:3])
    counts = Counter(many(chain(), count, temperature=1.0, top_k=3))
    assert_fits(counts, kept / kept.sum() * count)


def test_distribution_check_fails_on_a_small_fault():
    """A shift of 3% of the mass is seen with this many draws, so the checks above can fail."""
    counts = Counter(many(chain((0.53, 0.27, 0.15, 0.05)), 10_000, temperature=1.0))
    with pytest.raises(AssertionError):
        assert_fits(counts, [p * 10_000 for p in CHAIN])


@pytest.mark.parametrize("axis", ["position", "seed", "index"])
def test_flat_draws_are_uniform_over_ids_and_independent(axis):
    flat, count = torch.zeros(1, 1600), 8_000
    specs = [spec(temperature=1.0, **{axis: i}) for i in range(count)]
    tokens = draw(flat.expand(count, -1), specs)
    assert_fits(Counter(t // 100 for t in tokens), [count / 16] * 16)
    pairs = Counter(
        (a // 400) * 4 + b // 400 for a, b in zip(tokens[::2], tokens[1::2], strict=True)
    )
    assert_fits(pairs, [count / 2 / 16] * 16)


def test_tails_are_drawn_as_often_as_they_should_be():
    """2,000 tokens of 1e-4 each beside one of 0.8: rare tokens are not cut by rounding."""
    logits = torch.full((2001,), math.log(1e-4))
    logits[1000] = math.log(0.8)
    rest = sum(t != 1000 for t in many(logits, 10_000, temperature=1.0))
    assert abs(rest - 2000) < 5 * math.sqrt(10_000 * 0.2 * 0.8)


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"top_p": 0.4}, 1), ({"top_p": 0.79}, 2), ({"top_p": 0.81}, 3), ({"top_p": 1.0}, 4),
        ({"top_p": 1e-9}, 1), ({"top_p": 0.9999}, 4),
        ({"min_p": 0.0}, 4), ({"min_p": 0.11}, 3), ({"min_p": 0.31}, 2), ({"min_p": 0.61}, 1),
        ({"min_p": 1.0}, 1),
        ({"top_k": -1}, 4), ({"top_k": 0}, 4), ({"top_k": 1}, 1), ({"top_k": 2}, 2),
        ({"top_k": 299}, 4), ({"top_k": 300}, 4), ({"top_k": 301}, 4), ({"top_k": 9_999_999}, 4),
        ({"top_k": 2**63 - 1}, 4),
        # top-p counts what top-k left: of (.5, .3) / .8 the first alone has .625.
        ({"top_k": 2, "top_p": 0.62}, 1), ({"top_k": 2, "top_p": 0.63}, 2),
    ],
    ids=str,
)  # fmt: skip
def test_smp_04_support_sizes(params, support):
    tokens = many(chain(low=-200.0), 2000, temperature=1.0, **params)
    assert set(tokens) == set(range(support))


def test_smp_04_extreme_values_do_no_harm():
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    best = int(logits.argmax())
    assert draw(logits, [spec(temperature=5e-324)]) == [best]
    for penalty in (1e-300, 1e-9, 1e9, 1e10):
        history = range(500)
        drawn = sample(logits, [spec(repetition_penalty=penalty, output=history, temperature=1.0)])
        assert drawn[0].error is None
        assert 0 <= drawn[0].token_id < 500


@pytest.mark.parametrize(
    ("params", "count"),
    [({"top_k": 2}, 2), ({"top_p": 0.4}, 2), ({"top_p": 0.41}, 3), ({"top_p": 0.59}, 3),
     ({"top_k": 4, "top_p": 0.5}, 2), ({"min_p": 1.0}, 5)],
    ids=str,
)  # fmt: skip
def test_ties_are_kept_by_lowest_id(params, count):
    """Of five equal tokens among lower ones, a cut in their middle keeps the lowest ids."""
    logits = torch.full((200,), -50.0)
    logits[[3, 64, 65, 130, 199]] = 1.0
    expected = {3, 64, 65, 130, 199} if count == 5 else {3, 64, 65}
    tokens = set(many(logits, 300, temperature=1.0, **params))
    assert tokens == set(sorted(expected)[:count])


def test_argmax_takes_the_lowest_id_of_equals():
    for size in (1, 3, 63, 64, 65, 300):
        assert one(torch.zeros(size)) == 0
        assert one(torch.arange(size)) == size - 1
    assert one([-1.0, -0.0, 0.0]) == 1
    assert one([-1.0, 0.0, -0.0]) == 1
    assert one([-3.0, -2.0, -2.0]) == 1


def test_top_k_of_one_is_greedy():
    logits = torch.randn(20, 400, generator=torch.Generator().manual_seed(5))
    specs = [spec(seed=i, temperature=2.0, top_k=1) for i in range(20)]
    assert draw(logits, specs) == logits.argmax(-1).tolist()


def test_smp_21_top_k_one_is_undone_by_minus_one():
    assert set(many(chain(), 100, temperature=0.5, top_k=1)) == {0}
    assert len(set(many(chain(), 100, temperature=0.5, top_k=-1))) > 1


# --- seeds and company -------------------------------------------------------------------------

MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 5, "logprobs": 3},
    {"temperature": 1.0, "logit_bias": {7: 3.0}, "repetition_penalty": 1.3, "prompt": (1, 2, 7)},
    {"temperature": 0.0, "presence_penalty": 1.0, "output": (4, 4, 9), "logprobs": 0},
    {"temperature": 1.0, "min_p": 0.1, "bad": ((3,),)},
]


def test_smp_08_same_result_in_any_company():
    logits = torch.randn(70, 700, generator=torch.Generator().manual_seed(8)) * 2
    specs = [spec(seed=i, position=i, **MIXED[i % len(MIXED)]) for i in range(70)]
    alone = [sample(logits[i : i + 1], [specs[i]])[0] for i in range(70)]
    assert sample(logits, specs) == alone
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits[order], [specs[i] for i in order]) == [alone[i] for i in order]
    some = order[:5]
    assert sample(logits, [specs[i] for i in some], rows=some) == [alone[i] for i in some]


def test_smp_08_seeds_are_distinct_and_repeat():
    flat = torch.zeros(4)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 42]

    def run(seed):
        return tuple(many(flat, 32, temperature=1.0, seed=seed))

    runs = {seed: run(seed) for seed in seeds}
    assert len(set(runs.values())) == len(seeds)
    assert all(run(seed) == tokens for seed, tokens in runs.items())


def test_smp_08_first_tokens_of_many_seeds_follow_the_distribution():
    specs = [spec(seed=seed, temperature=1.0) for seed in range(4000)]
    counts = Counter(draw(torch.zeros(4).expand(4000, -1), specs))
    assert_fits(counts, [1000] * 4)


def test_choices_of_one_seed_differ_and_are_a_prefix_of_more():
    logits = torch.zeros(1, 1000)

    def choices(n):
        return draw(
            logits, [spec(seed=3, index=i, temperature=1.0) for i in range(n)], rows=[0] * n
        )

    assert choices(2) == choices(4)[:2]
    assert len(set(choices(8))) == 8


def test_choices_that_share_a_row_do_not_share_changes():
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    specs = [spec(logit_bias={0: -100.0}), spec(), spec(logit_bias={0: -100.0, 1: -100.0})]
    assert draw(logits, specs, rows=[0, 0, 0]) == [1, 0, 2]


def test_smp_23_nothing_is_remembered_and_logits_are_not_changed():
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    plain = [spec(seed=5, position=9, temperature=1.0), spec()]
    fresh = sample(logits, plain)
    for loud in MIXED[3:]:
        sample(logits, [spec(stop=(0, 1), left=3, allowed_token_ids=[0, 1, 2], **loud)] * 2)
        assert sample(logits, plain) == fresh
    assert torch.equal(logits, before)


def test_bfloat16_rows_give_what_their_float32_values_give():
    logits = torch.randn(9, 999, generator=torch.Generator().manual_seed(4)).bfloat16()
    logits[1, 990:] = 9.0
    logits[2] = -3.0
    logits[3, 5] = float("-inf")
    logits[4] = -0.0
    logits[4, 17] = 0.0
    greedy = [spec()] * 9
    assert draw(logits, greedy) == draw(logits.float(), greedy) == logits.argmax(-1).tolist()
    mixed = [spec(seed=i, **MIXED[i % len(MIXED)]) for i in range(9)]
    assert sample(logits, mixed) == sample(logits.float(), mixed)


# --- processors --------------------------------------------------------------------------------


def assert_processed(value, logit, **options):
    """The argmax flips between token 1 and an untouched rival within 1% around `value`.

    Token 1 has the raw `logit`; the rival, token 2, is set just below and just above.
    """
    margin = 0.01 * max(abs(value), 0.1)
    for rival, winner in ((value - margin, 1), (value + margin, 2)):
        logits = torch.full((8,), -1000.0)
        logits[1], logits[2] = logit, rival
        assert one(logits, **options) == winner, (value, rival)


REPETITION = {"repetition_penalty": 2.0}
FREQUENCY = {"frequency_penalty": 0.5}
PRESENCE = {"presence_penalty": 0.25}


@pytest.mark.parametrize(
    ("value", "logit", "options"),
    [
        # Repetition: once per distinct id, of prompt or output; negative logits are multiplied.
        (2.0, 4.0, {"prompt": (1, 1, 1), **REPETITION}),
        (2.0, 4.0, {"output": (1, 1), **REPETITION}),
        (2.0, 4.0, {"prompt": (1,), "output": (1,), **REPETITION}),
        (-8.0, -4.0, {"prompt": (1, 1), **REPETITION}),
        (4.0, 4.0, {"prompt": (5,), "output": (6,), **REPETITION}),
        # Frequency and presence: output only.
        (3.0, 4.0, {"output": (1, 1), **FREQUENCY}),
        (3.75, 4.0, {"output": (1, 1), **PRESENCE}),
        (2.75, 4.0, {"output": (1, 1), **FREQUENCY, **PRESENCE}),
        (4.0, 4.0, {"prompt": (1, 1, 1), **FREQUENCY, **PRESENCE}),
        (5.0, 4.0, {"output": (1, 1), "frequency_penalty": -0.5}),
        # Together, in order: bias, repetition, frequency and presence.
        (0.75, 4.0, {"prompt": (1, 1), "output": (1, 1), **REPETITION, **FREQUENCY, **PRESENCE}),
        (1.25, 4.0, {"output": (1, 1), "logit_bias": {1: 1.0}, **REPETITION, **FREQUENCY,
                     **PRESENCE}),
        (-4.0, 1.0, {"output": (1,), "logit_bias": {1: -3.0}, **REPETITION}),
    ],
)  # fmt: skip
def test_smp_13_penalties(value, logit, options):
    assert_processed(value, logit, **options)


def test_smp_13_temperature_comes_after_penalties():
    logits = chain(size=50)
    options = {"output": (0, 0, 1), "frequency_penalty": 1.0, "temperature": 0.5}
    penalized = np.log(CHAIN) - np.array([2.0, 1.0, 0.0, 0.0])
    expected = np.exp(penalized / 0.5)
    counts = Counter(many(logits, 10_000, **options))
    assert_fits(counts, expected / expected.sum() * 10_000)


def test_smp_17_bias_forces_and_forbids():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(6))
    best = int(logits.argmax())
    assert one(logits, logit_bias={7: 100}) == 7
    assert one(logits, logit_bias={best: -100}) == int(logits.topk(2).indices[1])
    assert set(many(logits, 50, temperature=1.0, logit_bias={7: 100})) == {7}
    assert best not in many(logits, 500, temperature=1.0, logit_bias={best: -100})


def test_allowed_ids_alone_are_drawn():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(6))
    allowed = [2, 64, 299]
    assert set(many(logits, 300, temperature=2.0, allowed_token_ids=allowed)) == set(allowed)
    assert one(logits, allowed_token_ids=[5]) == 5
    # A bias cannot bring back what is not allowed.
    assert one(logits, allowed_token_ids=[5, 6], logit_bias={9: 100.0}) in (5, 6)


def test_smp_19_bad_words():
    logits = torch.zeros(20)
    logits[4], logits[5] = 5.0, 3.0
    london, new_york = ((4,),), ((8, 4), (9, 8, 4))
    assert one(logits, bad=london) == 5
    assert one(logits, bad=new_york) == 4  # "York" alone is allowed
    assert one(logits, bad=new_york, output=(1, 8)) == 5
    assert one(logits, bad=new_york, output=(8, 1)) == 4
    assert one(logits, bad=new_york, prompt=(8,)) == 4  # the prompt's text is not the output
    assert one(logits, bad=((9, 8, 4),), output=(8,)) == 4
    assert one(logits, bad=((9, 8, 4),), output=(9, 8)) == 5
    assert one(logits, bad=tuple((i,) for i in range(20) if i != 11)) == 11


@pytest.mark.parametrize("prompt", [(0,), tuple(range(50))])
def test_stp_01_stop_ids_cannot_be_drawn_before_min_tokens(prompt):
    logits = torch.zeros(60)
    logits[[2, 11, 59]] = torch.tensor([9.0, 8.0, 7.0])
    logits[30] = 3.0
    options = {"prompt": prompt, "stop": (2, 11, 59), "logit_bias": {2: 100.0}}
    for left in (1, 2, 4):
        assert one(logits, left=left, **options) == 30
    assert one(logits, left=0, **options) == 2


def test_stp_03_the_last_id_of_the_vocabulary_can_be_drawn():
    for size in (64, 65, 127, 300):
        logits = torch.zeros(size)
        logits[-1] = 30.0
        assert one(logits) == size - 1
        for params in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}):
            assert one(logits, temperature=1.0, **params) == size - 1
        assert one(logits, stop=(2,), left=4) == size - 1


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_one_rows_bad_logits_end_only_that_row(bad, dtype):
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    for params in MIXED:
        specs = [spec(seed=i, **params) for i in range(6)]
        expected = sample(logits, specs)
        spoilt = logits.clone()
        spoilt[2, 150] = bad
        found = sample(spoilt, specs)
        assert "not numbers" in found[2].error
        assert (found[2].token_id, found[2].logprobs) == (-1, None)
        assert found[:2] + found[3:] == expected[:2] + expected[3:]


def test_a_negative_nan_is_seen():
    """A NaN with its sign bit set, as x86 makes them, is below every number by its bits."""
    logits = torch.zeros(1, 100)
    logits.view(torch.int32)[0, 70] = -0x400000
    assert sample(logits, [spec()])[0].error
    assert sample(logits.bfloat16(), [spec()])[0].error


def test_nothing_left_to_draw_is_that_rows_error():
    logits = torch.zeros(3, 40)
    specs = [
        spec(),
        spec(temperature=1.0, allowed_token_ids=[5, 6], bad=((5,),), stop=(6,), left=1),
        spec(logit_bias={3: 1.0}),
    ]
    found = sample(logits, specs)
    assert "no token is left" in found[1].error
    assert [s.token_id for s in found] == [0, -1, 3]
    masked = torch.full((1, 40), float("-inf"))
    assert "no token is left" in sample(masked, [spec()])[0].error
    # Whose fault it is: the request's, by a field of it, or that of the model's logits.
    assert [found[1].error_param, sample(masked, [spec()])[0].error_param] == [
        "allowed_token_ids", None,
    ]  # fmt: skip


def test_masked_logits_are_never_drawn():
    logits = torch.full((300,), float("-inf"))
    logits[[5, 299]] = torch.tensor([0.0, -1.0])
    for params in ({}, {"top_p": 0.99}, {"top_k": 50}, {"min_p": 0.01}, {"top_k": 299}):
        assert set(many(logits, 200, temperature=2.0, **params)) == {5, 299}


def test_an_id_out_of_the_vocabulary_ends_only_its_row():
    logits = torch.zeros(5, 40)
    specs = [
        spec(logit_bias={40: 1.0}),
        spec(allowed_token_ids=[1, 99]),
        spec(stop=(40,), left=2),
        spec(),
        spec(bad=((1, 41),), output=(1,)),
    ]
    found = sample(logits, specs)
    assert "bad_words has token id 41" in found[4].error
    assert "logit_bias has token id 40" in found[0].error
    assert "allowed_token_ids has token id 99" in found[1].error
    assert "stop_token_ids has token id 40" in found[2].error
    assert found[3].token_id == 0


def test_no_specs_no_tokens():
    assert sample(torch.zeros(0, 10), []) == []


# --- log-probabilities -------------------------------------------------------------------------


def assert_logprobs(found, logits, token, k, tolerance=2e-6):
    expected = reference_logprobs(logits)
    order = sorted(range(expected.size), key=lambda i: (-logits[i], i))
    assert found.token_ids == (token, *order[:k])
    assert found.ranks == (order.index(token) + 1, *range(1, k + 1))
    np.testing.assert_allclose(
        found.logprobs, expected[list(found.token_ids)], rtol=1e-6, atol=tolerance
    )


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 2.0}])
def test_lgp_01_the_token_itself_and_exactly_k(k, params):
    logits = torch.randn(10, 12_000, generator=torch.Generator().manual_seed(1)) * 3
    logits[3, :] = torch.arange(12_000) % 7  # many equal ones
    specs = [spec(seed=i, logprobs=k, **params) for i in range(10)]
    for row, found in zip(logits.numpy(), sample(logits, specs), strict=True):
        assert_logprobs(found.logprobs, row, found.token_id, k)


def test_logprob_tolerance_can_fail():
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(1)).mul(3)
    found = sample(logits, [spec(logprobs=5)])[0]
    with pytest.raises(AssertionError):
        assert_logprobs(found.logprobs, logits[0].numpy() * 1.01, found.token_id, 5)


def test_lgp_01_only_rows_that_ask_have_logprobs():
    logits = torch.randn(4, 100)
    specs = [spec(), spec(logprobs=0), spec(logprobs=2, temperature=1.0), spec()]
    found = sample(logits, specs)
    assert [s.logprobs and len(s.logprobs.token_ids) for s in found] == [None, 1, 3, None]


def test_more_logprobs_than_tokens():
    found = sample(torch.tensor([[0.0, 2.0, 1.0]]), [spec(logprobs=20)])[0].logprobs
    assert found.token_ids == (1, 1, 2, 0)
    assert found.ranks == (1, 1, 2, 3)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_p": 0.4},
        {"temperature": 1.0, "logit_bias": {2: 5.0, 0: -1.0}},
        {"output": (0, 0), "frequency_penalty": 2.0, "repetition_penalty": 1.5},
        {"allowed_token_ids": [3]},
        {"stop": (0,), "left": 3},
        {"bad": ((0,), (1,))},
    ],
    ids=str,
)
def test_lgp_05_logprobs_are_the_models_own(params):
    logits = chain()
    found = sample(logits[None], [spec(logprobs=4, **params)])[0]
    assert found.logprobs.token_ids == (found.token_id, 0, 1, 2, 3)
    np.testing.assert_allclose(found.logprobs.logprobs[1:], np.log(CHAIN), atol=1e-5)
    assert found.logprobs.logprobs[0] == found.logprobs.logprobs[1 + found.token_id]


def test_masked_tokens_keep_minus_infinity_here():
    """Flooring to -9999 is for JSON, not for the sampler."""
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    found = sample(logits, [spec(logprobs=3)])[0].logprobs
    assert found.token_ids == (0, 0, 2, 1)
    assert found.logprobs[-1] == float("-inf")


@pytest.mark.parametrize("k", [0, 2])
def test_lgp_08_prompt_logprobs(k):
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(33, 700, generator=generator) * 2
    targets = torch.randint(700, (33,), generator=generator).tolist()
    found = prompt_logprobs(logits, targets, k)
    for row, target, entry in zip(logits.numpy(), targets, found, strict=True):
        assert_logprobs(entry, row, target, k)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_lgp_09_prompt_logprobs_do_not_depend_on_chunks(chunk):
    logits = torch.randn(33, 500, generator=torch.Generator().manual_seed(9))
    targets = list(range(33))
    whole = prompt_logprobs(logits, targets, 2)
    parts = [
        prompt_logprobs(logits[at : at + chunk], targets[at : at + chunk], 2)
        for at in range(0, 33, chunk)
    ]
    assert sum(parts, ()) == whole


def test_prompt_logprobs_of_bad_logits_say_nan():
    logits = torch.zeros(3, 50)
    logits[1, 7] = float("nan")
    found = prompt_logprobs(logits, [1, 2, 3], 4)
    assert (found[1].token_ids, found[1].ranks) == ((2,), (0,))
    assert math.isnan(found[1].logprobs[0])
    assert found[0].token_ids == (1, 0, 1, 2, 3)
    assert prompt_logprobs(logits[:0], [], 4) == ()


class Mask:
    def __init__(self, allowed, size):
        bits = np.zeros(-(-size // 32) * 32, np.uint8)
        bits[allowed] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def words(self):
        return self._words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_leaves_only_its_tokens(dtype):
    size = 301
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(4)).to(dtype)
    allowed = [3, 64, 77, 299, 300]
    params = SamplingParams(temperature=0, logprobs=20)
    specs = [SampleSpec(params, 1, 0, i, mask=Mask(allowed, size)) for i in range(3)]
    specs += [SampleSpec(SamplingParams(temperature=1.5), 1, 0, i, mask=Mask(allowed, size))
              for i in range(2)] + [SampleSpec(params, 1, 0, 0)]  # fmt: skip
    found = sample(logits, specs)
    values = logits.float()
    for i in range(3):
        order = sorted(allowed, key=lambda token: (-values[i, token].item(), token))
        assert found[i].token_id == order[0]
        entry = found[i].logprobs
        assert list(entry.token_ids) == [order[0], *order]  # what is excluded is no alternative
        assert sum(math.exp(v) for v in entry.logprobs[1:]) == pytest.approx(1, abs=1e-5)
    assert {f.token_id for f in found[3:5]} <= set(allowed)
    assert found[5].token_id == values[5].argmax()
    assert len(found[5].logprobs.token_ids) == 21


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_token_without_alternatives_has_the_logprobs_that_forced_tokens_are_given(count):
    params = SamplingParams(logprobs=count)
    (found,) = sample(torch.randn(1, 70), [SampleSpec(params, 1, 0, 0, mask=Mask([65], 70))])
    assert found.logprobs == _certain(65, count)


def test_a_mask_that_fails_or_leaves_nothing_is_an_error_of_its_row():
    class Failing:
        def words(self):
            raise EngineError("the grammar failed: no reason")

    specs = [
        SampleSpec(SamplingParams(logprobs=1), 1, 0, 0, mask=Failing()), spec(),
        SampleSpec(SamplingParams(allowed_token_ids=[1]), 1, 0, 0, mask=Mask([2], 300)),
    ]  # fmt: skip
    failed, fine, empty = sample(chain().expand(3, -1), specs)
    assert failed.error == "the grammar failed: no reason"
    assert (failed.error_param, empty.error_param) == (None, "structured_outputs")
    assert fine.token_id == 0
    assert "structured_outputs" in empty.error
