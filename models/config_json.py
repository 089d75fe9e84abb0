"""Hugging Face's config.json <-> LlamaConfig, for the families llama, mistral, qwen2 (and 2.5) and qwen3.

Imports no JAX. What is missing in a config.json is what transformers takes in its place.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from models.config import LlamaConfig
from models.rope import SCALINGS, RopeScaling

Json = dict[str, Any]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_COUNTS = (*_COPIED[:-1], "num_key_value_heads", "head_dim", "sliding_window", "max_window_layers")
# Where a config.json says anything else, `models.llama` is another network; auto_map is code that comes with a model.
_MUST_BE = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None,
    "quantization_config": None,
    "auto_map": None,
}
_ROPE_OPTIONAL = {"original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"}
_DTYPES = ("bfloat16", "float16", "float32")


def read(directory: Path) -> Json:
    """Returns what is in a folder's config.json.

    Raises:
        ValueError: there is none, or it is no JSON object.
    """
    try:
        content = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"config.json must be a file of JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError("config.json must hold a JSON object")
    return content


def from_json(content: Json) -> LlamaConfig:
    """The architecture that a config.json describes.

    Raises:
        ValueError: a field is missing, or says what `models.llama` cannot do.
    """
    family = content.get("model_type")
    if family not in _ARCHITECTURES:
        raise ValueError(f"model_type={family} must be one of {', '.join(_ARCHITECTURES)}")
    for name, allowed in _MUST_BE.items():
        if content.get(name) not in (None, allowed):
            raise ValueError(f"{name}={content[name]} must be {allowed} or left out")
    heads = content.get("num_key_value_heads")
    required = _COPIED if family == "llama" or heads is not None else (*_COPIED, "num_key_value_heads")
    if missing := [name for name in required if content.get(name) is None]:
        raise ValueError(f"{', '.join(missing)} must be in config.json")
    _check_numbers(content, _COUNTS, int)
    _check_numbers(content, ("rms_norm_eps", "rope_theta"), int, float)
    theta, scaling = _rope(content)
    return LlamaConfig(
        **{name: content[name] for name in _COPIED},
        num_key_value_heads=heads or content["num_attention_heads"],
        head_dim=_head_dim(content),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=content.get("tie_word_embeddings") or False,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(content),
    )


def to_json(config: LlamaConfig, origin: Json | None = None) -> Json:
    """A config.json that describes `config`: that of the model it began as, with another RoPE where it has one.

    RoPE is written in both spellings, rope_theta with rope_scaling, and rope_parameters.

    Raises:
        ValueError: no family has this architecture.
    """
    if origin is not None and from_json(origin) == config:
        return origin
    content = {**(_plain(config) if origin is None else origin), **_rope_json(config)}
    if from_json(content) != config:
        raise ValueError(f"{config} must be a model of the family {content['model_type']}, with another RoPE at most")
    return content


def weights_dtype(content: Json) -> str:
    """The dtype in which a config.json says that its weights are stored; bfloat16 where it says nothing."""
    dtype = content.get("dtype") or content.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype} must be one of {', '.join(_DTYPES)}")
    return dtype


def _check_numbers(content: Json, names: Iterable[str], *kinds: type) -> None:
    for name in names:
        if (value := content.get(name)) is not None and type(value) not in kinds:
            raise ValueError(f"{name}={value!r} must be {' or '.join(kind.__name__ for kind in kinds)}")


def _head_dim(content: Json) -> int:
    width, heads = content["hidden_size"], content["num_attention_heads"]
    if (head_dim := content.get("head_dim")) is not None:
        return head_dim
    if content["model_type"] == "qwen3":
        return 128
    if width % heads:
        raise ValueError(f"hidden_size={width} must be a multiple of num_attention_heads={heads}, or head_dim be given")
    return width // heads


def _sliding_window(content: Json) -> int | None:
    """The window of all layers; the Qwens have one only if told to use it, and from a layer on."""
    family, first = content["model_type"], 0
    window = content.get("sliding_window", None if family == "llama" else 4096)
    if family in ("qwen2", "qwen3"):
        window = window if content.get("use_sliding_window") else None
        first = content.get("max_window_layers", 28)
    if window is not None and family == "llama":
        raise ValueError(f"sliding_window={window} must be left out, the family llama has none")
    kinds = content.get("layer_types") or [
        "full_attention" if window is None or i < first else "sliding_attention"
        for i in range(content["num_hidden_layers"])
    ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) == {"sliding_attention"} and window is not None:
        return window
    raise ValueError(f"layer_types={sorted(set(kinds))} with sliding_window={window} must be the same for all layers")


def _rope(content: Json) -> tuple[float, RopeScaling | None]:
    """Theta and scaling; the old and the new spelling may both be there if they agree."""
    given = [content[name] for name in ("rope_scaling", "rope_parameters") if content.get(name)]
    scalings = {_scaling(rope, content["max_position_embeddings"]) for rope in given}
    thetas = {theta for part in (content, *given) if (theta := part.get("rope_theta")) is not None}
    if len(scalings) > 1 or len(thetas) > 1:
        raise ValueError("rope_theta, rope_scaling and rope_parameters must agree with each other")
    return float(*thetas or {10_000.0}), scalings.pop() if scalings else None


def _scaling(rope: Json, max_position_embeddings: int) -> RopeScaling | None:
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling={rope!r} must be a JSON object")
    types = {str(rope[name]) for name in ("rope_type", "type") if name in rope}
    rope_type = types.pop() if len(types) == 1 else None
    if rope_type != "default" and rope_type not in SCALINGS:
        raise ValueError(f"rope_type={rope_type} must be one of default, {', '.join(SCALINGS)}, in {rope}")
    not_fields = {"rope_type", "type", "rope_theta"}
    if rope.get("partial_rotary_factor") == 1.0:
        not_fields.add("partial_rotary_factor")
    given = {name: value for name, value in rope.items() if name not in not_fields and value is not None}
    fields = set() if rope_type == "default" else {field.name for field in dataclasses.fields(SCALINGS[rope_type])}
    if unknown := given.keys() - fields:
        raise ValueError(f"{', '.join(sorted(unknown))} must not be in a RoPE of type {rope_type}, in {rope}")
    if missing := fields - _ROPE_OPTIONAL - given.keys():
        raise ValueError(f"{', '.join(sorted(missing))} must be in a RoPE of type {rope_type}, in {rope}")
    _check_numbers(rope, {*fields, "rope_theta"}, int, float, bool)
    if rope_type == "default":
        return None
    if "original_max_position_embeddings" in fields:
        given.setdefault("original_max_position_embeddings", max_position_embeddings)
    return SCALINGS[rope_type](**given)


def _plain(config: LlamaConfig) -> Json:
    """All but RoPE, in the family that has the parts of `config`; which tokens begin and end a text is not known."""
    qwen = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else None
    family = qwen or ("mistral" if config.sliding_window else "llama")
    copied = (*_COPIED, "num_key_value_heads", "head_dim", "tie_word_embeddings")
    content = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        **{name: getattr(config, name) for name in copied},
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    }
    if config.sliding_window is not None:
        content |= {"sliding_window": config.sliding_window, "max_window_layers": 0}
    return content | ({"use_sliding_window": config.sliding_window is not None} if qwen else {})


def _rope_json(config: LlamaConfig) -> Json:
    scaling = config.rope_scaling
    fields = {} if scaling is None else {k: v for k, v in dataclasses.asdict(scaling).items() if v is not None}
    rope = {"rope_type": "default" if scaling is None else scaling.rope_type, **fields}
    return {
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
    }
