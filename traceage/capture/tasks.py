"""What episodes are made of: opening turns, replies, and a score, all as token ids.

A `Task` says what an episode starts with, what comes after each completion, and what the whole was
worth. One is built in, which a model without a tokenizer can learn; prompts can come from a file;
and any object of this shape will do.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

_COMPLETION = "\ufffccompletion\ufffc"
"""Stands for a completion where a chat template is asked what follows one."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that are put before a model: a prompt, or what a tool or a user answered."""

    role: Literal["system", "user", "tool"]
    token_ids: list[int]
    text: str = ""


class Task(Protocol):
    """What an orchestrator asks of a task. `index` is any integer from 0: examples may repeat."""

    name: str
    stop_token_ids: list[int]
    """Token ids that end a completion."""

    def start(self, index: int) -> list[Turn]:
        """The turns that open an episode of example `index`."""

    def reply(self, index: int, completions: Sequence[Sequence[int]]) -> Turn | None:
        """The turn after the last completion, or None: the episode is over."""

    def score(self, index: int, completions: Sequence[Sequence[int]]) -> float | None:
        """The reward of a whole episode; None where there is none."""

    def text(self, token_ids: Sequence[int]) -> str:
        """A completion as text, for the record's message; empty where there is no tokenizer."""


class LowTokens:
    """Sample tokens from the lowest quarter of the vocabulary: the reward is their share.

    It needs no tokenizer, a random model starts at a quarter, and a policy gradient learns it. An
    episode has `turns` completions with a short tool turn between them.

    >>> task = LowTokens(vocab_size=512, stop_token_ids=[511])
    >>> [turn.role for turn in task.start(0)], task.start(0) == task.start(0)
    (['user'], True)
    >>> task.score(0, [[1, 2, 300, 400], [5, 127, 128, 0]])
    0.625
    """

    name = "low-tokens"

    def __init__(self, vocab_size: int, stop_token_ids: list[int], turns: int = 3) -> None:
        self.vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids
        self.turns = turns

    def _turn(self, role: Literal["user", "tool"], *seed: int) -> Turn:
        generator = random.Random("-".join(map(str, seed)))
        count = generator.randint(8, 24)
        ids = [generator.randrange(self.vocab_size) for _ in range(count)]
        return Turn(role, [token for token in ids if token not in self.stop_token_ids])

    def start(self, index: int) -> list[Turn]:
        """A prompt of random tokens, the same for the same index."""
        return [self._turn("user", index)]

    def reply(self, index: int, completions: Sequence[Sequence[int]]) -> Turn | None:
        """Another random turn, until there were `turns` completions."""
        if len(completions) >= self.turns:
            return None
        return self._turn("tool", index, len(completions))

    def score(self, index: int, completions: Sequence[Sequence[int]]) -> float | None:
        """The share of low tokens among all that were sampled."""
        total = sum(len(completion) for completion in completions)
        low = sum(token < self.vocab_size // 4 for ids in completions for token in ids)
        return low / total if total else 0.0

    def text(self, token_ids: Sequence[int]) -> str:
        """Empty: there is no tokenizer."""
        return ""


class Prompts:
    """Examples from a JSON-lines file, one a line.

    `prompt` is a text or a list of chat messages, or `token_ids` gives the tokens themselves.
    `turns`, if any, are the user's later turns, texts or lists of tokens. Where `answer` is given,
    the reward is 1 if the last completion contains it and 0 if not.
    """

    def __init__(self, path: Path, tokenizer: Any | None, stop_token_ids: list[int]) -> None:
        self.name = path.name.partition(".")[0]
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.examples: list[tuple[list[Turn], list[Turn], str | None]] = []
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        self.examples.append(self._example(json.loads(line.decode())))
                    except (ValueError, TypeError) as error:
                        raise ValueError(f"{path}, line {number}: {error}") from error
        if not self.examples:
            raise ValueError(f"{path} holds no prompts")

    def _example(self, row: Any) -> tuple[list[Turn], list[Turn], str | None]:
        if not isinstance(row, dict) or not ("prompt" in row or "token_ids" in row):
            raise ValueError('an object with "prompt" or "token_ids" was expected')
        messages: list[dict[str, str]] = []
        if "token_ids" in row:
            first = self._turn(row["token_ids"])
        else:
            messages += _messages(row["prompt"])
            first = Turn("user", self._encode(self._chat(messages)), messages[-1]["content"])
        later = []
        turns = row.get("turns", [])
        if not isinstance(turns, list):
            raise ValueError(f"turns have to be a list of texts or lists of tokens, not {turns!r}")
        for turn in turns:
            if not isinstance(turn, str):
                later.append(self._turn(turn))
                continue
            # What the template puts between a completion's last token and the next one's first.
            messages += [{"role": "assistant", "content": _COMPLETION}, _user(turn)]
            between = self._chat(messages).rpartition(_COMPLETION)[2]
            later.append(Turn("user", self._encode(between), turn))
        answer = row.get("answer")
        if answer is not None:
            # Any completion contains the empty text, and none can be searched for a number.
            if not isinstance(answer, str) or not answer:
                raise ValueError(f"an answer has to be a text that is not empty, not {answer!r}")
            self._need_tokenizer("an answer")
        return [first], later, answer

    def _chat(self, messages: list[dict[str, str]]) -> str:
        tokenizer = self._need_tokenizer("a prompt of text")
        try:
            if tokenizer.chat_template is None:
                return "\n".join(message["content"] for message in messages)
            return str(
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            )
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"these messages make no prompt: {error!r}") from error

    def _encode(self, text: str) -> list[int]:
        tokenizer = self._need_tokenizer("a prompt of text")
        # A template writes the special tokens itself.
        special = tokenizer.chat_template is None
        return list(tokenizer.encode(text, add_special_tokens=special))

    def _turn(self, token_ids: Any) -> Turn:
        good = isinstance(token_ids, list) and all(type(k) is int and k >= 0 for k in token_ids)
        if not good or not token_ids:
            raise ValueError(f"token ids have to be a list of integers from 0, not {token_ids!r}")
        return Turn("user", token_ids)

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer, and the model has none; give token_ids, or add its "
                "tokenizer.json"
            )
        return self.tokenizer

    def _of(self, index: int) -> tuple[list[Turn], list[Turn], str | None]:
        return self.examples[index % len(self.examples)]

    def start(self, index: int) -> list[Turn]:
        """The prompt."""
        return self._of(index)[0]

    def reply(self, index: int, completions: Sequence[Sequence[int]]) -> Turn | None:
        """The next of the example's later turns."""
        later = self._of(index)[1]
        if len(completions) > len(later):
            return None
        turn = later[len(completions) - 1]
        # A completion that came to its end has sampled the token that closes it.
        last = completions[-1][-1:]
        if last and last[0] in self.stop_token_ids and turn.token_ids[:1] == list(last):
            return replace(turn, token_ids=turn.token_ids[1:])
        return turn

    def score(self, index: int, completions: Sequence[Sequence[int]]) -> float | None:
        """Whether the last completion contains the answer; None without one."""
        answer = self._of(index)[2]
        return None if answer is None else float(answer in self.text(completions[-1]))

    def text(self, token_ids: Sequence[int]) -> str:
        """The completion, decoded."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt as chat messages; the chat template judges all but the last one's text."""
    if isinstance(prompt, str):
        return [_user(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"a prompt has to be a text or a list of chat messages, not {prompt!r}")
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'a message has to be an object with a "role", not {message!r}')
    if not isinstance(prompt[-1].get("content"), str):
        raise ValueError(f'the last message has to have a text as "content": {prompt[-1]!r}')
    return prompt


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def load_task(spec: str, model_dir: Path) -> Task:
    """The task that a command line names.

    `low-tokens` is the built-in one, a path that ends in `.jsonl` a file of prompts, and
    `package.module:attribute` an object, or a callable that is given the model's directory.

    Raises:
        ValueError: there is no such task, or its file cannot be used.
    """
    if spec == LowTokens.name:
        return LowTokens(vocabulary_size(model_dir), stop_token_ids(model_dir))
    if spec.endswith(".jsonl"):
        return Prompts(Path(spec), load_tokenizer(model_dir), stop_token_ids(model_dir))
    module, colon, attribute = spec.partition(":")
    if not colon:
        raise ValueError(
            f"no task {spec!r}: it is low-tokens, a .jsonl file, or package.module:attribute"
        )
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no task {spec!r}: {error}") from error
    if isinstance(found, type) or not hasattr(found, "start"):
        if not callable(found):
            raise ValueError(f"no task {spec!r}: it is neither a task nor makes one, but {found!r}")
        found = found(model_dir)
    task: Task = found
    return task


def _config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{model_dir} is no model: {error}") from error
    return config


def vocabulary_size(model_dir: Path) -> int:
    """How many token ids a model has."""
    config = _config(model_dir)
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def stop_token_ids(model_dir: Path) -> list[int]:
    """The token ids at which a model ends a completion: its generation config's, else its own."""
    path = model_dir / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    ids = generation.get("eos_token_id", _config(model_dir).get("eos_token_id"))
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def has_tokenizer(model_dir: Path) -> bool:
    """Whether a model comes with a tokenizer."""
    return any((model_dir / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(model_dir: Path) -> Any | None:
    """The model's tokenizer, or None where it has none."""
    if not has_tokenizer(model_dir):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)
