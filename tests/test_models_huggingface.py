"""models.huggingface: logits of transformers, the bytes and shards of the files, and what is refused."""

import functools
import json
import os
import pickle
import struct as struct_module

import jax
import jax.numpy as jnp
import make_huggingface_logits as reference
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from models import config_json, huggingface
from models.llama import Llama
from models.rope import RopeExtension

CONFIGS = reference.CONFIGS


def causal_attention(q, k, v, window=None):
    before = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=before)


def create(config):
    return Llama(
        config,
        attention=causal_attention,
        remat=lambda layer: layer,
        gather=lambda name, weight: weight,
        dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )


def struct_of(config, spec=P):
    """Where the parameters shall lie: `spec` says it from the shape; replicated without it."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"))
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(functools.partial(create, config))))
    sharding = (lambda x: NamedSharding(mesh, spec(x.shape))) if spec is not P else (lambda x: NamedSharding(mesh, P()))
    return jax.tree.map(lambda x: x.update(sharding=sharding(x)), params)


def over_heads_and_data(shape):
    """The last dim over seq, the one before it over data, where they divide; so head dims are cut, and projections."""
    free = [None] * (len(shape) - 2)
    return P(*free, *("data" if d % 2 == 0 else None for d in shape[-2:-1]), "seq" if shape[-1] % 4 == 0 else None)


def over_layers(shape):
    return P("data" if shape[0] == 2 else None)


def read_independently(folder):
    """Every tensor of a folder as (dtype, shape, bytes), by the description of the format."""
    found = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], content[start + first : start + end])
    return found


def write_sharded(folder, config, weights):
    """Three files and their index, with the tensors dealt out in turn."""
    homes = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(weights)}
    for file in set(homes.values()):
        save_file({name: weights[name] for name in homes if homes[name] == file}, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))


@pytest.fixture
def qwen(tmp_path):
    """(folder, parameters' struct) of a small Qwen 3, whose head dim is not hidden size / heads."""
    reference.write_model(tmp_path, CONFIGS["qwen-3"])
    return tmp_path, struct_of(config_json.from_json(CONFIGS["qwen-3"]))


def logits(config, params, positions):
    graphdef, _ = nnx.split(nnx.eval_shape(functools.partial(create, config)))

    def compute(params):
        model = nnx.merge(graphdef, nnx.State(params))
        return model(reference.TOKENS[:, : positions.max() + 1])[0, positions] @ model.head

    return jax.jit(compute)(jax.tree.map(lambda x: x.addressable_data(0), params))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers_beyond_the_old_context_too(name, tmp_path):
    reference.write_model(tmp_path, CONFIGS[name])
    config = config_json.from_json(config_json.read(tmp_path))
    params = huggingface.load(tmp_path, struct_of(config))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.num_parameters
    ours, theirs = logits(config, params, reference.POSITIONS), np.load(reference.LOGITS / f"{name}.npy")
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, "yarn over llama-3", "linear over qwen-3"])
def test_transformers_computes_the_same_from_what_is_written(name, tmp_path):
    pytest.importorskip("transformers")
    kind, _, base = name.rpartition(" over ")
    config = config_json.from_json(CONFIGS[base])
    if kind:
        config = config.extended(RopeExtension.parse(f"{kind}:4"))
    reference.write_model(tmp_path, CONFIGS[base])
    params = huggingface.load(tmp_path, struct_of(config))
    arrays = flatten_dict(params, sep=".")
    huggingface.save(tmp_path, struct_of(config), lambda path: np.asarray(arrays[path]), dtype="float32")
    # Not beside what it began as: RoPE is in both spellings then.
    (tmp_path / "config.json").write_text(json.dumps(config_json.to_json(config)))
    ours = logits(config, params, reference.FAR_POSITIONS)
    theirs = reference.transformers_logits(tmp_path, reference.FAR_POSITIONS)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama-3.2", "qwen-2.5-yarn", "qwen-3"])
