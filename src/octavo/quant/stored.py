"""AWQ and GPTQ checkpoints: what config.json says of them, and their tensors as `Codes`.

Both keep, for a product of K inputs and N outputs, in place of `X.weight` [N, K]:

    X.scales  float [groups, N]
    X.qzeros  int32 [groups, N * bits / 32], zero points packed along N
    X.qweight int32, codes packed along N for AWQ [K, N / 8], along K for GPTQ [K * bits / 32, N]
    X.g_idx   int32 [K], GPTQ only: the group of each input

and w = (code - zero) * scale. Packed values begin at the lowest bits. AWQ (AutoAWQ, "gemm") puts
eight columns into a word in the order 0 2 4 6 1 3 5 7. GPTQ's first format stores zero points
less one; `checkpoint_format` "gptq_v2" stores them as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.errors import CheckpointError, ConfigError
from octavo.quant.base import INT4, INT8, NONE, Codes

AWQ, GPTQ = "awq", "gptq"
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """How a checkpoint's products are stored. group: inputs that share a scale; 0: all."""

    method: str
    bits: int
    group: int
    zeros_less_one: bool = False
    any_order: bool = False  # groups need not be runs of inputs (GPTQ's desc_act)

    @property
    def computed_as(self) -> str:
        """The engine's own method that computes on it."""
        if self.any_order or (self.bits == 4 and self.group % 32):
            return NONE
        return INT4 if self.bits == 4 else INT8

    def explain(self) -> str:
        if self.computed_as != NONE:
            return f"{self.method}, {self.bits} bits, computed on as {self.computed_as}"
        why = "groups in any order (desc_act)" if self.any_order else f"groups of {self.group}"
        return f"{self.method}, {self.bits} bits, expanded: no kernel computes on {why}"

    def parts(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """The shape of each stored tensor of a product, by the ending of its name."""
        each = 32 // self.bits
        groups = -(-inputs // (self.group or inputs))
        shapes: dict[str, tuple[int, ...]] = {
            "qweight": (inputs, outputs // each),
            "qzeros": (groups, outputs // each),
            "scales": (groups, outputs),
        }
        if self.method == GPTQ:
            shapes |= {"qweight": (inputs // each, outputs), "g_idx": (inputs,)}
        return shapes

    def codes(self, parts: Mapping[str, torch.Tensor]) -> Codes | torch.Tensor:
        """A product's tensors as codes, or as values [N, K] where the groups are no runs.

        Raises CheckpointError for a group that does not exist.
        """
        scales = parts["scales"]
        zeros = self._unpacked(parts["qzeros"])
        if self.method == AWQ:
            codes = self._unpacked(parts["qweight"]).T
        else:
            codes = self._unpacked(parts["qweight"].T)
        step = scales.float().T.contiguous()
        low = -(zeros.float() + self.zeros_less_one).T * step
        inputs = codes.shape[1]
        group = self.group or inputs
        index = parts.get("g_idx", torch.arange(inputs) // group).long()
        if not bool(((index >= 0) & (index < len(scales))).all()):
            raise CheckpointError(
                f"g_idx names groups {int(index.min())} to {int(index.max())}; there are "
                f"{len(scales)}"
            )
        if not torch.equal(index, torch.arange(inputs) // group):
            values: torch.Tensor = codes.float() * step[:, index] + low[:, index]
            return values
        return Codes(codes.contiguous(), step, low.contiguous(), group, self.bits)

    def _unpacked(self, words: torch.Tensor) -> torch.Tensor:
        """int32 [rows, n] -> uint8 [rows, n * 32 / bits]."""
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32)
        fields = (words.unsqueeze(2) >> shifts) & (2**self.bits - 1)
        if self.method == AWQ:
            fields = fields[..., torch.tensor(_AWQ_ORDER).argsort()]
        unpacked: torch.Tensor = fields.to(torch.uint8).flatten(1)
        return unpacked


def stored_format(config: Any, source: str) -> StoredFormat:
    """What `quantization_config` describes. Raises CheckpointError for what is not known."""

    def wrong(name: str, right: str) -> CheckpointError:
        return CheckpointError(f"{source}: quantization_config.{name} is {get(name)!r}; it must "
                               f"be {right}")  # fmt: skip

    def get(name: str) -> Any:
        return config.get(name)

    if not isinstance(config, dict):
        raise CheckpointError(f"{source}: quantization_config is {config!r}, not an object")
    method = get("quant_method")
    if method not in (AWQ, GPTQ):
        raise CheckpointError(
            f"{source}: weights quantized with {method!r} are not supported (known: awq, gptq); "
            "use the model's bf16 safetensors or a GGUF"
        )
    bits = (4,) if method == AWQ else (4, 8)
    if get("bits") not in bits:
        raise wrong("bits", " or ".join(map(str, bits)))
    size = get("group_size")
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise wrong("group_size", "the inputs of a group, or -1 for all")
    if method == AWQ:
        if get("version") not in (None, "gemm"):
            raise wrong("version", "'gemm'")
        return StoredFormat(AWQ, 4, max(size, 0))
    if get("checkpoint_format") not in (None, "gptq", "gptq_v2"):
        raise wrong("checkpoint_format", "'gptq' or 'gptq_v2'")
    if get("desc_act") not in (None, True, False):
        raise wrong("desc_act", "true or false")
    first = get("checkpoint_format") != "gptq_v2"
    return StoredFormat(GPTQ, config["bits"], max(size, 0), first, bool(get("desc_act")))


def check_agrees(quantization: str | None, stored: StoredFormat | None) -> None:
    """Raise ConfigError if `quantization` asks for something else than the checkpoint holds."""
    if quantization in (AWQ, GPTQ) and (stored is None or stored.method != quantization):
        holds = "no quantized weights" if stored is None else f"weights of {stored.method!r}"
        raise ConfigError(
            f"quantization {quantization!r} is how a checkpoint is made; this one holds {holds}"
        )
    if stored is not None and quantization not in (None, stored.method):
        raise ConfigError(
            f"quantization is {quantization!r}, but the checkpoint's weights are quantized with "
            f"{stored.method!r} already; leave the option out"
        )
