r"""A line of JSON -> the same line without the long arrays nobody asked about.

Three quarters of a stored trace are per-token arrays: token ids, logprobs, masks. A question about
spans needs of all that only how many entries of a mask are true. So before a line is decoded its
arrays are cut out with `bytes.find`, at the speed of memory, and each mask is replaced by its
count; what is left is decoded as usual.

Why that is safe on text that was not parsed: inside a JSON string every quote is escaped. A quote
that no backslash precedes therefore opens or closes a string, and `"token_ids":[` with such a first
quote can only be a key and the start of its array: were that quote a closing one, the bare word
after it would be no JSON. Up to the next quote there is no string, so every bracket before it is a
real one, and the array ends at one of them. Were it not the chosen one, the brackets that are left
would not match (an object that is open there would need a key, hence a quote), and the decoder
refuses what is left. Whoever decodes a squeezed line has to fall back to the original then.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

MASK_COUNT = "mask#"
"""The key that takes the place of a squeezed `mask`: its value is how many entries are true."""

ARRAYS = (
    "mask",
    "token_ids",
    "logprobs",
    "is_content",
    "advantages",
    "trainer_logprobs",
    "reference_logprobs",
    "entropies",
    "mismatch_kl",
)
"""The keys of a node that hold an entry a token."""


@cache
def arrays_but(keep: frozenset[str] = frozenset()) -> re.Pattern[bytes]:
    """A pattern for the start of each array that is to be cut out: all but those to `keep`."""
    keys = "|".join(key for key in ARRAYS if key not in keep)
    return re.compile(rb'"(?:' + keys.encode() + rb')"\s*:\s*\[')


ALL_ARRAYS = arrays_but()
_TRUES = b"true," * 65_536
_NEAR = 24
"""An array ends, as a rule, within so many bytes of the next quote."""
_BACKSLASH, _CLOSE, _T, _F, _A = b"\\]tfa"


def squeeze(
    data: bytes | bytearray,
    start: int = 0,
    end: int | None = None,
    arrays: re.Pattern[bytes] = ALL_ARRAYS,
) -> bytes:
    """The line `data[start:end]` with each per-token array reduced to `[0]`, each mask to a count.

    An empty array stays empty, so that it can still be told from one that held something.
    `arrays` is a pattern of `arrays_but`: which arrays are meant.

    >>> squeeze(b'{"mask":[false,true,true],"logprobs":[-0.1,-0.2],"token_ids":[]}')
    b'{"mask#":2,"logprobs":[0],"token_ids":[]}'
    >>> squeeze(rb'{"content":"say \\"mask\\":[true]"}')
    b'{"content":"say \\\\"mask\\\\":[true]"}'
    """
    if end is None:
        end = len(data)
    search, find = arrays.search, data.find
    view = memoryview(data)
    kept: list[bytes | memoryview] = []
    done = at = start
    while (match := search(data, at, end)) is not None:
        key, at = match.span()
        # The array holds no quote, so its bracket is the first one before the next quote; as a
        # rule it stands close before that.
        quote = find(b'"', at, end)
        close = quote - 2
        if quote < 0:
            quote = end
        if close < at or data[close] != _CLOSE:
            close = find(b"]", max(at, quote - _NEAR), quote)
        if close < 0:
            close = find(b"]", at, quote)
        if close <= at or data[key - 1] == _BACKSLASH:
            continue
        if data[key + 2] == _A:  # of all these keys, only `mask` has it there
            count = _count_true(data, at, close)
            if count < 0:
                continue
            kept.append(view[done:key])
            kept.append(b'"mask#":%d' % count)
            done = at = close + 1
        else:
            kept.append(view[done:at])
            kept.append(b"0")
            done = at = close
    if not kept:
        return bytes(data[start:end])
    kept.append(view[done:end])
    return b"".join(kept)


def _count_true(data: bytes | bytearray, start: int, end: int) -> int:
    """How many entries of the mask in `data[start:end]` are true; -1 when they are no booleans."""
    first = data.find(b"t", start, end)
    scaffold = end if first < 0 else first
    if data[start] not in (_T, _F) or data.find(b"]", start, scaffold) >= 0:
        return -1
    if first < 0:
        return 0
    # Nearly every mask is a scaffold of falses, then trues to its end: one comparison says so.
    size = end - first
    if size % 5 == 4 and size <= len(_TRUES) and data.startswith(_TRUES[:size], first):
        return (size + 1) // 5
    if data.find(b"]", first, end) >= 0:
        return -1
    letters = np.frombuffer(data, np.uint8, size, first)
    return int(np.count_nonzero(letters == _T))
