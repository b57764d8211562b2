"""The trainer against a plain second writing of its formulas, and what it leaves on disk."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from engines import Policies
from safetensors.torch import load_file
from test_verifiers_client import write_tokenizer
from transformers import AutoModelForCausalLM

from traceage.capture.tasks import load_tokenizer, stop_token_ids
from traceage.capture.trainer import MAX_RATIO, Sample, Scored, Trainer

SAMPLES = [
    # A prompt, a completion, a turn of the task, a completion.
    Sample("a", 0, [5, 6, 7, 8, 9, 10, 11], [False, False, True, True, False, True, True],
           [-6.0, -6.3, -6.2, -5.9], 0.5),
    # A completion that begins the branch: nothing predicts its first token.
    Sample("b", 0, [300, 301, 302], [True, True, True], [-6.1, -9.0, -6.2], -0.25),
    # Nothing was sampled.
    Sample("c", 1, [4, 4], [False, False], [], 1.0),
]  # fmt: skip


def by_hand(policy: Path, sample: Sample) -> tuple[Scored, torch.Tensor, int]:
    """Streams, the sum that the loss takes from this sample, and its trained tokens."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    logits = model(torch.tensor([sample.token_ids])).logits[0]
    engine = iter(sample.logprobs)
    streams: list[list[float | None]] = [[], [], []]
    total, tokens = torch.tensor(0.0), 0
    for k, (token, sampled) in enumerate(zip(sample.token_ids, sample.mask, strict=True)):
        sampled_by = next(engine) if sampled else 0.0
        if not sampled or k == 0:
            for stream in streams:
                stream.append(None)
            continue
        probabilities = torch.softmax(logits[k - 1].detach().double(), -1)
        logprob = float(probabilities[token].log())
        entropy = -sum(float(p) * math.log(float(p)) for p in probabilities)
        ratio = logprob - sampled_by
        for stream, value in zip(
            streams, (logprob, entropy, math.exp(ratio) - ratio - 1), strict=True
        ):
            stream.append(value)
        total = total - min(math.exp(ratio), MAX_RATIO) * sample.advantage * logprob
        tokens += 1
    return Scored(sample.trace_id, sample.branch, *streams), total, tokens


def test_it_scores_the_policy_that_engines_have(tiny: Policies, tmp_path: Path) -> None:
    trainer = Trainer(tiny.model, tmp_path, learning_rate=0.01)
    assert (tmp_path / "step_0" / "STABLE").exists()
    scored, metrics = trainer.train(1, SAMPLES)
    again, _ = trainer.train(2, SAMPLES)
    for step, streams in ((0, scored), (1, again)):
        expected = [by_hand(tmp_path / f"step_{step}", sample) for sample in SAMPLES]
        for (hand, _, _), ours in zip(expected, streams, strict=True):
            assert (ours.trace_id, ours.branch) == (hand.trace_id, hand.branch)
            for name in ("trainer_logprobs", "entropies", "mismatch_kl"):
                got, wanted = getattr(ours, name), getattr(hand, name)
                assert [value is None for value in got] == [value is None for value in wanted]
                assert [v for v in got if v is not None] == pytest.approx(
                    [v for v in wanted if v is not None], abs=2e-4
                )
        if step == 0:
            loss = sum(float(total) for _, total, _ in expected)
            assert metrics["loss"] == pytest.approx(loss / sum(n for *_, n in expected), abs=1e-4)
    assert scored[0].trainer_logprobs != again[0].trainer_logprobs


def test_a_step_goes_down_the_loss(tiny: Policies, tmp_path: Path) -> None:
    trainer = Trainer(tiny.model, tmp_path, learning_rate=0.003)
    rewarded = Sample("a", 0, [5, 6, 7], [False, True, True], [-6.2, -6.2], 1.0)
    first, _ = trainer.train(1, [rewarded])
    for step in range(2, 6):
        last, _ = trainer.train(step, [rewarded])
    for before, after in zip(first[0].trainer_logprobs, last[0].trainer_logprobs, strict=True):
        assert (before is None and after is None) or (before or 0) < (after or 0) - 0.5


def test_checkpoints(tiny: Policies, tmp_path: Path) -> None:
    trainer = Trainer(tiny.model, tmp_path, learning_rate=0.01)
    trainer.train(1, SAMPLES)
    model = load_file(tiny.model / "model.safetensors")
    for step in (0, 1):
        policy = load_file(tmp_path / f"step_{step}" / "model.safetensors")
        assert {name: (t.shape, t.dtype) for name, t in policy.items()} == {
            name: (t.shape, t.dtype) for name, t in model.items()
        }
    assert all(torch.equal(model[n], t) for n, t in load_file(
        tmp_path / "step_0" / "model.safetensors"
    ).items())  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0", "step_1"]

    resumed = Trainer(tiny.model, tmp_path, step=1, learning_rate=0.01)
    scored, _ = resumed.train(2, SAMPLES)
    hand, _, _ = by_hand(tmp_path / "step_1", SAMPLES[0])
    assert [x for x in scored[0].trainer_logprobs if x is not None] == pytest.approx(
        [x for x in hand.trainer_logprobs if x is not None], abs=2e-4
    )


def test_a_checkpoint_is_a_model(tiny: Policies, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    write_tokenizer(model)
    (model / "generation_config.json").write_text('{"eos_token_id": [511, 510]}')
    Trainer(model, tmp_path / "policies", learning_rate=0.01)
    checkpoint = tmp_path / "policies" / "step_0"
    assert stop_token_ids(checkpoint) == [511, 510]
    words, again = load_tokenizer(model), load_tokenizer(checkpoint)
    assert words is not None
    assert again is not None
    assert again.chat_template == words.chat_template is not None


def test_a_checkpoint_is_replaced_whole(tiny: Policies, tmp_path: Path) -> None:
    trainer = Trainer(tiny.model, tmp_path, learning_rate=0.01)
    first = load_file(tmp_path / "step_0" / "model.safetensors")
    # What a trainer that was killed while it wrote leaves behind.
    (tmp_path / ".step_1.part").mkdir()
    (tmp_path / ".step_1.part" / "model.safetensors").write_bytes(b"half")
    trainer.train(1, SAMPLES)
    (tmp_path / "step_1" / "of_the_one_before").touch()
    trainer.train(1, SAMPLES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0", "step_1"]
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step_1").iterdir()}
    assert "of_the_one_before" not in files
    assert max(files, key=lambda name: files[name]) == "STABLE"
    # What is written is the rounding of the weights that are trained, and those move by less.
    weights = dict(
        zip((n for n, _ in trainer.model.named_parameters()), trainer.master, strict=True)
    )
    second = load_file(tmp_path / "step_1" / "model.safetensors")
    assert second.keys() == weights.keys()
    for name, tensor in second.items():
        assert torch.equal(tensor, weights[name].bfloat16())
        assert not torch.equal(tensor.float(), weights[name])
        assert not torch.equal(tensor, first[name])


def test_a_batch_of_nothing(tiny: Policies, tmp_path: Path) -> None:
    trainer = Trainer(tiny.model, tmp_path, learning_rate=0.01)
    scored, metrics = trainer.train(1, [SAMPLES[2]])
    assert scored == [Scored("c", 1, [None] * 2, [None] * 2, [None] * 2)]
    assert metrics["mismatch_kl/mean"] is None
    assert (tmp_path / "step_1" / "STABLE").exists()
