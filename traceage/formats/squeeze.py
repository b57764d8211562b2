r"""A line of JSON -> the same line without the long arrays nobody asked about.

Three quarters of a stored trace are per-token arrays: token ids, logprobs, masks. A question about
spans needs of all that only how many entries of a mask are true. So before a line is decoded its
arrays are cut out with `bytes.find`, at the speed of memory, and each mask is replaced by its
count; what is left is decoded as usual.

Why that is safe on text that was not parsed: inside a JSON string every quote is escaped. A quote
that no backslash precedes therefore opens or closes a string, and `"token_ids":[` with such a first
quote can only be a key and the start of its array: were that quote a closing one, the bare word
after it would be no JSON. Where the array, up to the first `]`, holds no quote, it holds no string,
so that bracket is a real one; and were it the end of a nested array, what is left has one bracket
too many and is refused by the decoder. Whoever decodes a squeezed line has to fall back to the
original when the decoder refuses it.
"""

from __future__ import annotations

import re

import numpy as np

MASK_COUNT = "mask#"
"""The key that takes the place of a squeezed `mask`: its value is how many entries are true."""

_ARRAY = re.compile(
    rb'"(mask|token_ids|logprobs|is_content|advantages|trainer_logprobs|reference_logprobs'
    rb'|entropies)"\s*:\s*\['
)
_COUNT_KEY = b'"' + MASK_COUNT.encode() + b'":'
_TRUE = b"true,"
_QUOTE, _BACKSLASH, _T, _F = b'"'[0], b"\\"[0], b"t"[0], b"f"[0]


def squeeze(line: bytes) -> bytes:
    """`line` with each per-token array reduced to `[0]` and each mask to its count of trues.

    An empty array stays empty, so that it can still be told from one that held something.

    >>> squeeze(b'{"mask":[false,true,true],"logprobs":[-0.1,-0.2],"token_ids":[]}')
    b'{"mask#":2,"logprobs":[0],"token_ids":[]}'
    >>> squeeze(rb'{"content":"say \\"mask\\":[true]"}')
    b'{"content":"say \\\\"mask\\\\":[true]"}'
    """
    kept: list[bytes | memoryview] = []
    view = memoryview(line)
    done = at = 0
    while (match := _ARRAY.search(line, at)) is not None:
        key, start = match.start(), match.end()
        at = start
        end = line.find(b"]", start)
        if end <= start or line[key - 1] == _BACKSLASH or line.find(b'"', start, end) >= 0:
            continue
        if match.group(1) == b"mask":
            if line[start] not in (_T, _F):
                continue
            kept += (view[done:key], _COUNT_KEY, b"%d" % _count_true(line, start, end))
            done = at = end + 1
        else:
            kept += (view[done:start], b"0")
            done = at = end
    if not kept:
        return line
    kept.append(view[done:])
    return b"".join(kept)


def _count_true(line: bytes, start: int, end: int) -> int:
    """How many entries of the mask in `line[start:end]` are true."""
    first = line.find(b"t", start, end)
    if first < 0:
        return 0
    # Nearly every mask is a scaffold of falses, then trues to its end: one comparison says so.
    count, rest = divmod(end - first + 1, len(_TRUE))
    if rest == 0 and line.startswith((_TRUE * count)[:-1], first):
        return count
    letters = np.frombuffer(line, np.uint8, end - first, first)
    return int(np.count_nonzero(letters == _T))
