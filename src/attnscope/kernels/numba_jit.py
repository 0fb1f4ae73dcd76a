"""The loops of the compiled kernel: what numba makes machine code of. Launched by `compiled.py`;
knows arrays and nothing else.

Sixteen rows at a time (a chunk) against all the keys that any of them sees: the scores of four rows
(a quad) and some hundred keys, summed in registers (`_products`); their exponentials and the sums
of those (`_weigh`); and when rows are whole, and can be divided by their sums, the sums over rows
(`_columns`). These three are written in LLVM's vectors, because what loops become by themselves is
not to be relied upon. All else is numba, and cheap.

Sums are float32 over sixteen rows or a block of keys, and float64 beyond. Nothing here assumes that
numbers are finite: one that is not must come out as one. All is in one file, by which numba knows
whether what it kept on disk is still true.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS = 16
"""Of a chunk: so many entries are added up in float32."""
QUAD, PAIR = 4, 2
"""Rows and vectors of keys of one product: their sums fill half of the registers."""
DEPTH = 8
"""Dimensions whose products are added up in one go: rounding is least near the root of all."""
VECTOR = 32
"""Bytes; longer registers hold several, shorter ones a part."""
STEP = 32
"""Arrays of keys are filled up to a multiple of so many, so that no loop has a rest."""
BLOCK = 384
"""Keys that four quads in turn are multiplied with, while they are in a near cache."""

# exp(x) = 2 ** n · exp(x - n ln 2): where 2 ** n becomes 0 and infinity; log2 e; a number so large
# that adding it rounds to whole numbers; - ln 2 in two parts, the first times n exact; and the
# polynomial of degree 6 through the exponential at Chebyshev's points between -ln 2 / 2 and
# ln 2 / 2, off by 2e-9, highest degree first.
_NEAR = np.polynomial.Chebyshev.interpolate(np.exp, 6, domain=[-math.log(2) / 2, math.log(2) / 2])
TABLE = [
    *(-88.0, 88.8, math.log2(math.e), 1.5 * 2**23, -0.693359375, 0.693359375 - math.log(2)),
    *_NEAR.convert(kind=np.polynomial.Polynomial).coef[::-1],
]


class Workspace(NamedTuple):
    """What one thread works in; T is the type of the products, all arrays are flat."""

    keys: Any
    """T [panels, D, keys of a panel]: the keys of one head."""
    q: Any
    """T [quads, D, QUAD]: the queries of a chunk."""
    scores: Any
    """T [QUAD, BLOCK]"""
    table: Any
    """float32 [of TABLE, VECTOR]: not as constants, which would be fetched by address each time."""
    p: Any
    """float32 [ROWS, keys and 16 more, lest all rows share one place of the cache]: entries, the
    exponentials of what is left of scores."""
    real: Any
    """uint8 [keys]"""
    start: Any
    """int32 [ROWS], as `stop`: equal where a row sees nothing."""
    stop: Any
    below: Any
    """T [ROWS]: what the scores of a row begin with, its log-sum-exp over the scale, negative: what
    is left of large scores is rounded as the small number it is."""
    sums: Any
    """float64 [ROWS, 2]: the sum of a row's entries, and that of p ln p."""
    times: Any
    """float32 [ROWS]: what its entries are multiplied by."""


