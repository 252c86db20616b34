"""Same request, same answer: whatever the company, the chunks, the cache, or the memory.

Every run is compared with the request alone on a fresh engine: token ids are equal, and
log-probabilities within 1e-4 (fp32). All of it once more with a KV cache of int8, whose codes must
not depend on any of this either, and (slow) with weights of 4 and 8 bits, on AMX in bf16, too; in
bf16 over each type of KV; and in fp32 over KV in bf16.
"""

import random

import pytest

from octavo import LLM, SamplingParams
from octavo.core.submission import Submission
from octavo.kernels.cpu import target

LENGTHS = [1, 2, 3, 7, 15, 16, 17, 18, 31, 32, 33, 40, 47, 48, 64, 70]


def options(**changes):
    return {
        "dtype": "float32", "num_gpu_blocks_override": 300, "max_model_len": 256,
        "load_progress": False, **changes,
    }  # fmt: skip


def prompts(count=16):
    draw = random.Random(5)
    return [[draw.randrange(0, 256) for _ in range(n)] for n in LENGTHS[:count]]


def params(index):
    """Greedy and seeded draws, penalties and filters, taking turns."""
    kinds = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 1.3, "seed": 12, "top_k": 40, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.7, "seed": -4, "min_p": 0.02, "presence_penalty": 0.5},
    ]
    return SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, **kinds[index % len(kinds)])


def ask(llm, order):
    outputs = llm.generate(
        [prompts()[i] for i in order], [params(i) for i in order], use_tqdm=False
    )
    return {i: output.outputs[0] for i, output in zip(order, outputs, strict=True)}


