"""Plain torch version of every op: the specification that each kernel is tested against.

All arithmetic is in float32 and rounded once, when the result is stored. Shapes: T tokens,
H hidden size, I inner size of the MLP; q and k are [T, heads, head_dim]. Rows are independent.
"""

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    cast_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = r / sqrt(mean(r^2) + eps) * weight with r = x + residual, of [T, H].

    Returns (y, r). With a residual, r is rounded to its dtype and stored in it, and the norm is
    taken of the rounded values; without one, r is x itself. weight may be float32 where x is not.
    cast_first: r / sqrt(...) is also rounded to x's dtype before the multiplication by weight.
    """
    if residual is None:
        residual = x
    else:
        residual.copy_(residual.float() + x.float())
    return _normed(residual, weight, eps, cast_first).to(x.dtype), residual


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, cast_first: bool = False) -> None:
    """RMS norm of each head of x [T, heads, head_dim] over head_dim, in place (Qwen3)."""
    x.copy_(_normed(x, weight, eps, cast_first))


def row_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, cast_first: bool = False) -> None:
    """RMS norm of x [T, heads, head_dim] over all heads of a token together, in place (OLMo 2).

    weight: [heads * head_dim].
    """
    x.copy_(_normed(x.flatten(1), weight, eps, cast_first).view(x.shape))


def row_squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The sums of squares of each token's heads, float32 [T, 2]: of query [T, heads, head_dim],
    and of key."""
    return torch.stack([part.flatten(1).float().pow(2).sum(1) for part in (query, key)], 1)


def divided_row_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    squares: torch.Tensor,
    column: int,
    count: int,
    eps: float,
    cast_first: bool = False,
) -> None:
    """As `row_norm` of rows of `count` values of which x [T, heads, head_dim] is a part.

    squares: float32 [T, 2], whose `column` has the sums of squares of the whole rows.
    """
    wide = x.flatten(1).float()
    normed = wide * torch.rsqrt(squares[:, column, None] / count + eps)
    if cast_first:
        normed = normed.to(x.dtype).float()
    x.copy_((normed * weight.float()).view(x.shape))


def add(x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """residual + scale * x of [T, H], rounded once and stored in `residual`, which is returned."""
    return residual.copy_(residual.float() + x.float() * scale)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, cast_first: bool) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast_first:
        normed = normed.to(x.dtype).float()
    return normed * weight.float()


