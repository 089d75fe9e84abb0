"""distflash_attention on virtual workers against dense float64: numbers, transformations, placements, refusals."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from counting import equations
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import Case
from tolerance import assert_close, max_error

from distflash_jax import attention, distflash_attention, which_implementation
from pallas_kernels import Choice, dense, xla

MHA, GQA4, MQA, ODD = (8, 8), (8, 2), (8, 1), (33, 11)  # (query heads, key/value heads)


def make_mesh(axis_type=AxisType.Auto, **shape):
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(axis_type,) * len(shape), devices=devices)


def attend(num_workers, **options):
    return functools.partial(distflash_attention, mesh=make_mesh(seq=num_workers), return_lse=True, **options)


def assert_matches(case: Case, attention):
    plain, exact = oracle.expected(case)
    ours = oracle.results(attention, *oracle.inputs(case)).named()
    for name in exact:
        assert_close(name, ours[name], plain[name], exact[name], case.dtype)


@pytest.mark.parametrize("num_workers", range(1, 9))
def test_causal_attention_and_all_gradients_equal_dense(num_workers):
    assert_matches(Case(T=43, N=8, K=4, B=1), attend(num_workers))


@pytest.mark.parametrize(
    "num_workers, heads",
    [(2, MQA), (3, GQA4), (4, ODD), (5, ODD), (8, MHA), (8, MQA)],
    ids=["2-mqa", "3-gqa4", "4-33heads", "5-33heads", "8-mha", "8-mqa"],
)
def test_any_heads_equal_dense_cut_by_heads_or_by_rows(num_workers, heads):
    assert_matches(Case(T=43, N=heads[0], K=heads[1], B=1), attend(num_workers))


@pytest.mark.parametrize(
    "num_workers, strategy",
    [(2, "balanced_unsplit"), (8, "balanced_unsplit"), (3, "ring"), (8, "ring"), *((P, "burst") for P in (2, 5))],
)
def test_every_strategy_equals_dense(num_workers, strategy):
    assert_matches(Case(T=43), attend(num_workers, strategy=strategy))


@pytest.mark.parametrize("num_workers, T, S", [(1, 43, 43), (4, 40, 29), (5, 9, 50)])
def test_full_attention_equals_dense_also_across_lengths(num_workers, T, S):
    assert_matches(Case(T=T, S=S, is_causal=False), attend(num_workers, causal=False))


@pytest.mark.parametrize("num_workers, T", [(8, 8), (8, 9), (2, 3)])
def test_one_token_a_worker_and_chunks_of_padding_equal_dense(num_workers, T):
    assert_matches(Case(T=T, N=2, K=1, B=1), attend(num_workers))


@pytest.mark.parametrize("num_workers, T", [(1, 70), (4, 101)])
def test_chunks_of_several_tiles_equal_dense(num_workers, T, monkeypatch):
    monkeypatch.setattr(xla, "ROWS_PER_TILE", 8)
    monkeypatch.setattr(xla, "KEYS_PER_TILE", 16)
    assert_matches(Case(T=T, N=2, K=1, B=1), attend(num_workers))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_half_precision_stays_within_twice_the_plain_error(num_workers, dtype):
    case = Case(B=1, T=136, H=32, dtype=dtype)
    assert_matches(case, attend(num_workers))
    out, lse = jax.eval_shape(attend(num_workers), *oracle.inputs(case)[:3])
    assert (out.dtype, lse.dtype) == (jnp.dtype(dtype), jnp.float32)


def test_error_is_flat_in_the_number_of_workers():
    case = Case(B=1, T=512, N=2, K=2, H=32, dtype="bfloat16")
    _, exact = oracle.expected(case)
    errors = {}
    for num_workers in (1, 2, 4, 8):
        ours = oracle.results(attend(num_workers), *oracle.inputs(case)).named()
        errors[num_workers] = {name: max_error(ours[name], exact[name]) for name in exact}
    for name, at_one in errors[1].items():
        assert errors[8][name] <= 1.5 * at_one + 1e-6, (name, errors)


def test_any_scale_head_dim_and_wild_scores_stay_exact():
    """Scores whose log-sum-exp differs by thousands between chunks; a head dim that is no power of two."""
    case = Case(T=40, H=40)
    q, k, v, dout, dlse = oracle.inputs(case)
    q = 200 * q
    results = {P: oracle.results(attend(P, scale=0.3), q, k, v, dout, dlse).named() for P in (1, 4)}
    for name, at_one in results[1].items():
        assert jnp.all(jnp.isfinite(results[4][name])), name
        np.testing.assert_allclose(results[4][name], at_one, rtol=2e-5, atol=2e-5 * float(jnp.abs(at_one).max()))


@pytest.mark.parametrize("head_dim", [72, 96, 192])
def test_any_head_dim_equals_dense(head_dim):
    assert_matches(Case(T=10, N=2, K=1, B=1, H=head_dim), attend(2))


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_may_be_zero_or_negative(scale):
    q, k, v, dout, dlse = oracle.inputs(Case(T=12, B=1))
    visible = jnp.tril(jnp.ones((12, 12), bool))
    ours = oracle.results(attend(2, scale=scale), q, k, v, dout, dlse).named()
    exact = oracle.results(
        functools.partial(dense.attention, visible=visible, scale=scale), q, k, v, dout, dlse
    ).named()
    for name in exact:
        np.testing.assert_allclose(ours[name], exact[name], atol=2e-5)


@pytest.mark.parametrize("num_workers", [4, 5])
def test_gradient_into_the_future_is_exactly_zero(num_workers):
    q, k, v, *_ = oracle.inputs(Case(T=40))
    loss = lambda k, v, row: sum(x[:, row].sum() for x in attend(num_workers)(q, k, v))
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for row in (0, 17, 39):
        for gradient in gradients(k, v, row):
            assert jnp.all(gradient[:, row + 1 :] == 0) and jnp.all(jnp.any(gradient[:, : row + 1] != 0, axis=(2, 3)))


def test_repeats_are_bitwise_equal():
    arrays = oracle.inputs(Case(T=64, dtype="bfloat16"))
    first, second = (oracle.results(attend(3), *arrays).named() for _ in range(2))
    for name in first:
        assert jnp.array_equal(first[name], second[name]), name


def test_lse_gradient_is_not_lost_and_leaves_dv_alone():
    q, k, v, *_ = oracle.inputs(Case())
    dq, dk, dv = jax.jit(jax.grad(lambda *x: jnp.mean(attend(2)(*x)[1]), argnums=(0, 1, 2)))(q, k, v)
    assert jnp.abs(dq).max() > 0 and jnp.abs(dk).max() > 0 and jnp.all(dv == 0)


# Transformations and placements


def test_batch_and_heads_may_be_sharded_over_other_axes():
    mesh = make_mesh(data=2, seq=2, tensor=2)
    attention = functools.partial(distflash_attention, mesh=mesh, spec=P("data", "seq", "tensor"), return_lse=True)
    assert_matches(Case(T=43, N=8, K=4), attention)


def test_under_an_ambient_mesh():
    with jax.set_mesh(make_mesh(data=2, seq=4)):
        assert_matches(Case(), functools.partial(distflash_attention, return_lse=True))


def test_explicit_sharding_is_inferred_and_kept():
    mesh = make_mesh(AxisType.Explicit, data=2, seq=4)
    case = Case(T=44)
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("data", "seq")))
    q, k, v, dout, dlse = map(place, oracle.inputs(case))
    out = jax.jit(distflash_attention)(q, k, v)
    assert jax.typeof(out).sharding.spec[:2] == ("data", "seq")
    ours = oracle.results(functools.partial(distflash_attention, return_lse=True), q, k, v, dout, dlse).named()
    plain, exact = oracle.expected(case)
    for name in exact:
        assert_close(name, ours[name], plain[name], exact[name], case.dtype)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_the_users_own_shard_map(check_vma):
    """With heads of q sharded over a second axis over which the one head of k and v is replicated."""
    mesh = make_mesh(seq=4, tensor=2)
    spec, kv_spec = P(None, "seq", "tensor"), P(None, "seq")
    attention = jax.shard_map(
        functools.partial(distflash_attention, return_lse=True),
        mesh=mesh,
        in_specs=(spec, kv_spec, kv_spec),
        out_specs=(spec, spec),
        check_vma=check_vma,
    )
    assert_matches(Case(T=44, N=8, K=1), attention)


def test_inside_a_shard_map_over_another_axis():
    mesh = make_mesh(data=2, seq=4)
    attention = jax.shard_map(
        functools.partial(distflash_attention, return_lse=True),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    assert_matches(Case(T=44), attention)


def test_vmap_scan_checkpoint_and_value_and_grad_compose():
    q, k, v, *_ = oracle.inputs(Case(T=24))
    attention = functools.partial(distflash_attention, mesh=make_mesh(seq=3))
    stack = lambda x: jnp.stack([x, 2 * x])

    def loss(q, k, v):
        layer = jax.checkpoint(lambda x, _: (attention(x, k, v) + x, None))
        return jax.lax.scan(layer, q, length=3)[0].sum()

    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(loss, argnums=(0, 1, 2))))(*map(stack, (q, k, v)))
    for i, factor in enumerate((1, 2)):
        value, expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*(factor * x for x in (q, k, v)))
        np.testing.assert_allclose(values[i], value, rtol=1e-5)
        for ours, theirs in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(ours[i], theirs, rtol=1e-4, atol=1e-4)


def test_eager_and_compiled_calls_agree():
    q, k, v, *_ = oracle.inputs(Case(B=1, T=4, N=1, K=1, H=4))
    np.testing.assert_allclose(attend(2)(q, k, v)[0], jax.jit(attend(2))(q, k, v)[0], rtol=1e-5, atol=1e-6)


def test_an_eager_call_compiles_attention_as_a_whole(caplog):
    q, k, v, *_ = oracle.inputs(Case(B=1, T=6, N=1, K=1, H=4))
    with jax.log_compiles():
        attend(3)(q, k, v)
    compiled = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling")]
    assert len(compiled) < 5, compiled


@pytest.mark.parametrize("strategy", ["balanced", "rsa"])
def test_other_derivatives_than_the_first_in_reverse_mode_are_refused(strategy):
    q, k, v, *_ = oracle.inputs(Case(B=1, T=4, N=1, K=1, H=4))
    loss = lambda x: attend(2, strategy=strategy)(q, x, v)[0].sum()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (k,), (k,))
    for second in (jax.hessian(loss), jax.grad(lambda x: jax.grad(loss)(x).sum())):
        with pytest.raises(NotImplementedError, match="must be differentiated once, in reverse mode"):
            jax.jit(second)(k)


def test_two_head_layouts_live_in_one_process():
    for heads in (MHA, MQA):
        assert_matches(Case(T=16, N=heads[0], K=heads[1], B=1), attend(2))


# Structure


def test_no_array_of_scores_exists():
    """Temporary memory grows in proportion to the length, not to its square."""
    sizes = {}
    for T in (8192, 16384):
        q = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.bfloat16)
        loss = lambda q, k, v: attend(4)(q, k, v)[0].astype(jnp.float32).sum()
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, q, q).compile()
        sizes[T] = compiled.memory_analysis().temp_size_in_bytes
    assert sizes[16384] < 2.2 * sizes[8192], sizes


def test_results_that_return_to_their_owner_are_float32():
    q = jax.ShapeDtypeStruct((1, 16, 4, 8), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda q: jax.vjp(lambda *x: attend(4)(*x)[0], q, q, q)[1](q))(q)
    returned = [e for scope, e in equations(jaxpr) if e.primitive.name == "ppermute" and "return" in scope]
    assert len(returned) == 2 * 2 + 2 * 3, "out, lse of two steps, and dq, dk, dv"
    assert {e.invars[0].aval.dtype for e in returned} == {jnp.dtype("float32")}


def test_a_million_tokens_lower():
    q = jax.ShapeDtypeStruct((1, 2**20, 32, 128), jnp.bfloat16)
    loss = lambda q, k, v: attend(8)(q, k, v)[0].astype(jnp.float32).sum()
    jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, q, q)


@pytest.mark.parametrize("num_workers, deterministic", [(1, False), (2, False), (3, True)])
def test_the_hopper_kernels_lower_on_a_mesh(num_workers, deterministic, monkeypatch):
    """Where JAX types what differs between workers, and a loop must not mix the types."""
    monkeypatch.setattr(attention, "which_implementation", lambda *_, **__: Choice("hopper", "for the test"))
    q, k = (jax.ShapeDtypeStruct((1, 2048, heads, 64), jnp.bfloat16) for heads in (4, 2))
    loss = lambda q, k, v: attend(num_workers, deterministic=deterministic)(q, k, v)[0].astype(jnp.float32).sum()
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert {"hopper_forward", "hopper_backward"} <= set(re.findall(r"hopper_(?:forward|backward)", text))


# Refusals


GOOD = {"q": (1, 16, 4, 8), "k": (1, 16, 2, 8), "v": (1, 16, 2, 8)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": (16, 4, 8)}, r"q: must have 4 dimensions .* got shape \(16, 4, 8\)"),
        ({"q": (1, 16, 3, 8)}, r"q: number of heads 3 must be a multiple of the 2 heads of k, v"),
        ({"k": (1, 16, 2, 4), "v": (1, 16, 2, 4)}, r"k, v: head dim must be that of q, 8, got 4"),
        ({"v": (1, 12, 2, 8)}, r"v: shape must be that of k, \(1, 16, 2, 8\), got \(1, 12, 2, 8\)"),
        ({"k": (2, 16, 2, 8), "v": (2, 16, 2, 8)}, r"k, v: batch size must be that of q, 1, got 2"),
        (
            {"k": (1, 12, 2, 8), "v": (1, 12, 2, 8)},
            r"q_offset=None: must be given where k, v are not as long as q \(12 and 16\) with causal",
        ),
        (
            {"q": (1, 3, 4, 8), "k": (1, 3, 2, 8), "v": (1, 3, 2, 8)},
            r"q: sequence length 3 must be at least the size 4 of",
        ),
        ({"q": (1, 0, 4, 8)}, r"q: must not be empty"),
        ({"strategy": "best"}, r"strategy='best': must be one of \('auto', 'balanced', 'balanced_unsplit', .*\)"),
        ({"implementation": "cuda"}, r"implementation='cuda': must be None or one of \['hopper', 'triton', 'xla'\]"),
        ({"axis": "sequence"}, r"axis='sequence': must be one of the mesh's axes \('data', 'seq'\)"),
        ({"spec": P("batch", "seq")}, r"spec=.*: 'batch' must be one of the mesh's axes"),
        (
            {"spec": P("seq", None)},
            r"the sequence \(entry 1\) must be sharded over axis='seq' alone, got None",
        ),
        ({"spec": P(None, "seq", None, "data")}, r"the head dim \(entry 3\) must not be sharded"),
        ({"spec": P(None, "seq", None, None, None)}, r"at most the 4 entries"),
        (
            {"spec": P("data", "seq")},
            r"q: batch size 1 must be a multiple of the size 2 of mesh axes \('data',\)",
        ),
        (
            {"spec": P(None, "seq", "data"), "q": (1, 16, 5, 8), "k": (1, 16, 1, 8), "v": (1, 16, 1, 8)},
            r"q: number of heads 5",
        ),
        (
            {"spec": P(None, "seq", "data"), "k": (1, 16, 1, 8), "v": (1, 16, 1, 8)},
            r"k, v: number of heads 1 must be a mult",
        ),
        (
            {"spec": P(None, "seq"), "axis": ["seq"]},
            r"axis=\['seq'\]: must be the name of a mesh axis, or a tuple of different",
        ),
        ({"axis": ("seq", "seq")}, r"axis=\('seq', 'seq'\): must be the name"),
        ({"scale": float("inf")}, "scale=inf: must be a finite number or None, and known when it compiles"),
        ({"causal": "yes"}, "causal='yes': must be True, False or None"),
        ({"sinks": [1.0] * 4}, r"sinks: must be an array of floats, one a head, of shape \(4,\), got list"),
        ({"dtype": jnp.int32}, r"q: dtype must be float32, bfloat16 or float16, got int32"),
        ({"mesh": None}, r"mesh=None: no mesh given and none set"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_bad_arguments_get_one_line(change, message):
    dtype = change.pop("dtype", jnp.float32)
    q, k, v = (jnp.zeros(change.pop(name, shape), dtype) for name, shape in GOOD.items())
    with pytest.raises(ValueError, match=message) as error:
        distflash_attention(q, k, v, **({"mesh": make_mesh(data=2, seq=4)} | change))
    assert "\n" not in str(error.value)


def test_mixed_dtypes_are_refused():
    q, k, v = (jnp.zeros(shape) for shape in GOOD.values())
    with pytest.raises(ValueError, match="k: dtype must be that of q, float32, got bfloat16"):
        distflash_attention(q, k.astype(jnp.bfloat16), v, mesh=make_mesh(seq=2))


def test_what_cannot_be_inside_a_shard_map_is_refused():
    q, k, v = (jnp.zeros(shape) for shape in GOOD.values())
    sharded = P(None, "seq")
    for specs, name in (((P(), sharded, sharded), "q"), ((sharded, P(), P()), "k")):
        with pytest.raises(ValueError, match=f"{name} is replicated over mesh axis 'seq'"):
            run = functools.partial(distflash_attention, causal=False)
            jax.shard_map(run, mesh=make_mesh(seq=2), in_specs=specs, out_specs=sharded)(q, k, v)
    inside = functools.partial(distflash_attention, mesh=make_mesh(seq=2))
    with pytest.raises(ValueError, match=r"mesh=.*: must be None inside a shard_map"):
        jax.shard_map(inside, mesh=make_mesh(seq=2), in_specs=P(None, "seq"), out_specs=P(None, "seq"))(q, k, v)
    mesh = make_mesh(data=2, seq=2)
    around = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    q, k, v = (jnp.zeros((4, *shape[1:])) for shape in GOOD.values())
    for options, message in (
        ({"mesh": mesh}, r"mesh=.*: must be None inside a shard_map, whose mesh is taken"),
        ({"spec": P("data", "seq")}, r"spec=.*: 'data' must be one of the mesh's axes \('seq',\)"),
    ):
        with pytest.raises(ValueError, match=message):
            around(functools.partial(distflash_attention, **options))(q, k, v)


def test_on_a_default_mesh_replicated_arrays_are_cut_and_others_refused():
    """jax.make_mesh makes Explicit axes unless told otherwise."""
    mesh = jax.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
    q, k, v = (jnp.ones((2, *shape[1:])) for shape in GOOD.values())
    assert jax.jit(functools.partial(distflash_attention, mesh=mesh))(q, k, v).shape == q.shape
    with jax.set_mesh(mesh):
        out = jax.jit(lambda *x: distflash_attention(*x, spec=P("data", "seq")))(q, k, v)
        assert jax.typeof(out).sharding.spec[:2] == ("data", "seq")
        with pytest.raises(ValueError, match=r"sequence length 15 must be a multiple of the size 2 .* Explicit axes"):
            distflash_attention(q[:, :15], k[:, :15], v[:, :15])
        with pytest.raises(ValueError, match=r"q: is sharded .* must be .*jax.reshard moves it"):
            distflash_attention(jax.reshard(q, P("data")), k, v, spec=P(None, "seq"))
        with pytest.raises(ValueError, match=r"segment_ids: is sharded .* must be .*jax.reshard moves it"):
            distflash_attention(q, k, v, segment_ids=jax.reshard(jnp.ones((2, 16), int), P(None, "seq")))
        with pytest.raises(ValueError, match="over axis='seq' alone, got 'data'"):
            distflash_attention(jax.reshard(q, P(None, "data")), k, v)


def test_which_implementation_says_what_runs_and_why():
    reason = "for every platform; hopper needs a GPU, got cpu; triton needs a GPU, got cpu"
    assert which_implementation() == ("xla", reason)
    assert which_implementation("xla", mesh=make_mesh(seq=2)).reason == "asked for"
