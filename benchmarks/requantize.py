"""A .gguf model converted to another weight format, to measure what that format costs.

    python -m benchmarks.requantize TARGET --form Q8_0 [--group 64] [--model smollm2]

The forms awq and gptq make a folder in Hugging Face layout, the others a .gguf file with every
matrix in that form. All round each weight to the nearest code, without the calibration of AWQ and
GPTQ.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.engines import model_file
from benchmarks.environments import folder_of

_FILES = ("BF16", "F16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--form", required=True, choices=[*_FILES, "awq", "gptq"])
    parser.add_argument("--group", type=int, default=64, help="inputs that share a scale")
    parser.add_argument("--model", default="smollm2", help="embedded name or .gguf file")
    args = parser.parse_args()
    if args.form not in ("awq", "gptq"):
        _gguf(model_file(args.model), args.target, args.form)
    else:
        _folder(folder_of(model_file(args.model)), args.target, args.form, args.group)
    return 0


def _gguf(source: Path, target: Path, form: str) -> None:
    import gguf

    reader, kind = gguf.GGUFReader(source), gguf.GGMLQuantizationType[form]
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _folder(source: Path, target: Path, form: str, group: int) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {n: t for file in source.glob("*.safetensors") for n, t in load_file(file).items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts = _parts(tensors.pop(name).float(), form, group)
        tensors |= {name.replace("weight", part): data for part, data in parts.items()}
    save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": form, "bits": 4, "group_size": group}
    (target / "config.json").write_text(json.dumps(config))


def _parts(weight: torch.Tensor, form: str, group: int) -> dict[str, torch.Tensor]:
    """The stored tensors of a product [N, K]: 16 levels from each group's least to its largest."""
    n, k = weight.shape
    grouped = weight.T.reshape(k // group, group, n)
    low, high = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-7).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (grouped / scales.float().unsqueeze(1) + zeros.unsqueeze(1)).round().clamp(0, 15)
    flat, zeros = codes.reshape(k, n).int(), zeros.int()
    if form == "awq":
        order = torch.tensor(_AWQ_ORDER)
        rows = {name: _words(v.view(len(v), -1, 8)[..., order])
                for name, v in (("qweight", flat), ("qzeros", zeros))}  # fmt: skip
        return {**rows, "scales": scales}
    return {
        "qweight": _words(flat.T.reshape(n, -1, 8)).T.contiguous(),
        "qzeros": _words((zeros - 1).view(len(zeros), -1, 8)),
        "scales": scales,
        "g_idx": (torch.arange(k) // group).int(),
    }


def _words(fields: torch.Tensor) -> torch.Tensor:
    """[..., 8] values of four bits -> int32 [...], the first in the lowest bits."""
    wide = (fields.long() << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(wide >= 2**31, wide - 2**32, wide).int()


if __name__ == "__main__":
    sys.exit(main())
