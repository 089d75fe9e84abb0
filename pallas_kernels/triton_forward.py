"""Forward of block attention in Triton (sm80 and later): softmax(scale * q k^T) v and its log-sum-exp.

A program takes one head and a tile of queries and walks over the tiles of keys that the mask leaves: with comparisons
where it cuts a tile, without where all is visible. What the kernels share lies here too: operands, masks, loads.

Names in capitals are known when the kernel is compiled. All else that a call knows, lengths and numbers of heads too,
comes in `numbers`, so that one compiled kernel serves every step of a table, every part of a chunk and every length:

    q_start, k_start, k_stop (those of Mask), then of the queries, then of the keys:
    is_peer, rows and heads of the box, rows and heads of the own chunk, row and head where the box starts in it

A peer's chunk is the box. IS_SHORT: some keys of the box lie behind the end of the own chunk. PRECISION: of products of
float32, "ieee" or "tf32".

Source: FlashAttention-2, arXiv 2307.08691, algorithm 1.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32: the maximum of no scores, as -inf - -inf is none


@triton.jit
def forward(
    numbers, table, q_ids, k_ids, own_q, peer_q, own_k, peer_k, own_v, peer_v, out, lse,
    G: tl.constexpr, H: tl.constexpr, IS_SHORT: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [B, T, N, H], lse [B, T, N]; programs: tiles of rows, of each head, of each batch element."""
    T, N, S, _ = sizes(numbers)
    batch, head, tile = find_tile(T, N, BLOCK_ROWS, IS_CAUSAL)
    start, full_start, full_stop, stop = tiles(table, batch, tile, T, BLOCK_ROWS, HAS_SEGMENTS)
    row = tile * BLOCK_ROWS
    place = find(numbers + 3, batch, head, H)
    q = load(choose(own_q, peer_q, place), place, row, BLOCK_ROWS, H, BLOCK_H, True)
    place = find(numbers + 10, batch, head // G, H)
    keys = choose(own_k, peer_k, place), choose(own_v, peer_v, place), place
    own, row_stop = limits(numbers, row, BLOCK_ROWS, IS_CAUSAL)
    own_id = segments(q_ids, batch, row, T, BLOCK_ROWS, HAS_SEGMENTS)
    mask = own[:, None], row_stop[:, None], own_id[:, None]
    state = (
        tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32),
        tl.full([BLOCK_ROWS], LOWEST, tl.float32),
        tl.zeros([BLOCK_ROWS], tl.float32),
    )
    if HAS_SEGMENTS or WINDOW > 0:  # by these alone some rows do not see keys before those that all see
        for j in tl.range(start, full_start):
            k, v = load_keys(keys, j, BLOCK_KEYS, H, BLOCK_H, True)
            key_id = segments(k_ids, batch, j * BLOCK_KEYS, S, BLOCK_KEYS, HAS_SEGMENTS)[None, :]
            seen = visible(mask, span(j, BLOCK_KEYS)[None, :], key_id, WINDOW, HAS_SEGMENTS)
            state = attend(state, q, k, v, seen, SCALE, SOFTCAP, PRECISION, True)
    for j in tl.range(full_start, full_stop):
        k, v = load_keys(keys, j, BLOCK_KEYS, H, BLOCK_H, IS_SHORT)
        state = attend(state, q, k, v, True, SCALE, SOFTCAP, PRECISION, False)
    for j in tl.range(full_stop, stop):
        k, v = load_keys(keys, j, BLOCK_KEYS, H, BLOCK_H, True)
        key_id = segments(k_ids, batch, j * BLOCK_KEYS, S, BLOCK_KEYS, HAS_SEGMENTS)[None, :]
        seen = visible(mask, span(j, BLOCK_KEYS)[None, :], key_id, WINDOW, HAS_SEGMENTS)
        state = attend(state, q, k, v, seen, SCALE, SOFTCAP, PRECISION, True)
    acc, top, total = state
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    store(out, acc, batch, head, row, T, N, BLOCK_ROWS, H, BLOCK_H)
    rows = tl.arange(0, BLOCK_ROWS)
    lse += (batch.to(tl.int64) * T + row) * N + head
    # A row that saw nothing: LOWEST + -inf.
    tl.store(lse + rows * N, (top + tl.log2(total)) / LOG2_E, mask=rows < T - row)


@triton.jit
def attend(
    state, q, k, v, seen, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, IS_MASKED: tl.constexpr
):  # fmt: skip
    """(acc, top, total) after another tile of keys; top is in units of log 2."""
    acc, top, total = state
    FACTOR: tl.constexpr = factor(SCALE, SOFTCAP)
    scores, _ = bounded(tl.dot(q, tl.trans(k), input_precision=PRECISION), SCALE, SOFTCAP)
    if IS_MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * FACTOR)
    p = tl.exp2(scores * FACTOR - new_top[:, None])
    decay = tl.exp2(top - new_top)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_top, total * decay + tl.sum(p, 1)


# Places and operands


@triton.jit
def sizes(numbers):
    """(T, N, S, K) of the boxes."""
    return tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 11), tl.load(numbers + 12)


