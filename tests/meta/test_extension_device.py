"""A device of one's own: one class in one file, registered by one line, behind the whole engine.

It is made of the torch reference: plain ops, `F.linear`, the torch attention backend, sampling in
NumPy, ordinary memory. Its greedy answers are those of the CPU device.
"""

import contextlib
import random
import traceback
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests import kit
from torch.overrides import TorchFunctionMode

import octavo
from octavo import LLM, SamplingParams, devices
from octavo.errors import ConfigError
from octavo.kernels.capture import CaptureError
from octavo.kernels.cpu.memory import MachineMemory
from octavo.kernels.dispatch import reference_ops
from octavo.kernels.sampling import ReferenceSampling
from octavo.runner.model_runner import ModelRunner

SOURCE = Path(octavo.__file__).parent


class ToyProducts:
    """`F.linear` on the weights as they are."""

    unstable = ()

    def make(self, weight, bias=None, max_rows=None, method="none"):
        assert method == "none"
        return lambda x: F.linear(x, weight, bias)

    def explain(self):
        return "F.linear"


class ToyDevice(ReferenceSampling):
    """Everything that `octavo.runner.device.Device` asks for."""

    name, torch_device, shares_host_memory, pads_steps = "toy", "cpu", True, False
    attention_order, quantization, keeps_blocks = ("torch",), (), False
    dtypes = (torch.float32,)

    def __init__(self, config):
        self.steps = 0

    def start(self):
        pass

    def warm_up(self):
        pass

    def default_dtype(self):
        return torch.float32

    def ops(self, dtype):
        return reference_ops("a toy has no kernels")

    def products(self, dtype, max_rows, deterministic):
        return ToyProducts()

    def decode_blocks(self, name, count, raw, out):
        return False

    def loading(self):
        return contextlib.nullcontext()

    def memory(self):
        return MachineMemory(total=2**31, free=2**30, used=2**20)

    def peak_of(self, step):
        step()
        return 2**20

    def release(self):
        pass

    def empty(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    host_empty = empty

    def tensor(self, name, array):
        return torch.tensor(array)

    def capture_sizes(self, max_tokens):
        return ()

    def capture(self, run):
        raise CaptureError("a toy captures nothing")


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(devices, "_registered", {})
    devices.register("toy", ToyDevice)


def answers(folder, device, **options):
    draw = random.Random(3)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in (1, 17, 40, 65)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    options = {"max_model_len": 128, "num_gpu_blocks_override": 40, "swap_space": 0, **options}
    llm = LLM(str(folder), device=device, dtype="float32", load_progress=False, **options)
    found = [
        output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)
    ]
    return found, llm


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 8},
     {"num_gpu_blocks_override": 8, "swap_space": 1, "preemption_mode": "swap"}],
    ids=["whole", "chunked", "swapped"],
)  # fmt: skip
def test_it_answers_as_the_cpu_does(tmp_path, options):
    folder = kit.tiny(tmp_path)
    expected, _ = answers(folder, "cpu")
    found, llm = answers(folder, "toy", **options)
    assert found == expected
    assert llm.engine.executor.explain()["attention"] == "torch"
    assert "a toy has no kernels" in llm.engine.executor.explain()["rms_norm"]
    assert llm.engine.executor.limits.device == "toy"
    if "preemption_mode" in options:
        assert llm.engine.stats.swapped_in_blocks > 0


def test_its_memory_sizes_the_cache(tmp_path):
    folder = kit.tiny(tmp_path)
    _, llm = answers(folder, "toy", num_gpu_blocks_override=None, gpu_memory_utilization=0.5)
    memory = llm.engine.executor.limits.memory
    assert (memory["total"], memory["used"]) == (2**31, 2**20)
    assert memory["limit"] == 2**20 + 2**29


@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"quantization_override": "lm_head=int8"}], ids=str
)
def test_quantized_products_that_it_lacks_are_refused(tmp_path, options):
    folder = kit.tiny(tmp_path)
    with pytest.raises(ConfigError, match=r"device 'toy' has no int8 products \(it has: none\)"):
        answers(folder, "toy", **options)


class HostReads(TorchFunctionMode):
    """Notes where values of tensors are read by the host: on a GPU each is a wait for the step."""

    NAMES = frozenset(("numpy", "tolist", "item", "nonzero", "cpu", "__bool__", "__int__",
                       "__float__", "__index__", "__array__"))  # fmt: skip

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            stack = traceback.extract_stack()
            files = [frame.filename for frame in stack if SOURCE in Path(frame.filename).parents]
            self.seen.add((str(Path(files[-1]).relative_to(SOURCE)), name))
        return func(*args, **(kwargs or {}))


def test_a_step_is_read_by_the_host_only_in_known_places(tmp_path, monkeypatch):
    """Neither the runner nor a layer waits for the device: what a GPU needs of this code."""
    reads, execute = HostReads(), ModelRunner.execute

    def spied(runner, plan):
        with reads:
            return execute(runner, plan)

    monkeypatch.setattr(ModelRunner, "execute", spied)
    llm = LLM(
        str(kit.tiny(tmp_path)), device="toy", load_progress=False, max_model_len=128,
        num_gpu_blocks_override=12, swap_space=0.1, preemption_mode="swap",
    )  # fmt: skip
    asked = [{"temperature": 0}, {"repetition_penalty": 1.2, "logprobs": 2, "n": 2},
             {"prompt_logprobs": 1}]  # fmt: skip
    params = [SamplingParams(max_tokens=10, ignore_eos=True, **fields) for fields in asked]
    llm.generate([list(range(n)) for n in (5, 40, 60)], params, use_tqdm=False)
    assert reads.seen == {
        ("kernels/sampling.py", "cpu"),  # the toy draws on the host,
        ("kernels/sampling.py", "numpy"),
        ("attention/torch_ref.py", "tolist"),  # its backend loops over rows in Python,
        ("runner/sampler.py", "numpy"),  # and penalties are applied to copies of rows.
    }


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"device must be one of \('auto', 'cpu', .*'toy'\)"):
        LLM("smollm2", device="tpu")


def test_an_incomplete_device_is_refused(tmp_path):
    class Half(ToyDevice):
        peak_of = loading = property()

    devices.register("half", Half)
    with pytest.raises(ConfigError, match="device 'half' lacks loading, peak_of"):
        answers(kit.tiny(tmp_path), "half")
