"""The KV pool: its default size, what options say, and refusals with values that would work."""

import logging
import re
from dataclasses import dataclass, replace

import pytest

from octavo.config import EngineConfig
from octavo.core.plan import FULL, CacheSpec
from octavo.errors import ConfigError, NotEnoughMemoryError
from octavo.runner.memory import GIB
from octavo.runner.sizing import DEFAULT_KV_BYTES, Needs, Sizing

MIB = 2**20


@dataclass
class Memory:
    total: int = 32 * GIB
    free: int = 30 * GIB
    used: int = GIB


def sizing(window=8192, token=32 * 1024, shares=True, promised=0, keeps=False, ranks=1, **options):
    """Of a model of `token` bytes of KV a token; the window is asked for if options say so."""
    groups = options.pop("groups", (FULL,))
    config = EngineConfig(**{"max_num_seqs": 128, **options})
    return Sizing(config, Needs(groups, 16 * token, window), shares, promised, keeps, ranks)


def test_the_default_pool_is_modest_and_says_how_to_get_more(caplog):
    with caplog.at_level(logging.INFO, logger="octavo"):
        found = sizing().divide(Memory(), GIB)
    assert (found.kv, found.swap) == (DEFAULT_KV_BYTES, GIB)
    assert "KV 4.00 GiB by default (more: gpu_memory_utilization=0.9, or" in caplog.text


@pytest.mark.parametrize(
    ("options", "memory", "kv"),
    [
        ({"max_num_seqs": 4, "window": 1024}, Memory(), 128 * MIB),  # all that 4 can use
        ({}, Memory(free=8 * GIB), 2 * GIB),  # a quarter of what is free
        ({"window": 2**18}, Memory(), 8 * GIB),  # but one whole request
        ({"promised": 22 * GIB}, Memory(), 2 * GIB),  # what others were promised is not free
    ],
)
def test_what_bounds_the_default_pool(options, memory, kv):
    assert sizing(**options).divide(memory, GIB).kv == kv


def test_captured_steps_take_from_the_pool_and_are_named_in_a_refusal():
    given = {"shares": False, "swap_space": 0}
    found = sizing(**given).divide(Memory(), GIB, captured=GIB)
    assert found.kv == sizing(**given).divide(Memory(), GIB).kv - GIB
    assert found.terms["captured"] == GIB
    with pytest.raises(NotEnoughMemoryError, match=r"1\.00 GiB for captured steps"):
        sizing(max_model_len=8192, gpu_memory_utilization=0.01, **given).divide(
            Memory(), GIB, captured=GIB
        )


@pytest.mark.parametrize("options", [{"shares": False}, {"gpu_memory_utilization": 0.9}])
def test_a_given_share_or_a_device_of_its_own_takes_the_whole_budget(options):
    found = sizing(swap_space=0, **options).divide(Memory(), GIB)
    assert found.kv == 26 * GIB  # 1 in use + 0.9 x 30 free - 1 in use - 1 for a step


def test_the_swap_pool_is_at_most_the_pool_where_they_share_memory():
    asked = {"kv_cache_memory_bytes": GIB, "swap_space": 4}
    here = sizing(**asked)
    found = here.take_given(Memory(), GIB)
    assert (found.kv, found.swap) == (GIB, GIB)
    assert here.host_blocks(found) == GIB // (16 * 32 * 1024)
    elsewhere = sizing(shares=False, **asked)
    assert elsewhere.take_given(Memory(), GIB).swap == 4 * GIB


def test_a_given_pool_beyond_what_is_free_is_taken_with_a_warning(caplog):
    found = sizing(kv_cache_memory_bytes=20 * GIB, promised=15 * GIB).take_given(Memory(), 20 * GIB)
    assert found.kv == 20 * GIB
    assert "20.00 GiB, as asked, but only 15.00 GiB are free beside the 15.00 GiB" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_model_len": 8192, "num_gpu_blocks_override": 4},
         r"max_model_len is 8192 but the KV cache holds 64 tokens.*2.00 MiB.*max_model_len to at "
         r"most 64, or num_gpu_blocks_override to at least 512"),
        ({"max_model_len": 8192, "kv_cache_memory_bytes": 4 * MIB},
         r"at most 128, or kv_cache_memory_bytes to at least 268435456 \(0.25 GiB\)"),
        ({"kv_cache_memory_bytes": 10}, "no KV block fits.*kv_cache_memory_bytes to at least"),
    ],
)  # fmt: skip
def test_a_given_pool_that_is_too_small_is_refused_before_the_load(options, says):
    with pytest.raises(ConfigError, match=says):
        sizing(**options).check(Memory(), 0)


