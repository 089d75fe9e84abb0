"""Where the arrays of a call lie: its mesh, its PartitionSpec, and what must hold before anything is compiled."""

import math

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

AnyMesh = Mesh | AbstractMesh
Axis = str | tuple[str, ...]  # of several, the first varies slowest along the sequence


def is_inside_shard_map(axis: Axis) -> bool:
    """Whether the caller runs inside a shard_map (or another manual region) over `axis`.

    Raises:
        ValueError: it does so over some of several axes; or `axis` is no name, and no tuple of different names.
    """
    if not isinstance(axis, str | tuple) or len(set(names(axis))) < len(names(axis)):
        raise ValueError(f"axis={axis!r}: must be the name of a mesh axis, or a tuple of different ones")
    manual = [name for name in names(axis) if name in jax.sharding.get_abstract_mesh().manual_axes]
    if manual and len(manual) < len(names(axis)):
        raise ValueError(f"axis={axis!r}: all of them or none must be axes of the shard_map around, which has {manual}")
    return bool(manual)


def size(mesh: AnyMesh, axis: Axis) -> int:
    """Workers along the axis."""
    return math.prod(mesh.shape[name] for name in names(axis))


def find_mesh(mesh: AnyMesh | None, axis: Axis, q: Array) -> AnyMesh:
    """The mesh given, or that of q's explicit sharding, or the ambient one (jax.set_mesh).

    Raises:
        ValueError: there is none, it has no axis `axis`, or it is another one than that of the shard_map around.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if mesh is not None and ambient.manual_axes and mesh != ambient:
        raise ValueError(f"mesh={mesh}: must be None inside a shard_map, whose mesh is taken")
    candidates = (mesh, jax.typeof(q).sharding.mesh, ambient)
    found = next((candidate for candidate in candidates if candidate is not None and not candidate.empty), None)
    if found is None:
        raise ValueError(
            f"mesh=None: no mesh given and none set; pass mesh= or call jax.set_mesh with a mesh that has an axis "
            f'"{names(axis)[0]}", such as jax.make_mesh((jax.device_count(),), ("{names(axis)[0]}",))'
        )
    if not set(names(axis)) <= set(found.axis_names):
        raise ValueError(f"axis={axis!r}: must be one of the mesh's axes {found.axis_names}")
    return found


def find_spec(spec: PartitionSpec | None, mesh: AnyMesh, axis: Axis, q: Array) -> PartitionSpec:
    """The spec given, or the explicit sharding of q with its sequence over `axis`, else P(None, axis); of length 4.

    Raises:
        ValueError: it names unknown axes, or those of a shard_map around, or does not put `axis`, alone, on the
            sequence.
    """
    free = [x for x, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual]
    if spec is None:
        known = jax.typeof(q).sharding.spec
        spec = PartitionSpec(known[0], known[1] or axis, *known[2:])
    if len(spec) > 4:
        raise ValueError(f"spec={spec}: must have at most the 4 entries of [B, T, N, H]")
    spec = PartitionSpec(*spec, *(None,) * (4 - len(spec)))
    unknown = [name for entry in spec for name in names(entry) if name not in free]
    if unknown:
        raise ValueError(f"spec={spec}: {unknown[0]!r} must be one of the mesh's axes {tuple(free)}")
    if names(spec[1]) != names(axis):
        raise ValueError(
            f"spec={spec}: the sequence (entry 1) must be sharded over axis={axis!r} alone, got {spec[1]!r}"
        )
    if names(spec[3]):
        raise ValueError(f"spec={spec}: the head dim (entry 3) must not be sharded, got {spec[3]!r}")
    return spec


def place(name: str, x: Array, mesh: AnyMesh, spec: PartitionSpec) -> Array:
    """x as `spec` says where the mesh has Explicit axes; only what is replicated is cut, nothing is gathered.

    Raises:
        ValueError: x is explicitly sharded in another way.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    wanted = [tuple(n for n in names(entry) if types[n] == AxisType.Explicit) for entry in spec]
    known = [names(entry) for entry in jax.typeof(x).sharding.spec]
    if any(have and have != want for have, want in zip(known, wanted, strict=True)):
        raise ValueError(f"{name}: is sharded {jax.typeof(x).sharding.spec}, must be {spec} (jax.reshard moves it)")
    return x if known == wanted else jax.reshard(x, NamedSharding(mesh, PartitionSpec(*(w or None for w in wanted))))


def check_divisible(q: Array, k: Array, mesh: AnyMesh, spec: PartitionSpec) -> None:
    """Raises ValueError where batch or heads do not divide, or the sequence is shorter than the workers are many.

    Over an Explicit axis the sequence must divide too: its padding could not be cut off again.
    """
    shards = [math.prod(mesh.shape[name] for name in names(entry)) for entry in spec]
    for name, size, entry, count in (
        ("q: batch size", q.shape[0], spec[0], shards[0]),
        ("q: number of heads", q.shape[2], spec[2], shards[2]),
        ("k, v: number of heads", k.shape[2], spec[2], shards[2]),
    ):
        if size % count:
            raise ValueError(f"{name} {size} must be a multiple of the size {count} of mesh axes {names(entry)}")
    for name, length in (("q", q.shape[1]), ("k, v", k.shape[1])):
        if length < shards[1]:
            raise ValueError(
                f"{name}: sequence length {length} must be at least the size {shards[1]} of mesh axis {spec[1]!r}"
            )
        if length % shards[1] and AxisType.Explicit in mesh.axis_types:
            raise ValueError(
                f"{name}: sequence length {length} must be a multiple of the size {shards[1]} of mesh axis {spec[1]!r} "
                "as the mesh has Explicit axes; an Auto mesh takes any length"
            )


def check_chunks(q: Array, k: Array, v: Array, axis: Axis, mesh: AnyMesh | None, spec: PartitionSpec | None) -> None:
    """Raises ValueError for what cannot be right inside a shard_map over `axis`."""
    for name, value in (("mesh", mesh), ("spec", spec)):
        if value is not None:
            raise ValueError(f"{name}={value}: must be None inside a shard_map that already holds axis {axis!r}")
    if not set(names(axis)) <= varying_axes(lax.axis_index(axis)):
        return  # check_vma=False: types do not say what is replicated
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not set(names(axis)) <= varying_axes(x):
            raise ValueError(
                f"{name} is replicated over mesh axis {axis!r}: its sequence must be sharded over it (in_specs)"
            )


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, all typed as varying over the union of the axes that each varies over.

    What is replicated for one of them (heads of k and v over a tensor axis, say) thus gets its gradient summed.
    """
    union = frozenset().union(*map(varying_axes, arrays))
    return tuple(
        lax.pcast(x, tuple(sorted(missing)), to="varying") if (missing := union - varying_axes(x)) else x
        for x in arrays
    )


def varying_axes(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def names(entry: Axis | None) -> tuple[str, ...]:
    """Those of the mesh axes in an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
