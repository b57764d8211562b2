"""A small policy-gradient trainer: shipped batches in, `step_<N>` checkpoints and streams out.

Batch `s` is scored under v`s-1` exactly as engines have it: the weights rounded to bfloat16, in a
float32 forward pass. The loss is a policy gradient with truncated importance weights,

    loss = -mean over sampled tokens of min(ratio, max_ratio) * advantage * logprob

where `ratio = exp(trainer logprob - engine logprob)` is held constant (Ionides, "Truncated
importance sampling", 2008; its use against the mismatch of engine and trainer is Yao et al., "Your
efficient RL framework secretly brings you off-policy RL training", 2025). Master weights stay in
float32, and Adam moves them by gradients clipped to a norm of 1; what it writes as v`s` is their
rounding.
"""

from __future__ import annotations

import copy
import math
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_RATIO = 2.0
"""Where importance weights are truncated."""
MAX_GRAD_NORM = 1.0
COMPANIONS = ("*token*", "chat_template*", "vocab.*", "merges.txt", "generation_config.json")
"""Files of a model that its checkpoints need to be models too: how text is read, where it ends."""


@dataclass(frozen=True)
class Sample:
    """One training sample: a branch of a shipped trace."""

    trace_id: str
    branch: int
    token_ids: list[int]
    mask: list[bool]
    """Which of them were sampled."""
    logprobs: list[float]
    """The engine's, one a sampled token."""
    advantage: float


@dataclass(frozen=True)
class Scored:
    """What the trainer says of a sample: streams as long as its token ids.

    None where a token was not sampled, and at the first position, which nothing predicts.
    """

    trace_id: str
    branch: int
    trainer_logprobs: list[float | None]
    entropies: list[float | None]
    """Of the distribution each token was drawn from, in nats."""
    mismatch_kl: list[float | None]
    """`exp(r) - r - 1` with `r` = trainer logprob - engine logprob."""


class Trainer:
    """A model in training. `policies` receives its checkpoints, `step` is the one it starts from.

    A trainer that starts from a checkpoint starts with fresh Adam moments and float32 weights that
    equal the rounded ones: a run resumed is not bit for bit the run undisturbed.
    """

    def __init__(
        self, model_dir: Path, policies: Path, *, step: int = 0, learning_rate: float, seed: int = 0
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # they are of reading and writing, at every step
        torch.manual_seed(seed)
        torch.set_num_threads(1)  # the engines need the other cores
        self.policies = policies
        self.model_dir = model_dir
        source = policies / f"step_{step}" if step else model_dir
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self.model.eval()  # no dropout: a sample is scored as the engine sampled it
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.master = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.Adam(self.master, lr=learning_rate)
        self._round()
        if not (policies / f"step_{step}" / "STABLE").exists():
            self.save(step)

    def _round(self) -> None:
        """Give the model the weights that engines have: the master's, rounded to bfloat16."""
        import torch

        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.master, strict=True):
                parameter.copy_(master.bfloat16())

    def save(self, step: int) -> Path:
        """Write the policy as `step_<step>`, whole before it has its name, `STABLE` last."""
        import torch
        from safetensors.torch import save_file

        target = self.policies / f"step_{step}"
        part = self.policies / f".step_{step}.part"
        for old in (part, target):
            if old.exists():
                # The marker goes first, so that nobody takes what is being removed.
                (old / "STABLE").unlink(missing_ok=True)
                shutil.rmtree(old)
        every = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in self.model.named_parameters()}
        state = {n: t.bfloat16() for n, t in self.model.state_dict().items() if n not in tied}
        part.mkdir(parents=True)
        save_file(state, part / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self.model.config)
        config.dtype = torch.bfloat16
        config.save_pretrained(part)
        for pattern in COMPANIONS:
            for file in self.model_dir.glob(pattern):
                shutil.copy(file, part)
        part.rename(target)
        (target / "STABLE").touch()
        return target

    def train(
        self, step: int, samples: Sequence[Sample]
    ) -> tuple[list[Scored], dict[str, float | None]]:
        """Train batch `step` on the policy before it, and write the policy that it makes.

        Returns what each sample scored under the policy that was trained, and the step's means over
        sampled tokens: `loss`, `grad_norm`, `entropy/mean`, `mismatch_kl/mean`,
        `importance_ratio/mean`.
        """
        import torch

        tokens = sum(sum(sample.mask[1:]) for sample in samples)
        scored, sums = [], [0.0] * 4
        for parameter in self.parameters:
            parameter.grad = None
        for sample in samples:
            logprobs, entropies, positions = self._score(sample)
            engine = torch.tensor(sample.logprobs)[-len(positions) :] if positions else logprobs
            log_ratio = logprobs - engine
            ratio = log_ratio.exp().clamp(max=MAX_RATIO).detach()
            loss = -(ratio * sample.advantage * logprobs).sum() / max(tokens, 1)
            loss.backward()
            mismatch = (log_ratio.exp() - log_ratio - 1).detach()
            scored.append(_spread(sample, positions, logprobs.detach(), entropies, mismatch))
            for k, values in enumerate((entropies, mismatch, log_ratio.detach().exp())):
                sums[k + 1] += float(values.sum())
            sums[0] += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM))
        if math.isfinite(norm):
            for parameter, master in zip(self.parameters, self.master, strict=True):
                master.grad = parameter.grad
            self.optimizer.step()
        self._round()
        self.save(step)
        names = ("entropy/mean", "mismatch_kl/mean", "importance_ratio/mean")
        means = {
            name: total / tokens if tokens else None
            for name, total in zip(names, sums[1:], strict=True)
        }
        return scored, {
            "loss": sums[0],
            "grad_norm": norm if math.isfinite(norm) else None,
            **means,
        }

    def _score(self, sample: Sample) -> tuple[Any, Any, list[int]]:
        """Logprob and entropy at each sampled position but the first of the branch."""
        import torch

        positions = [k for k, sampled in enumerate(sample.mask) if sampled and k > 0]
        ids = torch.tensor(sample.token_ids)
        logits = self.model(ids[None]).logits[0, [k - 1 for k in positions]]
        logprobs = logits.log_softmax(-1)
        with torch.no_grad():
            entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, ids[positions][:, None])[:, 0], entropies, positions


def _spread(sample: Sample, positions: list[int], *streams: Any) -> Scored:
    """Values at some positions as streams over all of them."""
    spread = []
    for values in streams:
        stream: list[float | None] = [None] * len(sample.token_ids)
        for position, value in zip(positions, values.tolist(), strict=True):
            stream[position] = value
        spread.append(stream)
    return Scored(sample.trace_id, sample.branch, *spread)


_trainer: Trainer | None = None


def start_trainer(
    model_dir: Path, policies: Path, step: int, learning_rate: float, seed: int
) -> None:
    """Make the trainer of this process; Ctrl-C is left to the process that started it."""
    global _trainer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _trainer = Trainer(model_dir, policies, step=step, learning_rate=learning_rate, seed=seed)


def is_ready() -> bool:
    """Whether this process has a trainer, and so the boot policy is written."""
    return _trainer is not None


def train(step: int, samples: Sequence[Sample]) -> tuple[list[Scored], dict[str, float | None]]:
    """`Trainer.train` of this process's trainer."""
    assert _trainer is not None, "start_trainer is the initializer of this process"
    return _trainer.train(step, samples)