def test_memory_that_is_too_small_is_refused_with_the_share_that_is_enough():
    small = sizing(gpu_memory_utilization=0.05)
    with pytest.raises(NotEnoughMemoryError) as caught:
        small.check(Memory(), 2 * GIB)
    said = str(caught.value)
    assert "gpu_memory_utilization=0.05 allows 1.60 GiB of 32.00 GiB" in said
    assert "at least 2.00 GiB for the weights" in said
    assert "set gpu_memory_utilization to more than 0.094" in said
    assert not re.search(r"(?<!\w)-\d", said), "no negative sizes"
    sizing(gpu_memory_utilization=0.095).check(Memory(), 2 * GIB)
    with pytest.raises(NotEnoughMemoryError, match=r"1.00 GiB for a step.*at least 0.063"):
        small.divide(Memory(), GIB)
    assert sizing(gpu_memory_utilization=0.064).divide(Memory(), GIB).kv > 0


def test_a_file_of_codes_that_is_dequantized_gets_the_advice_int4():
    with pytest.raises(
        NotEnoughMemoryError, match=r"no share is enough.*--quantization int4.*codes"
    ):
        sizing(keeps=True).check(Memory(), 40 * GIB)
    with pytest.raises(NotEnoughMemoryError, match=r"'int8' or 'int4'"):
        sizing().check(Memory(), 40 * GIB)


def test_a_window_that_was_asked_for_must_fit_in_what_memory_leaves():
    asked = sizing(max_model_len=2**20, window=2**20)
    with pytest.raises(NotEnoughMemoryError, match=r"32.00 GiB for the KV of 1048576 tokens"):
        asked.check(Memory(), GIB)
    assert sizing(window=2**20).divide(Memory(), GIB).kv < 32 * GIB  # its own is cut instead


@pytest.mark.parametrize("options", [{}, {"gpu_memory_utilization": 0.9}])
def test_engines_of_one_server_take_equal_parts_in_any_order(options):
    memory, weights, parts = Memory(free=12 * GIB), GIB, []
    for left in (3, 2, 1):  # what the others will read is promised, or read
        free = memory.free - left * weights
        one = replace(sizing(swap_space=0, **options), engines=3, unsized=left)
        parts.append(one.divide(replace(memory, free=free), 0).kv)
        memory = replace(memory, free=memory.free - weights - parts[-1])
    assert min(parts) > (0.99 if options else 0.8) * max(parts)
    assert sum(parts) <= 0.9 * 9 * GIB
    alone = sizing(swap_space=0, **options).divide(Memory(free=9 * GIB), 0).kv
    assert sum(parts) > 0.85 * alone


def test_the_model_s_own_window_is_cut_to_the_pool(caplog):
    assert sizing().window(64 * MIB) == 2048
    assert "max_model_len is 2048, not the model's 8192" in caplog.text


def test_a_block_for_every_group_is_the_least():
    groups = (FULL, CacheSpec("window", 64))
    with pytest.raises(NotEnoughMemoryError, match="no KV block fits"):
        sizing(groups=groups, num_gpu_blocks_override=1).check(Memory(), 0)


@pytest.mark.parametrize(
    "options", [{}, {"gpu_memory_utilization": 0.9}, {"gpu_memory_utilization": 0.3}]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_machine_s_memory_take_it_once(options, ranks):
    """Each has a part of the KV of each token, of the weights, and of what others were promised."""
    token, weights = 32 * 1024, 2 * GIB
    alone = Memory(free=26 * GIB, used=weights)
    one = sizing(token=token, promised=4 * GIB, **options).divide(alone, GIB)
    part = Memory(free=26 * GIB, used=weights // ranks)
    each = sizing(token=token // ranks, promised=4 * GIB // ranks, ranks=ranks, **options).divide(
        part, GIB // ranks
    )
    assert ranks * each.kv == pytest.approx(one.kv, abs=100)  # bytes
    assert ranks * each.swap == pytest.approx(one.swap, abs=100)


def test_a_refusal_of_one_of_several_ranks_says_so():
    with pytest.raises(NotEnoughMemoryError, match=r"GiB, one rank's part of 2, \("):
        sizing(ranks=2, max_model_len=8192).check(Memory(free=GIB), 2 * GIB)
