"""Gemma 3 270M from its GGUF file (`octavo pull gemma3-270m`), against transformers."""

from typing import Any

import pytest
import torch
from tests.models import toys

from octavo.models.decoder import Decoder
from octavo.models.files import embedded_path
from octavo.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]

NAME = "gemma3-270m"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a land of  two spaces",
    "def fibonacci(n):\n    if n < 2:\n\t\treturn n\n",
    "Grüße aus Zürich: 東京 \N{SNOWMAN}\N{GRINNING FACE} <b>x</b> 12345.6\r\n\n\n",
)


def path_of_file() -> Any:
    path = embedded_path(NAME)
    if not path.is_file():
        pytest.skip(f"the embedded model is not here: octavo pull {NAME}")
    return path


@pytest.fixture(scope="module")
def reference() -> Any:
    import transformers

    path = path_of_file()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, attn_implementation="eager", dtype=torch.float32
    )


@pytest.fixture(scope="module")
def model() -> Decoder:
    path_of_file()
    return toys.load(NAME, max_model_len=2048)


def test_the_description(model: Decoder) -> None:
    spec = model.spec
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (18, 640, 262144)
    assert spec.tie_embeddings
    windows = [layer.attention.window for layer in spec.layers]
    assert windows == ([512] * 5 + [None]) * 3
    thetas = [layer.rope.theta for layer in spec.layers if layer.rope]
    assert thetas == ([1e4] * 5 + [1e6]) * 3


TEXTS = (
    *PROMPTS, "  leading", "x      y\n\n\n\n   z", " ", "", "tab\t\t  end  ", "\u2581\u2581 under",
    "<start_of_turn>user\nhi<end_of_turn>", "a" * 50, "\0\1 \ufffd e\u0301 \ufb01",
)  # fmt: skip


def test_tokens_equal_those_of_transformers() -> None:
    import transformers

    path = path_of_file()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = load_tokenizer(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text


@pytest.mark.parametrize("length", [1, 17, 600])
def test_logits_equal_transformers_on_the_same_file(
    length: int, reference: Any, model: Decoder
) -> None:
    ids = torch.randint(3, 262000, (length,), generator=torch.Generator().manual_seed(length))
    wanted = toys.reference_logits(reference, ids.tolist())
    found = toys.Paged(model).step([("a", ids.tolist())])[0]
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_greedy_tokens_equal_transformers_on_the_same_file(
    prompt: int, reference: Any, model: Decoder
) -> None:
    ids = load_tokenizer(path_of_file()).encode(PROMPTS[prompt])
    wanted = reference.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=24,
        do_sample=False, pad_token_id=0,
    )[0, len(ids):].tolist()  # fmt: skip
    paged, found = toys.Paged(model), [*ids]
    new = list(ids)
    for _ in wanted:
        new = [int(paged.step([("a", new)])[0][-1].argmax())]
        found += new
    assert found[len(ids) :] == wanted
