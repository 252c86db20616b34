"""The cost of steps that tests use."""

from octavo.sim.cost import LinearCost, StepShape


def test_a_linear_cost_counts_tokens_context_and_copies() -> None:
    decode = StepShape(4, 4, 100, 0, 0, 4, True, 0)
    prompt = StepShape(10, 1, 0, 10, 55, 1, False, 3)
    cost = LinearCost(step=1.0, token=0.1, read=0.01, block=10.0)
    assert cost.seconds(decode) == 1.0 + 0.4 + 1.0
    assert cost.seconds(prompt) == 1.0 + 1.0 + 0.55 + 30.0