def test_the_round_trip_keeps_every_byte_in_one_file_and_in_many(name, dtype, tmp_path):
    weights = {key: value.astype(jnp.dtype(dtype)) for key, value in reference.weights(CONFIGS[name]).items()}
    source, whole, parts = (tmp_path / folder for folder in ("source", "whole", "parts"))
    for folder in (source, whole, parts):
        folder.mkdir()
    write_sharded(source, CONFIGS[name], weights)
    struct = struct_of(config_json.from_json(CONFIGS[name]), over_heads_and_data)
    params = flatten_dict(huggingface.load(source, struct), sep=".")
    assert all(leaf.dtype == jnp.float32 for leaf in params.values())

    def read(path):
        return np.asarray(params[path])

    assert huggingface.save(whole, struct, read, dtype=dtype) == ["model.safetensors"]
    files = huggingface.save(parts, struct, read, dtype=dtype, max_file_bytes=30_000)
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 5
    assert read_independently(source) == read_independently(whole) == read_independently(parts)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    for name, file in index["weight_map"].items():
        assert name.encode() in (parts / file).read_bytes()
    for file in files:
        assert sum(weights[name].nbytes for name, home in index["weight_map"].items() if home == file) <= 50_000


class Recorder:
    """A slice of a tensor that counts what is read from it."""

    def __init__(self, on_disk, sizes):
        self.on_disk, self.sizes = on_disk, sizes

    def __getattr__(self, name):
        return getattr(self.on_disk, name)

    def __getitem__(self, rows):
        found = self.on_disk[rows]
        self.sizes.append(found.size)
        return found


@pytest.mark.parametrize("spec", [over_heads_and_data, over_layers, P])
def test_every_device_gets_its_part_and_the_file_is_read_once_for_each_part(qwen, spec, monkeypatch):
    folder, replicated = qwen
    struct = struct_of(config_json.from_json(CONFIGS["qwen-3"]), spec)
    expected = huggingface.load(folder, replicated)
    open_files, sizes = huggingface._open, []
    monkeypatch.setattr(
        huggingface, "_open", lambda *args: {k: Recorder(v, sizes) for k, v in open_files(*args).items()}
    )
    for ours, theirs, leaf in zip(
        *map(jax.tree.leaves, (huggingface.load(folder, struct), expected, struct)), strict=True
    ):
        assert ours.sharding == leaf.sharding
        np.testing.assert_array_equal(ours, theirs)
        for shard in ours.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(theirs)[shard.index])
    total = sum(leaf.size for leaf in jax.tree.leaves(struct))
    # A head dim that is cut is read whole by its four devices.
    assert sum(sizes) == total if spec is not over_heads_and_data else sum(sizes) <= 4 * total


def change(folder, edit):
    weights = reference.weights(CONFIGS["qwen-3"])
    edit(weights)
    save_file(weights, folder / "model.safetensors")


O_PROJ = "model.layers.1.self_attn.o_proj.weight"
CHANGES = {
    f"^{O_PROJ} must be in the safetensors": lambda w: w.pop(O_PROJ),
    "^model.layers.0.mlp.gate_proj.bias in the safetensors files must be a tensor": lambda w: w.update(
        {"model.layers.0.mlp.gate_proj.bias": np.zeros(96, np.float32)}
    ),
    "^model.layers.2.input_layernorm.weight in the": lambda w: w.update(
        {"model.layers.2.input_layernorm.weight": np.zeros(64, np.float32)}
    ),
    rf"^{O_PROJ} has shape \[128, 64\] and must have \[64, 128\]": lambda w: w.update(
        {O_PROJ: np.zeros((128, 64), np.float32)}
    ),
    f"^{O_PROJ} has dtype I8 and must have one of F32, BF16, F16": lambda w: w.update(
        {O_PROJ: np.zeros((64, 128), np.int8)}
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_missing_extra_or_different_tensor_is_refused_by_name(qwen, message):
    folder, struct = qwen
    change(folder, CHANGES[message])
    with pytest.raises(ValueError, match=message):
        huggingface.load(folder, struct)


def test_frequencies_that_early_exports_stored_are_no_extra_tensors(qwen):
    folder, struct = qwen
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    change(folder, lambda weights: weights.update({name: np.zeros(16, np.float32)}))
    huggingface.load(folder, struct)


def test_a_pickle_is_refused_by_name_and_never_opened(qwen):
    folder, struct = qwen

    class Trap:
        def __reduce__(self):
            return (folder.joinpath("sprung").touch, ())

    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"^model\.safetensors must be a whole safetensors file"):
        huggingface.load(folder, struct)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin is a pickle, which transformers' save_pretrained converts"
    ):
        huggingface.load(folder, struct)
    assert not (folder / "sprung").exists()


