"""Backward of block attention in Triton (sm80 and later): one kernel for dk and dv, one for dq.

Each makes the scores again, seven matmuls in all instead of five, and none adds in memory: all bits repeat.

    S = Q K',  dP = dO V',  P = exp(scale S - lse),  dS = P (dP - delta)        (' is a transpose)
    dV += P' dO,  dK += scale dS' Q,  dQ += scale dS K

lse [B, N, T] is in units of log 2, and inf for rows that see nothing; rows behind the end get inf as well: their
weights are exp2(-inf) = 0 whatever lies there. Names in capitals as in triton_forward.

Source: FlashAttention-2, arXiv 2307.08691, algorithm 2.
"""

import triton
import triton.language as tl

from pallas_kernels.triton_forward import (
    bounded,
    choose,
    factor,
    find,
    find_tile,
    limits,
    load,
    load_keys,
    segments,
    sizes,
    span,
    store,
    tiles,
    visible,
)


@triton.jit
def keys_backward(
    numbers, table, q_ids, k_ids, own_q, peer_q, own_dout, peer_dout, own_k, peer_k, own_v, peer_v, lse, delta, dk, dv,
    G: tl.constexpr, H: tl.constexpr, IS_SHORT: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv [B, S, K, H]; programs: tiles of keys, of each key/value head, of each batch element."""
    # In this order the first keys of a head, of which causal queries see most, come first.
    T, N, S, K = sizes(numbers)
    batch, kv_head, tile = find_tile(S, K, BLOCK_KEYS, False)
    start, _, _, stop = tiles(table, batch, tile, S, BLOCK_KEYS, HAS_SEGMENTS)
    place = find(numbers + 10, batch, kv_head, H)
    keys = choose(own_k, peer_k, place), choose(own_v, peer_v, place), place
    k, v = load_keys(keys, tile, BLOCK_KEYS, H, BLOCK_H, True)
    key = span(tile, BLOCK_KEYS)[:, None]
    key_id = segments(k_ids, batch, tile * BLOCK_KEYS, S, BLOCK_KEYS, HAS_SEGMENTS)[:, None]
    dk_sum = tl.zeros([BLOCK_KEYS, BLOCK_H], tl.float32)
    dv_sum = tl.zeros([BLOCK_KEYS, BLOCK_H], tl.float32)
    place = find(numbers + 3, batch, kv_head * G, H)
    q_base, dout_base = choose(own_q, peer_q, place), choose(own_dout, peer_dout, place)
    first = (batch.to(tl.int64) * N + kv_head * G) * T
    # One loop over the heads and their tiles, in which all tiles are compared with the mask: a loop in another, or one
    # after another, need more registers than there are.
    num_tiles = stop - start
    for step in tl.range(0, G * num_tiles):
        g = step // num_tiles
        row = (start + step % num_tiles) * BLOCK_ROWS
        q = load(q_base + g * H, place, row, BLOCK_ROWS, H, BLOCK_H, True)
        dout = load(dout_base + g * H, place, row, BLOCK_ROWS, H, BLOCK_H, True)
        rows = row + tl.arange(0, BLOCK_ROWS)
        stats = first + g * T + rows
        lse_tile = tl.load(lse + stats, mask=rows < T, other=float("inf"))[None, :]
        # Scores lie as [keys, rows]. What a row needs besides is read when it is needed: registers are scarce.
        scores, slope = bounded(tl.dot(k, tl.trans(q), input_precision=PRECISION), SCALE, SOFTCAP)
        p = tl.exp2(scores * factor(SCALE, SOFTCAP) - lse_tile)
        if IS_CAUSAL or WINDOW > 0 or HAS_SEGMENTS:
            own, row_stop = limits(numbers, row, BLOCK_ROWS, IS_CAUSAL)
            own_id = segments(q_ids, batch, row, T, BLOCK_ROWS, HAS_SEGMENTS)
            mask = own[None, :], row_stop[None, :], own_id[None, :]
            p = tl.where(visible(mask, key, key_id, WINDOW, HAS_SEGMENTS), p, 0.0)
        dv_sum = tl.dot(p.to(dout.dtype), dout, dv_sum, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        delta_tile = tl.load(delta + stats, mask=rows < T, other=0.0)[None, :]
        ds = p * (dp - delta_tile) * slope
        dk_sum = tl.dot(ds.to(q.dtype), q, dk_sum, input_precision=PRECISION)
    # A key that is none has made nothing but its own dk and dv.
    _, key_stop = limits(numbers, 0, BLOCK_KEYS, False)
    is_key = key < key_stop[:, None]
    dk_sum, dv_sum = tl.where(is_key, dk_sum, 0.0), tl.where(is_key, dv_sum, 0.0)
    store(dk, dk_sum * SCALE, batch, kv_head, tile * BLOCK_KEYS, S, K, BLOCK_KEYS, H, BLOCK_H)
    store(dv, dv_sum, batch, kv_head, tile * BLOCK_KEYS, S, K, BLOCK_KEYS, H, BLOCK_H)


@triton.jit
def rows_backward(
    numbers, table, q_ids, k_ids, own_q, peer_q, own_dout, peer_dout, own_k, peer_k, own_v, peer_v, lse, delta, dq,
    G: tl.constexpr, H: tl.constexpr, IS_SHORT: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [B, T, N, H]; programs: tiles of rows, of each head, of each batch element."""
    T, N, S, _ = sizes(numbers)
    batch, head, tile = find_tile(T, N, BLOCK_ROWS, IS_CAUSAL)
    start, full_start, full_stop, stop = tiles(table, batch, tile, T, BLOCK_ROWS, HAS_SEGMENTS)
    row, rows = tile * BLOCK_ROWS, span(tile, BLOCK_ROWS)
    place = find(numbers + 3, batch, head, H)
    q = load(choose(own_q, peer_q, place), place, row, BLOCK_ROWS, H, BLOCK_H, True)
    dout = load(choose(own_dout, peer_dout, place), place, row, BLOCK_ROWS, H, BLOCK_H, True)
    first = (batch.to(tl.int64) * N + head) * T
    lse_tile = tl.load(lse + first + rows, mask=rows < T, other=float("inf"))[:, None]
    delta_tile = tl.load(delta + first + rows, mask=rows < T, other=0.0)[:, None]
    queries = q, dout, lse_tile, delta_tile
    place = find(numbers + 10, batch, head // G, H)
    keys = choose(own_k, peer_k, place), choose(own_v, peer_v, place), place
    own, row_stop = limits(numbers, row, BLOCK_ROWS, IS_CAUSAL)
    own_id = segments(q_ids, batch, row, T, BLOCK_ROWS, HAS_SEGMENTS)
    mask = own[:, None], row_stop[:, None], own_id[:, None]
    dq_sum = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
    if HAS_SEGMENTS or WINDOW > 0:
        for j in tl.range(start, full_start):
            k, v = load_keys(keys, j, BLOCK_KEYS, H, BLOCK_H, True)
            key_id = segments(k_ids, batch, j * BLOCK_KEYS, S, BLOCK_KEYS, HAS_SEGMENTS)[None, :]
            seen = visible(mask, span(j, BLOCK_KEYS)[None, :], key_id, WINDOW, HAS_SEGMENTS)
            dq_sum = add_keys(dq_sum, queries, k, v, seen, SCALE, SOFTCAP, PRECISION, True)
    for j in tl.range(full_start, full_stop):
        k, v = load_keys(keys, j, BLOCK_KEYS, H, BLOCK_H, IS_SHORT)
        dq_sum = add_keys(dq_sum, queries, k, v, True, SCALE, SOFTCAP, PRECISION, False)
    for j in tl.range(full_stop, stop):
        k, v = load_keys(keys, j, BLOCK_KEYS, H, BLOCK_H, True)
        key_id = segments(k_ids, batch, j * BLOCK_KEYS, S, BLOCK_KEYS, HAS_SEGMENTS)[None, :]
        seen = visible(mask, span(j, BLOCK_KEYS)[None, :], key_id, WINDOW, HAS_SEGMENTS)
        dq_sum = add_keys(dq_sum, queries, k, v, seen, SCALE, SOFTCAP, PRECISION, True)
    store(dq, dq_sum * SCALE, batch, head, row, T, N, BLOCK_ROWS, H, BLOCK_H)


@triton.jit
def add_keys(
    dq, queries, k, v, seen,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """dq / scale with what a tile of keys adds."""
    q, dout, lse, delta = queries
    scores, slope = bounded(tl.dot(q, tl.trans(k), input_precision=PRECISION), SCALE, SOFTCAP)
    p = tl.exp2(scores * factor(SCALE, SOFTCAP) - lse)
    if IS_MASKED:
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    ds = p * (dp - delta) * slope
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
