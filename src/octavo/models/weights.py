"""The parameters of one model, from the tensors of its checkpoint.

Strict both ways, before any weight is read: every tensor of the checkpoint must be a parameter
(or a part of one that is stored quantized), and every parameter must be there in the right shape
and type. What the tensors are called, and which parameters are products, the architecture says;
how a quantized product is stored, `quant`.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from octavo import progress
from octavo.checkpoint.base import Checkpoint, Naming, StoredTensor, name_list
from octavo.errors import CheckpointError, shown
from octavo.kernels.codes import StoredMatrix, StoredRows
from octavo.log import get_logger
from octavo.models.architecture import Architecture, GgufTensor
from octavo.models.gguf_config import METADATA_TENSORS
from octavo.models.sharding import WHOLE, Shard, local_shape
from octavo.models.spec import ModelSpec
from octavo.quant.base import INT4, NONE, W4A8, Codes, Region, StoredPart
from octavo.quant.declared import PLACES
from octavo.quant.tensors import (
    BlockDecoder,
    dtype_of,
    holds_codes,
    read_codes,
    read_into,
    region_bytes,
    same_bytes,
    stored_rows,
)

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A parameter's stored tensor; heads, shift: as in `GgufTensor`."""

    tensor: StoredTensor
    heads: int = 0
    shift: float = 0.0


Sources = dict[str, Source]
# (out [rows, ...] on a device, read): fills `out` with the rows that `read` (begin, end, host)
# writes to contiguous host memory, piece by piece.
Upload = Callable[[torch.Tensor, Callable[[int, int, torch.Tensor], None]], None]


