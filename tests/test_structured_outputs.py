"""What may be asked of a text's form, and that every answer has it, whatever happens meanwhile."""

import json
import pickle
import random

import jsonschema
import msgspec
import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.errors import RequestError, RequestTypeError
from schemas import SCHEMAS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "yes"}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
        ({"choice": ["a"] * 4097}, "structured_outputs.choice"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": "a\0"}, "structured_outputs.regex"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"grammar": "a" * 200_000}, "structured_outputs.grammar"),
        ({"json": 5}, "structured_outputs.json"),
        ({"json": {"a": float("nan")}}, "structured_outputs.json"),
        ({"structural_tag": True}, "structured_outputs.structural_tag"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ({"json": {}, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields, param):
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == param
    assert len(str(caught.value)) < 400


def test_sampling_params_take_an_object_of_its_fields():
    params = SamplingParams(structured_outputs={"choice": ["yes", "no", "yes"]})
    assert params.structured_outputs == StructuredOutputsParams(choice=("yes", "no"))
    with pytest.raises(RequestTypeError, match="did you mean 'regex'"):
        SamplingParams(structured_outputs={"regexp": "a"})
    with pytest.raises(RequestTypeError, match="structured_outputs must be"):
        SamplingParams(structured_outputs="json")


def test_vllm_s_old_names_say_the_new_ones():
    for name in ("json", "regex", "choice", "grammar", "whitespace_pattern"):
        with pytest.raises(RequestError, match=f"use structured_outputs.{name}"):
            SamplingParams(**{f"guided_{name}": "a"})
    assert SamplingParams(guided_json=None) == SamplingParams()


def test_values_survive_a_process_border():
    form = StructuredOutputsParams(json=PERSON, whitespace_pattern=" ?")
    params = SamplingParams(structured_outputs=form)
    assert json.loads(form.json) == PERSON
    assert hash(form) == hash(StructuredOutputsParams(json=json.dumps(PERSON),
                                                      whitespace_pattern=" ?"))  # fmt: skip
    assert pickle.loads(pickle.dumps(params)) == params
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


# --- answers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(str(tiny_folder), dtype="float32", max_model_len=512, swap_space=0,
             load_progress=False) as found:  # fmt: skip
        yield found


def ask(llm, prompts, params):
    return [o.outputs for o in llm.generate(prompts, params, use_tqdm=False)]


def check(text, reason, schema):
    """A complete text is a document of the schema; a cut one is the beginning of one, which
    only the mask can vouch for."""
    assert reason in ("stop", "length"), reason
    if reason == "stop":
        jsonschema.validate(json.loads(text), schema)
    return reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_complete_answer_is_valid(llm, temperature):
    some = random.Random(3).sample(SCHEMAS, 24)
    params = [
        SamplingParams(temperature=temperature, seed=5, n=1 if temperature == 0 else 3,
                       max_tokens=200, structured_outputs={"json": schema})
        for schema in some
    ]  # fmt: skip
    complete = 0
    for schema, choices in zip(some, ask(llm, ["json"] * len(some), params), strict=True):
        complete += sum(check(c.text, c.finish_reason, schema) for c in choices)
    assert complete > len(some) // 3


def test_regex_choice_and_grammars(llm):
    asked = {
        "regex": r"\d{3}-[a-f]{2}", "choice": ["yes", "no", 'q"\\/ü'],
        "grammar": 'root ::= "x" [0-9] "y"',
    }  # fmt: skip
    params = [SamplingParams(seed=1, max_tokens=20, structured_outputs={k: v})
              for k, v in asked.items()]  # fmt: skip
    (number,), (choice,), (gbnf,) = ask(llm, ["a", "b", "c"], params)
    assert number.text.isascii()
    assert number.text[:3].isdigit()
    assert len(number.text) == 6
    assert choice.text in asked["choice"]
    assert (gbnf.text[0], gbnf.text[2]) == ("x", "y")
    assert {c.finish_reason for c in (number, choice, gbnf)} == {"stop"}
    lark = {"grammar": 'start: "a" b+\nb: /[01]/'}
    ((cut,),) = ask(llm, ["a"], SamplingParams(max_tokens=4, seed=1, structured_outputs=lark))
    assert cut.text.startswith("a")
    assert set(cut.text[1:]) <= {"0", "1"}


def test_company_preemption_and_swap_change_nothing(tiny_folder):
    def params(index):
        return SamplingParams(temperature=0.9, seed=index, n=1 + index % 2, max_tokens=48,
                              logprobs=2, structured_outputs={"json": PERSON})  # fmt: skip

    prompts = [[65 + i] * (5 + 15 * i) for i in range(6)]
    plain = {"dtype": "float32", "max_model_len": 256, "load_progress": False}
    with LLM(str(tiny_folder), swap_space=0, **plain) as alone:
        wanted = [ask(alone, [p], params(i))[0] for i, p in enumerate(prompts)]
    for options in (
        {"num_gpu_blocks_override": 18, "preemption_mode": "recompute", "swap_space": 0},
        {"num_gpu_blocks_override": 18, "preemption_mode": "swap", "swap_space": 0.1},
        {"max_num_batched_tokens": 16, "swap_space": 0},
    ):
        with LLM(str(tiny_folder), **options, **plain) as crowded:
            got = ask(crowded, prompts, [params(i) for i in range(len(prompts))])
            if "num_gpu_blocks_override" in options:
                assert crowded.engine.stats.preemptions > 0
        for have, want in zip(got, wanted, strict=True):
            for one, other in zip(have, want, strict=True):
                assert one.token_ids == other.token_ids
                assert one.text == other.text


def test_log_probabilities_are_those_of_the_tokens_that_were_allowed(llm):
    form = {"choice": ["yes", "no"]}
    params = SamplingParams(temperature=0, logprobs=5, structured_outputs=form)
    ((answer,),) = ask(llm, ["?"], params)
    first = answer.logprobs[0]
    assert {entry.decoded_token for entry in first.values()} == {"y", "n"}
    total = sum(2.718281828**entry.logprob for entry in first.values())
    assert total == pytest.approx(1, abs=1e-4)
    forced = answer.logprobs[1]
    assert [entry.logprob for entry in forced.values()] == [pytest.approx(0, abs=1e-6)]


def test_ends_of_texts_meet_the_grammar(llm):
    def one(form, **options):
        params = SamplingParams(temperature=0.8, seed=2, structured_outputs=form,
                                **{"max_tokens": 40, **options})  # fmt: skip
        return ask(llm, ["?"], params)[0][0]

    number = {"regex": "[0-9]{4}"}
    assert len(one(number, ignore_eos=True).text) == 4  # a complete grammar ends all the same
    assert one(number, min_tokens=30).finish_reason == "stop"  # the grammar wins
    assert one(number, max_tokens=2).finish_reason == "length"
    stopped = one({"regex": "a[0-9]{3}b"}, stop="a")
    assert (stopped.text, stopped.stop_reason) == ("", "a")
    byte = ord("7")  # allowed only where the text may end
    ended = one({"regex": "[0-9]{2,30}"}, stop_token_ids=[byte], logit_bias={byte: 100})
    assert (len(ended.text), ended.stop_reason) == (2, byte)
    assert "7" not in ended.text


def test_what_leaves_no_token_is_an_error_of_that_request_only(llm):
    forbidden = SamplingParams(structured_outputs={"choice": ["yes"]},
                               allowed_token_ids=[ord("n")])  # fmt: skip
    outputs = llm.generate(["a", "b"], [forbidden, SamplingParams(max_tokens=3)], use_tqdm=False)
    assert "structured_outputs" in outputs[0].error
    assert outputs[1].error is None


def test_a_value_of_many_megabytes_is_refused_before_it_is_written():
    written = []

    class Values(dict):
        def items(self):
            written.append(1)
            return super().items()

    huge = Values({"enum": ["x" * 1000] * 1000})
    with pytest.raises(RequestError, match="at most 131072 characters"):
        StructuredOutputsParams(json=huge)
    assert not written
    ring = {}
    ring["a"] = ring
    with pytest.raises(RequestError, match="at most 131072 characters"):
        StructuredOutputsParams(json=ring)
