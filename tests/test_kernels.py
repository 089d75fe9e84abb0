"""One suite for every block kernel: what it returns for two chunks, whatever the mask and wherever operands lie."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflash_jax import which_implementation
from pallas_kernels import IMPLEMENTATIONS, Box, Mask, Operand, choose, dense, triton_attention, xla


class Pair(NamedTuple):
    """A query chunk of T rows from position q_start on, and a key chunk of S from k_start on, of num_keys in all."""

    T: int = 24
    S: int = 40
    q_start: int = 0
    k_start: int = 0
    num_keys: int = 1000
    is_causal: bool = True
    N: int = 4
    K: int = 2
    H: int = 64
    window: int | None = None
    documents: tuple[int, ...] = ()  # the positions at which they start; what lies before the first is padding
    softcap: float | None = None

    def segment_ids(self):
        if not self.documents:
            return None
        count = lambda positions: np.searchsorted(self.documents, positions, side="right").astype(np.int32)
        ids = count(self.q_start + np.arange(self.T)), count(self.k_start + np.arange(self.S))
        # The second row of the batch is one document.
        return tuple(jnp.asarray(np.stack([x, np.ones_like(x)])) for x in ids)

    def mask(self, k_stop=None) -> Mask:
        q_start, k_start, stop = (jnp.int32(x) for x in (self.q_start, self.k_start, self.num_keys))
        stop = stop if k_stop is None else jnp.int32(k_stop)
        return Mask(q_start, k_start, stop, self.is_causal, self.window, self.segment_ids())

    def visible(self) -> np.ndarray:
        q, k = self.q_start + np.arange(self.T)[:, None], self.k_start + np.arange(self.S)
        seen = (k < self.num_keys) & ((k <= q) | (not self.is_causal)) & (k > q - (self.window or 10**6))
        if self.documents:
            q_ids, k_ids = map(np.asarray, self.segment_ids())
            seen = seen & (q_ids[:, :, None] == k_ids[:, None]) & (q_ids[:, :, None] > 0)
        return seen


PAIRS = {
    "diagonal": Pair(T=40),
    "diagonal_of_other_lengths": Pair(T=50, S=40, q_start=100, k_start=100),
    "next_chunk": Pair(q_start=60, k_start=40),
    "chunks_that_cross": Pair(q_start=50, k_start=40),
    "far_chunk": Pair(q_start=900, k_start=40),
    "full": Pair(is_causal=False),
    "future": Pair(q_start=0, k_start=24),
    "padded_tail": Pair(k_start=40, num_keys=53, is_causal=False),
    "padding_alone": Pair(k_start=80, num_keys=53, is_causal=False),
    "one_row_and_one_key": Pair(T=1, S=1),
    "one_head_of_keys": Pair(T=40, N=3, K=1),
    "window": Pair(T=100, S=100, window=7),
    "window_across_chunks": Pair(T=50, S=60, q_start=100, k_start=50, window=70),
    "window_that_sees_nothing": Pair(q_start=200, k_start=40, window=30),
    "window_not_causal": Pair(T=50, S=90, q_start=40, window=20, is_causal=False),
    "keys_behind_each_query": Pair(T=100, S=100, q_start=1, window=1, is_causal=False),
    "first_keys_before_a_window": Pair(T=40, S=8, q_start=-5),
    "documents": Pair(T=150, S=150, documents=(0, 20, 23, 90)),
    "documents_not_causal": Pair(T=100, S=100, documents=(0, 33), is_causal=False),
    "documents_after_padding": Pair(T=50, S=100, q_start=50, documents=(30, 60)),
    "documents_in_a_window": Pair(T=100, S=100, documents=(0, 20, 60), window=11),
    "softcap": Pair(T=40, softcap=1.5),
    "head_dim_72": Pair(T=40, H=72),
    "head_dim_96": Pair(T=40, H=96),
    "head_dim_128": Pair(T=150, S=150, H=128, documents=(0, 90)),
    "head_dim_192": Pair(T=150, S=150, H=192),
    "head_dim_256": Pair(T=150, S=150, H=256, documents=(0, 90)),
}
# Each kernel with a dtype that it takes and the absolute error that this dtype allows on values of order one.
KERNEL = pytest.mark.parametrize(
    "kernel, dtype, atol",
    [
        pytest.param(IMPLEMENTATIONS["xla"], jnp.float32, 1e-5, id="xla"),
        pytest.param(IMPLEMENTATIONS["hopper"], jnp.bfloat16, 3e-2, id="hopper", marks=pytest.mark.gpu(1)),
        pytest.param(IMPLEMENTATIONS["triton"], jnp.bfloat16, 3e-2, id="triton", marks=pytest.mark.gpu(1)),
        pytest.param(IMPLEMENTATIONS["triton"], jnp.float32, 1e-4, id="triton_float32", marks=pytest.mark.gpu(1)),
    ],
)


@pytest.fixture(autouse=True)
def skip_where_the_kernel_does_not_run(request):
    callspec = getattr(request.node, "callspec", None)
    kernel = callspec and callspec.params.get("kernel")
    for name, implementation in IMPLEMENTATIONS.items():
        if kernel is implementation:
            skip_unless_it_runs(name, callspec.params["dtype"])


def skip_unless_it_runs(name, dtype=jnp.bfloat16):
    try:
        which_implementation(name, dtype=dtype)
    except ValueError as error:
        pytest.skip(str(error))


PAIR = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks of a few rows then take several tiles of xla."""
    monkeypatch.setattr(xla, "ROWS_PER_TILE", 16)
    monkeypatch.setattr(xla, "KEYS_PER_TILE", 16)


