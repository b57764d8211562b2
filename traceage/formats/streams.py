"""What a node stores a token -> arrays that stand one value a sampled token.

A record keeps some streams per token of `token_ids` (`mask`, `is_content`), others per *sampled*
token (`logprobs` and what a trainer stamped). In a table of tokens all of them stand beside the
sampled tokens. A stream that is absent or empty was not stamped: its values are null, here NaN
for floats and -1 for integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Stream = NDArray[Any]  # float32, or int32 for the streams of `PLACED`

FLOATS = {
    "logprob": "logprobs",
    "advantage": "advantages",
    "trainer_logprob": "trainer_logprobs",
    "reference_logprob": "reference_logprobs",
    "entropy": "entropies",
    "trainer_mismatch_kl": "mismatch_kl",
}
"""Column of the tokens table -> key of a node, for the streams that stand per sampled token."""

PLACED = ("token_id", "position", "is_content")
"""Columns that are known from the place of a token in `token_ids`."""

STREAMS = (*PLACED, *FLOATS)

ANNOTATED = frozenset(
    {"advantages", "trainer_logprobs", "reference_logprobs", "entropies", "mismatch_kl"}
)
"""Node keys that a trace store may hold as annotations."""


def keys_of(streams: Iterable[str], annotated: bool) -> frozenset[str]:
    """The per-token keys of a node that have to be decoded for `streams`.

    `annotated`: side files may hold streams of a branch, which have to be cut at its nodes.
    """
    streams = frozenset(streams)
    keys = {FLOATS[name] for name in streams if name in FLOATS}
    if streams.intersection(PLACED) or (annotated and keys & ANNOTATED):
        keys |= {"token_ids", "mask"}
    if "is_content" in streams:
        keys.add("is_content")
    return frozenset(keys)


def mask_of(node: Any) -> NDArray[np.bool_] | None:
    """Which tokens of a node the model sampled; None where the record does not tell.

    Raises `ValueError` when mask and token ids are not parallel.
    """
    ids = node.token_ids
    if not ids:
        return None
    if node.mask:
        if len(node.mask) != len(ids):
            raise ValueError(f"mask has {len(node.mask)} entries for {len(ids)} token_ids")
        return np.array(node.mask, np.bool_)
    # Without a mask there may be as many ids as sampled tokens, however those are counted.
    sampled = len(node.logprobs) if node.logprobs else 0
    if not sampled and node.weight_versions:
        sampled = max(span.end for span in node.weight_versions)
    return np.ones(len(ids), np.bool_) if sampled == len(ids) else None


def placed(
    node: Any, mask: NDArray[np.bool_] | None, tokens: int, before: int, streams: Iterable[str]
) -> dict[str, Stream]:
    """`token_id`, `position` and `is_content` of the sampled tokens of a node.

    `before`: the tokens of its branch that come before the node.
    Raises `ValueError` when `is_content` and token ids are not parallel.
    """
    at = None if mask is None else np.flatnonzero(mask)
    if at is not None and len(at) != tokens:
        at = None
    made: dict[str, Stream] = {}
    for name in PLACED:
        if name not in streams:
            continue
        values: NDArray[np.int32] | None = None
        if at is not None and name == "token_id":
            values = np.array(node.token_ids, np.int32)[at]
        elif at is not None and name == "position":
            values = (at + before).astype(np.int32)
        elif at is not None and mask is not None and name == "is_content" and node.is_content:
            if len(node.is_content) != len(mask):
                raise ValueError(f"is_content has {len(node.is_content)} entries, mask {len(mask)}")
            values = np.array(node.is_content, np.int32)[at]
        made[name] = np.full(tokens, -1, np.int32) if values is None else values
    return made


def per_sampled(values: Any, tokens: int) -> NDArray[np.float32]:
    """A stream that stands per sampled token; NaN where a value, or all of it, is absent.

    Raises `ValueError` when it is not as long as the sampled tokens are many, or no numbers.
    """
    if values is None or len(values) == 0:
        return np.full(tokens, np.nan, np.float32)
    if len(values) != tokens:
        raise ValueError(f"{len(values)} values for {tokens} sampled tokens")
    try:
        return np.asarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a list of numbers: {error}") from None


def lengths_of(nodes: Sequence[Any]) -> list[int]:
    """How many tokens each node adds to its branch."""
    return [len(node.token_ids or ()) for node in nodes]


def before_of(parents: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """How many tokens of its branch come before each node; a parent comes before its child."""
    before: list[int] = []
    for parent in parents:
        before.append(0 if parent < 0 else before[parent] + lengths[parent])
    return before
