"""AWQ and GPTQ tensors, packed bit by bit, beside the values that they stand for."""

import torch

N, K = 16, 96
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def word(values, bits):
    """Unsigned values into one int32, the first in the lowest bits."""
    whole = sum(int(v) << (bits * i) for i, v in enumerate(values))
    return whole - 2**32 if whole >= 2**31 else whole


def awq_packed(values):
    """[rows, N] -> int32 [rows, N / 8], eight columns a word in AutoAWQ's order."""
    return torch.tensor(
        [
            [word([row[c + j] for j in AWQ_COLUMNS], 4) for c in range(0, len(row), 8)]
            for row in values.tolist()
        ],
        dtype=torch.int32,
    )


def gptq_packed(values, bits):
    """[rows, n] -> int32 [rows, n * bits / 32], neighbours in a word in their own order."""
    each = 32 // bits
    return torch.tensor(
        [
            [word(row[c : c + each], bits) for c in range(0, len(row), each)]
            for row in values.tolist()
        ],
        dtype=torch.int32,
    )


def drawn(bits, groups, seed=0):
    """Codes [K, N], zero points and scales [groups, N]."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (K, N), generator=g)
    zeros = torch.randint(1, 2**bits, (groups, N), generator=g)
    return codes, zeros, (torch.rand(groups, N, generator=g) / 50).half()


def awq_parts(group=32, seed=0):
    codes, zeros, scales = drawn(4, K // group, seed)
    parts = {"qweight": awq_packed(codes), "qzeros": awq_packed(zeros), "scales": scales}
    index = torch.arange(K) // group
    return parts, ((codes - zeros[index]) * scales.float()[index]).T


def gptq_parts(bits=4, group=32, v2=False, order=None, seed=0):
    codes, zeros, scales = drawn(bits, K // group, seed)
    index = torch.arange(K) // group if order is None else order
    parts = {
        "qweight": gptq_packed(codes.T, bits).T.contiguous(),
        "qzeros": gptq_packed(zeros - (0 if v2 else 1), bits),
        "scales": scales,
        "g_idx": index.int(),
    }
    return parts, ((codes - zeros[index]) * scales.float()[index]).T


def awq_config(**changes):
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
            "version": "gemm", **changes}  # fmt: skip


def gptq_config(**changes):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
            **changes}  # fmt: skip


def shapes(parts):
    return {name: tuple(part.shape) for name, part in parts.items()}
