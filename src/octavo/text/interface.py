"""What `LLM.get_tokenizer()` gives: a tokenizer with transformers' names and meanings.

Scripts for vLLM render chats, count tokens and look up ids with the tokenizer of the model.
Padding, truncation and tensors are not here: use `transformers.AutoTokenizer` for those.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import RequestError, RequestTypeError, shown
from octavo.text.chat import encode_chat
from octavo.text.loading import NAMED_TOKENS
from octavo.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]

# Arguments of transformers' and the values of them that have no effect (None has none either).
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "padding": (False,),
    "truncation": (False,),
    "max_length": (),
    "return_tensors": (),
    "return_attention_mask": (True,),
    "return_token_type_ids": (False,),
    "clean_up_tokenization_spaces": (False,),
    "spaces_between_special_tokens": (True, False),
    "documents": (),
    "tokenizer_kwargs": ({},),
    "verbose": (True, False),
}


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask` of a text, or of several, as keys and as attributes."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class ModelTokenizer(Tokenizer):
    """A model's tokenizer, with what scripts use of transformers' tokenizers.

    eos_token, eos_token_id, bos_token, pad_token, unk_token, ...: None where there is none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        vars(self).update(vars(tokenizer))  # what is shared is immutable, or has its own lock

    def __getattr__(self, name: str) -> Any:
        token = name.removesuffix("_id")
        if token in NAMED_TOKENS:
            return self.named.get(token) if token == name else self._named_id(token)
        raise AttributeError(
            f"Octavo's tokenizer has no {name!r}; that of transformers.AutoTokenizer may",
            name=name,
            obj=self,
        )

    def __len__(self) -> int:
        """The number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    @property
    def all_special_tokens(self) -> list[str]:
        """The named special tokens first, then the others by id."""
        named = [self.named[name] for name in NAMED_TOKENS if name in self.named]
        others = [self.added_tokens[i].content for i in sorted(self.special_ids)]
        return list(dict.fromkeys([*named, *others]))

    @property
    def all_special_ids(self) -> list[int]:
        return [i for text in self.all_special_tokens if (i := self.token_id(text)) is not None]

    def __call__(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, **others: object
    ) -> Encoding:
        """The ids of a text, or of each of several."""
        _check_neutral(others)
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        many = [self.encode(item, add_special_tokens) for item in text]
        return Encoding(input_ids=many, attention_mask=[[1] * len(ids) for ids in many])

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return [self._spelled(i) for i in self.encode(text, add_special_tokens)]

    def decode(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False, **others: object
    ) -> str:
        """The text of one id or several. Special tokens are shown, as in transformers."""
        _check_neutral(others)
        return super().decode([ids] if isinstance(ids, int) else ids, skip_special_tokens)

    def batch_decode(
        self,
        sequences: Sequence[Sequence[int]],
        skip_special_tokens: bool = False,
        **others: object,
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens, **others) for ids in sequences]

    def convert_ids_to_tokens(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> Any:
        """The tokens as the vocabulary spells them."""
        if isinstance(ids, int):
            return self._spelled(ids)
        return [
            self._spelled(i) for i in ids if not (skip_special_tokens and i in self.special_ids)
        ]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The ids of tokens; of unknown ones the id of `unk_token`, or None."""
        if isinstance(tokens, str):
            found = self.token_id(tokens)
            return self._named_id("unk_token") if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Messages | Sequence[Messages],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """A conversation, or each of a list, as text (`tokenize=False`), ids, or an `Encoding`.

        `variables` are further variables of the template. Text in messages never becomes a special
        token, which transformers allows; for other messages the ids are the same.
        """
        for name in _NEUTRAL.keys() & variables.keys():
            _check_neutral({name: variables.pop(name)})
        many = bool(conversation) and not isinstance(conversation[0], Mapping)
        prompts = [
            encode_chat(
                self,
                messages,  # type: ignore[arg-type]
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=variables,
            )
            for messages in (conversation if many else [conversation])
        ]
        if not tokenize:
            texts = [prompt.text for prompt in prompts]
            return texts if many else texts[0]
        ids = [prompt.token_ids for prompt in prompts]
        masks = [[1] * len(tokens) for tokens in ids]
        if not return_dict:
            return ids if many else ids[0]
        return Encoding(
            input_ids=ids if many else ids[0], attention_mask=masks if many else masks[0]
        )

    def _spelled(self, token_id: int) -> str:
        found: str | None = self._backend.id_to_token(token_id)
        if found is None:
            raise RequestError(f"token id {token_id} is not in the vocabulary", "token_ids")
        return found


def _check_neutral(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if name not in _NEUTRAL:
            raise RequestTypeError(f"Octavo's tokenizer has no argument {name!r}", name)
        if value is not None and value not in _NEUTRAL[name]:
            raise RequestError(
                f"{name}={shown(value)}: Octavo's tokenizer gives lists of ids as they are; use "
                "transformers.AutoTokenizer for padding, truncation and tensors",
                name,
            )