def test_a_truncated_file_is_refused(qwen):
    folder, struct = qwen
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"^model\.safetensors must be a whole safetensors file"):
        huggingface.load(folder, struct)


def with_header(change):
    """A safetensors file of one tensor of four floats, whose header was changed, and maybe what follows it."""

    def write(file):
        header = {"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
        text, rest = change(header)
        file.write_bytes(struct_module.pack("<Q", len(text)) + text + rest)

    return write


def as_json(header):
    return json.dumps(header).encode()


def stretched(header):
    header["model.norm.weight"]["shape"] = [2**40]
    return as_json(header), bytes(16)


def overlapping(header):
    header["x"] = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
    return as_json(header), bytes(16)


HOSTILE = {
    "more bytes than it names": with_header(lambda header: (as_json(header), bytes(17))),
    "tensors that overlap": with_header(overlapping),
    "a shape of 2^40": with_header(stretched),
    "a header as long as the file says": lambda file: file.write_bytes(struct_module.pack("<Q", 2**62) + b"{}"),
    "a header of nested lists": with_header(lambda header: (b"[" * 10**6, b"")),
    "a pickle under its name": lambda file: file.write_bytes(pickle.dumps({"model.norm.weight": [1.0] * 4})),
    "a pipe": os.mkfifo,
    "a link to a device": lambda file: file.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_before_anything_of_its_size_is_made(qwen, name):
    folder, struct = qwen
    (folder / "model.safetensors").unlink()
    HOSTILE[name](folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"^model\.safetensors must be a whole safetensors file"):
        huggingface.load(folder, struct)


def test_a_link_to_a_file_is_followed_as_the_cache_of_the_hub_is_made_of_them(qwen):
    folder, struct = qwen
    (folder / "model.safetensors").rename(folder / "blob")
    (folder / "model.safetensors").symlink_to("blob")
    huggingface.load(folder, struct)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"weight_map": {"x": "../other/model.safetensors"}},
            r"\.\./other/model\.safetensors in model\.safetensors\.index",
        ),
        ({"weight_map": {"x": "/etc/passwd"}}, "/etc/passwd in"),
        ({"weight_map": {"x": "weights.bin"}}, "weights.bin in .* must be the name of a safetensors file beside it"),
        ({"weight_map": {"x": 3}}, "3 in"),
        ({"weight_map": {"x": ["a"]}}, "must be JSON with a weight_map"),
        ({"weight_map": {}}, "must name the file of each tensor"),
        ({"weight_map": {"lm_head.weight": "other.safetensors"}}, "lm_head.weight must be in the safetensors files"),
        ({"weight_map": {"x": "gone.safetensors"}}, "gone.safetensors must be a whole safetensors file"),
        ([], "must be JSON with a weight_map"),
    ],
)
def test_an_index_names_files_beside_it_and_nothing_else(qwen, index, message):
    folder, struct = qwen
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    if "lm_head" in message:
        change(folder, lambda weights: weights.pop("lm_head.weight"))
        (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        huggingface.load(folder, struct)


def test_a_tensor_in_two_files_is_refused(qwen):
    folder, struct = qwen
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"model.norm.weight": np.ones(64, np.float32)}, folder / "b.safetensors")
    index = {"weight_map": {"lm_head.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.norm\.weight must be in one file"):
        huggingface.load(folder, struct)
