"""KV memory per token: the numbers follow from the shape."""

from benchmarks import kv_memory


def test_groups_hold_the_windows_and_the_full_layers() -> None:
    short, long = kv_memory.measure([512, 4096])
    layer = 2 * 256 * 2  # keys and values of one head of 256 in bfloat16
    assert short["full"] == long["full"] == 18 * layer
    assert short["groups"] == 18 * layer  # all is within the windows
    assert long["groups"] == (3 * layer * 4096 + 15 * layer * 512) / 4096
    assert long["groups"] < long["groups_at_most"] < long["full"]