def rope(
    q: torch.Tensor, k: torch.Tensor | None, cos_sin: torch.Tensor, positions: torch.Tensor
) -> None:
    """Rotary embedding, NeoX style, in place on q [T, heads, hd] and, if given, k [T, heads, hd].

    cos_sin is float32 [max_position, rot_dim], the cosines in its first half, the sines in its
    second. Dimension i < rot_dim / 2 pairs with i + rot_dim / 2; the rest is unchanged.
    """
    rows = cos_sin[positions]
    cos, sin = (half.unsqueeze(1) for half in rows.chunk(2, dim=-1))
    half = cos.shape[-1]
    for x in (q,) if k is None else (q, k):
        wide = x[..., : 2 * half].float()
        first, second = wide[..., :half], wide[..., half:]
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        x[..., : 2 * half] = rotated.to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 I] = gate | up; returns [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with the tanh form of gelu, of [T, 2 I] = gate | up; returns [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = 0.7978845608028654 * (gate + 0.044715 * gate.pow(3))
    return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(gate_up.dtype)


def route(
    logits: torch.Tensor, choices: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `choices` largest of logits [T, E], of equal ones the first, and their weights.

    Returns (int32 [T, choices], float32 [T, choices]): shares of the softmax over all experts, or
    if `renormalize` over the chosen ones.
    """
    shares = torch.softmax(logits.float(), -1)
    chosen = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :choices]
    weights = shares.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen.int(), weights


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The sum, in the order of a token's choices, of its experts' MLPs by their weights: x's dtype.

    x [T, H]; chosen, weights [T, choices]; gate_up [E, 2 I, H], the gates first; down [E, H, I].
    activation: "silu" or "gelu_tanh". What lies between the two products, and each choice's result,
    are rounded to x's dtype.
    """
    act = silu_and_mul if activation == "silu" else gelu_and_mul
    total = torch.zeros(x.shape, device=x.device)
    for choice in range(chosen.shape[1]):
        matrices = chosen[:, choice].long()
        inner = act(torch.einsum("th,tih->ti", x.float(), gate_up[matrices].float())).to(x.dtype)
        result = torch.einsum("ti,thi->th", inner.float(), down[matrices].float()).to(x.dtype)
        total += result.float() * weights[:, choice, None]
    return total.to(x.dtype)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence: its last Q tokens over all of its L keys.

    query [Q, heads, hd]; key and value [L, kv_heads, hd] with heads = groups * kv_heads, query
    head h reading KV head h // groups. Token t sees keys max(0, t - window + 1) .. t. The score
    is scale * q.k, then soft_cap * tanh(score / soft_cap) if one is given. sinks [heads]: a further
    score of each head, which has a weight and no value. Returns float32 [Q, heads, hd].
    """
    queries, heads, head_dim = query.shape
    length, kv_heads, _ = key.shape
    groups = query.float().view(queries, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qkgd,lkd->kgql", groups, key.float()) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    tokens = torch.arange(length - queries, length, device=query.device).unsqueeze(1)
    keys = torch.arange(length, device=query.device)
    hidden = keys > tokens
    if window is not None:
        hidden |= keys <= tokens - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, queries, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    out = torch.einsum("kgql,lkd->qkgd", weights, value.float())
    return out.reshape(queries, heads, head_dim)


def quantize_kv(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `dtype` and a float32 scale for each row of x [..., head_dim]: x ~ codes * scale.

    The scale is max |x| / 127 (int8) or / 448 (float8_e4m3fn), rounded up to a bfloat16, so that a
    weight of 1 times it is one; codes are rounded to nearest even. e4m3 subnormals are not used:
    magnitudes below 2^-6 become 2^-6 or zero. A row with an infinity or NaN gets the scale NaN, so
    that it propagates.
    """
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exact = most / (127.0 if dtype == torch.int8 else 448.0)
    scale = ((exact.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    scaled = wide * (torch.ones_like(scale) / scale)
    if dtype == torch.int8:
        codes = scaled.nan_to_num(0).round().to(dtype)
    else:
        least = torch.where(scaled.abs() > 2.0**-7, 2.0**-6, 0.0).copysign(scaled)
        codes = torch.where(scaled.abs() < 2.0**-6, least, scaled).to(dtype)
    return codes, (scale + (wide * 0).sum(-1, keepdim=True)).squeeze(-1)


def dequantize_kv(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes [..., head_dim] and scale [...] of `quantize_kv` to float32."""
    return codes.float() * scale.unsqueeze(-1)


def int4_weights(codes: torch.Tensor, m: torch.Tensor, o: torch.Tensor, group: int) -> torch.Tensor:
    """int8 [N, K]: (c * m + o) >> 8 in 16 bits, of codes [N, K] with m and o per `group` k."""
    size = codes.shape[1]
    m, o = (v.repeat_interleave(group, 1)[:, :size] for v in (m, o))
    return ((codes.int() * m + o).to(torch.int16) >> 8).to(torch.int8)


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K] with each row rounded to int8, times int8 `weight` [N, K] and its `scale` [N]."""
    wide = x.float()
    most = wide.abs().amax(1, keepdim=True)
    # Not 127 / most, which torch rounds twice: as 127 times a reciprocal.
    factor = torch.where(most > 1e-30, torch.full_like(most, 127).div(most), 0.0)
    sums = (wide * factor).round().double() @ weight.double().T  # exact: integers below 2^53
    y = sums.float() * scale * (most.div(127) + (wide * 0).sum(1, keepdim=True))
    return (y if bias is None else y + bias.float()).to(x.dtype)
