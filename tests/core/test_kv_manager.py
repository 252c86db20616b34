"""What the scheduler asks about memory, one question at a time."""

import pytest
from tests.core.harness import make

from octavo.core.kv_manager import KVManager
from octavo.core.plan import BlockCopy
from octavo.core.prefix_cache import Prefix
from octavo.core.request import Request, Status
from octavo.errors import EngineError

NOTHING = Prefix([[]], [0])


def manager(blocks: int = 20, host: int = 0, caching: bool = True) -> KVManager:
    return KVManager(blocks, 16, caching, host)


def computed(kv: KVManager, request: Request, count: int) -> Request:
    """`request` as it is when its first `count` tokens are computed."""
    kv.match(request)
    assert kv.grow(request, count - request.num_computed)
    request.num_computed = count
    kv.publish(request, request.num_computed)
    kv.check()
    return request


def test_grow_takes_just_what_is_needed_or_nothing() -> None:
    kv = manager(blocks=4)
    request = make("r", range(100))
    assert kv.grow(request, 16)
    assert len(request.table) == 1
    assert kv.grow(request, 17)
    assert len(request.table) == 2
    assert kv.max_growth(request) == 48
    assert not kv.grow(request, 49)
    assert len(request.table) == 2
    request.num_computed = 32
    assert kv.max_growth(request) == 16
    kv.free(request)
    assert kv.pool.num_used == 0
    kv.check()


def test_a_block_in_use_by_two_is_copied_by_the_first_who_writes() -> None:
    kv = manager()
    parent = computed(kv, make("r", range(24)), 24)
    child = parent.fork(1)
    kv.fork(parent, child)
    before = parent.table.ids
    assert child.table.ids is before
    assert kv.usage().shared_slots == 32
    assert kv.usage().written_slots == 24
    assert kv.grow(child, 1)
    assert kv.take_copies() == (BlockCopy("copy", before[0][1], child.table.ids[0][1]),)
    assert child.table.ids[0][0] == before[0][0]
    assert kv.grow(parent, 1)
    assert kv.take_copies() == ()  # the last one writes in place
    assert parent.table.ids is before
    kv.check()


def test_a_published_block_is_never_written() -> None:
    kv = manager()
    first = computed(kv, make("a", range(32)), 32)
    blocks = first.table.ids
    kv.free(first)
    again = make("b", range(32))
    assert kv.match(again) == 31
    assert again.table.ids == blocks
    assert kv.grow(again, 1)
    assert again.table.ids[0][1] != blocks[0][1]
    assert [copy.source for copy in kv.take_copies()] == [blocks[0][1]]
    kv.check()


def test_a_full_hit_without_a_block_for_a_copy_computes_its_last_block_again() -> None:
    kv = manager(blocks=4)
    kv.free(computed(kv, make("a", range(48)), 48))
    again = make("b", range(48))
    found = kv.find(again)
    assert len(found) == 3
    assert kv.shortage(again, found, 0) == 0
    assert kv.take(again, found) == 32
    assert kv.grow(again, 16)
    assert kv.take_copies() == ()
    kv.check()


def test_grow_each_copies_what_grow_would_copy() -> None:
    kv = manager()
    kv.free(computed(kv, make("a", range(32)), 32))
    again = make("b", range(32))
    assert kv.match(again) == 31
    assert kv.grow_each([again]) == []
    assert len(kv.take_copies()) == 1
    kv.check()


def test_grow_each_reports_who_has_no_block() -> None:
    kv = manager(blocks=4, caching=False)
    inside, border, late = (make(n, range(40)) for n in "abc")
    for request, count in ((inside, 10), (border, 16), (late, 16)):
        computed(kv, request, count)
    assert kv.grow_each([inside, border, late]) == [border, late]  # all three blocks are held
    kv.free(inside)
    assert kv.grow_each([border, late]) == [late]
    kv.check()


def test_shortage_counts_found_blocks_that_are_free_now() -> None:
    kv = manager(blocks=7)
    kv.free(computed(kv, make("a", range(50)), 50))
    wanted = make("b", range(70))
    found = kv.find(wanted)
    assert len(found) == 3
    assert kv.shortage(wanted, found, 0) == -1
    assert kv.shortage(wanted, found, 3) == 2
    assert kv.pool.num_free == 6  # nothing was taken


def test_freed_blocks_lose_the_tail_of_a_prefix_first() -> None:
    kv = manager(blocks=6)
    kv.free(computed(kv, make("a", range(64)), 64))
    other = make("b", range(1000, 1048))
    assert kv.grow(other, 48)  # one block was empty; two cached ones are overwritten
    assert len(kv.find(make("c", range(64)))) == 2


def test_usage_counts_slots_once() -> None:
    kv = manager()
    request = computed(kv, make("r", range(40)), 40)
    sharer = make("s", range(40))
    assert kv.match(sharer) == 32
    usage = kv.usage()
    assert (usage.total_slots, usage.held_slots, usage.written_slots) == (19 * 16, 48, 40)
    assert usage.shared_slots == 32
    assert usage.fragmentation == pytest.approx(8 / 48)
    assert kv.usage_of(request) == (48, 40, 32)
    assert kv.grow(sharer, 8)
    assert kv.usage().held_slots == 64
    assert kv.usage().written_slots == 40
    kv.free(request)
    kv.free(sharer)
    usage = kv.usage()
    assert (usage.held_slots, usage.written_slots, usage.fragmentation) == (0, 0, 0.0)
    assert usage.most_held_slots == 64