class Vectors:
    """LLVM's vectors of one type, with the few operations on them that are needed here."""

    def __init__(self, builder: Any, element: Any, lanes: int):
        self.builder = builder
        self.lanes = lanes
        self.type = ir.VectorType(element, lanes)
        self.zero = self.constant(0.0)

    def constant(self, value: float) -> Any:
        """A vector of one number that is known."""
        return ir.Constant(self.type, [value] * self.lanes)

    def at(self, pointer: Any, offset: int) -> Any:
        """The place of a vector, so many of its elements behind a pointer."""
        builder = self.builder
        there = builder.gep(pointer, [ir.IntType(64)(offset)])
        return builder.bitcast(there, self.type.as_pointer())

    def load(self, pointer: Any, offset: int = 0) -> Any:
        """What is there."""
        return self.builder.load(self.at(pointer, offset), align=1)

    def store(self, value: Any, pointer: Any, offset: int = 0) -> None:
        """Put it there."""
        self.builder.store(value, self.at(pointer, offset), align=1)

    def spread(self, scalar: Any) -> Any:
        """A vector of one number."""
        empty = ir.Constant(self.type, ir.Undefined)
        first = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        one = self.builder.insert_element(empty, scalar, ir.IntType(32)(0))
        return self.builder.shuffle_vector(one, empty, first)

    def add_product(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c, rounded once where the machine can."""
        product = self.builder.fmul(a, b, flags=("contract",))
        return self.builder.fadd(product, c, flags=("contract",))

    def total(self, value: Any) -> Any:
        """The sum of a vector of float32."""
        element = self.type.element
        name = f"llvm.vector.reduce.fadd.v{self.lanes}f32"
        kind = ir.FunctionType(element, [element, self.type])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, [element(0.0), value], fastmath=("reassoc",))

    def exponential(self, x: Any, table: Any) -> Any:
        """Of a vector of float32; 0 and infinity where float32 ends."""
        builder, whole = self.builder, ir.VectorType(ir.IntType(32), self.lanes)
        lowest, highest, log2e, much, *rest = (
            self.load(table, n * VECTOR // 4) for n in range(len(TABLE))
        )
        x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)  # a nan stays
        x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
        n = self.add_product(x, log2e, much)
        power = builder.add(builder.bitcast(n, whole), ir.Constant(whole, [127] * self.lanes))
        power = builder.shl(power, ir.Constant(whole, [23] * self.lanes))
        n = builder.fsub(n, much)
        for part in rest[:2]:
            x = self.add_product(n, part, x)
        e = rest[2]
        for c in rest[3:]:
            e = self.add_product(e, x, c)
        return builder.fmul(e, builder.bitcast(power, self.type))


def _pointers(context: Any, builder: Any, signature: Any, args: Any) -> list[Any]:
    """Arguments as LLVM sees them: of an array its first element."""
    return [
        context.make_array(kind)(context, builder, value).data
        if isinstance(kind, types.Array)
        else value
        for kind, value in zip(signature.args, args, strict=True)
    ]


def _generate_products(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    scores, width, q, keys, depth, panels, begun = _pointers(context, builder, signature, args)
    n, mul, element = ir.IntType(64), builder.mul, signature.args[2].dtype
    lanes = 8 * VECTOR // element.bitwidth
    vectors = Vectors(builder, context.get_data_type(element), lanes)
    size = n(PAIR * lanes)
    every = [(i, v) for i in range(QUAD) for v in range(PAIR)]
    begun = [vectors.spread(builder.load(builder.gep(begun, [n(i)]))) for i in range(QUAD)]

    def add_dimension(panel: Any, d: Any, sums: list[Any]) -> list[Any]:
        there = builder.gep(q, [mul(d, n(QUAD))])
        of_rows = [vectors.spread(builder.load(builder.gep(there, [n(i)]))) for i in range(QUAD)]
        there = builder.gep(panel, [mul(d, size)])
        of_keys = [vectors.load(there, v * lanes) for v in range(PAIR)]
        pairs = zip(every, sums, strict=True)
        return [vectors.add_product(of_rows[i], of_keys[v], each) for (i, v), each in pairs]

    with cgutils.for_range(builder, panels) as loop:
        first = mul(loop.index, size)
        panel = builder.gep(keys, [mul(first, depth)])
        sums = [cgutils.alloca_once_value(builder, begun[i]) for i, _ in every]
        rest = builder.srem(depth, n(DEPTH))
        with cgutils.for_range_slice(builder, rest, depth, n(DEPTH), n) as (begin, _):
            parts = [vectors.zero for _ in every]
            for d in range(DEPTH):
                parts = add_dimension(panel, builder.add(begin, n(d)), parts)
            for total, part in zip(sums, parts, strict=True):
                builder.store(builder.fadd(builder.load(total), part), total)
        with cgutils.for_range(builder, rest) as few:
            parts = add_dimension(panel, few.index, [builder.load(total) for total in sums])
            for total, part in zip(sums, parts, strict=True):
                builder.store(part, total)
        for (i, v), total in zip(every, sums, strict=True):
            here = builder.gep(scores, [builder.add(mul(width, n(i)), first)])
            vectors.store(builder.load(total), here, v * lanes)
    return context.get_dummy_value()


@intrinsic
def _products(typing, scores, width, q, keys, depth, panels, begun):  # type: ignore[no-untyped-def]
    """A quad [D, QUAD] times some panels of keys [panels, D, panel], sums begun with a number for
    each row, into scores [QUAD, width]."""
    n = types.intp
    return types.void(scores, n, q, keys, n, n, begun), _generate_products


def _hide(floats: Vectors, first: Any, start: Any, stop: Any, real: Any, values: list[Any]) -> None:
    """Put 0 into those of the values, of the keys from `first` on, that a row does not see."""
    builder, lanes = floats.builder, floats.lanes
    order = ir.VectorType(ir.IntType(32), lanes)
    whole, bytes_ = Vectors(builder, order.element, lanes), Vectors(builder, ir.IntType(8), lanes)
    keys, low, high = (
        whole.spread(each) for each in (builder.trunc(first, order.element), start, stop)
    )
    keys = builder.add(keys, ir.Constant(order, list(range(lanes))))
    seen = builder.icmp_signed(">=", keys, low)
    seen = builder.and_(seen, builder.icmp_signed("<", keys, high))
    there = bytes_.load(builder.gep(real, [first]))
    seen = builder.and_(seen, builder.icmp_signed("!=", there, bytes_.constant(0)))
    for value in values:
        builder.store(builder.select(seen, builder.load(value), floats.zero), value)


def _generate_weigh(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    (
        scores, width, p, p_width, table, key, panels, clear_from, clear_to,
        scale, start, stop, real, sums,
    ) = _pointers(context, builder, signature, args)  # fmt: skip
    n, add, rows = ir.IntType(64), builder.add, range(QUAD)
    lanes = 8 * VECTOR // signature.args[0].dtype.bitwidth
    vectors, floats = Vectors(builder, scale.type, lanes), Vectors(builder, ir.FloatType(), lanes)

    def of(array: Any, i: int) -> Any:
        return builder.load(builder.gep(array, [n(i)]))

    scale = vectors.spread(scale)
    found = [[cgutils.alloca_once_value(builder, floats.zero) for _ in range(2)] for _ in rows]
    made = [[cgutils.alloca_once(builder, floats.type) for _ in range(2)] for _ in rows]
    with cgutils.for_range(builder, builder.mul(panels, n(PAIR))) as loop:
        at = builder.mul(loop.index, n(lanes))
        first = add(key, at)
        for i, (left, entry) in enumerate(made):
            x = vectors.load(builder.gep(scores, [add(builder.mul(width, n(i)), at)]))
            x = builder.fmul(x, scale)
            x = x if vectors.type == floats.type else builder.fptrunc(x, floats.type)
            builder.store(x, left)
            builder.store(floats.exponential(x, table), entry)
        edge = builder.or_(
            builder.icmp_signed("<", first, clear_from),
            builder.icmp_signed(">", add(first, n(lanes)), clear_to),
        )
        with builder.if_then(edge, likely=False):
            for i in rows:
                _hide(floats, first, of(start, i), of(stop, i), real, made[i])
        for i in rows:
            x, e = (builder.load(each) for each in made[i])
            floats.store(e, builder.gep(p, [add(builder.mul(p_width, n(i)), at)]))
            seen, entropy = found[i]
            builder.store(builder.fadd(builder.load(seen), e), seen)
            builder.store(floats.add_product(e, x, builder.load(entropy)), entropy)
    for i in rows:
        for one, each in enumerate(found[i]):
            there = builder.gep(sums, [n(2 * i + one)])
            more = builder.fpext(floats.total(builder.load(each)), ir.DoubleType())
            builder.store(builder.fadd(builder.load(there), more), there)
    return context.get_dummy_value()


@intrinsic
def _weigh(  # type: ignore[no-untyped-def]
    typing, scores, width, p, p_width, table, key, panels, clear_from, clear_to,
    scale, start, stop, real, sums,
):  # fmt: skip
    """The entries of a quad on some panels of keys from `key` on, p = exp(score · scale), 0 where a
    row sees none; and the sums of p and of p ln p, added to `sums`. All rows see the keys
    `clear_from … clear_to`."""
    n = types.intp
    arrays = start, stop, real, sums
    return types.void(scores, n, p, n, table, n, n, n, n, scale, *arrays), _generate_weigh


def _generate_columns(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    p, width, times, sums, low, high = _pointers(context, builder, signature, args)
    n, lanes = ir.IntType(64), VECTOR // 4
    floats = Vectors(builder, ir.FloatType(), lanes)
    doubles = Vectors(builder, ir.DoubleType(), lanes)
    with cgutils.for_range_slice(builder, low, high, n(STEP), n) as (key, _):
        # Two sums of each vector, so that one need not wait for the other.
        found = [[floats.zero] * 2 for _ in range(0, STEP, lanes)]
        for i in range(ROWS):
            one = floats.spread(builder.load(builder.gep(times, [n(i)])))
            here = builder.gep(p, [builder.add(builder.mul(width, n(i)), key)])
            for v, each in enumerate(found):
                each[i % 2] = floats.add_product(one, floats.load(here, v * lanes), each[i % 2])
        here = builder.gep(sums, [key])
        for v, each in enumerate(found):
            more = builder.fpext(builder.fadd(*each), doubles.type)
            more = builder.fadd(doubles.load(here, v * lanes), more)
            doubles.store(more, here, v * lanes)
    return context.get_dummy_value()


@intrinsic
def _columns(typing, p, width, times, sums, low, high):  # type: ignore[no-untyped-def]
    """Add the rows of a chunk, each times its number, to the sums of the keys `low … high`."""
    n = types.intp
    return types.void(p, n, times, sums, n, n), _generate_columns


# Without `_nrt` every array that a function is given would be counted, atomically.
_OPTIONS = {"fastmath": {"contract"}, "error_model": "numpy", "_nrt": False}
_jit = njit(**_OPTIONS)


@_jit
def _clear(values):  # type: ignore[no-untyped-def]
    for j in range(values.size):
        values[j] = 0.0


@_jit
def _pack_keys(k, panel, packed):  # type: ignore[no-untyped-def]
    """Keys [K, D] as panels [panels, D, panel], filled up with zeros."""
    K, D = k.shape
    _clear(packed[(K - K % panel) * D :])
    for j in range(K):
        here, key = packed[(j - j % panel) * D + j % panel :], k[j]
        for d in range(D):
            here[d * panel] = key[d]


@_jit
def _prepare(room, b, h, m, last, q, start, stop, lse, scale):  # type: ignore[no-untyped-def]
    """The rows `m … last` of a head, at most ROWS, as a chunk; others see nothing."""
    D = q.shape[3]
    for i in range(ROWS):
        there = m + i < last
        room.start[i] = start[b, m + i] if there else 0
        room.stop[i] = stop[b, m + i] if there else 0
        room.below[i] = -np.float64(lse[b, h, m + i]) / scale if there else 0.0
        room.sums[2 * i], room.sums[2 * i + 1], room.times[i] = 0.0, 0.0, 0.0
        packed = room.q[i // QUAD * QUAD * D + i % QUAD :]
        if there:
            row = q[b, h, m + i]
            for d in range(D):
                packed[d * QUAD] = row[d]
        else:
            for d in range(D):
                packed[d * QUAD] = 0.0


@_jit
def _span(start, stop, first, count):  # type: ignore[no-untyped-def]
    """From the first key that any of these rows sees to behind the last, and what all of them see
    of that."""
    low, high, clear_from, clear_to = 2**31, 0, 0, 2**31
    for i in range(first, first + count):
        if stop[i] > start[i]:
            low, high = min(low, start[i]), max(high, stop[i])
        clear_from, clear_to = max(clear_from, start[i]), min(clear_to, stop[i])
    return low, high, clear_from, clear_to


@_jit
def _entries(room, D, holes, low, high, scale):  # type: ignore[no-untyped-def]
    """The entries of a chunk on the keys `low … high`, and their sums."""
    width, panel = room.p.size // ROWS, PAIR * VECTOR // room.keys.itemsize
    for left in range(low, high, BLOCK):
        right = min(left + BLOCK, high)
        for row in range(0, ROWS, QUAD):
            first, last, clear_from, clear_to = _span(room.start, room.stop, row, QUAD)
            first, last = max(left, first - first % panel), min(right, last + -last % panel)
            if first < last:
                panels = (last - first) // panel
                q, keys = room.q[row * D :], room.keys[first * D :]
                _products(room.scores, BLOCK, q, keys, D, panels, room.below[row:])
                _weigh(
                    room.scores, BLOCK, room.p[row * width + first :], width, room.table,
                    first, panels, clear_from, -1 if holes else clear_to,
                    scale, room.start[row:], room.stop[row:], room.real,
                    room.sums[2 * row :],
                )  # fmt: skip
            else:
                first = last = left
            for i in range(row, row + QUAD):
                _clear(room.p[i * width + left : i * width + first])
                _clear(room.p[i * width + last : i * width + right])


@_jit
def _divide(room, i, below, weight, sink, has_sink, own, scalars):  # type: ignore[no-untyped-def]
    """Let `times` divide a row by what its entries and the sink's add up to. Returns its
    log-sum-exp."""
    seen, entropy = room.sums[2 * i], room.sums[2 * i + 1]
    total = seen
    if has_sink:
        total += math.exp(sink - below)
    # A row that sees nothing, or next to nothing beside its sink, stays as it is.
    total = total if seen > 0 else 1.0
    off = math.log(total)
    times = weight / total
    room.times[i] = times
    if room.start[i] <= own < room.stop[i]:
        scalars[0] += times * room.p[i * (room.p.size // ROWS) + own]
    scalars[1] -= times * (entropy - seen * off)
    if not abs(off) <= scalars[2]:  # a nan stays
        scalars[2] = abs(off)
    return below + off


@_jit
def _add_row(room, i, from_, sums, take):  # type: ignore[no-untyped-def]
    """Add what a row has on the keys from `from_` on that it sees; and `take` it from there."""
    at, times = i * (room.p.size // ROWS), np.float64(room.times[i])
    for j in range(max(from_, room.start[i]), room.stop[i]):
        sums[j] += times * room.p[at + j]
        if take:
            room.p[at + j] = 0.0


def sweep(  # type: ignore[no-untyped-def]
    first, last, scale, room, wide, large, q, k, start, stop, own, lse, real, weight, sinks, group,
    sums, scalars, told, flow,
):  # fmt: skip
    """The pieces `first … last` of the work, each some rows of one head: those whose products are
    made in the type of `scale`, which are the `large` ones if it is the `wide` type.

    Each writes its own sums: of columns (from queries after the key, and from others) [B, H,
    pieces of a head, 2, keys], of own tokens' weights and of entropies, with the largest correction
    of a log-sum-exp [B, H, pieces, 3], log-sum-exps [B, H, M], flow [B, H, classes, keys].
    """
    H, M, D = q.shape[1:]
    G, pieces = k.shape[1], sums.shape[2]
    size = -(-M // pieces)
    size += -size % ROWS
    panel, packed, holes = PAIR * VECTOR // room.keys.itemsize, -1, real.shape[1] > 0
    for n in range(first, last):
        b, h, piece = n // (H * pieces), n // pieces % H, n % pieces
        if large[b, h // (H // G)] != wide:
            continue
        if packed != b * G + h // (H // G):
            packed = b * G + h // (H // G)
            _pack_keys(k[b, h // (H // G)], panel, room.keys)
            for j in range(real.shape[1]):
                room.real[j] = real[b, j]
        end = min(M, (piece + 1) * size)
        for m in range(piece * size, end, ROWS):
            _prepare(room, b, h, m, min(end, m + ROWS), q, start, stop, lse, scale)
            low, high, _, _ = _span(room.start, room.stop, 0, ROWS)
            low, high = low - low % STEP, high + -high % STEP
            _entries(room, D, holes, low, high, scale)
            for i in range(min(ROWS, end - m)):
                told[b, h, m + i] = _divide(
                    room, i, np.float64(lse[b, h, m + i]),
                    weight[b, m + i] if weight.shape[1] else 1.0,
                    sinks[h] if sinks.size else 0.0, sinks.size > 0,
                    own[b, m + i], scalars[b, h, piece],
                )  # fmt: skip
                if group.shape[1] and group[b, m + i] >= 0:
                    _add_row(room, i, 0, flow[b, h, group[b, m + i]], False)
                _add_row(room, i, own[b, m + i], sums[b, h, piece, 1], True)
            _columns(room.p, room.p.size // ROWS, room.times, sums[b, h, piece, 0], low, high)


def make_room(keys: int, D: int, *, wide: bool) -> Workspace:
    """For so many keys."""
    T: Any = np.float64 if wide else np.float32
    return Workspace(
        keys=np.empty(keys * D, T),
        q=np.empty(ROWS * D, T),
        scores=np.empty(QUAD * BLOCK, T),
        table=np.repeat(np.array(TABLE, np.float32), VECTOR // 4),
        p=np.empty(ROWS * (keys + STEP // 2), np.float32),
        real=np.ones(keys, np.uint8),
        start=np.empty(ROWS, np.int32),
        stop=np.empty(ROWS, np.int32),
        below=np.empty(ROWS, T),
        sums=np.empty(2 * ROWS),
        times=np.empty(ROWS, np.float32),
    )


def build(*, wide: bool, cache: bool) -> Any:
    """`sweep` as machine code, for products in float64 or float32; kept on disk for other processes
    if `cache`. What is given may have any strides."""
    f4, f8, i4, i8, yes = types.float32, types.float64, types.int32, types.int64, types.boolean
    T = f8 if wide else f4
    room = T, T, T, f4, f4, types.uint8, i4, i4, T, f8, f4
    signature = types.void(
        i8, i8, T, types.NamedTuple([each[::1] for each in room], Workspace),
        yes, yes[:, :], f4[:, :, :, :], f4[:, :, :, :],
        i4[:, :], i4[:, :], i4[:, :], f4[:, :, :], yes[:, :], f4[:, :], f4[:], i8[:, :],
        f8[:, :, :, :, ::1], f8[:, :, :, ::1], f8[:, :, ::1], f8[:, :, :, ::1],
    )  # fmt: skip
    return njit(signature, cache=cache, nogil=True, **_OPTIONS)(sweep)
