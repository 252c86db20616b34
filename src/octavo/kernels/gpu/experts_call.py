"""Launches of the kernels of `experts`: routing, and the MLPs of a mixture of experts."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton

from octavo.errors import ConfigError
from octavo.kernels.codes import Codes
from octavo.kernels.gpu import experts
from octavo.kernels.gpu.linear import FP8, GpuProducts, Tile, as_codes, fp8_span, tile_for
from octavo.kernels.gpu.matmul import is_wide

# By the most rows that an expert has on average.
TILES = {16: Tile(16, 64, 4, 4), 32: Tile(64, 64, 4, 3), 2**31: Tile(128, 128, 8, 3)}
# Inputs that are multiplied at once.
SPAN = 64
# Programs for each multiprocessor, by the rows of a tile: small ones hide each other's loads.
_PROGRAMS = {16: 4, 64: 2, 128: 1, 32: 1}
_COLUMNS = 1024


def route(
    logits: torch.Tensor, choices: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.route`."""
    tokens, count = logits.shape
    chosen = torch.empty((tokens, choices), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, choices), dtype=torch.float32, device=logits.device)
    if tokens:
        experts.route[(tokens,)](
            chosen, weights, logits, logits.stride(0), EXPERTS=count,
            COLUMNS=triton.next_power_of_2(count), CHOICES=choices,
            PLACES=triton.next_power_of_2(choices), RENORMALIZE=renormalize, num_warps=1,
        )  # fmt: skip
    return chosen, weights


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of all experts for one of the two products, values or float8_e4m3fn.

    weight: [experts, N, K], or codes [experts * N, K] padded to whole spans; scale: float32
    [experts * N, groups] of codes.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    span: int
    constants: dict[str, Any]

    @staticmethod
    def of(weight: torch.Tensor | Codes, native: bool) -> "Matrices":
        """native: whether the GPU converts float8_e4m3fn itself."""
        if isinstance(weight, torch.Tensor):
            weight = weight.flatten(0, -2).contiguous()
            constants = {"FP8": False, "SPANS": 1, "NATIVE": False}
            return Matrices(weight, weight, SPAN, constants)
        single = weight.is_one_group
        span = fp8_span(weight.group, single, 0)
        assert span is not None
        bits = F.pad(weight.codes.view(torch.uint8), (0, -weight.codes.shape[1] % 16)).contiguous()
        scale = (weight.scale if native else weight.scale * 256).contiguous()
        spans = 2**30 if single else weight.group // span
        constants = {"FP8": True, "SPANS": spans, "NATIVE": native}
        return Matrices(bits.view(torch.float8_e4m3fn) if native else bits, scale, span, constants)


class RoutedExperts:
    """A router's logits and `GroupedExperts` as one."""

    def __init__(self, grouped: "GroupedExperts", choices: int, renormalize: bool) -> None:
        self._grouped, self._choices, self._renormalize = grouped, choices, renormalize

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """x [T, H], logits [T, experts] -> [T, H]."""
        return self._grouped(x, *route(logits, self._choices, self._renormalize))


