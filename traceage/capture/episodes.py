"""A multi-turn episode: a task's turns in, sampled completions out, as a `verifiers` record.

The record is a chain of nodes. A turn of the task is a node of its own; a completion is a node
whose tokens were all sampled, with a logprob a token and the engine's `weight_versions` spans as
they came. The prompt of a completion is every token before it, unchanged.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from traceage.capture.fleet import Completion
from traceage.capture.tasks import Task, Turn

Record = dict[str, Any]


class Generate(Protocol):
    """Samples a completion of a prompt of token ids; `Fleet.generate` does."""

    def __call__(
        self, token_ids: list[int], max_tokens: int, stop_token_ids: list[int]
    ) -> Awaitable[Completion]: ...


@dataclass
class Rollout:
    """One episode from dispatch to arrival, and what the orchestrator knows of it."""

    index: int
    """Which example of the task."""
    group: str
    """The episodes of one example that are compared with each other."""
    dispatch_step: int
    """The batch that was being collected when it was dispatched."""
    policy_start: int
    """The policy version that engines served at dispatch."""
    episode_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    trace_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    dispatch_time: float = field(default_factory=time.time)
    policy_end: int | None = None
    reward: float | None = None
    record: Record = field(default_factory=dict)

    @property
    def nodes(self) -> list[Record]:
        """The nodes of its one trace, from the root to the leaf."""
        nodes: list[Record] = self.record["traces"][0]["nodes"]
        return nodes


async def roll_out(
    rollout: Rollout,
    task: Task,
    generate: Generate,
    version: Callable[[], int],
    *,
    run_id: str,
    max_tokens: int,
    max_model_len: int,
) -> Rollout:
    """Run an episode to its end and fill in `rollout`'s record, reward and last policy version.

    The episode ends when the task has no further turn, or when the next one leaves no room in the
    model's context; `stop_condition` tells which.
    """
    nodes: list[Record] = []
    prompt: list[int] = []
    completions: list[list[int]] = []
    started = time.time()
    model_seconds = 0.0
    turns: list[Turn] = task.start(rollout.index)
    while True:
        for turn in turns:
            prompt += turn.token_ids
            nodes.append(_node(nodes, turn.role, turn.text, turn.token_ids, sampled=False))
        room = min(max_tokens, max_model_len - len(prompt))
        if room < 1:
            stop_condition = "context_length"
            break
        asked = time.time()
        completion = await generate(prompt, room, task.stop_token_ids)
        model_seconds += time.time() - asked
        prompt = prompt + completion.token_ids
        completions.append(completion.token_ids)
        node = _node(
            nodes, "assistant", task.text(completion.token_ids), completion.token_ids, sampled=True
        )
        node["logprobs"] = completion.logprobs
        if completion.weight_versions is not None:
            node["weight_versions"] = completion.weight_versions
        nodes.append(node)
        reply = task.reply(rollout.index, completions)
        if reply is None:
            stop_condition = "task_completed"
            break
        turns = [reply]
    ended = time.time()

    rollout.policy_end = version()
    rollout.reward = task.score(rollout.index, completions)
    what = {"type": task.name, "data": {"idx": rollout.index}}
    policy = {"start": rollout.policy_start, "end": rollout.policy_end}
    work = {"type": "train", "step": rollout.dispatch_step, "policy": policy}
    trace: Record = {
        "version": 1,
        "id": rollout.trace_id,
        "task": what,
        "agent": {"name": "agent", "trainable": True, "config": {}},
        "nodes": nodes,
        "rewards": {},
        "info": {},
        "is_completed": True,
        "ok": True,
        "errors": [],
        "stop_condition": stop_condition,
        "timing": {
            "start": started,
            "agent": {"start": started, "end": ended, "model": {"duration": model_seconds}},
        },
    }
    if rollout.reward is not None:
        trace["rewards"][task.name] = {"score": rollout.reward, "weight": 1.0}
    rollout.record = {
        "id": rollout.episode_id,
        "env": {"id": task.name, "name": task.name},
        "task": what,
        "group": {"id": rollout.group},
        "run": {"type": "train", "id": run_id, "work": work},
        "ok": True,
        "errors": [],
        "traces": [trace],
    }
    return rollout


def _node(
    nodes: list[Record], role: str, text: str, token_ids: list[int], *, sampled: bool
) -> Record:
    node: Record = {"parent": len(nodes) - 1} if nodes else {}
    message: Record = {"role": role, "content": text}
    if role == "tool":
        message["tool_call_id"] = f"turn-{len(nodes)}"
    node |= {
        "message": message,
        "sampled": sampled,
        "timestamp": time.time(),
        "token_ids": token_ids,
        "mask": [sampled] * len(token_ids),
    }
    return node
