"""Makes PDF files byte-identical: renumbers objects and sorts font names.

vl-convert gives both a different order in every call.
"""

import re

_REFERENCE = re.compile(rb"\b(\d+) 0 R\b")
_NAMES = re.compile(rb"(?<=<<\n)(?: +/\w+ \d+ 0 R\n){2,}")


def in_fixed_order(pdf: bytes) -> bytes:
    """The same document with sorted names and objects numbered in order of reference."""
    start = int(pdf[pdf.rindex(b"startxref") :].split()[1])
    table, trailer = pdf[start:].split(b"trailer", 1)
    # "xref", "0 N", then an entry of 20 bytes for each object, of which the first is not in use.
    entries = table.split(b"\n", 2)[2]
    starts = [int(entries[at : at + 10]) for at in range(20, len(entries) - 19, 20)]
    ends = sorted([*starts, start])
    objects = {}
    for number, at in enumerate(starts, start=1):
        content = pdf[at : ends[ends.index(at) + 1]].split(b"obj\n", 1)[1]
        # A stream is compressed and contains no references.
        head, mark, stream = content.partition(b"stream\n")
        objects[number] = (_NAMES.sub(_sorted, head), mark + stream)
    renumbered = {old: new for new, old in enumerate(_met(objects, trailer), start=1)}

    def moved(part: bytes) -> bytes:
        return _REFERENCE.sub(lambda match: b"%d 0 R" % renumbered[int(match[1])], part)

    body, rows = bytearray(pdf[: ends[0]]), [entries[:20]]
    for old, new in renumbered.items():
        rows.append(b"%010d 00000 n\r\n" % len(body))
        body += b"%d 0 obj\n" % new + moved(objects[old][0]) + objects[old][1]
    end = [b"xref\n0 %d\n" % len(rows), *rows, b"trailer", moved(trailer.split(b"startxref")[0])]
    return bytes(body) + b"".join(end) + b"startxref\n%d\n%%%%EOF" % len(body)


def _sorted(match: re.Match[bytes]) -> bytes:
    return b"".join(sorted(match[0].splitlines(keepends=True)))


def _met(objects: dict[int, tuple[bytes, bytes]], trailer: bytes) -> list[int]:
    """The referenced objects in the order of their first reference."""
    met: list[int] = []
    waiting = [int(number) for number in _REFERENCE.findall(trailer)]
    while waiting:
        number = waiting.pop(0)
        if number not in met:
            met.append(number)
            waiting += [int(n) for n in _REFERENCE.findall(objects[number][0])]
    return met
