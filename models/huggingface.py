"""Safetensors files with Hugging Face's names <-> the parameters of `models.llama`, one tensor at a time.

Only safetensors: a .bin or .pt file is a pickle, which can run code when it is opened.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

Params = dict[str, Any]
Block = tuple[tuple[int, int], ...]  # (first, end) along every dim

_INDEX = "model.safetensors.index.json"
_READABLE = ("F32", "BF16", "F16")
# Frequencies of RoPE, which early exports of Llama stored; they follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A parameter's name on disk, and both orders of its dims, a letter each; letters without a space are one dim."""

    name: str
    ours: str
    disk: str


_LAYOUTS = {
    "embed_tokens": _Layout("model.embed_tokens.weight", "vd", "v d"),
    "layers.input_layernorm": _Layout("model.layers.{}.input_layernorm.weight", "d", "d"),
    "layers.q_proj": _Layout("model.layers.{}.self_attn.q_proj.weight", "dnh", "nh d"),
    "layers.k_proj": _Layout("model.layers.{}.self_attn.k_proj.weight", "dnh", "nh d"),
    "layers.v_proj": _Layout("model.layers.{}.self_attn.v_proj.weight", "dnh", "nh d"),
    "layers.q_bias": _Layout("model.layers.{}.self_attn.q_proj.bias", "nh", "nh"),
    "layers.k_bias": _Layout("model.layers.{}.self_attn.k_proj.bias", "nh", "nh"),
    "layers.v_bias": _Layout("model.layers.{}.self_attn.v_proj.bias", "nh", "nh"),
    "layers.q_norm": _Layout("model.layers.{}.self_attn.q_norm.weight", "h", "h"),
    "layers.k_norm": _Layout("model.layers.{}.self_attn.k_norm.weight", "h", "h"),
    "layers.o_proj": _Layout("model.layers.{}.self_attn.o_proj.weight", "nhd", "d nh"),
    "layers.post_attention_layernorm": _Layout("model.layers.{}.post_attention_layernorm.weight", "d", "d"),
    "layers.gate_proj": _Layout("model.layers.{}.mlp.gate_proj.weight", "df", "f d"),
    "layers.up_proj": _Layout("model.layers.{}.mlp.up_proj.weight", "df", "f d"),
    "layers.down_proj": _Layout("model.layers.{}.mlp.down_proj.weight", "fd", "d f"),
    "norm": _Layout("model.norm.weight", "d", "d"),
    "lm_head": _Layout("lm_head.weight", "dv", "v d"),
}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor on disk: a parameter, or one layer of a stacked parameter."""

    path: str
    layer: int | None
    sizes: dict[str, int]  # of the letters of the layout

    @property
    def name(self) -> str:
        return _LAYOUTS[self.path].name.format(self.layer)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[letter] for letter in dim) for dim in _LAYOUTS[self.path].disk.split())

    def read(self, on_disk: Any, block: Block) -> np.ndarray:
        """The block of our array, from the rows of the file that hold it."""
        layout = _LAYOUTS[self.path]
        wanted = {letter: slice(*bounds) for letter, bounds in zip(layout.ours, block, strict=True)}
        rows, shape, inside = [], [], []
        for outer, *inner in layout.disk.split():
            run = math.prod(self.sizes[letter] for letter in inner)
            rows.append(slice(wanted[outer].start * run, wanted[outer].stop * run))
            shape += [wanted[outer].stop - wanted[outer].start, *(self.sizes[letter] for letter in inner)]
            inside += [slice(None), *(wanted[letter] for letter in inner)]
        found = on_disk[tuple(rows)].reshape(shape)[tuple(inside)]
        letters = layout.disk.replace(" ", "")
        return found.transpose([letters.index(letter) for letter in layout.ours])

    def to_disk(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Our array as the file has it; contiguous, since safetensors writes the memory of any other as it lies."""
        layout = _LAYOUTS[self.path]
        order = [layout.ours.index(letter) for letter in layout.disk.replace(" ", "")]
        return np.ascontiguousarray(array.transpose(order).astype(dtype).reshape(self.shape))


def load(directory: Path, struct: Params) -> Params:
    """The parameters in a folder's safetensors files; the host holds one device's part of one parameter at a time.

    Args:
        struct: ShapeDtypeStructs with shardings, in the structure of the parameters of `models.llama`.

    Raises:
        ValueError: a tensor is missing, not known, or of another shape or dtype, or a file is no safetensors file.
    """
    leaves = _leaves(struct)
    with contextlib.ExitStack() as stack:
        on_disk = _open(directory, stack)
        tensors = {path: list(_tensors(path, leaf.shape)) for path, leaf in leaves.items()}
        _check(on_disk, [tensor for parts in tensors.values() for tensor in parts])
        return unflatten_dict({path: _place(leaf, tensors[path], on_disk) for path, leaf in leaves.items()}, sep=".")


def save(
    directory: Path,
    struct: Params,
    read: Callable[[str], np.ndarray],
    *,
    dtype: str,
    max_file_bytes: int = 5 * 10**9,
) -> list[str]:
    """Writes a model's weights into a folder and returns the names of the files.

    The host holds one parameter and one file at a time. Files follow the order of the parameters, so that each
    is read once: all layers of one projection, then all of the next.

    Args:
        struct: shapes in the structure of the parameters of `models.llama`.
        read: "layers.q_proj" -> the whole array.
        max_file_bytes: of the tensors in a file; above it there are several, with an index.
    """
    target = np.dtype(jnp.dtype(dtype))
    files = _divide(struct, max_file_bytes // target.itemsize)
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    names = ["model.safetensors"] if len(files) == 1 else names
    arrays = _on_disk(itertools.chain.from_iterable(files), read, target)
    for name, tensors in zip(names, files, strict=True):
        save_file({tensor.name: next(arrays) for tensor in tensors}, directory / name, metadata={"format": "pt"})
    if len(files) > 1:
        total = sum(math.prod(tensor.shape) for tensors in files for tensor in tensors) * target.itemsize
        homes = {tensor.name: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes.items()))}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return names


