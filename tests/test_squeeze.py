"""Cutting arrays out of unparsed text must never change what is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from traceage.formats.content import stream_content
from traceage.formats.squeeze import MASK_COUNT, squeeze
from traceage.sources import find_files

KEYS = ["mask", "token_ids", "logprobs", "is_content", "entropies", "mismatch_kl", "content", "a"]

hostile = st.sampled_from(
    [
        "",
        '"',
        "\\",
        '"mask":[true]',
        '\\"token_ids":[1',
        "]",
        "[",
        '":[',
        "mask",
        '"mask": [',
        "é\u2028",
    ]
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    hostile,
    st.text(max_size=5),
)
arrays = st.one_of(
    st.lists(st.booleans()),
    st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda n: [False] * n[0] + [True] * n[1]),
    st.lists(st.integers(0, 9)),
    st.lists(scalars, max_size=4),
)
values = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | hostile, inner, max_size=4)
    ),
    max_leaves=20,
)


def without_arrays(value: Any) -> Any:
    """What a squeezed record says: the reference, on parsed values."""
    if isinstance(value, list):
        return [without_arrays(item) for item in value]
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {}
    for key, item in value.items():
        flat = (
            isinstance(item, list)
            and item
            and not any(
                isinstance(one, (str, list)) or (isinstance(one, dict) and one) for one in item
            )
        )
        if key not in KEYS[:6] or not flat:
            made[key] = without_arrays(item)
        elif key != "mask":
            made[key] = [0]
        elif item[0] is True or item[0] is False:
            made[MASK_COUNT] = sum(one is True for one in item)
        else:
            made[key] = item
    return made


@given(values, st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : ")]), st.booleans())
def test_only_arrays_go(value: Any, separators: tuple[str, str], ascii_only: bool) -> None:
    line = json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode()
    squeezed = squeeze(line)
    try:
        found = json.loads(squeezed)
    except ValueError:
        return  # refused by the decoder: the reader then takes the whole line
    # An array that was left as it is does no harm.
    assert flattened(without_arrays(found)) == flattened(without_arrays(value))


def flattened(value: Any) -> Any:
    """With each array that is not read as `[0]`: what was in it makes no difference."""
    if isinstance(value, list):
        return [flattened(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: [0] if key in KEYS[1:6] and isinstance(item, list) and item else flattened(item)
        for key, item in value.items()
    }


def test_lines_of_real_runs_are_squeezed_and_never_refused() -> None:
    data = Path(__file__).parent.parent / "data/real-dump-steps"
    for file in find_files(data):
        content = b"".join(stream_content(file.path))
        for line in content.splitlines():
            squeezed = squeeze(line)
            assert len(squeezed) < 0.8 * len(line)
            assert json.loads(squeezed) == without_arrays(json.loads(line))