def check_same(got, alone):
    for index, output in got.items():
        assert output.token_ids == alone[index].token_ids, index
        for have, want in zip(output.logprobs, alone[index].logprobs, strict=True):
            assert have.keys() == want.keys()
            for token, entry in want.items():
                assert have[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
                assert have[token].rank == entry.rank


MODES = {
    "float32": {"kv_cache_dtype": "float32"},
    "int8": {"kv_cache_dtype": "int8"},
    "bfloat16": {"kv_cache_dtype": "bfloat16"},
    "all-bfloat16": {"dtype": "bfloat16"},
    "bfloat16-int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "bfloat16-fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "weights-int8": {"quantization": "int8"},
    "weights-int4": {"quantization": "int4"},
    "weights-int4-tiles": {"quantization": "int4", "dtype": "bfloat16"},
}
FAST = ("float32", "int8")


@pytest.fixture(
    scope="module",
    params=[pytest.param(mode, marks=[pytest.mark.slow] * (mode not in FAST)) for mode in MODES],
)
def make(tiny_folder, request):
    """Makes an engine with the KV cache or the weights of the day."""
    if "tiles" in request.param and not target.has_tiles():
        pytest.skip("no AMX here: products of bfloat16 are not all of our own")
    return lambda **changes: LLM(str(tiny_folder), **options(**MODES[request.param], **changes))


@pytest.fixture(scope="module")
def alone(make):
    """Each request on an engine that has seen nothing else."""
    llm = make(enable_prefix_caching=False)
    return {i: ask(llm, [i])[i] for i in range(16)}


@pytest.fixture(scope="module")
def llm(make):
    return make()


def test_smp_12_all_at_once_at_every_row(llm, alone):
    check_same(ask(llm, list(range(16))), alone)
    check_same(ask(llm, list(range(15, -1, -1))), alone)
    for shift in (3, 8):
        check_same(ask(llm, [(i + shift) % 16 for i in range(16)]), alone)


def test_cache_hits_change_nothing(make, alone):
    llm = make()
    check_same(ask(llm, list(range(16))), alone)
    assert llm.engine.stats.cached_tokens == 0
    check_same(ask(llm, list(range(16))), alone)
    assert llm.engine.stats.cached_tokens > 0


@pytest.mark.parametrize("budget", [16, 17, 32, 64])
def test_sch_07_chunks_change_nothing(make, alone, budget):
    llm = make(max_num_batched_tokens=budget)
    check_same(ask(llm, list(range(16))), alone)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("cache", [False, True])
def test_sch_01_preemption_changes_nothing(make, alone, mode, cache):
    llm = make(
        num_gpu_blocks_override=7, max_model_len=100, enable_prefix_caching=cache,
        preemption_mode=mode,
    )  # fmt: skip
    check_same(ask(llm, list(range(16))), alone)
    assert llm.engine.stats.preemptions > 0
    swaps = llm.engine.scheduler.num_swap_outs
    assert swaps == 0 if mode == "recompute" else mode == "auto" or swaps > 0
    llm.engine.scheduler.check()


@pytest.mark.parametrize("blocks", [300, 7])
def test_planning_ahead_changes_nothing(make, alone, blocks):
    """Also where requests are preempted, swapped, and computed in chunks."""
    llm = make(
        async_scheduling=True, num_gpu_blocks_override=blocks, max_model_len=100,
        max_num_batched_tokens=32, preemption_mode="swap",
    )  # fmt: skip
    ahead = 0
    submit = llm.engine.executor.submit

    def watched(plan):
        nonlocal ahead
        ahead += sum(row.from_draw is not None for row in plan.rows)
        return submit(plan)

    llm.engine.executor.submit = watched
    check_same(ask(llm, list(range(16))), alone)
    assert ahead > (300 if blocks == 300 else 50)
    assert (llm.engine.scheduler.num_swap_outs > 0) == (blocks == 7)
    assert llm.engine.scheduler.kv.pool.num_used == llm.engine.scheduler.num_in_flight == 0
    llm.engine.scheduler.check()


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("blocks", [300, 9])
def test_drafts_change_nothing(make, alone, blocks, eager, monkeypatch):
    """Of each request's drafts some are right, then one is wrong: rows gain several tokens."""
    llm = make(num_gpu_blocks_override=blocks, max_model_len=100, enforce_eager=eager)
    scheduler, draw = llm.engine.scheduler, random.Random(3)
    schedule = scheduler.schedule

    def propose_and_schedule(now):
        for request in scheduler.queues.running:
            index, done = LENGTHS.index(request.num_prompt_tokens), request.num_output_tokens
            right = alone[index].token_ids[done : done + draw.randrange(5)]
            scheduler.propose(request.request_id, 0, [*right, draw.randrange(256)])
        return schedule(now)

    monkeypatch.setattr(scheduler, "schedule", propose_and_schedule)
    check_same(ask(llm, list(range(16))), alone)
    assert llm.engine.stats.steps < 20 or blocks == 9
    scheduler.check()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sch_06_displacement_changes_nothing(make, alone, mode):
    llm = make(
        num_gpu_blocks_override=12, max_model_len=150, preemption_mode=mode, max_num_seqs=3,
        scheduler="priority",
    )  # fmt: skip
    engine, got = llm.engine, {i: [] for i in range(16)}
    for urgency, group in enumerate((range(5), range(5, 10), range(10, 16))):
        for i in group:
            asked = Submission(str(i), tuple(prompts()[i]), params(i), priority=-urgency)
            engine.add_request(asked)
        for _ in range(6 if urgency < 2 else 1000):
            for update in engine.step():
                got[int(update.request_id)] += update.token_ids
    assert not engine.has_work()
    assert engine.stats.displaced > 2
    assert engine.scheduler.num_swap_outs > 0 or mode == "recompute"
    assert got == {i: list(alone[i].token_ids) for i in range(16)}
    engine.scheduler.check()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sch_01_a_stop_string_is_found_across_a_preemption(make, llm, mode):
    """Each answer's stop string is what it says at its end: most of it came before a preemption."""
    decode = llm.get_tokenizer().decode
    letters = [i for i in range(256) if decode([i]).isascii() and decode([i]).isalpha()]
    plain = [
        SamplingParams(
            temperature=0.9, seed=40 + i, max_tokens=60, ignore_eos=True, allowed_token_ids=letters
        )
        for i in range(6)
    ]
    asked = [prompts()[10 + i][:20] for i in range(6)]
    whole = [out.outputs[0] for out in llm.generate(asked, plain, use_tqdm=False)]
    stops = [one.text[-6:] for one in whole]
    small = make(num_gpu_blocks_override=10, max_model_len=100, preemption_mode=mode)
    stopping = [p.with_(stop=[stop]) for p, stop in zip(plain, stops, strict=True)]
    found = [out.outputs[0] for out in small.generate(asked, stopping, use_tqdm=False)]
    assert small.engine.stats.preemptions > 0
    for one, before, stop in zip(found, whole, stops, strict=True):
        assert (one.finish_reason, one.stop_reason) == ("stop", stop)
        assert one.text == before.text[: before.text.index(stop)]
        assert one.token_ids == before.token_ids[: len(one.token_ids)]


def test_joining_midway_changes_nothing(llm, alone):
    llm.reset_prefix_cache()
    done, streams = {}, {}
    for i in range(16):
        streams[i] = llm.stream(prompts()[i], params(i).with_(logprobs=None))
        for _, stream in zip(range(3), streams.values(), strict=False):
            next(stream, None)
    for i, stream in streams.items():
        done[i] = [t for output in stream for t in output.outputs[0].token_ids]
    for i in range(16):
        # What `next` consumed above is missing here; the end is what must agree.
        want = alone[i].token_ids
        assert done[i] == want[len(want) - len(done[i]) :], i


def test_smp_08_a_seed_is_its_own_and_no_seed_is_fresh(llm):
    seeded = SamplingParams(temperature=1, seed=42, max_tokens=16, ignore_eos=True)
    prompt = prompts()[5]
    first = llm.generate(prompt, seeded, use_tqdm=False)[0].outputs[0].token_ids
    free = seeded.with_(seed=None)
    mixed = llm.generate(
        [prompt] * 21, [free] * 7 + [seeded] + [seeded.with_(seed=7)] * 6 + [free] * 7,
        use_tqdm=False,
    )  # fmt: skip
    assert mixed[7].outputs[0].token_ids == first
    unseeded = [tuple(o.outputs[0].token_ids) for i, o in enumerate(mixed) if i < 7 or i > 13]
    assert len(set(unseeded)) >= 10
    zero = [
        llm.generate(prompt, seeded.with_(seed=0), use_tqdm=False)[0].outputs[0].token_ids
        for _ in range(2)
    ]
    assert zero[0] == zero[1]


def test_lgp_09_prompt_logprobs_survive_chunks_and_the_cache(make, llm):
    ask_all = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    lengths = [1, 15, 16, 17, 33, 64]
    wanted = [p for p in prompts() if len(p) in lengths]
    whole = llm.generate(wanted, ask_all, use_tqdm=False)
    again = llm.generate(wanted, ask_all, use_tqdm=False)
    chunked = make(max_num_batched_tokens=16).generate(wanted, ask_all, use_tqdm=False)
    for first, second, third in zip(whole, again, chunked, strict=True):
        assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
        assert first.prompt_logprobs[0] is None
        for other in (second, third):
            assert other.prompt_logprobs[0] is None
            pairs = zip(first.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
            for have, want in pairs:
                assert have.keys() == want.keys()
                for token in want:
                    assert have[token].logprob == pytest.approx(want[token].logprob, abs=1e-4)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 33])