def random_arrays(pair: Pair, dtype):
    shapes = [(2, pair.T, pair.N, pair.H), *[(2, pair.S, pair.K, pair.H)] * 2, (2, pair.T, pair.N, pair.H)]
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def as_float32(*arrays):
    return [x.astype(jnp.float32) for x in arrays]


def own(*arrays):
    """The arrays, whole, as operands that lie here."""
    return Operand(arrays, Box(0, arrays[0].shape[1], 0, arrays[0].shape[2]), None, jnp.array(False))


dense_attention = jax.jit(dense.attention, static_argnames=("scale", "softcap"))


def skip_without_tiles_of_its_own(kernel, pair):
    if kernel is IMPLEMENTATIONS["xla"] and pair.H != 64:
        pytest.skip("to xla one head dim is like another")


@KERNEL
@PAIR
def test_forward_equals_dense(kernel, dtype, atol, pair):
    skip_without_tiles_of_its_own(kernel, pair)
    q, k, v, _ = random_arrays(pair, dtype)
    scale = pair.H**-0.5
    run = jax.jit(lambda q, k, v, mask: kernel.forward(own(q), own(k, v), mask, scale, pair.softcap))
    out, lse = run(q, k, v, pair.mask())
    expected_out, expected_lse = dense_attention(q, k, v, pair.visible(), scale, pair.softcap)
    np.testing.assert_allclose(out, expected_out, atol=atol)
    np.testing.assert_allclose(lse, expected_lse, atol=atol)


@KERNEL
@PAIR
def test_backward_equals_dense(kernel, dtype, atol, pair):
    """With a dlse, which enters through delta alone."""
    skip_without_tiles_of_its_own(kernel, pair)
    q, k, v, dout = random_arrays(pair, dtype)
    scale = pair.H**-0.5
    exact = lambda *x: dense_attention(*x, pair.visible(), scale, pair.softcap)
    (out, lse), pull_back = jax.vjp(exact, *as_float32(q, k, v))
    dlse = jnp.where(lse == -jnp.inf, 0.0, jnp.sin(lse))
    delta = jnp.sum(dout.astype(jnp.float32) * out, axis=-1) - dlse
    run = jax.jit(lambda mask, k, v, *rows: kernel.backward(own(*rows), own(k, v), mask, scale, pair.softcap))
    ours = run(pair.mask(), k, v, q, dout, lse, delta)
    for x, expected in zip(ours, pull_back((*as_float32(dout), dlse)), strict=True):
        np.testing.assert_allclose(x, expected, atol=atol)


@KERNEL
def test_gradients_of_blocks_add_up(kernel, dtype, atol):
    """Two key chunks, each differentiated with the lse and delta of whole rows."""
    pair = Pair(T=40, S=80, q_start=40)
    q, k, v, dout = random_arrays(pair, dtype)
    (out, lse), pull_back = jax.vjp(lambda *x: dense_attention(*x, pair.visible(), 0.3), *as_float32(q, k, v))
    delta = jnp.sum(dout.astype(jnp.float32) * out, axis=-1)
    blocks = [
        kernel.backward(
            own(q, dout, lse, delta),
            own(k[:, start : start + 40], v[:, start : start + 40]),
            pair._replace(k_start=start).mask(),
            0.3,
        )
        for start in (0, 40)
    ]
    dq, dk, dv = pull_back((*as_float32(dout), jnp.zeros_like(lse)))
    np.testing.assert_allclose(blocks[0][0] + blocks[1][0], dq, atol=atol)
    np.testing.assert_allclose(jnp.concatenate([block[1] for block in blocks], axis=1), dk, atol=atol)
    np.testing.assert_allclose(jnp.concatenate([block[2] for block in blocks], axis=1), dv, atol=atol)


