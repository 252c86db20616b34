"""The reference against torch's own functions and against formulas written out."""

import pytest
import torch
import torch.nn.functional as F

from octavo.kernels import reference


def test_rms_norm_is_torchs() -> None:
    x, weight = torch.randn(5, 33), torch.randn(33)
    expected = F.rms_norm(x, (33,), weight, 1e-5)
    got, residual = reference.rms_norm(x, weight, 1e-5)
    assert residual is x
    torch.testing.assert_close(got, expected)
    total = x + 1
    got, residual = reference.rms_norm(x, weight, 1e-5, torch.ones(5, 33))
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(got, F.rms_norm(total, (33,), weight, 1e-5))


def test_activations_are_torchs() -> None:
    gate_up = torch.randn(4, 30) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(reference.silu_and_mul(gate_up), F.silu(gate) * up)
    expected = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(reference.gelu_and_mul(gate_up), expected)


def test_rope_turns_pairs_by_the_position() -> None:
    q, k = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    angles = torch.arange(10).float()[:, None] * torch.tensor([1.0, 0.1, 0.01])
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([0, 4, 9])
    before = q.clone()
    reference.rope(q, k, table, positions)
    assert torch.equal(q[..., 6:], before[..., 6:])
    pair = torch.complex(before[..., :3], before[..., 3:6])
    turned = pair * torch.polar(torch.ones(3, 1, 3), angles[positions].unsqueeze(1))
    torch.testing.assert_close(q[..., :6], torch.cat((turned.real, turned.imag), dim=-1))
    assert not torch.equal(k[1], k[2])


@pytest.mark.parametrize("queries", [1, 5, 20])
def test_attention_is_torchs(queries: int) -> None:
    q, k, v = torch.randn(queries, 6, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    for window in (None, 1, 6):
        tokens = torch.arange(20 - queries, 20)[:, None]
        seen = torch.arange(20) <= tokens
        if window is not None:
            seen &= torch.arange(20) > tokens - window
        expected = F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen, scale=0.3, enable_gqa=True
        )
        got = reference.attention(q, k, v, 0.3, window)
        torch.testing.assert_close(got, expected.transpose(0, 1))
    capped = reference.attention(q, k, v, 0.3, soft_cap=1e4)
    torch.testing.assert_close(capped, reference.attention(q, k, v, 0.3), rtol=1e-3, atol=1e-4)


def test_a_sink_takes_a_share_of_the_softmax() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    sinks = torch.randn(4)
    got = reference.attention(q, k, v, 0.5, sinks=sinks)
    for head in range(4):
        for query in range(3):
            seen = slice(0, 3 + query)
            weights = torch.exp(0.5 * k[seen, head // 2] @ q[query, head])
            total = weights.sum() + sinks[head].exp()
            expected = weights @ v[seen, head // 2] / total
            torch.testing.assert_close(got[query, head], expected)
