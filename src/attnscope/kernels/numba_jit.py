"""The loops of the CPU kernel that numba compiles; `numba_kernel.py` calls them.

A chunk is 16 rows against all keys that any of them sees. Each chunk has three steps:
`_products` computes the scores of four rows (a quad) and some hundred keys in registers;
`_exp_row_sums` computes their exponentials and row sums; `_column_sums` adds the normalised rows.
These three use LLVM vectors, because automatic vectorisation of loops is not reliable.

Sums are float32 over 16 rows or a block of keys, and float64 beyond. Values that are not finite
stay not finite. All code is in one file, because numba checks its disk cache by file.
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
FLOATS = VECTOR // 4
"""Numbers of float32 in a vector."""
STEP = 32
"""Arrays of keys are filled up to a multiple of so many, so that no loop has a rest."""
LOWEST = -3.0e38
"""Below any score of float32, and finite: 0 times it is 0."""
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
    offset: Any
    """T [ROWS]: what the scores of a row begin with, its log-sum-exp over the scale, negative: what
    is left of large scores is rounded as the small number it is."""
    sums: Any
    """float64 [ROWS, 2]: the sum of a row's entries, and that of p ln p."""
    row_scale: Any
    """float32 [ROWS]: what its entries are multiplied by."""
    largest: Any
    """float32 [ROWS, VECTOR / 4]: the largest that is left of a row's scores, in parts."""