def test_sch_12_each_choice_is_what_it_would_be_alone(llm, length):
    draw = random.Random(length)
    prompt = [draw.randrange(256) for _ in range(length)]
    ask_four = SamplingParams(
        n=4, temperature=1, seed=5, max_tokens=40, ignore_eos=True, logprobs=0
    )
    choices = llm.generate(prompt, ask_four, use_tqdm=False)[0].outputs
    assert [c.index for c in choices] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in choices}) == 4
    # Teacher forcing: the prompt log-probabilities of prompt + choice repeat its own.
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for choice in choices:
        forced = llm.generate([prompt + choice.token_ids], score, use_tqdm=False)[0]
        scored = forced.prompt_logprobs[length:]
        for token, own, other in zip(choice.token_ids, choice.logprobs, scored, strict=True):
            assert own[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_smp_23_nothing_of_a_request_is_left_for_the_next(make):
    llm = make(max_num_seqs=1)
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = prompts()[9]
    fresh = llm.generate(prompt, plain, use_tqdm=False)[0].outputs[0].token_ids
    loaded = SamplingParams(
        temperature=1.5, seed=1, max_tokens=8, min_tokens=8, logit_bias={3: 100},
        presence_penalty=2, frequency_penalty=2, repetition_penalty=2, bad_words=["a"],
    )  # fmt: skip
    llm.generate(prompt, loaded, use_tqdm=False)
    assert llm.generate(prompt, plain, use_tqdm=False)[0].outputs[0].token_ids == fresh
    stream = llm.stream(prompt, loaded)
    next(stream)
    stream.close()
    assert llm.generate(prompt, plain, use_tqdm=False)[0].outputs[0].token_ids == fresh
