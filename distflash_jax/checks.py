"""What distflash_attention refuses before anything is traced: arrays and masks, by name, value and what is allowed."""

import math
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from distflash_jax.masks import INTEGERS, AttentionMask, Window, sides_of


def check_arrays(q: Array, k: Array, v: Array) -> None:
    """Raises ValueError where shapes or dtypes of q, k and v do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "dtype") or x.ndim != 4:
            got = f"shape {x.shape}" if hasattr(x, "dtype") else type(x).__name__
            raise ValueError(f"{name}: must have 4 dimensions [batch, sequence, heads, head dim], got {got}")
        if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"{name}: dtype must be float32, bfloat16 or float16, got {x.dtype}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: dtype must be that of q, {q.dtype}, got {x.dtype}")
        if 0 in x.shape:
            raise ValueError(f"{name}: must not be empty, got shape {x.shape}")
    if k.shape != v.shape:
        raise ValueError(f"v: shape must be that of k, {k.shape}, got {v.shape}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k, v: batch size must be that of q, {q.shape[0]}, got {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"k, v: head dim must be that of q, {q.shape[3]}, got {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q: number of heads {q.shape[2]} must be a multiple of the {k.shape[2]} heads of k, v")


def check_mask(
    mask: AttentionMask | None, q: Array, k: Array, *, causal: bool | None, window: Window | None, **others: Any
) -> AttentionMask:
    """The mask, or that of the keyword arguments, which are its short form; causal by default.

    Raises:
        ValueError: both are given, or a mask that cannot be, or whose arrays do not fit q and k.
    """
    if mask is None:
        if causal not in (None, True, False):
            raise ValueError(f"causal={causal!r}: must be True, False or None")
        causal = causal is None or bool(causal)
        if window is not None and not isinstance(window, tuple) and not causal:
            raise ValueError(f"window={window}: needs causal=True, or must be (left, right)")
        sides = None if window is None else sides_of(window)
        mask = AttentionMask(is_causal=causal, window=sides, **others)
    elif given := [name for name, x in {"causal": causal, "window": window, **others}.items() if x is not None]:
        raise ValueError(f"{given[0]}: must be left out where mask is given, which says it all")
    if not isinstance(mask, AttentionMask):
        raise ValueError(f"mask: must be made by distflash_jax.masks, got {type(mask).__name__}; none is dense")
    _check_sides(mask)
    _check_lengths(mask, q.shape[1], k.shape[1])
    if mask.kv_segment_ids is not None and mask.segment_ids is None:
        raise ValueError("kv_segment_ids: needs segment_ids, those of the queries")
    _check_array("prefix_lengths", mask.prefix_lengths, q.shape[:1], jnp.integer, "integers")
    if mask.segments is not None:
        _check_array("segment_ids", mask.segments.q, q.shape[:2], jnp.integer, "integers")
        _check_array("kv_segment_ids", mask.segments.kv, k.shape[:2], jnp.integer, "integers")
    return mask


def _check_sides(mask: AttentionMask) -> None:
    """What is seen before and behind a token."""
    for name in ("global_tokens", "q_offset"):
        if (value := getattr(mask, name)) is not None and not isinstance(value, INTEGERS):
            raise ValueError(f"{name}={value!r}: must be a whole number that is known when it compiles, or None")
    if mask.is_causal and mask.window is not None and mask.window[1] != 0:
        raise ValueError(f"window={mask.window}: the right side must be 0 with causal=True")
    if mask.global_tokens is not None and mask.global_tokens < 0:
        raise ValueError(f"global_tokens={mask.global_tokens}: must be at least 0, or None")
    if mask.global_tokens is not None and mask.window is None:
        raise ValueError(f"global_tokens={mask.global_tokens}: needs a window, beyond which they are seen")
    if mask.prefix_lengths is not None and not mask.is_causal:
        raise ValueError("prefix_lengths: needs causal=True, behind the prefix")
    if mask.prefix_lengths is not None and mask.window is not None:
        raise ValueError("prefix_lengths: must be left out with a window")


def _check_lengths(mask: AttentionMask, T: int, S: int) -> None:
    """Queries and keys of other lengths."""
    has_positions = mask.is_causal or mask.window is not None
    if mask.q_offset is not None and not has_positions:
        raise ValueError(f"q_offset={mask.q_offset}: needs causal=True or a window")
    if has_positions and T != S and mask.q_offset is None:
        raise ValueError(
            f"q_offset=None: must be given where k, v are not as long as q ({S} and {T}) with causal=True or a window: "
            "0 aligns the first tokens, and what k, v are longer the last ones"
        )
    for name in ("global_tokens", "prefix_lengths"):
        if getattr(mask, name) is not None and (T != S or mask.q_offset):
            raise ValueError(f"{name}: needs k, v that are as long as q, {T}, without q_offset, got {S}")


def check_sinks(sinks: Array | None, q: Array) -> None:
    """Raises ValueError where sinks are not one score for each head."""
    _check_array("sinks", sinks, q.shape[2:3], jnp.floating, "floats, one a head,")


def check_number(name: str, value: Any, *, is_positive: bool = False) -> float:
    """The value as a Python float.

    Raises:
        ValueError: it is none, is not finite, or not positive where it has to be.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):  # a traced array raises a TypeError
        number = math.nan
    if not math.isfinite(number) or (is_positive and number <= 0):
        kind = "positive or None" if is_positive else "a finite number or None"
        raise ValueError(f"{name}={value!r}: must be {kind}, and known when it compiles")
    return number


def _check_array(name: str, x: Array | None, shape: tuple[int, ...], kind: DTypeLike, words: str) -> None:
    if x is None:
        return
    if not hasattr(x, "dtype"):
        raise ValueError(f"{name}: must be an array of {words} of shape {shape}, got {type(x).__name__}")
    if x.shape != shape or not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"{name}: must be {words} of shape {shape}, got {x.dtype}{x.shape}")