class Vectors:
    """LLVM's vectors of one type, with the few operations on them that are needed here."""

    def __init__(self, builder: Any, element: Any, elements: int):
        self.builder = builder
        self.elements = elements
        self.type = ir.VectorType(element, elements)
        self.zero = self.constant(0.0)

    def constant(self, value: float) -> Any:
        """A vector of one number that is known."""
        return ir.Constant(self.type, [value] * self.elements)

    def at(self, pointer: Any, offset: int) -> Any:
        """The place of a vector, so many of its elements behind a pointer."""
        builder = self.builder
        address = builder.gep(pointer, [ir.IntType(64)(offset)])
        return builder.bitcast(address, self.type.as_pointer())

    def load(self, pointer: Any, offset: int = 0) -> Any:
        """What is there."""
        return self.builder.load(self.at(pointer, offset), align=1)

    def store(self, value: Any, pointer: Any, offset: int = 0) -> None:
        """Put it there."""
        self.builder.store(value, self.at(pointer, offset), align=1)

    def spread(self, scalar: Any) -> Any:
        """A vector of one number."""
        empty = ir.Constant(self.type, ir.Undefined)
        first = ir.Constant(ir.VectorType(ir.IntType(32), self.elements), [0] * self.elements)
        one = self.builder.insert_element(empty, scalar, ir.IntType(32)(0))
        return self.builder.shuffle_vector(one, empty, first)

    def add_product(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c, rounded once where the machine can."""
        product = self.builder.fmul(a, b, flags=("contract",))
        return self.builder.fadd(product, c, flags=("contract",))

    def total(self, value: Any) -> Any:
        """The sum of a vector of float32."""
        element = self.type.element
        name = f"llvm.vector.reduce.fadd.v{self.elements}f32"
        kind = ir.FunctionType(element, [element, self.type])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, [element(0.0), value], fastmath=("reassoc",))

    def exponential(self, x: Any, table: Any) -> Any:
        """Of a vector of float32; 0 and infinity where float32 ends."""
        builder, integer = self.builder, ir.VectorType(ir.IntType(32), self.elements)
        lowest, highest, log2e, much, *rest = (
            self.load(table, n * VECTOR // 4) for n in range(len(TABLE))
        )
        x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)  # a nan stays
        x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
        n = self.add_product(x, log2e, much)
        power = builder.add(
            builder.bitcast(n, integer), ir.Constant(integer, [127] * self.elements)
        )
        power = builder.shl(power, ir.Constant(integer, [23] * self.elements))
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
    scores, width, q, keys, depth, panels, initial = _pointers(context, builder, signature, args)
    n, mul, element = ir.IntType(64), builder.mul, signature.args[2].dtype
    elements = 8 * VECTOR // element.bitwidth
    vectors = Vectors(builder, context.get_data_type(element), elements)
    size = n(PAIR * elements)
    every = [(i, v) for i in range(QUAD) for v in range(PAIR)]
    initial = [vectors.spread(builder.load(builder.gep(initial, [n(i)]))) for i in range(QUAD)]

    def add_dimension(panel: Any, d: Any, sums: list[Any]) -> list[Any]:
        address = builder.gep(q, [mul(d, n(QUAD))])
        of_rows = [vectors.spread(builder.load(builder.gep(address, [n(i)]))) for i in range(QUAD)]
        address = builder.gep(panel, [mul(d, size)])
        of_keys = [vectors.load(address, v * elements) for v in range(PAIR)]
        pairs = zip(every, sums, strict=True)
        return [vectors.add_product(of_rows[i], of_keys[v], each) for (i, v), each in pairs]

    with cgutils.for_range(builder, panels) as loop:
        first = mul(loop.index, size)
        panel = builder.gep(keys, [mul(first, depth)])
        sums = [cgutils.alloca_once_value(builder, initial[i]) for i, _ in every]
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
            vectors.store(builder.load(total), here, v * elements)
    return context.get_dummy_value()


@intrinsic
def _products(typing, scores, width, q, keys, depth, panels, initial):  # type: ignore[no-untyped-def]
    """A quad [D, QUAD] times some panels of keys [panels, D, panel], with an initial sum for
    each row, into scores [QUAD, width]."""
    n = types.intp
    return types.void(scores, n, q, keys, n, n, initial), _generate_products


def _mask_hidden(
    floats: Vectors, first: Any, start: Any, stop: Any, real: Any, left: Any, entry: Any
) -> None:
    """Put LOWEST and 0 into those of the scores and entries, of the keys from `first` on, that a
    row does not see."""
    builder, elements = floats.builder, floats.elements
    order = ir.VectorType(ir.IntType(32), elements)
    integers, bytes_ = (
        Vectors(builder, order.element, elements),
        Vectors(builder, ir.IntType(8), elements),
    )
    keys, low, high = (
        integers.spread(each) for each in (builder.trunc(first, order.element), start, stop)
    )
    keys = builder.add(keys, ir.Constant(order, list(range(elements))))
    mask = builder.icmp_signed(">=", keys, low)
    mask = builder.and_(mask, builder.icmp_signed("<", keys, high))
    address = bytes_.load(builder.gep(real, [first]))
    mask = builder.and_(mask, builder.icmp_signed("!=", address, bytes_.constant(0)))
    for value, hidden in ((left, floats.constant(LOWEST)), (entry, floats.zero)):
        builder.store(builder.select(mask, builder.load(value), hidden), value)


def _generate_exp_row_sums(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    (
        scores, width, p, p_width, table, key, panels, dense_from, dense_to,
        scale, start, stop, real, sums, max_logit, largest,
    ) = _pointers(context, builder, signature, args)  # fmt: skip
    n, add, rows = ir.IntType(64), builder.add, range(QUAD)
    elements = 8 * VECTOR // signature.args[0].dtype.bitwidth
    vectors, floats = (
        Vectors(builder, scale.type, elements),
        Vectors(builder, ir.FloatType(), elements),
    )

    def of(array: Any, i: int) -> Any:
        return builder.load(builder.gep(array, [n(i)]))

    scale = vectors.spread(scale)
    max_logit = builder.icmp_signed("!=", max_logit, n(0))
    totals = [[cgutils.alloca_once_value(builder, floats.zero) for _ in range(2)] for _ in rows]
    entries = [[cgutils.alloca_once(builder, floats.type) for _ in range(2)] for _ in rows]
    with cgutils.for_range(builder, builder.mul(panels, n(PAIR))) as loop:
        at = builder.mul(loop.index, n(elements))
        first = add(key, at)
        for i, (left, entry) in enumerate(entries):
            x = vectors.load(builder.gep(scores, [add(builder.mul(width, n(i)), at)]))
            x = builder.fmul(x, scale)
            x = x if vectors.type == floats.type else builder.fptrunc(x, floats.type)
            builder.store(x, left)
            builder.store(floats.exponential(x, table), entry)
        edge = builder.or_(
            builder.icmp_signed("<", first, dense_from),
            builder.icmp_signed(">", add(first, n(elements)), dense_to),
        )
        with builder.if_then(edge, likely=False):
            for i in rows:
                _mask_hidden(floats, first, of(start, i), of(stop, i), real, *entries[i])
        with builder.if_then(max_logit, likely=False):
            for i in rows:
                left, at_row = builder.load(entries[i][0]), builder.gep(largest, [n(FLOATS * i)])
                known = floats.load(at_row)
                more = builder.fcmp_ordered(">", left, known)
                floats.store(builder.select(more, left, known), at_row)
        for i in rows:
            x, e = (builder.load(each) for each in entries[i])
            floats.store(e, builder.gep(p, [add(builder.mul(p_width, n(i)), at)]))
            row_sum, entropy = totals[i]
            builder.store(builder.fadd(builder.load(row_sum), e), row_sum)
            builder.store(floats.add_product(e, x, builder.load(entropy)), entropy)
    for i in rows:
        for one, each in enumerate(totals[i]):
            address = builder.gep(sums, [n(2 * i + one)])
            more = builder.fpext(floats.total(builder.load(each)), ir.DoubleType())
            builder.store(builder.fadd(builder.load(address), more), address)
    return context.get_dummy_value()


@intrinsic
def _exp_row_sums(  # type: ignore[no-untyped-def]
    typing, scores, width, p, p_width, table, key, panels, dense_from, dense_to,
    scale, start, stop, real, sums, max_logit, largest,
):  # fmt: skip
    """The entries of a quad on some panels of keys from `key` on, p = exp(score · scale), 0 where a
    row sees none; and the sums of p and of p ln p, added to `sums`. All rows see the keys
    `dense_from … dense_to`. Unless `max_logit` is 0, also the largest that is left of a score."""
    n = types.intp
    arrays = start, stop, real, sums, n, largest
    return types.void(scores, n, p, n, table, n, n, n, n, scale, *arrays), _generate_exp_row_sums


def _generate_column_sums(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    p, width, row_scale, sums, low, high = _pointers(context, builder, signature, args)
    n, elements = ir.IntType(64), VECTOR // 4
    floats = Vectors(builder, ir.FloatType(), elements)
    doubles = Vectors(builder, ir.DoubleType(), elements)
    with cgutils.for_range_slice(builder, low, high, n(STEP), n) as (key, _):
        # Two sums of each vector, so that one need not wait for the other.
        totals = [[floats.zero] * 2 for _ in range(0, STEP, elements)]
        for i in range(ROWS):
            one = floats.spread(builder.load(builder.gep(row_scale, [n(i)])))
            here = builder.gep(p, [builder.add(builder.mul(width, n(i)), key)])
            for v, each in enumerate(totals):
                each[i % 2] = floats.add_product(one, floats.load(here, v * elements), each[i % 2])
        here = builder.gep(sums, [key])
        for v, each in enumerate(totals):
            more = builder.fpext(builder.fadd(*each), doubles.type)
            more = builder.fadd(doubles.load(here, v * elements), more)
            doubles.store(more, here, v * elements)
    return context.get_dummy_value()


@intrinsic
def _column_sums(typing, p, width, row_scale, sums, low, high):  # type: ignore[no-untyped-def]
    """Add the rows of a chunk, each times its number, to the sums of the keys `low … high`."""
    n = types.intp
    return types.void(p, n, row_scale, sums, n, n), _generate_column_sums


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
def _prepare(workspace, b, h, m, last, q, start, stop, lse, scale):  # type: ignore[no-untyped-def]
    """The rows `m … last` of a head, at most ROWS, as a chunk; others see nothing."""
    D = q.shape[3]
    for i in range(ROWS):
        valid = m + i < last
        workspace.start[i] = start[b, m + i] if valid else 0
        workspace.stop[i] = stop[b, m + i] if valid else 0
        workspace.offset[i] = -np.float64(lse[b, h, m + i]) / scale if valid else 0.0
        workspace.sums[2 * i], workspace.sums[2 * i + 1], workspace.row_scale[i] = 0.0, 0.0, 0.0
        for part in range(FLOATS):
            workspace.largest[i * FLOATS + part] = LOWEST
        packed = workspace.q[i // QUAD * QUAD * D + i % QUAD :]
        if valid:
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
    low, high, dense_from, dense_to = 2**31, 0, 0, 2**31
    for i in range(first, first + count):
        if stop[i] > start[i]:
            low, high = min(low, start[i]), max(high, stop[i])
        dense_from, dense_to = max(dense_from, start[i]), min(dense_to, stop[i])
    return low, high, dense_from, dense_to


@_jit
def _exponentials(workspace, D, holes, low, high, scale, max_logit):  # type: ignore[no-untyped-def]
    """The entries of a chunk on the keys `low … high`, and their sums."""
    width, panel = workspace.p.size // ROWS, PAIR * VECTOR // workspace.keys.itemsize
    for left in range(low, high, BLOCK):
        right = min(left + BLOCK, high)
        for row in range(0, ROWS, QUAD):
            first, last, dense_from, dense_to = _span(workspace.start, workspace.stop, row, QUAD)
            first, last = max(left, first - first % panel), min(right, last + -last % panel)
            if first < last:
                panels = (last - first) // panel
                q, keys = workspace.q[row * D :], workspace.keys[first * D :]
                _products(workspace.scores, BLOCK, q, keys, D, panels, workspace.offset[row:])
                _exp_row_sums(
                    workspace.scores, BLOCK, workspace.p[row * width + first :], width,
                    workspace.table, first, panels, dense_from, -1 if holes else dense_to,
                    scale, workspace.start[row:], workspace.stop[row:], workspace.real,
                    workspace.sums[2 * row :], max_logit, workspace.largest[FLOATS * row :],
                )  # fmt: skip
            else:
                first = last = left
            for i in range(row, row + QUAD):
                _clear(workspace.p[i * width + left : i * width + first])
                _clear(workspace.p[i * width + last : i * width + right])


@_jit
def _normalize(workspace, i, offset, weight, sink, has_sink, self_key, scalars):  # type: ignore[no-untyped-def]
    """Let `row_scale` divide a row by what its entries and the sink's add up to. Returns its
    log-sum-exp."""
    row_sum, entropy = workspace.sums[2 * i], workspace.sums[2 * i + 1]
    total = row_sum
    if has_sink:
        total += math.exp(sink - offset)
    # A row that sees nothing, or next to nothing beside its sink, stays as it is.
    total = total if row_sum > 0 else 1.0
    off = math.log(total)
    row_scale = weight / total
    workspace.row_scale[i] = row_scale
    if workspace.start[i] <= self_key < workspace.stop[i]:
        scalars[0] += row_scale * workspace.p[i * (workspace.p.size // ROWS) + self_key]
    scalars[1] -= row_scale * (entropy - row_sum * off)
    if not abs(off) <= scalars[2]:  # a nan stays
        scalars[2] = abs(off)
    return offset + off


@_jit
def _largest_score(workspace, i, offset):  # type: ignore[no-untyped-def]
    """The largest score of a row, from the largest that is left of its scores; -inf if it sees
    nothing."""
    most = workspace.largest[i * FLOATS]
    for part in range(1, FLOATS):
        most = max(most, workspace.largest[i * FLOATS + part])
    return offset + most if most > LOWEST else -math.inf


@_jit
def _add_row(workspace, i, from_, sums, take):  # type: ignore[no-untyped-def]
    """Add what a row has on the keys from `from_` on that it sees; and `take` it from there."""
    at, row_scale = i * (workspace.p.size // ROWS), np.float64(workspace.row_scale[i])
    for j in range(max(from_, workspace.start[i]), workspace.stop[i]):
        sums[j] += row_scale * workspace.p[at + j]
        if take:
            workspace.p[at + j] = 0.0


def reduce_rows(  # type: ignore[no-untyped-def]
    first, last, scale, workspace, wide, large, q, k, start, stop, self_key, lse, real, weight,
    sinks, group, max_logit, sums, scalars, lse_out, flow,
):  # fmt: skip
    """The pieces `first … last` of the work, each some rows of one head: those whose products are
    made in the type of `scale`, which are the `large` ones if it is the `wide` type.

    Each writes its own sums: of columns (from queries after the key, and from others) [B, H,
    pieces of a head, 2, keys], of own tokens' weights and of entropies, with the largest correction
    of a log-sum-exp and the largest score [B, H, pieces, 4], log-sum-exps [B, H, M], flow [B, H,
    classes, keys].
    """
    H, M, D = q.shape[1:]
    G, pieces = k.shape[1], sums.shape[2]
    size = -(-M // pieces)
    size += -size % ROWS
    panel, packed, holes = PAIR * VECTOR // workspace.keys.itemsize, -1, real.shape[1] > 0
    for n in range(first, last):
        b, h, piece = n // (H * pieces), n // pieces % H, n % pieces
        if large[b, h // (H // G)] != wide:
            continue
        if packed != b * G + h // (H // G):
            packed = b * G + h // (H // G)
            _pack_keys(k[b, h // (H // G)], panel, workspace.keys)
            for j in range(real.shape[1]):
                workspace.real[j] = real[b, j]
        end = min(M, (piece + 1) * size)
        for m in range(piece * size, end, ROWS):
            _prepare(workspace, b, h, m, min(end, m + ROWS), q, start, stop, lse, scale)
            low, high, _, _ = _span(workspace.start, workspace.stop, 0, ROWS)
            low, high = low - low % STEP, high + -high % STEP
            _exponentials(workspace, D, holes, low, high, scale, max_logit)
            for i in range(min(ROWS, end - m)):
                if max_logit:
                    score = _largest_score(workspace, i, np.float64(lse[b, h, m + i]))
                    scalars[b, h, piece, 3] = max(scalars[b, h, piece, 3], score)
                lse_out[b, h, m + i] = _normalize(
                    workspace, i, np.float64(lse[b, h, m + i]),
                    weight[b, m + i] if weight.shape[1] else 1.0,
                    sinks[h] if sinks.size else 0.0, sinks.size > 0,
                    self_key[b, m + i], scalars[b, h, piece],
                )  # fmt: skip
                if group.shape[1] and group[b, m + i] >= 0:
                    _add_row(workspace, i, 0, flow[b, h, group[b, m + i]], False)
                _add_row(workspace, i, self_key[b, m + i], sums[b, h, piece, 1], True)
            _column_sums(
                workspace.p,
                workspace.p.size // ROWS,
                workspace.row_scale,
                sums[b, h, piece, 0],
                low,
                high,
            )


def make_workspace(keys: int, D: int, *, wide: bool) -> Workspace:
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
        offset=np.empty(ROWS, T),
        sums=np.empty(2 * ROWS),
        row_scale=np.empty(ROWS, np.float32),
        largest=np.empty(ROWS * FLOATS, np.float32),
    )


def build(*, wide: bool, cache: bool) -> Any:
    """Compile `reduce_rows` for products in float64 or float32; `cache` keeps it on disk.

    Arrays may have any strides.
    """
    f4, f8, i4, i8, yes = types.float32, types.float64, types.int32, types.int64, types.boolean
    T = f8 if wide else f4
    workspace = T, T, T, f4, f4, types.uint8, i4, i4, T, f8, f4, f4
    signature = types.void(
        i8, i8, T, types.NamedTuple([each[::1] for each in workspace], Workspace),
        yes, yes[:, :], f4[:, :, :, :], f4[:, :, :, :],
        i4[:, :], i4[:, :], i4[:, :], f4[:, :, :], yes[:, :], f4[:, :], f4[:], i8[:, :], i8,
        f8[:, :, :, :, ::1], f8[:, :, :, ::1], f8[:, :, ::1], f8[:, :, :, ::1],
    )  # fmt: skip
    return njit(signature, cache=cache, nogil=True, **_OPTIONS)(reduce_rows)
