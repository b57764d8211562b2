"""The trainer and the built-in task together, without an engine: the reward rises."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from traceage.capture.tasks import LowTokens
from traceage.capture.tiny_model import make_tiny_model
from traceage.capture.trainer import Sample, Trainer

GROUP, GROUPS, TOKENS = 8, 4, 32


def sample_group(
    model: Any, task: LowTokens, index: int, generator: torch.Generator
) -> list[Sample]:
    """A group of one-turn episodes that `model` samples; advantages are over the group's mean."""
    prompt = task.start(index)[0].token_ids
    tokens, cache = torch.tensor([prompt] * GROUP), DynamicCache()
    columns, logprobs = [], []
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            columns.append(tokens)
            logprobs.append(logits.log_softmax(-1).gather(1, tokens))
    completions = torch.cat(columns, 1).tolist()
    rewards = [float(task.score(index, [completion]) or 0.0) for completion in completions]
    mask = [False] * len(prompt) + [True] * TOKENS
    return [
        Sample(f"{index}-{k}", 0, prompt + ids, mask, engine, reward - fmean(rewards))
        for k, (ids, engine, reward) in enumerate(
            zip(completions, torch.cat(logprobs, 1).tolist(), rewards, strict=True)
        )
    ]


# Over six seeds (fresh) and ten (stale) it ended at 0.66 or more; older samples learn slower.
@pytest.mark.parametrize(("lag", "steps"), [(0, 16), (2, 24)])
def test_the_reward_rises(tmp_path: Path, lag: int, steps: int) -> None:
    tiny = make_tiny_model(tmp_path / "model")
    task = LowTokens(512, [511], turns=1)
    trainer = Trainer(tiny, tmp_path / "policies", learning_rate=0.01)
    generator = torch.Generator().manual_seed(0)
    rewards, mismatch = [], []
    for step in range(1, steps + 1):
        policy = tmp_path / "policies" / f"step_{max(0, step - 1 - lag)}"
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
        batch = [
            sample
            for index in range(step * GROUPS, (step + 1) * GROUPS)
            for sample in sample_group(model, task, index, generator)
        ]
        completions = [sample.token_ids[-TOKENS:] for sample in batch]
        rewards.append(task.score(0, completions) or 0.0)
        _, metrics = trainer.train(step, batch)
        mismatch.append(metrics["mismatch_kl/mean"] or 0.0)
    assert fmean(rewards[:3]) == pytest.approx(0.25, abs=0.05)
    assert fmean(rewards[-3:]) > 0.45
    # The same weights in the same arithmetic agree; older ones do not.
    if lag:
        assert fmean(mismatch[lag:]) > 1e-3
    else:
        assert max(map(abs, mismatch)) < 1e-6
