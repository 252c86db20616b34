"""What every format keeps: parsers and what they are given to read, in every chunking."""

import json
from functools import partial

import pytest
from tests.text.tools import transcripts

from octavo.text.tools.registry import FORMATS

FORMATS_AND_MARKERS = [
    pytest.param(one, markers, id=f"{one.name}-{kind}")
    for one in FORMATS
    for kind, markers in zip(("text", "tokens"), transcripts.both_markers(one), strict=True)
]


@pytest.mark.parametrize(("tool_format", "markers"), FORMATS_AND_MARKERS)
def test_what_is_written_is_parsed_in_every_chunking(tool_format, markers):
    for seed, made in enumerate(transcripts.transcripts(tool_format.markers)):
        # Where nothing opens a section, calls begin the answer.
        before = made.before if tool_format.begin or not made.calls else ""
        text = before + tool_format.write(made.calls) * bool(made.calls) + made.after
        read = partial(transcripts.parse, tool_format, markers, text)
        found = read()
        assert [name for name, _, _ in found.calls] == [call.name for call in made.calls], text
        assert all(ended for _, _, ended in found.calls)
        assert [json.loads(text) for _, text, _ in found.calls] == [
            call.arguments for call in made.calls
        ]
        assert found.content == before + made.after
        assert read(cut=transcripts.characters) == found
        assert read(cut=partial(transcripts.at_random, seed=seed)) == found
