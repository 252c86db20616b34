"""A request derives what can be derived, and its choices share what was asked."""

from tests.core.harness import make

from octavo.core.request import Status


def test_a_fork_has_the_same_past_and_its_own_name() -> None:
    parent = make("r", [1, 2, 3], n=3, seed=5, repetition_penalty=1.1)
    assert parent.to_fork
    assert [spec.index for spec in parent.sample_specs()] == [0, 1, 2]
    child = parent.fork(2)
    assert child.seq_id == "r#2"
    assert child.submission is parent.submission
    assert child.prompt_ids is parent.prompt_ids
    child.tokens.append(9)
    assert parent.tokens == [1, 2, 3]
    assert not child.to_fork
    (spec,) = child.sample_specs()
    assert (spec.index, spec.position, spec.output_ids) == (2, 1, (9,))


def test_history_is_only_given_to_those_who_look_at_it() -> None:
    plain, looking = make("a", [1, 2]), make("b", [1, 2], presence_penalty=1.0)
    for request in (plain, looking):
        request.tokens.append(7)
    assert plain.sample_specs()[0].prompt_ids == plain.sample_specs()[0].output_ids == ()
    assert looking.sample_specs()[0].prompt_ids == (1, 2)
    assert looking.sample_specs()[0].output_ids == (7,)


def test_waiting_time_adds_up() -> None:
    request = make("r", [1], arrival=2.0)
    assert request.waited_at(5.0) == 3.0
    request.waited_before, request.status = 3.0, Status.RUNNING
    assert request.waited_at(9.0) == 3.0
    request.status, request.waiting_since = Status.PREEMPTED, 9.0
    assert request.waited_at(10.0) == 4.0
    assert "r" in repr(request)
