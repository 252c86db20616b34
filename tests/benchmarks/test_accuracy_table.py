"""The table of accuracy: what is measured against what, and how rows become a page."""

import dataclasses
import re
from typing import Any

import pytest

from benchmarks import accuracy_table
from octavo.checkpoint.gguf import FORMATS

FACTS = {"reference": "r", "perplexity": 20.5, "reference_perplexity": 20.4, "kl_p99": 0.01,
         "same_top_token": 0.97, "answer_tokens_same": 0.5, "commit": "1"}  # fmt: skip


def test_every_stored_type_is_compared_with_its_dequantized_self() -> None:
    forms = {case.form.lower() for case in accuracy_table.CASES if case.group == "stored"}
    known = {form.name.lower() for form in FORMATS.values()} - {"f32", "f16", "bf16"}
    assert forms == known | {"awq", "gptq"}


def test_references_are_shared_and_what_cannot_be_made_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    references: list[Any] = []
    seen: list[tuple[str | None, str]] = []

    @dataclasses.dataclass(frozen=True)
    class Known:
        model: str
        answers: bool

        @classmethod
        def of(cls, model: str, text: str, answers: bool = True) -> "Known":
            references.append((model, answers))
            return cls(model, answers)

    def compared(reference: Known, options: dict[str, Any]) -> dict[str, Any]:
        assert reference.model == options["model"]
        seen.append((options.get("quantization"), options["dtype"]))
        return {**FACTS, **options, "kl_mean": 0.001}

    def file(model: str, form: str) -> str:
        if form == "Q6_K":
            raise accuracy_table.PeerError("no llama.cpp here")
        return f"{model}-{form}"

    monkeypatch.setattr(accuracy_table, "Reference", Known)
    monkeypatch.setattr(accuracy_table, "compared", compared)
    monkeypatch.setattr(accuracy_table, "_file", file)
    rows = list(accuracy_table._rows("smollm2", accuracy_table.CASES))
    assert len(rows) == len(accuracy_table.CASES) - 1
    assert references.count(("smollm2", True)) == 1
    assert ("smollm2-Q4_0", False) in references
    assert "quantization" not in next(row for row in rows if row["weights"].startswith("AWQ"))
    stored = sum(row["group"] == "stored" for row in rows)
    assert seen.count((None, "float32")) + seen.count(("gguf", "float32")) == stored
    assert seen.count(("none", "bfloat16")) == stored + 3, "decoded, beside each stored form"
    text = accuracy_table.table(accuracy_table.newest([*rows, {**rows[0], "kl_mean": 0.0125}]))
    methods, forms = text.split("\n\n")
    assert "| smollm2 | bfloat16 | bfloat16 | 20.500 (20.400) | 0.0125 |" in methods
    assert methods.count("| w4a8 |") == 1
    assert not re.search("answer|Q6_K", forms)
    assert "| smollm2 | Q4_0 | 20.500 (20.400) | 0.0010000 | 0.00100 | 0.00100 |" in forms
