"""One suite for every block kernel: what it returns for two chunks, whatever the mask and wherever operands lie."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import IMPLEMENTATIONS, Box, Mask, Operand, choose, dense, xla


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
    H: int = 16

    def mask(self, k_stop=None) -> Mask:
        q_start, k_start, stop = (jnp.int32(x) for x in (self.q_start, self.k_start, self.num_keys))
        return Mask(q_start, k_start, stop if k_stop is None else jnp.int32(k_stop), self.is_causal)

    def visible(self) -> jax.Array:
        q, k = self.q_start + jnp.arange(self.T)[:, None], self.k_start + jnp.arange(self.S)
        return (k < self.num_keys) & ((k <= q) | (not self.is_causal))


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
    "odd_head_dim": Pair(T=40, H=20),
}
IMPLEMENTATION = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
PAIR = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Chunks of a few rows then take several tiles."""
    monkeypatch.setattr(xla, "ROWS_PER_TILE", 16)
    monkeypatch.setattr(xla, "KEYS_PER_TILE", 16)


def random_arrays(pair: Pair, dtype=jnp.float32):
    shapes = [(2, pair.T, pair.N, pair.H), *[(2, pair.S, pair.K, pair.H)] * 2, (2, pair.T, pair.N, pair.H)]
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def own(*arrays):
    """The arrays, whole, as operands that lie here."""
    return Operand(arrays, Box(0, arrays[0].shape[1], 0, arrays[0].shape[2]), None, jnp.array(False))


@IMPLEMENTATION
@PAIR
def test_forward_equals_dense(implementation, pair):
    q, k, v, _ = random_arrays(pair)
    scale = pair.H**-0.5
    out, lse = IMPLEMENTATIONS[implementation].forward(own(q), own(k, v), pair.mask(), scale)
    expected_out, expected_lse = dense.attention(q, k, v, pair.visible(), scale)
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=2e-6)


@IMPLEMENTATION
@PAIR
def test_backward_equals_dense(implementation, pair):
    """With a dlse, which enters through delta alone."""
    q, k, v, dout = random_arrays(pair)
    scale = pair.H**-0.5
    (out, lse), pull_back = jax.vjp(lambda *x: dense.attention(*x, pair.visible(), scale), q, k, v)
    dlse = jnp.where(lse == -jnp.inf, 0.0, jnp.sin(lse))
    delta = jnp.sum(dout * out, axis=-1) - dlse
    ours = IMPLEMENTATIONS[implementation].backward(own(q, dout, lse, delta), own(k, v), pair.mask(), scale)
    for x, expected in zip(ours, pull_back((dout, dlse)), strict=True):
        np.testing.assert_allclose(x, expected, atol=1e-5)


@IMPLEMENTATION
def test_gradients_of_blocks_add_up(implementation):
    """Two key chunks, each differentiated with the lse and delta of whole rows."""
    pair = Pair(T=40, S=80, q_start=40)
    q, k, v, dout = random_arrays(pair)
    (out, lse), pull_back = jax.vjp(lambda *x: dense.attention(*x, pair.visible(), 0.3), q, k, v)
    delta = jnp.sum(dout * out, axis=-1)
    blocks = [
        IMPLEMENTATIONS[implementation].backward(
            own(q, dout, lse, delta),
            own(k[:, start : start + 40], v[:, start : start + 40]),
            pair._replace(k_start=start).mask(),
            0.3,
        )
        for start in (0, 40)
    ]
    dq, dk, dv = pull_back((dout, jnp.zeros_like(lse)))
    np.testing.assert_allclose(blocks[0][0] + blocks[1][0], dq, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([block[1] for block in blocks], axis=1), dk, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([block[2] for block in blocks], axis=1), dv, atol=1e-5)


@IMPLEMENTATION
@pytest.mark.parametrize("is_peer", [True, False])
@pytest.mark.parametrize("cut", ["heads", "rows"])
def test_own_box_or_peer_is_chosen_at_run_time(implementation, is_peer, cut):
    """Own operands lie as whole chunks of which the task takes a box; a peer's are boxes already."""
    pair = Pair(T=40)
    (q, k, v, _), (other_q, other_k, other_v, _) = random_arrays(pair), (2 * x for x in random_arrays(pair))
    boxes = {"heads": (Box(0, 40, 2, 2), Box(0, 40, 1, 1)), "rows": (Box(20, 20, 0, 4), Box(0, 40, 0, 2))}[cut]
    queries = Operand((q,), boxes[0], (boxes[0].take(other_q),), jnp.array(is_peer))
    keys = Operand((k, v), boxes[1], (boxes[1].take(other_k), boxes[1].take(other_v)), jnp.array(is_peer))
    mask = pair._replace(q_start=boxes[0].row).mask()
    results = IMPLEMENTATIONS[implementation].forward(queries, keys, mask, 0.25)
    whole = dense.attention(*((other_q, other_k, other_v) if is_peer else (q, k, v)), pair.visible(), 0.25)
    for x, expected in zip(results, whole, strict=True):
        np.testing.assert_allclose(x, boxes[0].take(expected), atol=2e-6)


@IMPLEMENTATION
def test_a_worker_without_a_task_returns_nothing(implementation):
    pair = Pair(T=40, is_causal=False)
    q, k, v, dout = random_arrays(pair)
    out, lse = IMPLEMENTATIONS[implementation].forward(own(q), own(k, v), pair.mask(k_stop=0), 0.25)
    assert jnp.all(out == 0) and jnp.all(lse == -jnp.inf)
    rows = jnp.ones(q.shape[:3])
    for gradient in IMPLEMENTATIONS[implementation].backward(
        own(q, dout, rows, rows), own(k, v), pair.mask(k_stop=0), 0.25
    ):
        assert jnp.all(gradient == 0)


@IMPLEMENTATION
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_partial_results_are_float32_whatever_the_inputs(implementation, dtype):
    pair = Pair(T=40)
    q, k, v, dout = random_arrays(pair, dtype)
    kernel = IMPLEMENTATIONS[implementation]
    out, lse = kernel.forward(own(q), own(k, v), pair.mask(), 0.25)
    gradients = kernel.backward(own(q, dout, lse, jnp.zeros_like(lse)), own(k, v), pair.mask(), 0.25)
    assert {x.dtype for x in (out, lse, *gradients)} == {jnp.dtype("float32")}
    exact = dense.attention(q, k, v, pair.visible(), 0.25)
    np.testing.assert_allclose(out, exact[0], atol=2e-2)
    np.testing.assert_allclose(lse, exact[1], atol=2e-2)


def test_the_padding_of_a_box_is_dropped_on_the_way_back():
    chunk = jnp.arange(2 * 5 * 4 * 3.0).reshape(2, 5, 4, 3)
    box = Box(row=3, num_rows=3, head=1, num_heads=2)
    taken = box.take(chunk)
    assert taken.shape == (2, 3, 2, 3) and jnp.all(taken[:, 2] == 0)
    np.testing.assert_array_equal(box.put(chunk, taken), chunk)
    np.testing.assert_array_equal(box.put(chunk, taken + 1)[:, 3:, 1:3], chunk[:, 3:, 1:3] + 1)


def test_choose_names_its_reason_and_refuses_unknown_names():
    assert choose("xla", "cpu").reason == "asked for"
    assert choose(None, "cpu").name == "xla"
    with pytest.raises(ValueError, match="implementation='cudnn': must be None or one of"):
        choose("cudnn", "cpu")
