"""Tasks: what an episode starts with, what it is answered, what it is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceage.capture.tasks import LowTokens, Prompts, Turn, load_task

TOKENS = st.lists(st.integers(0, 511), max_size=30)


@given(st.integers(0, 1 << 40), st.lists(TOKENS, min_size=1, max_size=3))
def test_low_tokens(index: int, completions: list[list[int]]) -> None:
    task = LowTokens(512, [511])
    opening = task.start(index)
    assert opening == LowTokens(512, [511]).start(index)
    later = [task.reply(index, completions[:k]) for k in range(1, len(completions) + 1)]
    assert [turn is None for turn in later] == [k == 3 for k in range(1, len(completions) + 1)]
    for turn in [*opening, *(turn for turn in later if turn is not None)]:
        assert turn.token_ids
        assert all(0 <= token < 511 for token in turn.token_ids)
    flat = [token for completion in completions for token in completion]
    low = [token for token in flat if token < 128]
    assert task.score(index, completions) == (len(low) / len(flat) if flat else 0.0)


def write_model(directory: Path, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 40, **config}))
    return directory


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_of_token_ids(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", eos_token_id=[3, 4])
    rows = [{"token_ids": [1, 2]}, {"token_ids": [5], "turns": [[6, 7], [8]]}]
    task = load_task(str(write_rows(tmp_path / "words.jsonl", *rows)), model)
    assert (task.name, task.stop_token_ids) == ("words", [3, 4])
    assert task.start(0) == task.start(2) == [Turn("user", [1, 2])]
    assert task.reply(0, [[9]]) is None
    assert task.reply(1, [[9]]) == Turn("user", [6, 7])
    assert task.reply(1, [[9], [9]]) == Turn("user", [8])
    assert task.reply(1, [[9], [9], [9]]) is None
    assert task.score(1, [[9]]) is None
    assert task.text([9]) == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hello"}, "needs a tokenizer"),
        ({"token_ids": [1], "answer": "4"}, "needs a tokenizer"),
        ({"token_ids": []}, "list of integers"),
        ({"token_ids": [1, "2"]}, "list of integers"),
        ({"token_ids": [True]}, "list of integers"),
        ({"token_ids": [-1]}, "list of integers"),
        ({"token_ids": [1], "turns": 5}, "turns have to be a list"),
        ({"token_ids": [1], "turns": "hello"}, "turns have to be a list"),
        ({"token_ids": [1], "turns": [5]}, "list of integers"),
        ({"token_ids": [1], "answer": 4}, "an answer has to be a text"),
        ({"token_ids": [1], "answer": ""}, "an answer has to be a text"),
        ({"prompt": 5}, "a text or a list of chat messages"),
        ({"prompt": []}, "a text or a list of chat messages"),
        ({"prompt": ["hello"]}, 'object with a "role"'),
        ({"prompt": [{"role": "user"}]}, 'a text as "content"'),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, 'a text as "content"'),
        ({"text": "hello"}, '"prompt" or "token_ids"'),
        ([1, 2], '"prompt" or "token_ids"'),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = write_rows(tmp_path / "bad.jsonl", {"token_ids": [1]}, row)
    with pytest.raises(ValueError, match=message) as caught:
        Prompts(path, None, [])
    assert f"{path}, line 2" in str(caught.value)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    for line in (b'{"token_ids": [1]', b'{"prompt": "\xff"}'):
        path.write_bytes(b'{"token_ids": [1]}\n\n' + line + b"\n")
        with pytest.raises(ValueError, match="line 3") as caught:
            Prompts(path, None, [])
        assert str(path) in str(caught.value)


def test_no_prompts_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no prompts"):
        Prompts(write_rows(tmp_path / "none.jsonl"), None, [])


def test_a_task_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text(
        "from traceage.capture.tasks import LowTokens\n"
        "short = LowTokens(10, [9], turns=1)\n"
        "def made(model_dir):\n"
        "    return LowTokens(len(str(model_dir)), [])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = write_model(tmp_path / "model", eos_token_id=None)
    assert load_task("my_tasks:short", model).reply(0, [[1]]) is None
    made = load_task("my_tasks:made", model)
    assert isinstance(made, LowTokens)
    assert made.vocab_size == len(str(model))
    built_in = load_task("low-tokens", model)
    assert isinstance(built_in, LowTokens)
    assert (built_in.vocab_size, built_in.stop_token_ids) == (40, [])
    for spec in ("my_tasks", "my_tasks:nothing", "no_such_module:x", "my_tasks:__name__"):
        with pytest.raises(ValueError, match="no task"):
            load_task(spec, model)
    with pytest.raises(ValueError, match="is no model"):
        load_task("low-tokens", tmp_path / "nowhere")
