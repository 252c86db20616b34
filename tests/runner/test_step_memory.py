"""What steps need beside weights and KV."""

from octavo.attention.base import AttentionSpec
from octavo.attention.triton_cache import TritonCache
from octavo.models.config import from_config
from octavo.models.known import CONFIGS
from octavo.runner import step_memory

SPEC = AttentionSpec(8, 2, 64, 0.125)


def test_logits_are_bounded():
    assert step_memory.logits_bytes(4, 1000) == 4 * 4 * 4000
    assert step_memory.logits_bytes(10**6, 10**6) == 4 * 4 * step_memory.LOGITS_AT_ONCE


def test_the_step_that_is_measured_is_a_seventh_of_a_second_of_work():
    assert step_memory.probe_tokens(135 * 10**6) == 254
    assert step_memory.probe_tokens(1235 * 10**6) == 27
    assert step_memory.probe_tokens(8 * 10**9) == 16
    assert step_memory.probe_tokens(0) == 256


def test_a_measured_step_is_extended_by_the_activations_of_a_token():
    assert step_memory.full_peak(256, 256, 256, 1) == 256
    assert step_memory.full_peak(512, 256, 1256, 1) == 512 + 2 * 1000, "as measured"
    assert step_memory.full_peak(0, 256, 1256, 1) == 1000, "memory that was there already"
    assert step_memory.full_peak(25600, 256, 1256, 1) == 25600 + 3 * 1000, "a huge page"
    assert step_memory.full_peak(512, 256, 100, 1) == 512


def test_captured_steps_hold_their_share_and_the_backend_s_memory():
    static = TritonCache().static_bytes(SPEC, 16, 1000)
    assert static == 4 * (16 * 4 * 4) * 2 * 66  # lines: tokens, pieces of 256 keys, heads a group
    found = step_memory.captured_bytes(TritonCache(), [SPEC], (8, 16), 1000, 6400, 64)
    assert found == 1600 + static
    assert step_memory.captured_bytes(object(), [SPEC], (8, 16), 1000, 6400, 64) == 1600
    assert step_memory.captured_bytes(TritonCache(), [SPEC], (), 1000, 6400, 64) == 0


def activations(name, ranks=1):
    spec = from_config(CONFIGS[name])
    attention = [layer.attention for layer in spec.layers]
    return step_memory.activation_bytes(spec, attention, 2, ranks)


def test_activations_are_those_of_the_wider_half_of_a_layer():
    assert activations("llama-2-13b") == (2 * 5120 + 3 * 13824) * 2
    assert activations("llama-2-13b", ranks=2) < activations("llama-2-13b")
    # A token passes 8 experts of 768; attention over 32 heads of 128 is narrower.
    assert activations("qwen3-30b-a3b") == (2 * 2048 + 3 * 8 * 768) * 2
    assert activations("mixtral-8x7b") == (2 * 4096 + 3 * 2 * 14336) * 2
