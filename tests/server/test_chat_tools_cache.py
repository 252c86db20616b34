"""An agent's conversation finds all of its earlier turns in the prefix cache."""

import pytest

import tool_model
from serving import Server
from tool_model import PATH, TOOLS, call

BLOCK = 16
TURNS = 6


def script(folder, text):
    return f"say [{tool_model.ids(folder, text)}]"


def said(turn, thinks):
    """What the model writes in a turn: with words around, other alphabets, several calls."""
    thought = f"<think>\nturn {turn}\n</think>\n\n" if thinks else ""
    words = "Podívám se.\n" if turn % 3 == 1 else ""
    first = call(arguments=f'{{"city": "Brno 漢 {turn}"}}')
    second = "\n" + call("clock", "{}") if turn % 4 == 3 else ""
    return thought + words + first + second


@pytest.mark.parametrize("thinks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_turn_computes_only_what_is_new(tmp_path, engine_path, thinks):
    template = tool_model.THINKING if thinks else tool_model.TEMPLATE
    folder = tool_model.write(tmp_path / "m", template)
    with Server(folder, {}, max_model_len=16384, num_gpu_blocks_override=2049) as server:
        messages = [{"role": "user", "content": script(folder, said(0, thinks))}]
        before = 0
        for turn in range(TURNS):
            reply = server.post(PATH, messages=messages, tools=TOOLS, max_tokens=400).json()
            usage, choice = reply["usage"], reply["choices"][0]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= before
            assert choice["finish_reason"] == "tool_calls"
            # The fake's end-of-text token is not the one with which its template ends a turn.
            before = (usage["total_tokens"] - 1) // BLOCK * BLOCK
            messages.append(choice["message"])
            calls = choice["message"]["tool_calls"]
            for answered in calls:
                following = script(folder, said(turn + 1, thinks))
                messages.append(
                    {"role": "tool", "tool_call_id": answered["id"], "content": following}
                )