class Weights:
    """The parameters of one model, checked, and handed out once each: a rank's part of them, of
    which nothing else is read.

    Raises CheckpointError at once for a tensor missing, unexpected, or of another shape or type.
    """

    def __init__(
        self,
        spec: ModelSpec,
        architecture: type[Architecture],
        checkpoint: Checkpoint,
        device: str,
        dtype: torch.dtype,
        decoder: BlockDecoder | None = None,
        shard: Shard = WHOLE,
        upload: Upload | None = None,
        kept: Collection[torch.dtype] = (),
    ) -> None:
        """device: torch's name of it; decoder: the device's own of blocks, tried first; shard: of
        a model whose architecture has `parameter_cuts`, the part that is handed out; upload: how
        weights reach a device with memory of its own (None: read whole, then copied); kept: types
        beside `dtype` in which weights of products and token embeddings may stay."""
        stored = {name: t for name, t in checkpoint.tensors.items() if t.num_bytes}
        sources = _SOURCES[checkpoint.container.naming](spec, architecture, stored)
        self._sources = _settle_head(spec, architecture, sources, shard.rank == 0)
        self._root = checkpoint.root
        self._shapes = architecture.parameter_shapes(spec)
        self._cuts = architecture.parameter_cuts(spec) if shard.size > 1 else {}
        self._shard = shard
        self._quantization = spec.quantization
        self._quantized = self._quantized_parts(architecture.product_weights(spec))
        self._leave_out_zeros()
        self._device, self._dtype, self._decoder = device, dtype, decoder
        self._upload, self._kept = upload, kept
        self._check()
        self._phase = progress.Phase("reading weights", self._num_bytes(), "B")

    @property
    def dtype(self) -> torch.dtype:
        """See Parameters.dtype."""
        return self._dtype

    def take(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See Parameters.take; the result is a new tensor."""
        shapes = [self._local_shape(name) for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty(
            (rows, *shapes[0][1:]),
            dtype=dtype or self._dtype,
            device=None if self._upload is None else self._device,
        )
        begin = 0
        for name in names:
            source = self._sources.pop(name)
            for region in self._regions(name):
                end = begin + _num_rows(source.tensor, region)
                self._fill(source, out[begin:end], region)
                begin = end
        return out.to(self._device)

    def matrix(self, method: str, *names: str) -> torch.Tensor | Codes:
        """See Parameters.matrix: codes if the checkpoint's quantization or (where `method` is
        int4 or w4a8) blocks of 4 bits hold all of `names` in equal groups, else values."""
        plain = [self._sources[name].tensor for name in names if name not in self._quantized]
        if len(plain) < len(names) or (method in (INT4, W4A8) and all(map(holds_codes, plain))):
            found = self._stacked([self._as_stored(name) for name in names])
            if isinstance(found, Codes):
                return found.map(self._moved)
            return found
        dtype = self._kept_dtype(names) if method == NONE else None
        return self.take(*names, dtype=dtype).flatten(0, -2)

    def _kept_dtype(self, names: Collection[str]) -> torch.dtype | None:
        """The type in which all of `names` are stored, if they may stay in it."""
        sources = [self._sources[name] for name in names]
        found = {dtype_of(source.tensor.format) for source in sources if not source.shift}
        kept = found.intersection(self._kept)
        return kept.pop() if len(found) == len(kept) == 1 else None

    def stored(self, *names: str) -> StoredMatrix | None:
        """See Parameters.stored; None, too, where a cut tears blocks."""
        parts: list[StoredRows | None] = []
        for name in names:
            if name in self._quantized or self._sources[name].shift:
                return None
            source = self._sources[name]
            parts += [self._rows(source, region) for region in self._regions(name)]
        found = tuple(part for part in parts if part is not None)
        if len(found) < len(parts):
            return None
        for name in names:
            del self._sources[name]
        return StoredMatrix(found)

    def _rows(self, source: Source, region: Region | None) -> StoredRows | None:
        order = None
        if source.heads:
            numbers = torch.arange(_num_rows(source.tensor, region)).unsqueeze(1)
            order = _plain_order(numbers, _num_heads(source, region)).flatten()

        def release() -> None:
            self._advance(source, region)
            source.tensor.release()

        return stored_rows(
            source.tensor, region, order, lambda out: self._read(source, out, region), release
        )

    def progress(self) -> AbstractContextManager[progress.Phase]:
        """The reading as a phase, in bytes of the files."""
        return progress.during(self._phase)

    def _num_bytes(self) -> int:
        """What will be read."""
        total = 0
        for name, regions in ((name, self._regions(name)) for name in self._shapes):
            parts = self._quantized.get(name)
            for region in regions:
                if parts is None:
                    total += region_bytes(self._sources[name].tensor, region)
                    continue
                for ending, part in parts.items():
                    source = self._sources.get(_stem(name) + ending)
                    if source is not None:
                        total += region_bytes(source.tensor, _part_region(source, part, region))
        return total

    def _regions(self, name: str) -> list[Region | None]:
        """The parts of a parameter that this rank holds, to be stacked; None: all of it."""
        cut = self._cuts.get(name)
        if cut is None or cut.kind == "replicated":
            return [None]
        return [*cut.regions(self._shapes[name], self._shard)]

    def _local_shape(self, name: str) -> tuple[int, ...]:
        shape, cut = self._shapes[name], self._cuts.get(name)
        return shape if cut is None else local_shape(shape, cut, self._shard)

    def _as_stored(self, name: str) -> torch.Tensor | Codes:
        """One product's weight [N, K] in the form closest to the stored one."""
        if name in self._quantized:
            return self._decoded(name)
        if not holds_codes(self._sources[name].tensor):
            return self.take(name).flatten(0, -2)
        source = self._sources.pop(name)
        found = [self._codes(source, region) for region in self._regions(name)]
        return found[0] if len(found) == 1 else Codes.stacked(found)

    def _codes(self, source: Source, region: Region | None) -> Codes:
        codes = read_codes(source.tensor, region)
        assert codes is not None
        self._advance(source, region)
        source.tensor.release()
        if not source.heads:
            return codes
        heads = _num_heads(source, region)
        return codes.map(lambda rows: _plain_order(rows, heads))

    def _decoded(self, name: str) -> torch.Tensor | Codes:
        """A product in the checkpoint's own quantization; a stack of matrices row by row."""
        stem = _stem(name)
        stored = {
            ending: self._sources.pop(stem + ending, None) for ending in self._quantized[name]
        }
        sources = {ending: source for ending, source in stored.items() if source is not None}
        found = [self._decoded_part(name, sources, region) for region in self._regions(name)]
        return found[0] if len(found) == 1 else self._stacked(found)

    def _decoded_part(
        self, name: str, sources: Mapping[str, Source], region: Region | None
    ) -> torch.Tensor | Codes:
        stored, parts = self._quantized[name], {}
        for ending, source in sources.items():
            part, whole = stored[ending], source.tensor.shape
            where = _part_region(source, part, region)
            shape = whole if where is None else [end - begin for begin, end in where]
            parts[ending] = torch.empty(shape, dtype=part.dtype)
            read_into(source.tensor, parts[ending], self._decoder, where)
            self._advance(source, where)
            source.tensor.release()
        found = self._decode(name, parts)
        return found if region is None else _rest_of_cut(found, region, stored.values())

    def _decode(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor | Codes:
        assert self._quantization is not None
        stem, stack = _stem(name), self._shapes[name][:-2]
        try:
            if not stack:
                return self._quantization.decode(parts)
            flat = {ending: part.flatten(0, len(stack) - 1) for ending, part in parts.items()}
            return self._stacked(
                [
                    self._quantization.decode({ending: part[i] for ending, part in flat.items()})
                    for i in range(math.prod(stack))
                ]
            )
        except CheckpointError as error:
            raise CheckpointError(f"{self._root}: {stem}: {error}") from error

    def _stacked(self, parts: list[torch.Tensor | Codes]) -> torch.Tensor | Codes:
        codes = [part for part in parts if isinstance(part, Codes)]
        if len(codes) == len(parts) and len({(part.group, part.bits) for part in codes}) == 1:
            return Codes.stacked(codes)
        values = [part.values() if isinstance(part, Codes) else part for part in parts]
        return self._moved(torch.cat([part.to(self._dtype) for part in values]))

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory, on the device."""
        if self._upload is None:
            return tensor.to(self._device)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._upload(out, lambda begin, end, host: _copy(tensor[begin:end], host))
        return out

    def _fill(self, source: Source, out: torch.Tensor, region: Region | None) -> None:
        if self._upload is not None:
            self._upload(out, lambda begin, end, host: read_into(
                source.tensor, host, self._decoder, _some_rows(source.tensor, region, begin, end)
            ))  # fmt: skip
            if source.heads:
                out.copy_(_plain_order(out, _num_heads(source, region)))
        else:
            self._read(source, out, region)
        if source.shift:
            out.add_(source.shift)
        self._advance(source, region)
        source.tensor.release()

    def _read(self, source: Source, out: torch.Tensor, region: Region | None) -> None:
        """Into host memory, in Hugging Face's order of rows."""
        if not source.heads:
            read_into(source.tensor, out, self._decoder, region)
            return
        stored = torch.empty_like(out)
        read_into(source.tensor, stored, self._decoder, region)
        out.copy_(_plain_order(stored, _num_heads(source, region)))

    def _advance(self, source: Source, region: Region | None = None) -> None:
        self._phase.advance(region_bytes(source.tensor, region))

    def _quantized_parts(self, products: frozenset[str]) -> dict[str, Mapping[str, StoredPart]]:
        """The parts of each product that is stored in the checkpoint's quantization."""
        found: dict[str, Mapping[str, StoredPart]] = {}
        if self._quantization is None:
            return found
        for name in products & self._shapes.keys():
            parts = self._quantization.parts(self._shapes[name])
            # One of a format's parts may itself be called "weight".
            further = (
                _stem(name) + ending in self._sources for ending in parts.keys() - {"weight"}
            )
            if "weight" in parts:
                stored = self._sources.get(name)
                kind = None if stored is None else dtype_of(stored.tensor.format)
                is_part = any(further) or kind == torch.float8_e4m3fn
            else:
                is_part = name not in self._sources
            if is_part:
                found[name] = parts
        return found

    def _leave_out_zeros(self) -> None:
        """Biases of zeros where the family has none, as AutoGPTQ writes, carry nothing."""
        zero = []
        for name in self._sources.keys() - self._shapes.keys():
            stem, tensor = name.removesuffix("bias"), self._sources[name].tensor
            if stem == name or stem + "weight" not in self._shapes:
                continue
            kind = dtype_of(tensor.format)
            if kind is None or not kind.is_floating_point or len(tensor.shape) != 1:
                continue
            values = torch.empty(tensor.shape)
            read_into(tensor, values)
            if not values.any():
                zero.append(name)
        if zero:
            logger.info("left out, all zero: %s", name_list(sorted(zero), 3))
        for name in zero:
            del self._sources[name]

    def _wanted(self) -> dict[str, StoredPart]:
        """What the checkpoint should hold, and no more."""
        wanted: dict[str, StoredPart] = {}
        for name, shape in self._shapes.items():
            if name in self._quantized:
                stem = _stem(name)
                wanted |= {stem + ending: part for ending, part in self._quantized[name].items()}
            else:
                wanted[name] = StoredPart(shape, self._dtype)
        return wanted

    def _check(self) -> None:
        stored, wanted = self._sources, self._wanted()
        problems = list(_shape_problems(stored, wanted))
        needed = {name for name, part in wanted.items() if part.needed}
        if missing := sorted(needed - stored.keys()):
            problems.append(f"missing: {name_list(missing)}")
        if extra := sorted(stored.keys() - wanted.keys()):
            problems.append(f"unexpected: {name_list(extra)}")
        if self._quantization is None and any(name.endswith(".qweight") for name in extra):
            problems.insert(
                0,
                "its tensors (qweight) are those of a quantized checkpoint, but nothing says how; "
                f"looked for: {PLACES}",
            )
        for name in sorted(stored.keys() & wanted.keys()):
            if not _can_hold(dtype_of(stored[name].tensor.format), wanted[name].dtype):
                problems.append(f"{shown(name)} has the type {stored[name].tensor.format.name}")
        if problems:
            file = next((s.tensor.file for s in stored.values()), "no tensors at all")
            raise CheckpointError(
                f"the weights do not fit the model's config ({file}): {'; '.join(problems[:8])}"
            )


def _by_parameter_name(
    spec: ModelSpec, architecture: type[Architecture], stored: Mapping[str, StoredTensor]
) -> Sources:
    names = {name: architecture.parameter_name(spec, name) for name in stored}
    if left := sorted(old for old, name in names.items() if name is None):
        logger.info("left out, not needed: %s", name_list(left, 3))
    return {name: Source(stored[old]) for old, name in names.items() if name is not None}


def _by_gguf_name(
    spec: ModelSpec, architecture: type[Architecture], stored: Mapping[str, StoredTensor]
) -> Sources:
    table = architecture.gguf_tensors(spec)
    found: Sources = {}
    for name, tensor in stored.items():
        if name not in METADATA_TENSORS:
            known = table.get(name, GgufTensor(name))
            found[known.parameter] = Source(tensor, known.heads, known.shift)
    return found


# Stored tensors -> by the parameter (or its part) that they hold, without those not needed.
_SOURCES: Mapping[
    Naming, Callable[[ModelSpec, type[Architecture], Mapping[str, StoredTensor]], Sources]
] = {"huggingface": _by_parameter_name, "gguf": _by_gguf_name}


def _stem(name: str) -> str:
    """The name of a product's weight without "weight", which the endings of parts follow."""
    return name.removesuffix("weight")


def _can_hold(stored: torch.dtype | None, wanted: torch.dtype) -> bool:
    """Whether values of a stored type may be read as `wanted`: floats are rounded, integers not."""
    if stored is None or stored.is_floating_point != wanted.is_floating_point:
        return False
    if torch.float8_e4m3fn in (stored, wanted):  # a code, which means nothing without its scale
        return stored == wanted
    return wanted.is_floating_point or torch.promote_types(stored, wanted) == wanted


def _num_rows(tensor: StoredTensor, region: Region | None) -> int:
    begin, end = (0, tensor.shape[0]) if region is None else region[0]
    return end - begin


def _some_rows(tensor: StoredTensor, region: Region | None, begin: int, end: int) -> Region:
    """Of rows begin .. end - 1 of a region alone."""
    (first, _), *others = region or tuple((0, size) for size in tensor.shape)
    return ((first + begin, first + end), *others)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _num_heads(source: Source, region: Region | None) -> int:
    """The heads of a region whose rows are those of whole heads."""
    return source.heads * _num_rows(source.tensor, region) // source.tensor.shape[0]


def _part_region(source: Source, part: StoredPart, region: Region | None) -> Region | None:
    """What of a stored part is read for a region of the weight."""
    if region is None or source.tensor.shape != part.shape:
        return None
    return part.region(region)


def _rest_of_cut(
    whole: torch.Tensor | Codes, region: Region, parts: Collection[StoredPart]
) -> torch.Tensor | Codes:
    """A region of a matrix along those of its sides along which no part is divided."""
    (first, last), (begin, end) = region[-2:]
    if all(part.outputs is None for part in parts):
        whole = whole.rows(first, last) if isinstance(whole, Codes) else whole[first:last]
    if all(part.inputs is None for part in parts):
        whole = whole.columns(begin, end) if isinstance(whole, Codes) else whole[:, begin:end]
    return whole


def _plain_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in GGUF's order, the two of each rotary pair side by side, in Hugging Face's."""
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)


def _shape_problems(
    stored: Mapping[str, Source], wanted: Mapping[str, StoredPart]
) -> Iterator[str]:
    for name in sorted(wanted.keys() & stored.keys()):
        if stored[name].tensor.shape not in (wanted[name].shape, *wanted[name].also):
            found = stored[name].tensor.shape
            yield f"{shown(name)} has the shape {found}, not {wanted[name].shape}"


def _settle_head(
    spec: ModelSpec, architecture: type[Architecture], sources: Sources, compare: bool
) -> Sources:
    """A tied model uses the embedding as its head, as transformers does, whatever else is stored.

    compare: read a head that is stored beside it, to warn where it differs.

    Untied and without a head is an error, which is reported here with its remedy.
    """
    name = architecture.HEAD
    if not spec.tie_embeddings:
        # The head may be stored in parts; whether they are all there is checked with the others.
        if not any(stored.startswith(_stem(name)) for stored in sources):
            file = next((f" ({s.tensor.file})" for s in sources.values()), "")
            raise CheckpointError(
                f"the checkpoint{file} holds no {name!r} and its config says "
                "tie_word_embeddings=false; add the tensor, or "
                "set tie_word_embeddings to true if the embedding is the head"
            )
        return sources
    head, embed = sources.pop(name, None), sources.get(architecture.EMBEDDING)
    if parts := sorted(stored for stored in sources if stored.startswith(_stem(name))):
        raise CheckpointError(
            "the config says tie_word_embeddings=true, but the checkpoint stores a head of its "
            f"own ({name_list(parts)}); set tie_word_embeddings to false if that is the model's"
        )
    if head is not None and embed is None:
        # `safetensors.torch.save_model` keeps one of two names of a tensor, the first by alphabet.
        logger.info("%s is the embedding, too: the config ties them", name)
        sources[architecture.EMBEDDING] = head
    elif compare and head and embed and not same_bytes(head.tensor, embed.tensor):
        logger.warning(
            "%s differs from the embedding, but the config ties them: the embedding is used", name
        )
    return sources
