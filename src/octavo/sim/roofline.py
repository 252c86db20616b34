"""The cost of a step on a GPU that is not here: each part takes the longer of its operations and
its bytes, at the share of the card's peaks that programs reach, and never less than a kernel does.

Not here: the peaks (`octavo.hardware`) and what fits (`octavo.planner`). `docs/simulate.md` has the
formulas, and where each number of `Reached` is from.
"""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.hardware import Card
from octavo.models.loader import Outline
from octavo.sim.cost import StepShape

# What one launch computes: products of one input are one.
_FUSED = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up",
}  # fmt: skip
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.*?)([^.]+)\.weight")
_EXPERT = re.compile(r"experts\.\d+\.")
_TILE = 16  # rows of a tile of the matrix units
# Launches of a layer beside its products: 2 norms, rotary embedding and cache write, attention,
# activation; the join of attention over pieces. Of a step: inputs before the layers, draws after.
_LAYER_LAUNCHES, _STEP_LAUNCHES = 6, 12
_REDUCES = 2  # of a layer: after attention, and after the MLP


@dataclass(frozen=True, slots=True)
class Reached:
    """Shares of a card's peaks that programs reach, and times that no data sheet has.

    bandwidth, kv_bandwidth: of the memory's, by products and by attention over pages. flops,
    prompt_flops: of the matrix units', by products and by attention of prompts. link, pcie: of
    the links'. kernel: the least time of one, in a captured step; launch: of the host, for one that
    is not captured; replay: of the host, for a captured step. reduce: the least time of a sum over
    ranks. host_step, host_row: plan and commit, of a step and of a sequence in it.
    """

    bandwidth: float = 0.75
    kv_bandwidth: float = 0.75
    flops: float = 0.80
    prompt_flops: float = 0.50
    link: float = 0.65
    pcie: float = 0.80
    kernel: float = 2.5e-6
    launch: float = 20e-6
    replay: float = 15e-6
    reduce: float = 19e-6
    host_step: float = 400e-6
    host_row: float = 10e-6


