"""Writes tests/data/huggingface/*.npy: the logits that transformers computes for a small model of each family.

To be run by hand where torch and transformers are installed, from the root of the checkout:
`python tests/make_huggingface_logits.py`; the files here are of transformers 5.24.0 and torch 2.14.1, in float32.
The weights follow from the tensors' names, so that only configs (in `CONFIGS`) and logits are kept.
"""

import json
import zlib
from pathlib import Path

import numpy as np

LOGITS = Path(__file__).parent / "data" / "huggingface"
TOKENS = np.random.RandomState(0).randint(0, 128, (1, 4096)).astype(np.int32)
# Around the border of the 128 positions of the scaled models, and eight times as far. These are kept.
POSITIONS = np.array([0, 1, 2, 31, 32, 100, 127, 128, 129, 255, 256, 500, 511, 777, 1000, 1023])
# Compared where transformers is installed.
FAR_POSITIONS = np.array([1, 1023, 1500, 2047, 2048, 3000, 4095])

_SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_LLAMA = {**_SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_QWEN_2 = {
    **_SMALL,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "sliding_window": 128,
    "max_window_layers": 2,
}
_LLAMA_3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_type": "llama3",
}
# In the spelling in which each family was published, and the newest.
CONFIGS = {
    "llama-2": {**_LLAMA, "rope_scaling": None, "pretraining_tp": 1},
    "llama-3": {**_LLAMA, "rope_scaling": None, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False},
    "llama-3.1": {**_LLAMA, "rope_theta": 500000.0, "rope_scaling": _LLAMA_3_ROPE},
    "llama-3.2": {
        **_LLAMA,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {**_LLAMA_3_ROPE, "factor": 32.0, "rope_theta": 500000.0},
    },
    "llama-linear": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen-2.5": {**_QWEN_2, "tie_word_embeddings": True},
    "qwen-2.5-yarn": {
        **_QWEN_2,
        "rope_scaling": {"factor": 16.0, "original_max_position_embeddings": 128, "type": "yarn"},
    },
    "qwen-3": {
        **_QWEN_2,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 32,
        "sliding_window": None,
    },
    "mistral": {
        **_SMALL,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rope_theta": 1e6,
        "sliding_window": 4096,
    },
}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of `CONFIGS` as its files have them."""
    width, mlp = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", width // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (width, q),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (mlp, width),
        "mlp.up_proj.weight": (mlp, width),
        "mlp.down_proj.weight": (width, mlp),
    }
    if config["model_type"] == "qwen2":
        layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", q), ("k", kv), ("v", kv))}
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    tables = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        tables["lm_head.weight"] = (config["vocab_size"], width)
    layers = range(config["num_hidden_layers"])
    return tables | {f"model.layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}


def weights(config: dict) -> dict[str, np.ndarray]:
    """Random float32 tensors that depend on their name alone; scores are large, so that far rows depend on RoPE."""

    def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
        random = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        scaled = 1 + 0.2 * random if "norm" in name else random * (0.5 if name.endswith("bias") else shape[-1] ** -0.5)
        return (1.5 * scaled if "q_" in name or "k_" in name else scaled).astype(np.float32)

    return {name: weight(name, shape) for name, shape in shapes(config).items()}


def transformers_logits(folder: Path, positions: np.ndarray) -> np.ndarray:
    """What transformers computes from a folder with a model, at some positions: float32 [positions, vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS[:, : positions.max() + 1]).long()).logits[0, positions].numpy()


def write_model(folder: Path, config: dict) -> None:
    """A folder as Hugging Face has it, of one file."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(config), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    import tempfile

    LOGITS.mkdir(parents=True, exist_ok=True)
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as scratch:
            write_model(Path(scratch), config)
            logits = transformers_logits(Path(scratch), POSITIONS)
        np.save(LOGITS / f"{name}.npy", logits)
        print(name, logits.dtype, logits.shape, f"std {logits.std():.3f}")


if __name__ == "__main__":
    main()
