"""From a Python kernel to object code: Numba for the code, LLVM for the machine.

Imported only when a kernel is not in the cache yet, because it brings in Numba.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import llvmlite.binding as llvm
from numba import cfunc
from numba.core import config as numba_config

from octavo import log
from octavo.kernels.cpu import target

_logger = log.get_logger(__name__)

# A C function that calls Numba's own, whose first arguments (result, exception) are not used.
_ENTRY = """
declare i32 @"{native}"(ptr, ptr, i64)
define void @"{name}"(i64 %arguments) {{
  %result = alloca ptr
  %exception = alloca ptr
  %status = call i32 @"{native}"(ptr %result, ptr %exception, i64 %arguments)
  ret void
}}
"""


def object_code(kernel: Callable[[int], None], name: str) -> bytes:
    """Compile `kernel(address)` to an object file with one exported function, `name`."""
    _logger.info("compiling %s (once per machine)", name)
    with _as_written():
        compiled = cfunc("void(int64)", error_model="numpy", nogil=True)(kernel)
        module = llvm.parse_assembly(compiled.inspect_llvm())
    native = compiled.native_name.removeprefix("cfunc.")
    entry = _ENTRY.format(native=native, name=name)
    module.link_in(llvm.parse_assembly(entry))
    for function in module.functions:
        if not function.is_declaration and function.name != name:
            function.linkage = "internal"
    return _emit(module)


_level = threading.Lock()


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """Have Numba skip optimization: `_optimize` does it, and both would take twice as long."""
    with _level:
        options: Any = numba_config
        before = options.OPT
        options.OPT = type(before)(0)
        try:
            yield
        finally:
            options.OPT = before


def _emit(module: llvm.ModuleRef) -> bytes:
    return bytes(_optimize(module).emit_object(module))


def _optimize(module: llvm.ModuleRef) -> llvm.TargetMachine:
    cpu, features = target.cpu()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu,
        features=",".join(f"+{f}" for f in sorted(features)),
        opt=3,
        reloc="pic",
        codemodel="small",
    )
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    builder.getModulePassManager().run(module, builder)
    return machine