@KERNEL
@pytest.mark.parametrize("is_peer", [True, False])
@pytest.mark.parametrize("cut", ["heads", "rows"])
def test_own_box_or_peer_is_chosen_at_run_time(kernel, dtype, atol, is_peer, cut):
    """Own operands lie as whole chunks of which the task takes a box; a peer's are boxes already."""
    pair = Pair(T=40)
    (q, k, v, _), (other_q, other_k, other_v, _) = (
        random_arrays(pair, dtype),
        (2 * x for x in random_arrays(pair, dtype)),
    )
    boxes = {"heads": (Box(0, 40, 2, 2), Box(0, 40, 1, 1)), "rows": (Box(20, 20, 0, 4), Box(0, 40, 0, 2))}[cut]
    queries = Operand((q,), boxes[0], (boxes[0].take(other_q),), jnp.array(is_peer))
    keys = Operand((k, v), boxes[1], (boxes[1].take(other_k), boxes[1].take(other_v)), jnp.array(is_peer))
    mask = pair._replace(q_start=boxes[0].row).mask()
    results = kernel.forward(queries, keys, mask, 0.25)
    whole = dense_attention(*((other_q, other_k, other_v) if is_peer else (q, k, v)), pair.visible(), 0.25)
    for x, expected in zip(results, whole, strict=True):
        np.testing.assert_allclose(x, boxes[0].take(expected), atol=atol)


@KERNEL
def test_a_worker_without_a_task_returns_nothing(kernel, dtype, atol):
    pair = Pair(T=40, is_causal=False)
    q, k, v, dout = random_arrays(pair, dtype)
    out, lse = kernel.forward(own(q), own(k, v), pair.mask(k_stop=0), 0.25)
    assert jnp.all(out == 0) and jnp.all(lse == -jnp.inf)
    rows = jnp.ones(q.shape[:3])
    for gradient in kernel.backward(own(q, dout, rows, rows), own(k, v), pair.mask(k_stop=0), 0.25):
        assert jnp.all(gradient == 0)


@KERNEL
@pytest.mark.parametrize("result", ["float32", "bfloat16"])
def test_partial_results_have_the_dtype_that_the_caller_wants(kernel, dtype, atol, result):
    pair = Pair(T=40)
    q, k, v, dout = random_arrays(pair, dtype)
    out, lse = kernel.forward(own(q), own(k, v), pair.mask(), 0.25, dtype=result)
    task = own(q, dout, lse, jnp.zeros_like(lse)), own(k, v), pair.mask()
    assert {x.dtype for x in (out, *kernel.backward(*task, 0.25, dtype=result))} == {jnp.dtype(result)}
    assert {x.dtype for x in (lse, *kernel.backward(*task, 0.25))} == {jnp.dtype("float32")}
    exact = dense_attention(q, k, v, pair.visible(), 0.25)
    np.testing.assert_allclose(out.astype(jnp.float32), exact[0], atol=3e-2)
    np.testing.assert_allclose(lse, exact[1], atol=3e-2)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("sizes", [(16, 16), (32, 8)])
