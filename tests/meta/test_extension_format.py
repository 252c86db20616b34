"""A weight format and a container of one's own: each one class in one file, registered by one line.

The format keeps weights of -1, 0 and 1 in 2 bits, with a scale for each output. The container is a
line of JSON and then the numbers.
"""

import json
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import kit

from octavo import LLM, SamplingParams
from octavo.checkpoint import registry as containers
from octavo.checkpoint.base import Container, OpenedFile, StoredTensor, TensorFormat
from octavo.checkpoint.registry import register_container
from octavo.errors import CheckpointError, ConfigError
from octavo.quant import registry as formats
from octavo.quant.base import NONE, StoredPart
from octavo.quant.registry import register_quantization


@dataclass(frozen=True)
class Ternary:
    """Everything that `octavo.quant.base.CheckpointQuantization` asks for."""

    METHOD = "ternary"
    computed_as = NONE

    zero: int  # the code that stands for 0

    @classmethod
    def from_config(cls, fields):
        if fields.get("zero") not in (0, 1):
            raise fields.wrong("zero", "0 or 1")
        return cls(fields.get("zero"))

    def explain(self):
        return "ternary, 2 bits, dequantized"

    def parts(self, shape):
        *stack, outputs, inputs = shape
        return {
            "quarters": StoredPart((*stack, outputs, inputs // 4), torch.uint8),
            "scale": StoredPart((*stack, outputs), torch.float32),
        }

    def decode(self, parts):
        fields = (parts["quarters"].unsqueeze(2) >> torch.tensor([0, 2, 4, 6])) & 3
        return (fields.flatten(1).float() - self.zero) * parts["scale"].unsqueeze(1)


def packed(weight):
    """Parts of a matrix [N, K] with the zero at 1, and the values that they stand for."""
    scale = weight.abs().amax(1)
    signs = (weight / scale.unsqueeze(1)).round().long()
    quarters = ((signs + 1).view(len(weight), -1, 4) << torch.tensor([0, 2, 4, 6])).sum(2)
    return {"quarters": quarters.to(torch.uint8), "scale": scale}, signs * scale.unsqueeze(1)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A checkpoint in the format, and its twin of floats."""
    monkeypatch.setattr(formats, "_registered", {})
    twin, folder = kit.tiny(tmp_path / "twin"), kit.tiny(tmp_path / "ternary")
    plain, stored = load_file(twin / "model.safetensors"), {}
    for name, tensor in list(plain.items()):
        if name.endswith("_proj.weight"):
            parts, plain[name] = packed(tensor)
            stored |= {name.removesuffix("weight") + part: data for part, data in parts.items()}
        else:
            stored[name] = tensor
    save_file(plain, twin / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    configure(folder, quant_method="ternary", zero=1)
    return folder, twin


def configure(folder, **quantization):
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(fields))


def loaded(folder, **options):
    options = {"num_gpu_blocks_override": 20, "swap_space": 0, "load_progress": False, **options}
    return LLM(str(folder), dtype="float32", max_model_len=128, **options)


def answers(folder, **options):
    """Tokens with their logprobs."""
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(40, 90))]
    outputs = loaded(folder, **options).generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("named", [False, True])
def test_answers_are_those_of_the_float_twin(named, folders):
    folder, twin = folders
    with pytest.raises(CheckpointError, match=r"'ternary' are not supported \(known: awq, gptq, "):
        loaded(folder)
    register_quantization(Ternary)
    wanted = answers(twin)
    assert answers(folder, quantization="ternary" if named else None) == wanted
    configure(folder, quant_method="ternary", zero=0)
    assert answers(folder) != wanted


def test_a_field_that_is_not_understood(folders):
    folder, _ = folders
    register_quantization(Ternary)
    configure(folder, quant_method="ternary", zero=3)
    with pytest.raises(CheckpointError, match=r"quantization_config\.zero is 3; it must be 0 or 1"):
        loaded(folder)
    configure(folder, quant_method="ternary", zero=1)
    with pytest.raises(ConfigError, match="quantized with 'ternary' already"):
        loaded(folder, quantization="int8")


def test_each_stored_tensor_is_checked(folders):
    folder, _ = folders
    register_quantization(Ternary)
    path, at = folder / "model.safetensors", "model.layers.1.mlp.down_proj."
    whole = load_file(path)

    def said(**changes):
        tensors = whole | {at + part: data for part, data in changes.items()}
        save_file({name: data for name, data in tensors.items() if data is not None}, path)
        with pytest.raises(CheckpointError) as caught:
            loaded(folder)
        return str(caught.value)

    assert f"missing: {at}scale" in said(scale=None)
    assert f"'{at}scale' has the shape (1,), not (64,)" in said(scale=torch.ones(1))
    assert f"'{at}quarters' has the type F32" in said(quarters=torch.ones(64, 24))
    assert f"'{at}quarters' has the type I32" in said(
        quarters=torch.ones(64, 24, dtype=torch.int32)
    )
    assert f"unexpected: {at}qzeros" in said(qzeros=torch.ones(1))


FLOAT = TensorFormat("float", 1, 4, "float32")


def open_lines(path):
    """A line of JSON (name -> shape), then the float32 values of each in turn."""
    header, _, body = path.read_bytes().partition(b"\n")
    tensors, at = {}, 0
    for name, shape in json.loads(header).items():
        end = at + FLOAT.num_bytes(shape)
        load = partial(bytearray, body[at:end])
        tensors[name] = StoredTensor(path, tuple(shape), FLOAT, load)
        at = end
    if at != len(body):
        raise CheckpointError(f"{path} holds {len(body)} bytes of values, not {at}")
    return OpenedFile(tensors, {})


LINES = Container("lines", ".lines", "huggingface", self_contained=False, open=open_lines)


def test_a_container_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "_registered", {})
    twin, folder = kit.tiny(tmp_path / "twin"), kit.tiny(tmp_path / "lines")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    header = json.dumps({name: list(tensor.shape) for name, tensor in tensors.items()})
    values = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    path = folder / "model.lines"
    path.write_bytes(header.encode() + b"\n" + values)
    register_container(LINES)
    assert answers(folder) == answers(twin)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=r"model\.lines holds"):
        loaded(folder)
