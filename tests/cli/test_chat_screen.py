"""Reasoning in the terminal chat: dim above the answer; no part of it in pipes and histories."""

import io

import pytest

import fake_engine
import tool_model
from octavo.cli.chat_backend import EngineBackend
from octavo.cli.chat_screen import Screen
from octavo.cli.chat_server import _piece
from octavo.cli.chat_session import Session, Turn
from octavo.cli.preparation import Preparation
from octavo.config import EngineConfig
from octavo.engine.requests import RequestMaker
from octavo.llm import LLM
from octavo.params import SamplingParams
from octavo.text.tokenizer import load_tokenizer


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(out, colours=True):
    err = io.StringIO()
    screen = Screen(out, err, colours)
    with screen.answer():
        for piece in ("so ", "what"):
            screen.think(piece)
        for piece in ("An ", "answer."):
            screen.show(piece)
    return out.getvalue(), err.getvalue()


def test_on_a_terminal_reasoning_is_dim_and_above_the_answer():
    assert shown(Terminal()) == ("\033[2mso what\n\033[0m\nAn answer.\n", "")
    assert shown(Terminal(), colours=False) == ("so what\n\nAn answer.\n", "")


def test_in_a_pipe_reasoning_is_no_part_of_the_answer():
    assert shown(io.StringIO()) == ("An answer.\n", "so what\n")


@pytest.mark.parametrize("stop", [None, "wer"])
def test_a_turn_has_the_answer_without_reasoning(tmp_path, stop):
    folder = tool_model.write(tmp_path / "m", tool_model.THINKING)
    config = EngineConfig(model=str(folder), swap_space=0, max_model_len=2048)
    tokenizer = load_tokenizer(folder)
    llm = LLM.over(fake_engine.create(config), tokenizer, config)
    prepared = Preparation.__new__(Preparation)
    prepared.config, prepared.capabilities = config, llm.engine.capabilities
    prepared._tokenizer = tokenizer
    prepared._requests = RequestMaker(config, tokenizer, llm.engine.capabilities, lambda: 0.0)
    prepared.load = lambda: llm
    backend = EngineBackend(prepared)
    backend.load()
    session = Session(backend, SamplingParams(max_tokens=None, stop=stop))
    asked = f"say [{tool_model.ids(folder, '<think>hm</think>Answer.')}]"
    texts, thoughts = [], []
    reply = session.ask(asked, texts.append, thoughts.append)
    answer = "Answer." if stop is None else "Ans"
    assert ("".join(thoughts), "".join(texts), reply.text) == ("hm", answer, answer)
    assert session.turns == [Turn(asked, answer)]
    llm.close()


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_server_s_reasoning_is_read_under_either_name(name):
    piece = _piece({"choices": [{"delta": {name: "hm"}}]}, 0)
    assert (piece.reasoning, piece.text, piece.num_tokens) == ("hm", "", 1)
