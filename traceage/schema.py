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

AGE = pl.Int32()
TOKENS = pl.Int64()
