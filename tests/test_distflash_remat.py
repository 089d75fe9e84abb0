"""The backward pass never runs an attention forward, nor its messages, again: counted, not timed."""

import contextlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import num_forward_launches, num_messages, permuted_bytes
from test_distflash_attention import make_mesh

from distflash_jax import distflash_attention, remat
from distflash_jax.cost import Cost, Shape
from distflash_jax.schedule import balanced
from distflash_jax.table import Schedule

L, N, K, H, D = 3, 4, 2, 8, 16


def messages(schedule: Schedule) -> tuple[int, int]:
    """(forward, backward) messages of the table, one an array."""
    num_q = sum(bool(step.q.fetch) for step in schedule.steps)
    num_kv = sum(bool(step.kv.fetch) for step in schedule.steps)
    return (
        3 * num_q + 2 * num_kv,
        5 * num_q + 4 * num_kv,
    )  # q + out, lse; k, v | q, dout, lse, delta + dq; k, v + dk, dv


def network(num_workers: int, wrap, **options):
    """Loss of L scanned attention layers, as a function of their weights and the input."""
    options = {"mesh": make_mesh(seq=num_workers)} | options

    def layer(x, weights):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights[:3])
        return x + jnp.einsum("btnh,nhd->btd", jnp.sin(distflash_attention(q, k, v, **options)), weights[3]), None

    return lambda weights, x: jnp.sum(jax.lax.scan(wrap(layer), x, weights)[0] ** 2)


def arguments(T=16, kv_heads=K):
    shapes = [(L, D, N, H), (L, D, kv_heads, H), (L, D, kv_heads, H), (L, N, H, D)]
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [0.2 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    return weights, jax.random.normal(keys[4], (1, T, D))


def gradient_jaxpr(num_workers, wrap, **options):
    return jax.make_jaxpr(jax.grad(network(num_workers, wrap, **options)))(*arguments())


COMBINED = ("save_and_dots", "offload_and_dots")
WITH_POLICY = {
    "save": lambda f: jax.checkpoint(f, policy=remat.save_attention_outputs()),
    "offload": lambda f: jax.checkpoint(f, policy=remat.offload_attention_outputs()),
    "save_and_dots": lambda f: jax.checkpoint(
        f, policy=remat.save_attention_outputs(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    ),
    "offload_and_dots": lambda f: jax.checkpoint(
        f, policy=remat.offload_attention_outputs(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    ),
}


@pytest.mark.parametrize("num_workers, policy", [(1, "save"), (2, "offload"), (8, "save"), *((2, p) for p in COMBINED)])
def test_with_the_policy_each_forward_runs_and_sends_once(num_workers, policy):
    jaxpr = gradient_jaxpr(num_workers, WITH_POLICY[policy])
    schedule = balanced(num_workers)
    assert num_forward_launches(jaxpr) == len(schedule.steps)
    assert num_messages(jaxpr) == sum(messages(schedule))


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_with_plain_checkpoint_each_forward_runs_and_sends_twice(num_workers):
    jaxpr = gradient_jaxpr(num_workers, jax.checkpoint)
    forward, backward = messages(balanced(num_workers))
    assert num_forward_launches(jaxpr) == 2 * len(balanced(num_workers).steps)
    assert num_messages(jaxpr) == 2 * forward + backward


def test_messages_at_eight_workers_are_the_tables_own():
    """4 steps fetch k, v and 4 fetch q, whose out and lse return; backward with dout, lse, delta and gradients."""
    assert messages(balanced(8)) == (20, 36)
    assert num_messages(gradient_jaxpr(8, lambda f: f)) == 56


@pytest.mark.parametrize("num_workers, kv_heads", [(2, 2), (2, 1), (3, 4), (4, 2), (8, 1)])
def test_compiled_messages_carry_the_tables_bytes_and_no_more(num_workers, kv_heads):
    chunk = 6
    loss = jax.grad(network(num_workers, WITH_POLICY["save"]))
    compiled = jax.jit(loss).lower(*arguments(chunk * num_workers, kv_heads)).compile()
    schedule = balanced(num_workers, cut="heads" if kv_heads % 2 == 0 else "rows")
    cost = Cost(schedule, Shape(chunk * num_workers, N, kv_heads, H, itemsize=4))
    of_table = num_workers * (cost.traffic("forward") + cost.traffic("backward"))
    assert permuted_bytes(compiled.as_text()) == of_table


def test_the_policies_change_no_number():
    plain, *others = (
        jax.jit(jax.value_and_grad(network(2, wrap)))(*arguments())
        for wrap in (lambda f: f, WITH_POLICY["save"], WITH_POLICY["offload_and_dots"])
    )
    for other in others:
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_out_and_lse_are_the_only_saved_attention_residuals(capsys):
    jax.ad_checkpoint.print_saved_residuals(network(2, WITH_POLICY["save"]), *arguments())
    saved = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    shapes = sorted(line.split(" ")[0] for line in saved)
    out, lse, layer_inputs = f"f32[{L},1,16,{N},{H}]", f"f32[{L},1,16,{N}]", f"f32[{L},1,16,{D}]"
    assert shapes.count(out) == shapes.count(lse) == 1 and layer_inputs in shapes
    assert not any(shape.startswith(f"f32[{L},1,16,{K},") for shape in shapes), saved


def test_remat3_without_custom_vjp3_is_warned_of():
    with (
        jax_option("jax_remat3"),
        pytest.warns(UserWarning, match="JAX_REMAT3 is set without JAX_CUSTOM_VJP3"),
    ):
        remat.save_attention_outputs()
    with jax_option("jax_remat3"), jax_option("jax_custom_vjp3"):
        remat.save_attention_outputs()  # warnings are errors here


@contextlib.contextmanager
def jax_option(name):
    jax.config.update(name, True)
    yield
    jax.config.update(name, False)


CHILD = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
from test_distflash_remat import *
compiled = jax.jit(jax.grad(network(2, WITH_POLICY["save"]))).lower(*arguments()).compile().as_text()
assert compiled.count(" collective-permute(") == sum(messages(balanced(2))), compiled
"""


def test_the_counts_hold_under_the_coming_remat_too():
    """There it is XLA that removes the dead forward, so the compiled program is counted."""
    tests = os.path.dirname(__file__)
    environment = os.environ | {"JAX_REMAT3": "1", "JAX_CUSTOM_VJP3": "1", "JAX_PLATFORMS": "cpu"}
    path = os.pathsep.join([tests, os.path.dirname(tests), environment.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert child.returncode == 0, child.stderr
