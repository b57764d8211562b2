"""Prompts of text, with a real tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from engines import Policies
from test_verifiers_client import write_tokenizer

from traceage.capture.tasks import Turn, load_task


def test_prompts_of_text(tiny: Policies, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    write_tokenizer(model)
    rows = [
        {"prompt": "t1 t2", "answer": "t7 t8", "turns": ["t3"]},
        {"prompt": [{"role": "system", "content": "t4"}, {"role": "user", "content": "t5"}]},
    ]
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(str(prompts), model)
    # A turn is its words between 509 and 511, and 509 asks for the next one.
    assert task.start(0) == [Turn("user", [509, 1, 2, 511, 509], "t1 t2")]
    assert task.start(1) == [Turn("user", [509, 4, 511, 509, 5, 511, 509], "t5")]
    # A completion that sampled its end is followed by what comes after it, one that was cut off
    # is ended first.
    assert task.reply(0, [[6, 511]]) == Turn("user", [509, 3, 511, 509], "t3")
    assert task.reply(0, [[6]]) == Turn("user", [511, 509, 3, 511, 509], "t3")
    assert task.reply(1, [[6]]) is None
    assert task.text([6, 7, 511]) == "t6 t7"
    assert task.score(0, [[1], [6, 7, 8, 511]]) == 1.0
    assert task.score(0, [[7, 8], [6, 8, 7]]) == 0.0
    assert task.score(1, [[7]]) is None
    assert task.stop_token_ids == [511]


def test_a_prompt_that_the_template_refuses_is_named(tiny: Policies, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    write_tokenizer(model)
    (model / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text('{"token_ids": [1]}\n{"prompt": "t1"}\n')
    with pytest.raises(ValueError, match=r"line 2: these messages make no prompt.*no such role"):
        load_task(str(prompts), model)
