"""The tokenizer that scripts get: transformers' answers under transformers' names."""

from pathlib import Path
from typing import Any

import pytest

import kit
from octavo.errors import RequestError, RequestTypeError
from octavo.text.interface import ModelTokenizer
from octavo.text.tokenizer import load_tokenizer

TEXTS = ["Hello world", " the block pool", "a<|im_end|>b", "漢字 🌶", ""]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello world"},
]


@pytest.fixture(params=["toy", "byte", "llama"])
def pair(request: pytest.FixtureRequest, kinds: Any, tiny_folder: Path) -> tuple[Any, Any]:
    """(ours, transformers') of one folder."""
    from transformers import PreTrainedTokenizerFast

    folder = tiny_folder if request.param == "toy" else kinds[request.param].folder
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    return ModelTokenizer(load_tokenizer(folder)), reference


def test_ids_and_texts(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            found, expected = (t(text, add_special_tokens=special) for t in pair)
            assert found["input_ids"] == found.input_ids == expected["input_ids"]
            assert found.attention_mask == expected["attention_mask"]
            assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
        assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours(TEXTS).input_ids == theirs(TEXTS)["input_ids"]
    batch = [ours.encode(text) for text in TEXTS]
    assert ours.batch_decode(batch) == theirs.batch_decode(batch)
    assert ours.batch_decode(batch, skip_special_tokens=True) == [
        ours.decode(ids, skip_special_tokens=True) for ids in batch
    ]


def test_named_tokens(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids)
    assert set(ours.all_special_ids) == set(ours.special_ids)
    assert ours.all_special_ids == ours.convert_tokens_to_ids(ours.all_special_tokens)
    for token in (*ours.all_special_tokens, ours.convert_ids_to_tokens(65), "no such token"):
        assert ours.convert_tokens_to_ids(token) == theirs.convert_tokens_to_ids(token)
    few = [0, 200, *theirs.all_special_ids]
    assert ours.convert_ids_to_tokens(few) == theirs.convert_ids_to_tokens(few)
    assert ours.convert_ids_to_tokens([3], skip_special_tokens=True) == (
        [] if 3 in ours.special_ids else [ours.convert_ids_to_tokens(3)]
    )


@pytest.mark.parametrize("opens", [True, False])
def test_a_chat(tiny_folder: Path, opens: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = ModelTokenizer(load_tokenizer(tiny_folder))
    theirs = PreTrainedTokenizerFast.from_pretrained(tiny_folder)
    for chat in (CHAT, [CHAT, CHAT[1:]]):
        for options in (
            {"tokenize": False},
            {"tokenize": True},
            {"return_dict": False},
            {"chat_template": "{{ messages[0].content }}{{ mood }}", "mood": "!"},
        ):
            given = {"add_generation_prompt": opens, **options}
            expected = theirs.apply_chat_template(chat, **given)
            found = ours.apply_chat_template(chat, **given)
            assert found == (dict(expected) if hasattr(expected, "keys") else expected)


def test_continuing_an_answer(tiny_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    chat = [*CHAT, {"role": "assistant", "content": "Hi"}]
    given = {"tokenize": False, "continue_final_message": True}
    theirs = PreTrainedTokenizerFast.from_pretrained(tiny_folder)
    ours = ModelTokenizer(load_tokenizer(tiny_folder))
    assert ours.apply_chat_template(chat, **given) == theirs.apply_chat_template(chat, **given)


def test_what_is_not_supported_says_what_to_use(tiny_folder: Path) -> None:
    tokenizer = ModelTokenizer(load_tokenizer(tiny_folder))
    assert tokenizer("a", padding=False, truncation=None, return_tensors=None).input_ids == [97]
    with pytest.raises(RequestError, match=r"return_tensors='pt'.*transformers.AutoTokenizer"):
        tokenizer("a", return_tensors="pt")
    with pytest.raises(RequestError, match="truncation=True"):
        tokenizer.apply_chat_template(CHAT, truncation=True)
    with pytest.raises(RequestTypeError, match="no argument 'paddin'"):
        tokenizer("a", paddin=True)
    with pytest.raises(AttributeError, match="'save_pretrained'; that of transformers"):
        tokenizer.save_pretrained("x")
    with pytest.raises(RequestError, match="9999"):
        tokenizer.convert_ids_to_tokens(9999)


def test_it_is_still_the_engine_s(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    ours = ModelTokenizer(tokenizer)
    assert (ours.vocab_size, ours.eos_ids) == (tokenizer.vocab_size, (kit.EOS,))
    assert ours.encode_ordinary("</s>") == tokenizer.encode_ordinary("</s>")


@pytest.mark.model
def test_of_the_embedded_model(smollm2: Path, smollm2_reference: Any) -> None:
    ours = ModelTokenizer(load_tokenizer(smollm2))
    assert ours.eos_token_id == smollm2_reference.eos_token_id
    assert len(ours) == len(smollm2_reference)
    theirs = smollm2_reference.apply_chat_template(
        CHAT, chat_template=ours.chat_template, tokenize=False, add_generation_prompt=True
    )
    assert ours.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == theirs
    ids = smollm2_reference(theirs, add_special_tokens=False)["input_ids"]
    assert ours.apply_chat_template(CHAT, add_generation_prompt=True).input_ids == ids
    assert ours.convert_ids_to_tokens(ids) == smollm2_reference.convert_ids_to_tokens(ids)