def test_the_most_written_slots_are_those_of_a_step_s_end() -> None:
    kv = manager()
    first, second = make("a", range(40)), make("b", range(100, 130))
    for request, count in ((first, 40), (second, 30)):
        assert kv.grow(request, count)
    kv.note_written(70)
    assert kv.usage().most_written_slots == 70
    first.num_computed, second.num_computed = 40, 30
    kv.free(first)
    assert kv.grow(second, 1)
    kv.note_written(1)
    usage = kv.usage()
    assert (usage.most_held_slots, usage.most_written_slots) == (80, 70)
    assert usage.written_slots == 30


def test_swap_out_and_in_moves_what_is_computed() -> None:
    kv = manager(host=10)
    request = computed(kv, make("r", range(60)), 40)
    assert kv.grow(request, 20)  # not computed: not copied
    blocks = request.table.ids
    assert kv.swap_out(request)
    request.status = Status.SWAPPED
    copies = kv.take_copies()
    assert [(copy.kind, copy.source) for copy in copies] == [("out", b) for b in blocks[0][:3]]
    assert request.num_computed == 40
    assert kv.pool.num_used == 0
    kv.check()
    kv.pool.forget()  # as if other requests had overwritten them
    kv.swap_in(request)
    back = kv.take_copies()
    assert [(copy.kind, copy.source) for copy in back] == [("in", c.target) for c in copies]
    assert request.table.ids == (tuple(copy.target for copy in back),)
    usage = kv.usage()
    assert (usage.swapped_out_blocks, usage.swapped_in_blocks, usage.host_blocks) == (3, 3, 0)
    kv.check()


def test_what_is_still_in_the_pool_is_not_copied_back() -> None:
    kv = manager(host=10)
    request = computed(kv, make("r", range(60)), 40)
    blocks = request.table.ids
    assert kv.swap_out(request)
    kv.take_copies()
    kv.swap_in(request)
    assert request.table.ids[0][:2] == blocks[0][:2]
    assert [copy.kind for copy in kv.take_copies()] == ["in"]  # the half-full one
    kv.check()


@pytest.mark.parametrize("caching", [False, True])
def test_shared_blocks_are_copied_once_each_way(caching: bool) -> None:
    kv = manager(host=10, caching=caching)
    parent = computed(kv, make("r", range(40)), 40)
    children = [parent.fork(index) for index in (1, 2)]
    for child in children:
        kv.fork(parent, child)
    family = [parent, *children]
    for request in family:
        assert kv.swap_out(request)
        kv.check()
    assert len(kv.take_copies()) == 3
    assert kv.host is not None
    assert kv.host.num_used == 3
    kv.pool.forget()
    for request in family:
        kv.swap_in(request)
        kv.check()
    # Two full blocks, shared again, and a half-full one for each to write to.
    assert len(kv.take_copies()) == 2 + 3
    assert len({block for request in family for block in request.table.ids[0]}) == 5


@pytest.mark.parametrize("caching", [False, True])
def test_what_a_running_sibling_holds_is_shared_again(caching: bool) -> None:
    kv = manager(host=10, caching=caching)
    parent = computed(kv, make("r", range(40)), 40)
    child = parent.fork(1)
    kv.fork(parent, child)
    assert kv.swap_out(child)
    kv.take_copies()
    kv.swap_in(child)
    assert child.table.ids[0][:2] == parent.table.ids[0][:2]
    assert [copy.kind for copy in kv.take_copies()] == ["in"]
    kv.check()


def test_a_host_without_room_takes_nothing() -> None:
    kv = manager(host=3)
    request = computed(kv, make("r", range(60)), 40)
    assert not kv.swap_out(request)
    assert kv.take_copies() == ()
    assert len(request.table) == 3
    assert not manager().swap_out(request)
    kv.check()


def test_a_swapped_request_that_ends_frees_its_host_blocks() -> None:
    kv = manager(host=10)
    request = computed(kv, make("r", range(60)), 40)
    assert kv.swap_out(request)
    kv.free(request)
    assert kv.host is not None
    assert kv.host.num_used == 0
    kv.check()


def test_preemption_costs_nothing_for_what_others_hold() -> None:
    kv = manager()
    first = computed(kv, make("a", range(64)), 64)
    assert kv.preemption_cost(first) == (64, 8)
    assert kv.freed_by(first, NOTHING) == 4
    second = computed(kv, make("b", [*range(32), *range(500, 532)]), 64)
    assert kv.preemption_cost(second) == (32, 4)
    assert kv.freed_by(second, Prefix([second.table.groups[0][2:3]], [0])) == 1
    assert kv.freed_by(second, NOTHING) == 2


def test_check_sees_a_block_of_two_owners() -> None:
    kv = manager()
    one, two = (computed(kv, make(n, range(i, i + 20)), 20) for i, n in enumerate("ab"))
    two.table.replace(0, 1, one.table.groups[0][1])
    with pytest.raises(EngineError):
        kv.check()