def _on_disk(tensors: Iterable[_Tensor], read: Callable[[str], np.ndarray], dtype: np.dtype) -> Iterator[np.ndarray]:
    """Each as the file has it."""
    for path, parts in itertools.groupby(tensors, key=lambda tensor: tensor.path):
        array = read(path)
        for tensor in parts:
            yield tensor.to_disk(array if tensor.layer is None else array[tensor.layer], dtype)
        del array  # before the next one is read


def _leaves(params: Params) -> dict[str, Any]:
    """The parameters by the names of `_LAYOUTS`."""
    return cast(dict[str, Any], flatten_dict(params, sep="."))


def _divide(struct: Params, max_size: int) -> list[list[_Tensor]]:
    """The tensors of each file, in the order of the layouts; only a single tensor may exceed the size."""
    leaves = _leaves(struct)
    files: list[list[_Tensor]] = [[]]
    room = max_size
    for tensor in (tensor for path in _LAYOUTS if path in leaves for tensor in _tensors(path, leaves[path].shape)):
        size = math.prod(tensor.shape)
        if size > room and files[-1]:
            files.append([])
            room = max_size
        files[-1].append(tensor)
        room -= size
    return files


def _tensors(path: str, shape: tuple[int, ...]) -> Iterator[_Tensor]:
    """The tensors of a parameter; in `layers` the first dim counts the layers."""
    is_stacked = path.startswith("layers.")
    sizes = dict(zip(_LAYOUTS[path].ours, shape[is_stacked:], strict=True))
    for layer in range(shape[0]) if is_stacked else [None]:
        yield _Tensor(path, layer, sizes)


def _place(leaf: Any, tensors: list[_Tensor], on_disk: dict[str, Any]) -> jax.Array:
    """One parameter, read for one device after the other; devices that hold the same share one reading."""
    holders: dict[Block, list[Any]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        block = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        holders.setdefault(block, []).append(device)
    parts = []
    for block, devices in holders.items():
        part = np.empty([end - first for first, end in block], leaf.dtype)
        if tensors[0].layer is None:
            part[...] = tensors[0].read(on_disk[tensors[0].name], block)
        else:
            for i, tensor in enumerate(tensors[slice(*block[0])]):
                part[i] = tensor.read(on_disk[tensor.name], block[1:])
        kind = leaf.sharding.memory_kind
        # Waiting keeps the transfers of several parts from piling up in the host's memory.
        placements = [SingleDeviceSharding(device, memory_kind=kind) for device in devices]
        parts += jax.block_until_ready([jax.device_put(part, placement) for placement in placements])
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def _open(directory: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Every tensor of a folder by its name, as a slice that reads when it is indexed."""
    on_disk: dict[str, Any] = {}
    homes = _homes(directory)
    for file in dict.fromkeys(homes.values()) or ["model.safetensors"]:
        # A link may lead to a file elsewhere, as in the cache of the hub; a pipe or a device never ends.
        if (directory / file).exists() and not (directory / file).is_file():
            raise ValueError(f"{file} must be a whole safetensors file (it is no file)")
        try:
            opened = stack.enter_context(safe_open(directory / file, framework="np"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} must be a whole safetensors file ({error})") from error
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            if name in on_disk or homes.get(name, file) != file:
                raise ValueError(f"{name} must be in one file, the one that {_INDEX} names, and not in {file}")
            on_disk[name] = opened.get_slice(name)
    return on_disk


def _homes(directory: Path) -> dict[str, str]:
    """The file of each tensor as the index says; empty where one file holds all."""
    if (directory / "model.safetensors").exists():
        return {}
    if not (directory / _INDEX).exists():
        pickles = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in directory.glob(kind))
        advice = f"; {pickles[0]} is a pickle, which transformers' save_pretrained converts" if pickles else ""
        raise ValueError(f"model.safetensors or {_INDEX} must be in the folder{advice}")
    try:
        homes = json.loads((directory / _INDEX).read_text())["weight_map"]
        files = set(homes.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{_INDEX} must be JSON with a weight_map ({error})") from error
    for file in files:
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\]+\.safetensors", file):
            raise ValueError(f"{file} in {_INDEX} must be the name of a safetensors file beside it")
    if not homes:
        raise ValueError(f"{_INDEX} must name the file of each tensor")
    return homes


def _check(on_disk: dict[str, Any], wanted: list[_Tensor]) -> None:
    """Refuses a folder that does not hold the wanted tensors and nothing else."""
    names = {tensor.name for tensor in wanted}
    if missing := [tensor.name for tensor in wanted if tensor.name not in on_disk]:
        raise ValueError(f"{_some(missing)} must be in the safetensors files")
    if extra := [name for name in on_disk if name not in names and not _DERIVED.fullmatch(name)]:
        raise ValueError(f"{_some(extra)} in the safetensors files must be a tensor of this model")
    for tensor in wanted:
        found, dtype = on_disk[tensor.name].get_shape(), on_disk[tensor.name].get_dtype()
        if tuple(found) != tensor.shape:
            raise ValueError(f"{tensor.name} has shape {list(found)} and must have {list(tensor.shape)}")
        if dtype not in _READABLE:
            raise ValueError(f"{tensor.name} has dtype {dtype} and must have one of {', '.join(_READABLE)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