def test_tiles_that_the_mask_leaves_out_hide_everything_and_full_ones_nothing(pair, sizes):
    rows, keys = sizes
    tables = lambda mask: {
        "keys": mask.key_tiles(pair.T, rows, pair.S, keys),
        "queries": mask.query_tiles(pair.T, rows, pair.S, keys),
    }
    table = jax.device_get(jax.jit(tables)(pair.mask()))
    visible = np.broadcast_to(pair.visible(), (2, pair.T, pair.S))
    for side, (size, other) in {"keys": (rows, keys), "queries": (keys, rows)}.items():
        seen = visible if side == "keys" else visible.swapaxes(1, 2)
        for batch, number in np.ndindex(2, -(-seen.shape[1] // size)):
            start, full_start, full_stop, stop = table[side][batch % len(table[side]), number]
            assert 0 <= start <= full_start <= full_stop <= stop <= -(-seen.shape[2] // other)
            tile = seen[batch, number * size : (number + 1) * size]
            assert not tile[:, : start * other].any() and not tile[:, stop * other :].any()
            assert tile[:, full_start * other : full_stop * other].all()


def test_tiles_of_long_documents_are_skipped_and_full():
    """What time follows: of 64 x 64 tiles those on the diagonal of a document are masked, those below it full."""
    ids = jnp.repeat(jnp.arange(1, 5), 256)[None]
    mask = Mask(0, 0, 1024, True, segment_ids=(ids, ids))
    first = 4 * (np.arange(16) // 4)
    for table, (start, full_stop) in {
        "key_tiles": (first, np.arange(16)),
        "query_tiles": (np.arange(16), first + 4),
    }.items():
        rows = np.asarray(getattr(mask, table)(1024, 64, 1024, 64))[0]
        np.testing.assert_array_equal(rows[:, 0], start)
        np.testing.assert_array_equal(rows[:, 2], full_stop)
        np.testing.assert_array_equal((rows[:, 3] - rows[:, 0]).sum(), 4 * 10)


def test_the_padding_of_a_box_is_dropped_on_the_way_back():
    chunk = jnp.arange(2 * 5 * 4 * 3.0).reshape(2, 5, 4, 3)
    box = Box(row=3, num_rows=3, head=1, num_heads=2)
    taken = box.take(chunk)
    assert taken.shape == (2, 3, 2, 3) and jnp.all(taken[:, 2] == 0)
    np.testing.assert_array_equal(box.put(chunk, taken), chunk)
    np.testing.assert_array_equal(box.put(chunk, taken + 1)[:, 3:, 1:3], chunk[:, 3:, 1:3] + 1)


H200 = {"platform": "gpu", "compute_capability": "9.0", "scale": 0.1}
A100 = H200 | {"compute_capability": "8.0"}
V100 = H200 | {"compute_capability": "7.0"}
CPU = H200 | {"platform": "cpu", "compute_capability": None}


@pytest.mark.parametrize(
    "device, dtype, head_dim, name, reason",
    [
        (H200, jnp.bfloat16, 128, "hopper", "a GPU of compute capability 9.0, bfloat16, head dim 128"),
        (H200, jnp.float16, 64, "hopper", "a GPU of compute capability 9.0"),
        (H200, jnp.float32, 128, "triton", "a GPU .*; hopper needs bfloat16 or float16, got float32"),
        (H200 | {"scale": -1.0}, jnp.bfloat16, 64, "xla", "hopper needs a positive scale, got -1.0; triton needs a p"),
        (H200, jnp.bfloat16, 80, "hopper", "a GPU of compute capability 9.0"),
        (H200, jnp.bfloat16, 320, "xla", "hopper needs a head dim of at most 256, got 320; triton needs a head dim of"),
        (H200 | {"cuda_version": 12090}, jnp.bfloat16, 64, "triton", "miscompile causal masks, got 12.9.0"),
        (H200 | {"cuda_version": 12091}, jnp.bfloat16, 64, "hopper", "a GPU of compute capability 9.0"),
        (A100, jnp.bfloat16, 128, "triton", "a GPU of compute capability 8.0, .* capability 9.0, got 8.0"),
        (A100 | {"compute_capability": "12.0"}, jnp.float16, 256, "triton", "a GPU of compute capability 12.0"),
        (V100, jnp.bfloat16, 128, "xla", "triton needs an NVIDIA GPU of compute capability 8.0 or later, got 7.0"),
        (
            A100 | {"compute_capability": "gfx942"},
            jnp.bfloat16,
            128,
            "xla",
            "triton needs an NVIDIA GPU .*, got gfx942",
        ),
        (CPU, jnp.bfloat16, 128, "xla", "hopper needs a GPU, got cpu; triton needs a GPU, got cpu"),
    ],
)
def test_the_best_kernel_of_the_device_is_chosen_and_says_why(device, dtype, head_dim, name, reason, monkeypatch):
    call = device | {"dtype": jnp.dtype(dtype), "head_dim": head_dim}
    monkeypatch.setattr(triton_attention, "is_installed", lambda: True)
    choice = choose(None, **call)
    assert choice.name == name
    assert re.search(reason, choice.reason)
    assert choose("xla", **call).reason == "asked for"
    if name == "xla":
        for refused in ("hopper", "triton"):
            with pytest.raises(ValueError, match=f"implementation='{refused}': {refused} needs"):
                choose(refused, **call)


def test_a_gpu_without_jax_triton_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(triton_attention, "is_installed", lambda: False)
    call = A100 | {"dtype": jnp.dtype(jnp.bfloat16), "head_dim": 128}
    assert choose(None, **call).name == "xla"
    assert choose(None, **call).reason.endswith("triton needs jax-triton: pip install 'distflash_jax[triton]'")
    with pytest.raises(ValueError, match=r"implementation='triton': .* pip install 'distflash_jax\[triton\]'"):
        choose("triton", **call)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation='cudnn': must be None or one of"):
        choose("cudnn", **H200, dtype=jnp.dtype(jnp.bfloat16), head_dim=128)


def test_a_window_without_the_query_itself_is_refused():
    with pytest.raises(ValueError, match="window=0: must be at least 1"):
        Mask(0, 0, 8, True, window=0)


@KERNEL
def test_a_softcap_that_bounds_nothing_is_refused(kernel, dtype, atol):
    pair = Pair()
    q, k, v, dout = random_arrays(pair, dtype)
    rows = jnp.ones(q.shape[:3])
    for call in (
        lambda: kernel.forward(own(q), own(k, v), pair.mask(), 0.1, 0.0),
        lambda: kernel.backward(own(q, dout, rows, rows), own(k, v), pair.mask(), 0.1, 0.0),
    ):
        with pytest.raises(ValueError, match=r"softcap=0\.0: must be positive or None"):
            call()
