"""Prompts share what they are said to share, and nothing else."""

from octavo.core.prefix_cache import block_names
from octavo.sim.requests import Job, SimulatedRequest


def names(number: int, job: Job) -> list[bytes]:
    return block_names(SimulatedRequest(number, job, 0.0).submission.token_ids, 16, None)


def test_groups_share_their_blocks_and_others_none() -> None:
    one, two = names(0, Job(0.0, 64, 1, 0, 1, 40)), names(1, Job(0.0, 80, 1, 0, 1, 40))
    assert len(one) == 4
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two)
    assert not set(names(2, Job(0.0, 64, 1, 0, 2, 40))) & set(one)
    assert not set(names(3, Job(0.0, 64, 1))) & set(names(4, Job(0.0, 64, 1)))


def test_a_prompt_has_its_length_and_at_least_one_token_of_its_own() -> None:
    for length in (1, 2, 40, 41):
        tokens = [SimulatedRequest(n, Job(0.0, length, 1, 0, 1, 40), 0.0).tokens for n in (0, 1)]
        assert [len(ids) for ids in tokens] == [length, length]
        assert tokens[0] != tokens[1]
