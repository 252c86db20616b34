"""Three kinds of tokenizer made on the spot, each beside a library that knows what is right."""

import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tests import kit
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from octavo.log import cache_dir
from octavo.text.matcher import Grammars
from octavo.text.tokenizer import Tokenizer as OctavoTokenizer
from octavo.text.tokenizer import load_tokenizer

CORPUS = [
    "The block pool keeps the key-value cache in blocks of sixteen tokens, and hands them out.",
    "A request has tokens, and a count of how many are computed. What lags behind is computed.",
    "Žluťoučký kůň pěl ďábelské ódy; the horse sang, it's said, and we've heard that it'll sing.",
    "漢字かな交じり文 and numbers: 1234567890, 3.14, 2024-12-31. Prices: 5 €, 7 $.",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
] * 4
SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|eot|>"]
PLAIN = ["<think>", "</think>"]


@dataclass(frozen=True)
class Kind:
    """One kind: ours, and what the reference gives for a text and for ids."""

    name: str
    ours: OctavoTokenizer
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    folder: Path


def _write(folder: Path, settings: dict[str, object]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_level(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        },
    )


def _spm(folder: Path, kind: str) -> sentencepiece.SentencePieceProcessor:
    llama = kind == "bpe"
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=kind,
        vocab_size=600 if llama else 260,
        byte_fallback=llama,
        normalization_rule_name="identity" if llama else "nmt_nfkc",
        remove_extra_whitespaces=not llama,
        control_symbols=["<|turn|>"],
        user_defined_symbols=["<sep>"],
        hard_vocab_limit=llama,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _llama_json(folder: Path, processor: sentencepiece.SentencePieceProcessor) -> None:
    """The pieces as Llama 2's own tokenizer.json has them, prefix and all."""
    size = processor.get_piece_size()
    vocab = {processor.id_to_piece(i): i for i in range(size)}
    scores = {processor.id_to_piece(i): processor.get_score(i) for i in range(size)}
    pairs = [
        (-scores[text], text[:cut], text[cut:])
        for text, i in vocab.items()
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab and not processor.is_control(i)
    ]
    merges = [(left, right) for _, left, right in sorted(pairs)]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|turn|>"])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
    )


def _hf(name: str, folder: Path) -> Kind:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    return Kind(
        name,
        load_tokenizer(folder),
        lambda text: reference.encode(text, add_special_tokens=False),
        lambda ids: reference.decode(ids, clean_up_tokenization_spaces=False),
        folder,
    )


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    folders = {n: tmp_path_factory.mktemp(n) for n in ("byte", "spm", "unigram", "llama")}
    _byte_level(folders["byte"])
    made = {"byte": _hf("byte", folders["byte"])}
    for name, kind in (("spm", "bpe"), ("unigram", "unigram")):
        processor = _spm(folders[name], kind)
        ours = load_tokenizer(folders[name])
        made[name] = Kind(name, ours, processor.encode, processor.decode, folders[name])
        if name == "spm":
            _llama_json(folders["llama"], processor)
    made["llama"] = _hf("llama", folders["llama"])
    return made


@pytest.fixture(params=["byte", "spm", "unigram", "llama"])
def kind(request: pytest.FixtureRequest, kinds: dict[str, Kind]) -> Kind:
    return kinds[request.param]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model's file, from the cache or where a developer keeps one."""
    places = [*cache_dir().rglob("*.gguf"), Path(tempfile.gettempdir()) / "smol" / "smollm2.gguf"]
    found = next((p for p in places if "smollm2" in p.name.lower() and p.is_file()), None)
    if found is None:
        pytest.skip("the embedded model is not in the cache: run `octavo pull smollm2`")
    return found


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: Path) -> Any:
    """transformers' tokenizer of that file, without the quarter minute its public door takes."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, described, settings = get_gguf_tokenizer(str(smollm2))
    backend, _ = convert_gguf_tokenizer(architecture, described)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    """Over a head of 300 rows, of which some have no token: bytes, a few words, added tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    kit.write_tokenizer(folder, ["yes", '{"', '": '])
    found = Grammars(lambda: load_tokenizer(folder), 300, [kit.EOS])
    yield found
    found.close()