class GroupedExperts:
    """The MLPs of a layer's experts: see `reference.experts`."""

    def __init__(
        self,
        gate_up: torch.Tensor | Codes,
        down: torch.Tensor | Codes,
        count: int,
        activation: str,
        native: bool = False,
    ) -> None:
        """gate_up: [count * 2 I, H], down: [count * H, I], the experts one below the other; Codes
        are float8_e4m3fn. native: see `Matrices.of`."""
        self._count, self._gelu = count, activation == "gelu_tanh"
        shape = (gate_up.codes if isinstance(gate_up, Codes) else gate_up).shape
        self._hidden, self._inner = shape[-1], shape[0] // (2 * count)
        self._gate_up, self._down = Matrices.of(gate_up, native), Matrices.of(down, native)

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """x [T, H]; chosen int32, weights float32 [T, choices], contiguous; returns [T, H]."""
        tokens, choices = chosen.shape
        pairs = tokens * choices
        out = x.new_empty((tokens, self._hidden))
        if not pairs:
            return out
        tile = tile_for(TILES, -(-pairs // self._count), x.dtype)
        self._compute(out, x, chosen, weights, tile)
        return out

    def launch_all(self, dtype: torch.dtype, device: torch.device, choices: int) -> None:
        """Each kernel once in every form, so that none is compiled later."""
        x = torch.zeros((1, self._hidden), dtype=dtype, device=device)
        chosen = torch.zeros((1, choices), dtype=torch.int32, device=device)
        for tile in TILES.values():
            self._compute(torch.empty_like(x), x, chosen, chosen.float(), tile)

    def _compute(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        tile: Tile,
    ) -> None:
        tokens, choices = chosen.shape
        pairs = tokens * choices
        order = chosen.new_empty(pairs)
        num_items = pairs // tile.rows + self._count
        items = chosen.new_empty((num_items, experts.ITEM_FIELDS))
        experts.sort_pairs[(self._count,)](
            order, items, chosen, pairs, EXPERTS=self._count, ROWS=tile.rows, BLOCK=1024,
            FIELDS=experts.ITEM_FIELDS, num_warps=4,
        )  # fmt: skip
        inner = x.new_empty((pairs, self._inner))
        each = x.new_empty((pairs, self._hidden))
        self._multiply(inner, x, self._gate_up, order, items, choices, tile, gated=True)
        self._multiply(each, inner, self._down, order, items, choices, tile, gated=False)
        experts.combine[tokens, triton.cdiv(self._hidden, _COLUMNS)](
            out, each, weights, self._hidden, CHOICES=choices, COLUMNS=_COLUMNS,
        )  # fmt: skip

    def _multiply(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        matrices: Matrices,
        order: torch.Tensor,
        items: torch.Tensor,
        choices: int,
        tile: Tile,
        gated: bool,
    ) -> None:
        outputs = outputs_of(tile, gated)
        tiles = len(items) * triton.cdiv(y.shape[1], outputs)
        weight, scale = matrices.weight, matrices.scale
        experts.multiply_experts[(_programs(x.device, tile, tiles),)](
            y, x, weight, scale, order, items, y.shape[1], x.shape[1], len(items), x.stride(0),
            weight.stride(0), scale.stride(0), CHOICES=choices, ROWS=tile.rows, OUTPUTS=outputs,
            SPAN=matrices.span, GATED=gated, GELU=gated and self._gelu, **matrices.constants,
            WIDE=is_wide(x.dtype), FIELDS=experts.ITEM_FIELDS, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip


class GpuModelProducts(GpuProducts):
    """Creates the products of one model, those of experts among them."""

    def __init__(self, dtype: torch.dtype, deterministic: bool, converts_fp8: bool = False) -> None:
        super().__init__(dtype, deterministic, converts_fp8)
        self._mixtures: set[str] = set()

    def make_experts(
        self,
        gate_up: torch.Tensor | Codes,
        down: torch.Tensor | Codes,
        experts: int,
        choices: int,
        renormalize: bool,
        activation: str,
        methods: tuple[str, str],
    ) -> RoutedExperts:
        """See `layers.experts.ExpertProducts.make_experts`."""
        one, other = (
            self._weight_of_experts(weight, method)
            for weight, method in zip((gate_up, down), methods, strict=True)
        )
        grouped = GroupedExperts(one, other, experts, activation, self._converts_fp8)
        if not triton.knobs.runtime.interpret:
            device = (down.codes if isinstance(down, Codes) else down).device
            grouped.launch_all(self._dtype, device, choices)
        return RoutedExperts(grouped, choices, renormalize)

    def _weight_of_experts(self, weight: torch.Tensor | Codes, method: str) -> torch.Tensor | Codes:
        """Integer codes of a checkpoint are expanded: there is no kernel for them."""
        if isinstance(weight, Codes):
            single = weight.is_one_group
            if weight.are_floats and fp8_span(weight.group, single, 0) is not None:
                self._mixtures.add(FP8)
                return weight
            self._mixtures.add("expanded")
            return weight.values().to(self._dtype)
        if method == FP8:
            self._mixtures.add(FP8)
            return as_codes(weight, method)
        if method != "none":
            raise ConfigError(
                f"quantization: there are no {method} products of experts on a GPU; use fp8, or "
                "leave the option out"
            )
        self._mixtures.add("plain")
        return weight

    def explain(self) -> str:
        mixtures = f"; experts in Triton ({', '.join(sorted(self._mixtures))})"
        return super().explain() + (mixtures if self._mixtures else "")


def outputs_of(tile: Tile, gated: bool) -> int:
    """Outputs of a tile; large ones of the gated product have half: it has gates and ups."""
    return tile.outputs // 2 if gated and tile.outputs > 64 else tile.outputs


def _programs(device: torch.device, tile: Tile, tiles: int) -> int:
    """Those that a GPU runs at a time, if there is work for them; two in the interpreter."""
    if device.type != "cuda":
        return min(2, tiles)
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return min(_PROGRAMS[tile.rows] * count, tiles)
