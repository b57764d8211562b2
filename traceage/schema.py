"""The columns of the tables and their types, declared once.

`spans` has a row a run of sampled tokens of one label; everything else is derived from it.
"""

from __future__ import annotations

import polars as pl

SPANS: dict[str, pl.DataType] = {
    "step": pl.Int32(),
    "training_version": pl.Int32(),
    "kind": pl.String(),
    "subset": pl.String(),
    "shipped": pl.Boolean(),
    "env": pl.String(),
    "group_id": pl.String(),
    "episode_id": pl.String(),
    "trace_id": pl.String(),
    "agent": pl.String(),
    "trainable": pl.Boolean(),
    "node": pl.Int32(),
    "turn": pl.Int32(),
    "completion_tokens": pl.Int32(),
    "start": pl.Int32(),
    "end": pl.Int32(),
    "length": pl.Int32(),
    "label": pl.String(),
    "version": pl.Int32(),
    "mixed": pl.Boolean(),
    "branches": pl.Int32(),
    "has_run": pl.Boolean(),
    "policy_start": pl.Int32(),
    "policy_end": pl.Int32(),
    "reward": pl.Float64(),
    "timestamp": pl.Float64(),
    "file": pl.String(),
    "line": pl.Int64(),
}
"""The spans table.

- `step`: the batch that trained on the trace; for an episode that no batch took, the step at
  which it arrived.
- `training_version`: the policy version that batch trained; null where nothing trained.
- `kind` (`train`, `eval`), `subset` (`effective`, `all`): null where nothing tells.
- `shipped`: whether a batch took the trace; null where the layout does not tell.
- `node`: index in the trace's nodes; `turn`: how many sampled nodes come before it.
- `completion_tokens`: how many tokens were sampled for the node; null without a node.
- `start`, `end`, `length`: the run's place in the node's sampled tokens. Runs tile the node.
- `label`: as stored, null where the engine gave none; `version`: its integer, null for `default`.
- `mixed`: the completion carries more than one distinct label.
- `branches`: how many training samples hold the node.
- `has_run`, `policy_start`, `policy_end`: the record's `run` and the policies live while it ran.
- `reward`: weighted sum of the trace's scores; `timestamp`: seconds since the epoch.
- `file`, `line`: where it was read.

An empty completion, a trace without completions and an episode without traces are one row of
length 0 each (with `node`, or `trace_id` too, null), so that they can be counted.
"""

TOKENS: dict[str, pl.DataType] = {
    **{name: dtype for name, dtype in SPANS.items() if name not in ("start", "end", "length")},
    "branch": pl.Int32(),
    "branch_tokens": pl.Int32(),
    "index": pl.Int32(),
    "position": pl.Int32(),
    "age": pl.Int32(),
    "context_age": pl.Int32(),
    "token_id": pl.Int32(),
    "logprob": pl.Float32(),
    "advantage": pl.Float32(),
    "trainer_logprob": pl.Float32(),
    "reference_logprob": pl.Float32(),
    "entropy": pl.Float32(),
    "trainer_mismatch_kl": pl.Float32(),
    "is_content": pl.Boolean(),
}
"""The tokens table, a row a sampled token: the columns of its span, and

- `branch`, `branch_tokens`: with `weighting="branches"`, the index of the branch among the trace's
  leaves and how many tokens its `token_ids` have; null otherwise;
- `index`: place among the sampled tokens of its node; `position`: place in the `token_ids` of
  every branch that holds it;
- `age`: null without a version;
- `context_age`: the age of the oldest token that the token was conditioned on, that is, of the
  lowest version among the sampled tokens before it in its branch (those of its own completion and
  of all sampled nodes above it, in the same trace); null where none of them has a version. The
  token's own version plays no part, so one labelled `default`, or not at all, has a context age;
- `token_id`, and the streams that were stamped, annotated or exported; null where they were not.
  `trainer_mismatch_kl` is the mismatch KL that the trainer itself logged.
"""

RUN_COLUMNS = {
    **SPANS,
    "branch": TOKENS["branch"],
    "branch_tokens": TOKENS["branch_tokens"],
    "context_version": pl.Int32(),
}
"""What is known of a whole run: columns of either table, and the lowest version among the sampled
tokens before the run in its branch, from which `context_age` is made."""

COUNT = pl.Int64()
"""The type of every count of tokens, episodes, traces and nodes."""
