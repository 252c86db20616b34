"""The JSON Schema Test Suite against what structured outputs enforce.

The suite comes with the source distribution of `jsonschema`, which pip fetches once; without a
package index the test is skipped. For each of its schemas that is not refused, no document that is
not valid matches the grammar, and texts drawn from the grammar's masks at random are valid.
"""

import json
import random
import subprocess
import sys
import tarfile
from importlib.metadata import version

import jsonschema
import numpy as np
import pytest
from tests import kit

from octavo.errors import RequestError
from octavo.log import cache_dir
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.grammar import grammar_of
from octavo.text.matcher import Grammars
from octavo.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

DRAFT = "draft2020-12"
# A validator in Python takes them for matches: its \W and \S are those of Unicode.
UNLIKE_PYTHON = {r"ECMA 262 \W matches everything but ascii letters",
                 r"ECMA 262 \S matches everything but whitespace"}  # fmt: skip
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def suite():
    """(file, case) of all of the draft."""
    folder = cache_dir() / "json-schema-suite"
    name = f"jsonschema-{version('jsonschema')}"
    if not (archive := folder / f"{name}.tar.gz").exists():
        wanted = name.replace("-", "==")
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-binary", ":all:",
             "-d", str(folder), wanted], capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"pip cannot fetch the source of {wanted}: {done.stderr[-200:]}")
    with tarfile.open(archive) as files:
        members = [m for m in files if f"/json/tests/{DRAFT}/" in m.name and m.isfile()]
        read = {m.name.rpartition("/")[2]: json.load(files.extractfile(m)) for m in members}
    return [(file, case) for file, cases in read.items() for case in cases]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    kit.write_tokenizer(folder)
    found = Grammars(lambda: load_tokenizer(folder), kit.EOS + 1, [kit.EOS])
    yield found
    found.close()


def test_nothing_invalid_matches_and_everything_drawn_is_valid(suite, grammars):
    drawn = refused = checked = 0
    for file, case in suite:
        if (compiled := enforced(grammars, case["schema"])) is None:
            refused += 1
            continue
        for part in case["tests"]:
            if not part["valid"] and case["description"] not in UNLIKE_PYTHON:
                checked += 1
                text = json.dumps(part["data"], ensure_ascii=False)
                assert not accepts(grammars.matcher(compiled), text), (file, part["description"])
        if case["description"] in UNLIKE_PYTHON or "\\p{" in json.dumps(case["schema"]):
            continue
        for seed in range(3):
            text = draw(grammars.matcher(compiled), random.Random(seed))
            if text is not None:
                drawn += 1
                check(json.loads(text), case["schema"], file, case["description"])
    # Most of what is refused are keywords that cannot be enforced, which are a part of the suite.
    assert len(suite) - refused > 180
    assert checked > 250
    assert drawn > 500


def test_most_valid_documents_match(suite, grammars):
    """Where it is stricter than the standard: the order of properties, 1.0 for an integer, formats
    (which the standard lets be), leap seconds, spaces beyond ASCII."""
    valid = matched = 0
    for file, case in suite:
        if file == "format.json" or (compiled := enforced(grammars, case["schema"])) is None:
            continue
        texts = [json.dumps(t["data"], ensure_ascii=False) for t in case["tests"] if t["valid"]]
        valid += len(texts)
        matched += sum(accepts(grammars.matcher(compiled), text) for text in texts)
    assert matched > 0.9 * valid


def enforced(grammars, schema):
    """The compiled grammar; None for a schema that is refused."""
    try:
        return grammars.compile(grammar_of(StructuredOutputsParams(json=schema))).result()
    except RequestError:
        return None


def allowed(found):
    return np.flatnonzero(np.unpackbits(found.mask().words().view(np.uint8), bitorder="little"))


def accepts(found, text):
    for byte in text.encode():
        if found.complete or byte not in allowed(found):
            return False
        found.advance(byte)
    return found.complete or kit.EOS in allowed(found)


def draw(found, rng):
    """A text at random, which tends to its end; None for one that does not find it."""
    text = bytearray()
    while not found.complete:
        ids = allowed(found)
        if kit.EOS in ids and (rng.random() < 0.5 or len(ids) == 1):
            break
        closing = [token for token in b'"}]' if token in ids]
        token = rng.choice(closing) if closing and rng.random() < 0.3 else int(rng.choice(ids))
        if token == kit.EOS:
            break
        text.append(token)
        found.advance(token)
        if len(text) > MAX_TOKENS:
            return None
    return bytes(text)


def check(value, schema, *where):
    validator = jsonschema.Draft202012Validator
    errors = list(validator(schema, format_checker=validator.FORMAT_CHECKER).iter_errors(value))
    assert not errors, (*where, value, errors[0].message)
