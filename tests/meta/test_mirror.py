"""Where a test is: tests/core/test_scheduler.py tests core/scheduler.py, and so on."""

from pathlib import Path

import octavo

SOURCE = Path(octavo.__file__).parent
TESTS = Path(__file__).parents[1]

# Folders of tests that mirror something else, or nothing.
ELSEWHERE = {"meta", "benchmarks", "browser", "clients", "examples", "fuzz"}
# Tests of a whole part rather than of one of its files.
WHOLE = {"soak", "rows", "gpu"}


def noun(test: Path) -> str:
    return test.stem.removeprefix("test_")


def sources(folder: Path) -> set[str]:
    return {path.stem for path in (SOURCE / folder).glob("*.py") if path.stem != "__init__"}


def mirrored() -> list[Path]:
    found = TESTS.glob("*/**/test_*.py")
    return sorted(path for path in found if path.relative_to(TESTS).parts[0] not in ELSEWHERE)


def test_every_test_file_names_the_file_it_tests() -> None:
    stray = [
        str(path.relative_to(TESTS))
        for path in mirrored()
        if noun(path) not in WHOLE
        and not any(
            noun(path) == name or noun(path).startswith(f"{name}_")
            for name in sources(path.parent.relative_to(TESTS))
        )
    ]
    assert stray == []


# Parts that only work through a kernel, and the kernel whose tests run them.
RUN_BY = {
    "__main__": "kernel",
    "all_reduce_call": "all_reduce",
    "compile": "kernel",
    "fused": "fused_call",
    "gguf_call": "gguf",
    "gguf_pack_call": "gguf_pack",
    "weight_only_call": "weight_only",
    "panels": "weight_only",
    "weight_only_codes": "weight_only",
    "weight_only_many": "weight_only",
    "codes_pack_call": "codes_pack",
    "weight_only_tiles_call": "weight_only_tiles",
    "gemm_bf16_call": "gemm_bf16",
    "gemm_int8_call": "gemm_int8",
    "gemm_vectors_call": "gemm_vectors",
    "program": "graph",
    "activations": "fused_call",
    "attention_kv": "attention",
    "attention_softmax": "attention",
    "tiles": "attention",
}
# The same of GPU kernels; what only a GPU can run is run by `make gpu-check`.
RUN_BY_GPU = {
    "memory": "device", "cards": "device", "matmul": "linear", "fused_call": "fused",
    "experts_call": "experts", "sampling_call": "sampling",
}  # fmt: skip


def test_every_kernel_has_a_test() -> None:
    tested = {noun(path) for path in TESTS.glob("kernels/cpu/test_*.py")}
    assert (TESTS / "attention" / "test_cpu.py").is_file()
    tested.add("attention")  # tested through the backend that owns its layout
    kernels = sources(Path("kernels/cpu"))
    assert {name for name in kernels if RUN_BY.get(name, name) not in tested} == set()


def test_every_gpu_kernel_has_a_test() -> None:
    tested = {noun(path) for path in TESTS.glob("kernels/gpu/test_*.py")}
    kernels = sources(Path("kernels/gpu"))
    assert {name for name in kernels if RUN_BY_GPU.get(name, name) not in tested} == set()


def test_every_op_has_a_reference_of_its_name() -> None:
    from octavo.kernels import dispatch, reference

    ops = set(dispatch.Ops.__slots__) - {"reason"}
    assert ops
    assert {name for name in ops if not callable(getattr(reference, name, None))} == set()
