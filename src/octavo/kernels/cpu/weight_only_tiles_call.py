"""How `weight_only_tiles` divides a product. Imports no Numba."""

from octavo.kernels.cpu import openmp
from octavo.kernels.cpu.weight_only_layout import BLOCK, PANEL, PackedCodes

_DEPTH = 2 * BLOCK  # k of a step
_CHUNK = 128  # k whose weights are in the first cache: 8 KB of a panel
_ITEM_ROWS = 1024  # for which weights are made of codes once: then 7% of their products' time
_ITEM_BYTES = 1 << 20  # of weights of a work item and 32 rows: they stay in a core's L2
_MOST_PANELS, _ITEMS_PER_THREAD = 8, 4  # of a work item; for load balance


def sizes(weight: PackedCodes) -> dict[str, int]:
    """The kernel's arguments that depend on the shape alone."""
    panels, blocks = weight.codes.shape[:2]
    steps = (blocks + 1) // 2
    panel_bytes = steps * _DEPTH * PANEL * 2
    item_panels = min(
        _ITEM_BYTES // panel_bytes - 1,
        panels // (_ITEMS_PER_THREAD * openmp.threads()),
        _MOST_PANELS,
    )
    item_panels = max(1, item_panels)
    return {
        "q_stride": 0 if weight.in_size % _DEPTH == 0 else steps * _DEPTH * 2,
        "sums_stride": 0, "scratch_size": item_panels * panel_bytes, "item_rows": _ITEM_ROWS,
        "item_panels": item_panels, "chunk_groups": _chunk_groups(weight.form.group // BLOCK),
    }  # fmt: skip


def _chunk_groups(group_blocks: int) -> int:
    """Groups of about _CHUNK k that are whole steps."""
    groups = max(1, _CHUNK // BLOCK // group_blocks)
    return groups + groups * group_blocks % 2