@triton.jit
def find_tile(length, num_heads, SIZE: tl.constexpr, IS_REVERSED: tl.constexpr):
    """(batch, head, tile) of a program."""
    num_tiles = tl.cdiv(length, SIZE)
    tile = tl.program_id(0) % num_tiles
    if IS_REVERSED:  # under a causal mask the last rows see most keys: they come first
        tile = num_tiles - 1 - tile
    head = tl.program_id(0) // num_tiles
    return head // num_heads, head % num_heads, tile


@triton.jit
def tiles(table, batch, tile, length, SIZE: tl.constexpr, HAS_SEGMENTS: tl.constexpr):
    """The row of Mask.key_tiles or query_tiles of a tile of SIZE of a length."""
    row = table + tile * 4
    if HAS_SEGMENTS:
        row += batch * tl.cdiv(length, SIZE) * 4
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def find(side, batch, head, H: tl.constexpr):
    """(is_peer, elements before the first row of a head of the box, elements from row to row, rows that there are)."""
    is_peer, box_rows, box_heads = tl.load(side) != 0, tl.load(side + 1), tl.load(side + 2)
    rows = tl.where(is_peer, box_rows, tl.load(side + 3))
    heads = tl.where(is_peer, box_heads, tl.load(side + 4))
    row = tl.where(is_peer, 0, tl.load(side + 5))
    head += tl.where(is_peer, 0, tl.load(side + 6))
    offset = ((batch.to(tl.int64) * rows + row) * heads + head) * H
    return is_peer, offset, heads * H, tl.minimum(box_rows, rows - row)


@triton.jit
def choose(own, peer, place):
    return tl.where(place[0], peer, own)


@triton.jit
def load(base, place, row, SIZE: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, IS_CUT: tl.constexpr):
    """Rows row .. row + SIZE - 1; zeros behind the head dim and, if IS_CUT, behind the last row."""
    _, offset, stride, num_rows = place
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, BLOCK_H)[None, :]
    pointers = base + (offset + row * stride.to(tl.int64)) + (rows * stride + columns)
    if IS_CUT and BLOCK_H != H:
        x = tl.load(pointers, mask=(rows < num_rows - row) & (columns < H), other=0.0)
    elif IS_CUT:
        x = tl.load(pointers, mask=rows < num_rows - row, other=0.0)
    elif BLOCK_H != H:
        x = tl.load(pointers, mask=columns < H, other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def load_keys(keys, tile, SIZE: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, IS_CUT: tl.constexpr):
    k, v, place = keys
    row = tile * SIZE
    return load(k, place, row, SIZE, H, BLOCK_H, IS_CUT), load(v, place, row, SIZE, H, BLOCK_H, IS_CUT)


@triton.jit
def store(target, x, batch, head, row, num_rows, num_heads, SIZE: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Rows from `row` on of a head of target [B, num_rows, num_heads, H]; what lies behind the ends is dropped."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, BLOCK_H)[None, :]
    target += ((batch.to(tl.int64) * num_rows + row) * num_heads + head) * H
    is_there = (rows < num_rows - row) & (columns < H)
    tl.store(target + (rows * (num_heads * H) + columns), x.to(target.dtype.element_ty), mask=is_there)


# Masks and scores


@triton.jit
def limits(numbers, row, SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """(the key at the position of each row, the first key behind those that the row may see); keys count from 0."""
    k_start = tl.load(numbers + 1)
    own = tl.arange(0, SIZE) + (tl.load(numbers) + row - k_start)
    stop = tl.minimum(tl.load(numbers + 2) - k_start, tl.load(numbers + 11)) + tl.zeros([SIZE], tl.int32)
    if IS_CAUSAL:
        stop = tl.minimum(stop, own + 1)
    return own, stop


@triton.jit
def segments(ids, batch, first, length, SIZE: tl.constexpr, HAS_SEGMENTS: tl.constexpr):
    """Segments [SIZE] from `first` on, of a length that is padded to whole tiles; zeros if there are none."""
    x = tl.zeros([SIZE], tl.float32)
    if HAS_SEGMENTS:
        x = tl.load(ids + batch * (tl.cdiv(length, SIZE) * SIZE) + first + tl.arange(0, SIZE))
    return x


@triton.jit
def span(tile, SIZE: tl.constexpr):
    return tile * SIZE + tl.arange(0, SIZE)


@triton.jit
def visible(mask, key, key_id, WINDOW: tl.constexpr, HAS_SEGMENTS: tl.constexpr):
    """Mask.visible, where mask is (own, stop) of limits() and the segments of the rows."""
    own, stop, own_id = mask
    seen = key < stop
    if WINDOW > 0:
        seen = seen & (key > own - WINDOW)
    if HAS_SEGMENTS:
        seen = seen & (own_id == key_id)
    return seen


@triton.constexpr_function
def factor(scale, softcap):
    """What bounded() leaves to be multiplied; exp(x) = exp2(x * log2(e))."""
    return (softcap or scale) * 1.4426950408889634


@triton.jit
def bounded(products, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """(scores in units of log 2 / factor(), their derivative by the scores without a softcap)."""
    slope = 1.0
    if SOFTCAP > 0:  # tanh of exponentials alone: the GPU's own is good to three digits
        products = 1 - 2 / (1 + tl.exp2(products * (2 * LOG2_E * SCALE / SOFTCAP)))
        slope = 1 - products * products
    return products, slope
