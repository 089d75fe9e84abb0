"""models.config_json: what a config.json means, what it is after a change, and what is refused."""

import dataclasses

import pytest
from make_huggingface_logits import CONFIGS

from models import config_json
from models.rope import Llama3RopeScaling, RopeExtension, YarnRopeScaling

ROPE = CONFIGS["llama-3.1"]["rope_scaling"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": ROPE},
        {"rope_theta": 500000, "rope_scaling": {**ROPE, "type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in ROPE.items()}},
        {"rope_parameters": {**ROPE, "rope_theta": 500000.0}},
        {"rope_theta": 5e5, "rope_scaling": ROPE, "rope_parameters": {**ROPE, "rope_theta": 5e5}},
    ],
)
def test_all_spellings_of_rope_mean_the_same(rope):
    content = {k: v for k, v in CONFIGS["llama-3.1"].items() if not k.startswith("rope")} | rope
    config = config_json.from_json(content)
    assert config == config_json.from_json(CONFIGS["llama-3.1"])
    assert (config.rope_theta, config.rope_scaling) == (5e5, Llama3RopeScaling(original_max_position_embeddings=128))


YARN = {"type": "yarn", "factor": 4.0}


def test_yarn_takes_its_old_context_from_the_model_where_it_names_none():
    config = config_json.from_json({**CONFIGS["llama-3"], "rope_scaling": {**YARN, "beta_fast": 16}})
    assert config.rope_scaling == YarnRopeScaling(4.0, 4096, beta_fast=16)


REFUSED = {
    "rope_type=longrope must be one of default, linear, llama3, yarn": {"rope_scaling": {"rope_type": "longrope"}},
    "rope_type=dynamic must be": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "rope_type=None must be one of": {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
    "mscale must not be in a RoPE of type yarn": {"rope_scaling": {**YARN, "mscale": 0.7}},
    "factor must be in a RoPE of type linear": {"rope_scaling": {"type": "linear"}},
    "factor='4' must be int or float": {"rope_scaling": {**YARN, "factor": "4"}},
    "rope_scaling.factor=0.5 must be at least 1": {"rope_scaling": {**YARN, "factor": 0.5}},
    "rope_scaling='yarn' must be a JSON object": {"rope_scaling": "yarn"},
    "rope_theta, rope_scaling and rope_parameters must agree": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}
    },
    "model_type=gpt2 must be one of llama, mistral, qwen2, qwen3": {"model_type": "gpt2"},
    "hidden_act=gelu must be silu": {"hidden_act": "gelu"},
    "attention_bias=True must be False": {"attention_bias": True},
    "mlp_bias=True": {"mlp_bias": True},
    "quantization_config={'bits': 4} must be None": {"quantization_config": {"bits": 4}},
    "auto_map={'AutoModel': 'm.M'} must be None": {"auto_map": {"AutoModel": "m.M"}},
    "partial_rotary_factor=0.5 must be 1.0": {"partial_rotary_factor": 0.5},
    "vocab_size must be in config.json": {"vocab_size": None},
    "hidden_size='64' must be int": {"hidden_size": "64"},
    "hidden_size=64 must be a multiple of num_attention_heads=6": {"num_attention_heads": 6},
    "rope_theta=nan must be positive and finite": {"rope_theta": float("nan")},
    "sliding_window=9 must be left out": {"sliding_window": 9},
    "num_key_value_heads must be in config.json": {"num_key_value_heads": None, "model_type": "mistral"},
    "layer_types=.* with sliding_window=9 must be the same for all layers": {
        "model_type": "qwen2",
        "sliding_window": 9,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_config_that_means_another_network_is_refused_by_the_name_of_its_field(message):
    with pytest.raises(ValueError, match=message):
        config_json.from_json({**CONFIGS["llama-3"], **REFUSED[message]})


@pytest.mark.parametrize(
    ("family", "given", "window"),
    [
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 64}, 64),
        ("qwen-2.5", {}, None),
        ("qwen-2.5", {"use_sliding_window": True, "max_window_layers": 0}, 128),
        ("qwen-2.5", {"use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen-2.5", {"layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_a_window_counts_only_where_the_family_uses_it(family, given, window):
    assert config_json.from_json({**CONFIGS[family], **given}).sliding_window == window


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_comes_back_as_it_was_and_every_architecture_can_be_written_anew(name):
    config = config_json.from_json(CONFIGS[name])
    assert config_json.to_json(config, CONFIGS[name]) is CONFIGS[name]
    assert config_json.from_json(config_json.to_json(config)) == config


@pytest.mark.parametrize("extension", ["yarn:32", "linear:4", "llama3"])
@pytest.mark.parametrize("name", ["llama-2", "llama-3.1", "qwen-3"])
def test_a_longer_context_is_written_in_both_spellings_and_all_else_stays(name, extension):
    began = config_json.from_json(CONFIGS[name])
    config = dataclasses.replace(began.extended(RopeExtension.parse(extension)), rope_theta=2e6)
    content = config_json.to_json(config, CONFIGS[name])
    assert config_json.from_json(content) == config
    kind, original = extension.partition(":")[0], 128 if name == "llama-3.1" else 4096
    assert content["rope_scaling"]["rope_type"] == content["rope_parameters"]["rope_type"] == kind
    assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == 2e6
    assert content["max_position_embeddings"] == original * {"yarn": 32, "linear": 4, "llama3": 8}[kind]
    changed = {key for key in content if content[key] != CONFIGS[name].get(key)}
    assert changed <= {"rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"}


def test_another_width_is_not_written_over_the_config_of_a_model():
    config = dataclasses.replace(config_json.from_json(CONFIGS["llama-2"]), vocab_size=99)
    with pytest.raises(ValueError, match="must be a model of the family llama, with another RoPE at most"):
        config_json.to_json(config, CONFIGS["llama-2"])


@pytest.mark.parametrize("content", ["", "[1]", None])
def test_a_folder_without_a_whole_config_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"^config\.json must"):
        config_json.read(tmp_path)


def test_the_weights_have_the_dtype_that_the_config_names():
    assert config_json.weights_dtype({"dtype": "float16", "torch_dtype": "float32"}) == "float16"
    assert config_json.weights_dtype({}) == "bfloat16"
    with pytest.raises(ValueError, match="dtype=int8 must be one of"):
        config_json.weights_dtype({"torch_dtype": "int8"})