@dataclass(frozen=True, slots=True)
class Product:
    """`count` products of [rows, inputs] by weights of `size` bytes, [outputs, inputs]. experts:
    how many such weights there are, of which each token takes `choices`."""

    outputs: int
    inputs: int
    size: int
    count: int
    experts: int = 1
    choices: int = 1


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model the time of a step depends on, for one rank.

    layers: numbers of layers by their window (None: all tokens). token_bytes: of KV, in a layer.
    attention: query heads times head size. width, itemsize: of activations. logits: columns of a
    rank's part. block_bytes: that a swap moves.
    """

    products: tuple[Product, ...]
    head: Product
    layers: dict[int | None, int]
    token_bytes: float
    attention: int
    width: int
    inner: int
    itemsize: int
    logits: int
    block_bytes: int
    ranks: int = 1

    @property
    def num_layers(self) -> int:
        return sum(self.layers.values())

    @property
    def launches(self) -> int:
        """Kernels of a step."""
        sums = _REDUCES * self.num_layers if self.ranks > 1 else 0
        products = sum(product.count for product in self.products) + 1
        return products + _LAYER_LAUNCHES * self.num_layers + _STEP_LAUNCHES + sums


def model_of(outline: Outline, token_bytes: float, block_bytes: int) -> Model:
    """token_bytes: of KV of a token, in a layer; block_bytes: of a block."""
    spec, sizes, shapes = outline.spec, outline.parameter_bytes(), outline.shapes
    attention = outline.attention_specs
    if spec.quantization is not None:
        raise ConfigError(
            f"the products of {spec.quantization.METHOD} checkpoints have no model of their time "
            "yet; simulate the model in its dtype, or with --quantization"
        )
    head = outline.architecture.HEAD
    tied = spec.tie_embeddings
    vocab, width = shapes[outline.architecture.EMBEDDING if tied else head]
    head_bytes = vocab * width * outline.dtype.itemsize if tied else sizes[head]
    first = attention[0]
    return Model(
        products=tuple(_products(outline)),
        head=Product(vocab, width, head_bytes, 1),
        layers=dict(Counter(each.window for each in attention)),
        token_bytes=token_bytes,
        attention=first.num_heads * first.head_dim,
        width=width,
        inner=spec.intermediate_size // outline.group.size,
        itemsize=outline.dtype.itemsize,
        logits=vocab,
        block_bytes=block_bytes,
        ranks=outline.group.size,
    )


def _products(outline: Outline) -> Iterator[Product]:
    """Of all layers, those of one size together."""
    shapes, sizes = outline.shapes, outline.parameter_bytes()
    extra = outline.spec.extra
    choices = extra.get("num_experts_per_tok") or 1
    found: dict[tuple[str, str, str], list[tuple[int, int, int]]] = {}
    for name in outline.architecture.product_weights(outline.spec):
        place = _LAYER.fullmatch(outline.architecture.parameter_name(outline.spec, name) or name)
        if place is None:
            continue  # the head
        number, before, last = place.groups()
        outputs, inputs = shapes[name]
        key = (number, _EXPERT.sub("experts.", before), _FUSED.get(last, last))
        found.setdefault(key, []).append((outputs, inputs, sizes[name]))
    alike: Counter[tuple[int, int, int, int, int]] = Counter()
    for (_, before, part), weights in found.items():
        parts = 2 if part == "gate_up" else 3 if part == "qkv" else 1
        experts = len(weights) // parts if before.endswith("experts.") else 1
        outputs = sum(outputs for outputs, _, _ in weights) // experts
        size = sum(size for _, _, size in weights)
        alike[outputs, weights[0][1], size, experts, choices if experts > 1 else 1] += 1
    for (outputs, inputs, size, experts, chosen), count in sorted(alike.items()):
        yield Product(outputs, inputs, size, count, experts, chosen)


class RooflineCost:
    """StepCost of a model on a card. captures: numbers of rows of captured steps; none: all steps
    are launched kernel by kernel. ahead: whether the host plans while the device computes.

    Raises ConfigError for rates that are not known or none.
    """

    def __init__(
        self,
        model: Model,
        card: Card,
        captures: Sequence[int] = (),
        *,
        kind: str = "bfloat16",
        ahead: bool = True,
        reached: Reached | None = None,
    ) -> None:
        reached = reached or Reached()
        self.model, self._reached = model, reached
        self._captures, self._ahead = tuple(captures), ahead
        bandwidth = _known(card, "bandwidth", card.bandwidth, "--bandwidth in GB/s")
        flops = _known(card, f"rate of {kind} products", card.flops.get(kind), "--flops in TFLOPS")
        link = card.link
        if model.ranks > 1:
            link = _known(card, "link between cards", link, "--link in GB/s")
        self._bandwidth, self._kv = bandwidth * reached.bandwidth, bandwidth * reached.kv_bandwidth
        self._flops, self._prompt = flops * reached.flops, flops * reached.prompt_flops
        self._link = (link or 1) * reached.link
        self._of_rows: dict[int, float] = {}
        self._of_samples: dict[int, float] = {0: 0.0}
        self._host = (card.host or card.link or bandwidth) * reached.pcie

    def seconds(self, shape: StepShape) -> float:
        """See StepCost."""
        reached = self._reached
        host = reached.host_step + reached.host_row * shape.sequences
        device = self.model.block_bytes * shape.swapped_blocks / self._host
        if shape.rows:
            captured = self._padded(shape.rows) if shape.captured else None
            rows = captured or shape.rows
            device += self.device_seconds(shape, rows)
            host += reached.launch * self.model.launches if captured is None else reached.replay
        return max(device, host) if self._ahead else device + host

    def device_seconds(self, shape: StepShape, rows: int) -> float:
        """Of the kernels of a step, padded to `rows`, one after the other."""
        # Kept by their sizes: a simulation asks for millions of steps.
        seconds = self._of_rows.get(rows)
        if seconds is None:
            seconds = sum(self._product(product, rows) for product in self.model.products)
            seconds += self._between(rows) + self._sums(rows)
            self._of_rows[rows] = seconds
        samples = shape.samples
        drawing = self._of_samples.get(samples)
        if drawing is None:
            drawing = self._product(self.model.head, samples) + self._draws(samples)
            self._of_samples[samples] = drawing
        return seconds + self._attention(shape) + drawing + _STEP_LAUNCHES * self._reached.kernel

    def _padded(self, rows: int) -> int | None:
        """The rows of the captured step that serves so many."""
        at = bisect_left(self._captures, rows)
        return self._captures[at] if at < len(self._captures) else None

    def _product(self, product: Product, rows: int) -> float:
        pairs = rows * product.choices
        used = 1 - (1 - product.choices / product.experts) ** rows if product.experts > 1 else 1.0
        tiles = max(math.ceil(pairs / _TILE) * _TILE, used * product.experts * _TILE)
        moved = product.size * used
        moved += pairs * (product.inputs + product.outputs) * self.model.itemsize
        operations = 2 * tiles * product.inputs * product.outputs
        return product.count * self._longest(operations / self._flops, moved / self._bandwidth)

    def _attention(self, shape: StepShape) -> float:
        """Rows of one token read their contexts; prompts multiply with theirs."""
        model = self.model
        decoding = shape.rows - shape.prefill_tokens
        seconds = 0.0
        for window, count in model.layers.items():
            read, pairs = shape.kv_read, shape.prefill_pairs
            if window is not None:  # as if all rows were of the mean length
                read = min(read, window * decoding)
                pairs = min(pairs, window * shape.prefill_tokens)
            if decoding:
                seconds += count * self._longest(0.0, read * model.token_bytes / self._kv)
            if pairs:
                seconds += count * self._longest(4 * pairs * model.attention / self._prompt, 0.0)
        return seconds

    def _between(self, rows: int) -> float:
        """What a layer does between products: each value read or written once is a byte count."""
        model = self.model
        norms = 2 * 4 * model.width
        rotary = 2 * (model.attention + 2 * model.token_bytes / model.itemsize)
        values = rows * (norms + rotary + 3 * model.inner)
        least = (_LAYER_LAUNCHES - 1) * self._reached.kernel
        return model.num_layers * max(least, values * model.itemsize / self._bandwidth)

    def _sums(self, rows: int) -> float:
        """Sums over ranks, each of which sends 2 (n - 1) / n of the values."""
        model = self.model
        if model.ranks == 1:
            return 0.0
        share = 2 * (model.ranks - 1) / model.ranks
        moved = share * rows * model.width * model.itemsize
        return _REDUCES * model.num_layers * (self._reached.reduce + moved / self._link)

    def _draws(self, samples: int) -> float:
        """Logits are gathered from the ranks, written, and read twice in 32 bits."""
        logits = samples * self.model.logits * self.model.ranks
        gathered = self._reached.reduce + logits * self.model.itemsize / self._link
        return (gathered if self.model.ranks > 1 else 0.0) + logits * 10 / self._bandwidth

    def _longest(self, *seconds: float) -> float:
        return max(self._reached.kernel, *seconds)


def _known(card: Card, what: str, value: int | None, flag: str) -> int:
    if value is None:
        raise ConfigError(f"the {what} of {card.name} is not known; give {flag}")
    if value <= 0:
        raise ConfigError(f"the {what} of {card.name} is {value}; it must be above 0")
    return value
