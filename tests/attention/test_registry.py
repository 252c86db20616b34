"""Names, the rule behind "auto", and refusals that say what to change."""

import sys
from dataclasses import replace

import pytest
import torch

from octavo import attention
from octavo.attention import registry
from octavo.attention.base import AttentionSpec, Capabilities
from octavo.attention.cpu import CpuAttention
from octavo.attention.torch_ref import TorchAttention
from octavo.errors import ConfigError


class Mine(TorchAttention):
    """A user's own backend."""

    name = "mine"
    capabilities = Capabilities((torch.float32,), (torch.float32,), ("cpu",), (64,), (16,), False)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def spec(head_dim: int = 64, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(4, 2, head_dim, 0.125, window)


def test_names_lead_to_backends() -> None:
    assert isinstance(attention.create("cpu", "cpu", torch.bfloat16), CpuAttention)
    assert isinstance(attention.create("torch", "cpu", torch.float32), TorchAttention)


def test_auto_takes_the_first_that_can() -> None:
    assert isinstance(attention.create("auto", "cpu", torch.float32, [spec()], 16), CpuAttention)
    odd = attention.create("auto", "cpu", torch.float32, [spec(head_dim=20)], 16)
    assert isinstance(odd, TorchAttention)
    assert isinstance(attention.create("auto", "cpu", torch.float16), TorchAttention)


def test_what_has_no_kernel_on_a_gpu_names_the_slow_way() -> None:
    order = ("triton",)
    says = "triton: head size 20 is not one of 8, 16, .*; attention_impl='torch' can, slowly"
    with pytest.raises(ConfigError, match=says):
        attention.create("auto", "cuda", torch.bfloat16, [spec(head_dim=20)], 16, order=order)
    plain = attention.create("torch", "cuda", torch.bfloat16, [spec(head_dim=20)], 16, order=order)
    assert isinstance(plain, TorchAttention)


def test_sinks_are_for_backends_that_take_them() -> None:
    sinks = replace(spec(), sinks=True)
    assert isinstance(attention.create("auto", "cpu", torch.float32, [sinks], 16), TorchAttention)
    with pytest.raises(ConfigError, match=r"cpu: it has no attention sinks; .*'torch' can, slowly"):
        attention.create("cpu", "cpu", torch.float32, [spec(), sinks], 16)


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(ConfigError, match=r"'cpv'.*auto, cpu, torch, triton; did you mean 'cpu'"):
        attention.create("cpv", "cpu", torch.float32)


def test_a_user_registers_a_backend() -> None:
    attention.register_attention_impl("mine", Mine)
    assert attention.names() == ["auto", "cpu", "mine", "torch", "triton"]
    assert isinstance(attention.create("mine", "cpu", torch.float32, [spec()], 16), Mine)


@pytest.mark.parametrize("name", ["", "auto", "cpu", "torch"])
def test_a_taken_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="taken or empty"):
        attention.register_attention_impl(name, Mine)


def test_a_class_without_the_contract_is_refused() -> None:
    with pytest.raises(ConfigError, match="lacks capabilities, kv_layout, write, attend"):
        attention.register_attention_impl("bad", object)  # type: ignore[arg-type]


def test_every_objection_is_named() -> None:
    attention.register_attention_impl("mine", Mine)
    with pytest.raises(ConfigError) as caught:
        attention.create("mine", "cuda:0", torch.bfloat16, [spec(80, 9)], 32)
    for part in (
        "device 'cuda' is not one of cpu",
        "dtype bfloat16 is not one of float32",
        "kv_cache_dtype bfloat16",
        "block_size 32 is not one of 16",
        "head size 80 is not one of 64",
        "no sliding window",
    ):
        assert part in str(caught.value)


def test_a_cache_type_that_a_backend_lacks_is_refused_at_the_start() -> None:
    attention.register_attention_impl("mine", Mine)
    for kv_dtype, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "fp8")):
        with pytest.raises(ConfigError, match=f"kv_cache_dtype {name} is not one of float32"):
            attention.create("mine", "cpu", torch.float32, [spec()], 16, kv_dtype)
        made = attention.create("auto", "cpu", torch.bfloat16, [spec()], 16, kv_dtype)
        assert isinstance(made, CpuAttention)
        odd = attention.create("auto", "cpu", torch.bfloat16, [spec(20)], 16, kv_dtype)
        assert isinstance(odd, TorchAttention)


def test_unknown_attributes_of_the_package_are_errors() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        attention.nothing  # noqa: B018


def test_without_triton_its_backend_is_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "octavo.attention.triton", raising=False)
    with pytest.raises(ConfigError, match=r"attention_impl 'triton'.*package triton.*leave"):
        attention.create("triton", "cpu", torch.float32)
