"""Fields of `config.json`, one by one and drawn at random, held against `transformers`.

    python configs.py --fields [--check]
    python configs.py MOEJOB [--count N] [--seed N]

The first writes what `transformers` finds for each field of each family at a value that matters
to tests/parity/data/fields.json, which worker/tests/hf_fields.rs reads:

    {"versions": {..}, "bases": {FAMILY: config}, "cases": [{"family": ..,
        "set": {FIELD: VALUE, ..}, "without": [FIELD, ..], "loss": X, "refused": FIELD}]}

A case is its family's base with `set` in it and without `without`. `loss` is the mean
cross-entropy of TEXT in windows of SEQUENCE tokens, with weights that the names of the tensors
decide; "refused" stands where the field is not built in, and has to be refused by its name.

The second draws N configurations of the five families. `moejob eval` has to find the loss of
`transformers` within 1e-5, or to refuse one of the fields that were drawn by its name.
"""

import argparse
import contextlib
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
import transformers
from generate import CORRECTION, logical
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
DATA = pathlib.Path(__file__).parent / "data" / "fields.json"
SEQUENCE, BOUND = 24, 1e-5
COMMON = dict(
    vocab_size=256,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    initializer_range=0.02,
    hidden_act="silu",
    num_experts_per_tok=2,
)
DEEPSEEK = dict(
    n_routed_experts=8,
    n_shared_experts=1,
    moe_intermediate_size=8,
    intermediate_size=12,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.5,
    norm_topk_prob=True,
    head_dim=4,
)
BASES = {
    "mixtral": dict(
        COMMON, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=5,
        intermediate_size=8, head_dim=4,
    ),
    "qwen3_moe": dict(
        COMMON, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=5,
        moe_intermediate_size=8, intermediate_size=12, head_dim=4, norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "olmoe": dict(
        COMMON, architectures=["OlmoeForCausalLM"], model_type="olmoe", num_experts=5,
        intermediate_size=8, norm_topk_prob=False,
    ),
    "glm4_moe": dict(
        COMMON, **DEEPSEEK, architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe",
        partial_rotary_factor=1.0, use_qk_norm=True,
    ),
    "dots1": dict(COMMON, **DEEPSEEK, architectures=["Dots1ForCausalLM"], model_type="dots1"),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
FULL, SLIDING = "full_attention", "sliding_attention"
# Fields and values, the field that has to be refused, and whether the loss is another one than
# that of the base.
EVERY = [
    ({"rope_theta": 100.0}, None, True),
    ({"rope_parameters": DEFAULT}, None, True),
    ({"rope_scaling": DEFAULT}, None, True),
    ({"rope_scaling": {"type": "default"}, "rope_parameters": DEFAULT}, None, "some"),
    ({"rope_scaling": {}, "rope_parameters": DEFAULT}, None, True),
    ({"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, None, False),
    ({"rope_scaling": YARN, "rope_parameters": DEFAULT}, "rope_scaling", True),
    ({"rope_parameters": YARN}, "rope_parameters", True),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling", True),
    ({"rms_norm_eps": 0.5}, None, True),
    ({"hidden_act": "relu"}, None, True),
    ({"hidden_act": "gelu_new"}, None, True),
    ({"hidden_act": "gelu"}, "hidden_act", True),
    ({"tie_word_embeddings": True}, None, True),
    ({"num_key_value_heads": 4}, None, True),
    ({"num_key_value_heads": 1}, None, True),
    ({"num_experts_per_tok": 1}, None, True),
    ({"num_hidden_layers": 2}, None, True),
    ({"attention_dropout": 0.5}, "attention_dropout", False),
    ({"initializer_range": 0.5}, None, False),
    ({"max_position_embeddings": 8}, None, False),
    ({"is_causal": False}, "is_causal", True),
    ({"layer_types": [FULL] * 3}, None, False),
    ({"chunk_size_feed_forward": 4, "pretraining_tp": 2, "use_cache": False}, None, False),
    ({"output_router_logits": True, "pad_token_id": 3, "torch_dtype": "bfloat16"}, None, False),
    ({"made_up": 2.0}, None, False),
]
OWN = {
    "mixtral": [
        ({"head_dim": 8}, None, True),
        ({"head_dim": None}, None, False),
        ({"num_local_experts": 3}, None, True),
        ({"num_experts": 3}, "num_local_experts", True),
        ({"intermediate_size": 10}, None, True),
        ({"sliding_window": 8}, "sliding_window", True),
        ({"sliding_window": 16, "max_position_embeddings": 16}, "sliding_window", True),
        ({"sliding_window": None}, None, False),
        ({"router_jitter_noise": 0.5}, "router_jitter_noise", False),
        ({"router_aux_loss_coef": 0.5}, None, False),
        ({"norm_topk_prob": False}, None, False),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", False),
    ],
    "qwen3_moe": [
        ({"head_dim": 8}, None, True),
        ({"num_experts": 3}, None, True),
        ({"moe_intermediate_size": 10}, None, True),
        ({"intermediate_size": 10}, None, True),
        ({"norm_topk_prob": False}, None, True),
        ({"mlp_only_layers": []}, None, True),
        ({"decoder_sparse_step": 3}, None, True),
        ({"attention_bias": True}, None, True),
        ({"sliding_window": 8}, None, False),
        ({"sliding_window": 8, "use_sliding_window": True}, "sliding_window", True),
        ({"sliding_window": None, "use_sliding_window": True}, None, False),
        ({"sliding_window": 8, "max_window_layers": 0}, None, False),
    ],
    "olmoe": [
        ({"num_experts": 3}, None, True),
        ({"intermediate_size": 10}, None, True),
        ({"norm_topk_prob": True}, None, True),
        ({"clip_qkv": 0.7}, None, True),
        ({"clip_qkv": None}, None, False),
        ({"clip_qkv": 0.0}, "clip_qkv", True),
        ({"attention_bias": True}, None, True),
        ({"num_key_value_heads": None}, None, True),
        ({"sliding_window": 8}, "sliding_window", False),
        ({"head_dim": 4}, None, False),
    ],
    "glm4_moe": [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", True),
        ({"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, "rope_parameters", True),
        ({"use_qk_norm": False}, None, True),
        ({"attention_bias": True}, "attention_bias", True),
        ({"num_nextn_predict_layers": 2}, None, False),
    ],
    "dots1": [
        ({"attention_bias": True}, None, True),
        ({"num_key_value_heads": None}, None, True),
        ({"sliding_window": 8}, None, False),
        ({"sliding_window": 8, "max_window_layers": 1}, "sliding_window", True),
        ({"sliding_window": 8, "max_window_layers": 3}, None, False),
        ({"sliding_window": None, "max_window_layers": 0}, None, False),
        ({"max_window_layers": 0}, "sliding_window", False),
        ({"sliding_window": 8, "layer_types": [FULL, SLIDING, FULL]}, "layer_types", True),
        ({"sliding_window": 8, "max_window_layers": 0, "layer_types": [FULL] * 3}, None, False),
    ],
}
BOTH = [
    ({"head_dim": 8}, None, True),
    ({"n_routed_experts": 6}, None, True),
    ({"num_local_experts": 6}, "n_routed_experts", True),
    ({"n_shared_experts": 2}, None, True),
    ({"n_shared_experts": 0}, None, True),
    ({"moe_intermediate_size": 10}, None, True),
    ({"intermediate_size": 10}, None, True),
    ({"first_k_dense_replace": 2}, None, True),
    ({"n_group": 1, "topk_group": 1}, None, True),
    ({"topk_group": 2}, None, True),
    ({"routed_scaling_factor": 3.0}, None, True),
    ({"norm_topk_prob": False}, None, True),
    ({"scoring_func": "softmax", "moe_layer_freq": 2}, None, False),
]
# What stands in place of a field that is not there. Only where the file says nothing of it.
ABSENT = {
    "mixtral": ["rms_norm_eps", "rope_theta", "hidden_act"],
    "qwen3_moe": ["rms_norm_eps", "rope_theta", "norm_topk_prob", "num_key_value_heads"],
    "olmoe": ["rms_norm_eps", "rope_theta", "num_key_value_heads", "norm_topk_prob"],
    "glm4_moe": ["rms_norm_eps", "rope_theta", "norm_topk_prob", "first_k_dense_replace",
                 "routed_scaling_factor", "n_group", "use_qk_norm"],
    "dots1": ["rms_norm_eps", "rope_theta", "norm_topk_prob", "first_k_dense_replace",
              "routed_scaling_factor", "n_group"],
}


def text_of(count):
    """Letters that a line of arithmetic chooses."""
    state, text = 1, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        text.append(97 + (state >> 16) % 26)
    return bytes(text)


TEXT = text_of(SEQUENCE * 8 + 1)


def numbers(name, count, gain):
    """As worker/tests/common/hf.rs makes them: multiples of 1/256, exact in every float type."""
    mask = 2**64 - 1
    seed = 17
    for byte in name.encode():
        seed = (seed * 0x5851F42D4C957F2D + byte) & mask
    found = []
    for at in range(count):
        mixed = ((seed ^ at) * 0x9E3779B97F4A7C15) & mask
        mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & mask
        found.append((1.0 if gain else 0.0) + ((mixed >> 40) % 255) / 256 - 0.5)
    return found


def published(name, family):
    if family != "mixtral":
        return name
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for ours, letter in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(ours, letter)
    return name


def build(config, folder, fill):
    """A directory of this `config.json`, with weights by `fill(name, shape, is_gain)`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(read)
    state = dict(model.named_parameters())
    state |= {name: b for name, b in model.named_buffers() if name.endswith(CORRECTION)}
    gains = ("norm.weight", "layernorm.weight")
    tensors = {}
    for name, value in logical(state).items():
        if name == "lm_head.weight" and read.tie_word_embeddings:
            continue
        gain = name.endswith(gains)
        tensors[published(name, config["model_type"])] = fill(name, value.shape, gain)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def loss_of(folder, text, sequence, dtype):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, attn_implementation="eager",
        experts_implementation="eager",
    )
    wrong = {key: value for key, value in report.items() if value}
    assert not wrong, f"{folder}: {wrong}"
    count = (len(text) - 1) // sequence
    ids = torch.tensor(list(text))
    rows = [ids[i * sequence : (i + 1) * sequence + 1] for i in range(count)]
    windows = torch.stack(rows)
    with torch.no_grad():
        logits = model.eval()(input_ids=windows[:, :-1]).logits.double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def by_name(name, shape, gain):
    count = 1
    for size in shape:
        count *= size
    return torch.tensor(numbers(name, count, gain)).view(shape)


def recorded(family, fields, without, folder):
    config = {key: value for key, value in BASES[family].items() if key not in without}
    build(config | fields, folder, by_name)
    return loss_of(folder, TEXT, SEQUENCE, torch.float32)


def every_field():
    cases, wrong = [], []
    with tempfile.TemporaryDirectory() as folder:
        at = pathlib.Path(folder)
        for family in BASES:
            base = recorded(family, {}, [], at / family)
            cases.append({"family": family, "set": {}, "without": [], "loss": base})
            both = BOTH if family in ("glm4_moe", "dots1") else []
            every = EVERY
            if family == "glm4_moe":
                # Without it these turn half of each head.
                turned = {"partial_rotary_factor": 1.0}
                every = [({**turned, **fields}, *rest) for fields, *rest in EVERY]
            named = [(fields, [], *rest) for fields, *rest in every + OWN[family] + both]
            named += [({}, [field], None, "some") for field in ABSENT[family]]
            for number, (fields, without, refused, matters) in enumerate(named):
                if len(fields.get("layer_types", [0] * 3)) != 3:
                    continue
                place = at / f"{family}-{number}"
                try:
                    loss = recorded(family, fields, without, place)
                except Exception as error:
                    # What transformers does not load has no right value.
                    wrong.append(f"{family} {fields} {without}: {error!r:.200}")
                    continue
                moved = abs(loss - base) > 20 * BOUND
                if matters not in ("some", moved):
                    wrong.append(f"{family} {fields}: {base} -> {loss}")
                case = {"family": family, "set": fields, "without": without, "loss": loss}
                if refused:
                    case["refused"] = refused
                cases.append(case)
    assert not wrong, "\n".join(wrong)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"versions": versions, "bases": BASES, "cases": cases}


def rope(draw):
    theta = draw.choice([50.0, 1e3, 1e6, 10000])
    plain = {"rope_type": "default", "rope_theta": theta}
    other = draw.choice([
        dict(YARN), {"type": "yarn", "factor": 2.0}, {"rope_type": "linear", "factor": 3.0},
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
    ])
    return draw.choice([
        {"rope_theta": theta},
        {"rope_parameters": plain},
        {"rope_scaling": plain},
        {"rope_scaling": {"type": "default"}, "rope_theta": theta},
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": plain},
        {"rope_scaling": {}, "rope_parameters": plain},
        {"rope_scaling": None, "rope_parameters": plain, "rope_theta": 70.0},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": theta},
        {"rope_scaling": plain, "rope_parameters": {"rope_type": "default", "rope_theta": 70.0}},
        {"rope_scaling": other, "rope_theta": theta},
        {"rope_parameters": other},
        {"rope_scaling": other, "rope_parameters": plain},
    ])


def window(draw, family, layers):
    size = draw.choice([None, 4, 16, 32, 47, 48, 49, 200])
    fields = {"sliding_window": size}
    if draw.random() < 0.6:
        fields["max_window_layers"] = draw.randint(0, layers + 1)
    if draw.random() < 0.6:
        fields["use_sliding_window"] = draw.random() < 0.5
    if family == "dots1" and draw.random() < 0.4:
        kinds = [FULL] if size is None else [FULL, FULL, SLIDING]
        fields["layer_types"] = [draw.choice(kinds) for _ in range(layers)]
    if draw.random() < 0.4:
        fields["max_position_embeddings"] = draw.choice([8, 16, 32, 48, 64])
    if family == "dots1" and draw.random() < 0.2:
        del fields["sliding_window"]
    return fields


def drawn(family, draw):
    """A configuration, and the fields of it that were drawn."""
    kv, each, head_dim = draw.randint(1, 3), draw.randint(1, 3), 2 * draw.randint(1, 5)
    heads, layers, experts = kv * each, draw.randint(1, 4), draw.randint(2, 9)
    config = dict(
        BASES[family],
        hidden_size=heads * head_dim if family == "olmoe" else draw.randint(8, 40),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        num_experts_per_tok=draw.randint(1, experts),
        head_dim=head_dim,
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-2]),
        hidden_act=draw.choice(["silu", "swish", "relu", "gelu_pytorch_tanh", "gelu_new"]),
        tie_word_embeddings=draw.random() < 0.3,
        initializer_range=draw.choice([0.02, 0.5]),
    )
    width = draw.randint(1, 20)
    if family in ("mixtral", "olmoe"):
        config["intermediate_size"] = width
    else:
        config |= {"moe_intermediate_size": width, "intermediate_size": draw.randint(1, 20)}
    if family == "mixtral":
        config["num_local_experts"] = experts
        own = [
            {"router_jitter_noise": draw.choice([0.0, 0.1])},
            {"num_experts": draw.choice([experts, experts + 1])},
            {"norm_topk_prob": False},
            {"head_dim": None},
        ]
    elif family == "qwen3_moe":
        dense = [layer for layer in range(layers) if draw.random() < 0.3]
        config |= {"num_experts": experts, "mlp_only_layers": dense}
        own = [
            {"decoder_sparse_step": draw.randint(1, 3)},
            {"norm_topk_prob": draw.random() < 0.5},
            {"attention_bias": draw.random() < 0.7},
            {"num_local_experts": experts},
            {"mlp_only_layers": None},
        ]
    elif family == "olmoe":
        config["num_experts"] = experts
        own = [
            {"clip_qkv": draw.choice([None, 0.0, 0.2, 1, 3.0])},
            {"norm_topk_prob": draw.random() < 0.5},
            {"attention_bias": draw.random() < 0.7},
            {"num_local_experts": draw.choice([experts, experts + 1])},
            {"num_key_value_heads": None},
        ]
    else:
        groups = draw.randint(1, 3)
        experts = groups * draw.randint(2, 4)
        kept = draw.randint(1, groups)
        config |= {
            "n_routed_experts": experts,
            "n_group": groups,
            "topk_group": kept,
            "num_experts_per_tok": draw.randint(1, kept * experts // groups),
            "n_shared_experts": draw.randint(0, 2),
            "first_k_dense_replace": draw.randint(0, layers),
            "routed_scaling_factor": draw.choice([1.0, 0.5, 2.5]),
            "norm_topk_prob": draw.random() < 0.5,
        }
        own = [
            {"num_local_experts": draw.choice([experts, 2 * experts])},
            {"scoring_func": "softmax", "topk_method": "greedy"},
            {"moe_layer_freq": 2},
            {"num_nextn_predict_layers": draw.randint(0, 2)},
            {"use_qk_norm": draw.random() < 0.5},
            {"attention_bias": draw.random() < 0.5},
        ]
    every = [
        {"attention_dropout": draw.choice([0.0, 0.1])},
        {"hidden_act": draw.choice(["gelu", "gelu_fast", "tanh", "sigmoid"])},
        {"is_causal": draw.random() < 0.5},
        {"partial_rotary_factor": draw.choice([0.5, 1.0])},
        {"output_router_logits": True, "router_aux_loss_coef": 0.5},
        {"pad_token_id": 7, "bos_token_id": 1, "eos_token_id": [2, 3]},
        {"torch_dtype": "bfloat16", "use_cache": False, "chunk_size_feed_forward": 8},
        {"made_up": draw.choice([1.5, "x", True])},
        {"layer_types": [FULL] * layers},
        {"attention_chunk_size": 8},
        {"is_encoder_decoder": draw.random() < 0.5},
    ]
    changes = draw.sample(own, draw.randint(0, 3)) + draw.sample(every, draw.randint(0, 1))
    if draw.random() < 0.4:
        changes.append(window(draw, family, layers))
    if draw.random() < 0.5:
        changes.append(rope(draw))
    fields = {}
    for change in changes:
        fields |= change
    if any(name.startswith("rope_") for name in fields) and draw.random() < 0.8:
        config.pop("rope_theta")
    if family == "dots1" and layers > 1 and draw.random() < 0.3:
        fields |= {"sliding_window": draw.choice([4, 16]), "max_window_layers": layers - 1}
    return config | fields, fields


def text_for(draw, sequence, count):
    return bytes(draw.randint(0, 127) for _ in range(sequence * count + 1))


def judge(moejob, number, seed, folder):
    """`equal`, `refused`, or none where transformers does not load it; why; how far apart."""
    family = list(BASES)[number % len(BASES)]
    draw = random.Random(f"{family} {seed} {number}")
    config, fields = drawn(family, draw)
    generator = torch.Generator().manual_seed(draw.randint(0, 2**31))

    def fill(_, shape, gain):
        return (1.0 if gain else 0.0) + 0.3 * torch.randn(shape, generator=generator)

    sequence = 48
    text = text_for(draw, sequence, 4)
    try:
        with contextlib.redirect_stderr(None):
            build(config, folder, fill)
            expected = loss_of(folder, text, sequence, torch.float32)
    except Exception as error:
        return None, f"transformers: {error!r:.120}", 0.0
    data = folder / "data.txt"
    data.write_bytes(text)
    options = ["--data", data, "--sequence-length", sequence, "--tokenizer", "bytes", "--json"]
    command = [moejob, "eval", folder, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    shown = f"{family} {fields}"
    if done.returncode == 0:
        found = json.loads(done.stdout)
        gap = abs(found["loss"] - expected)
        assert gap <= BOUND, f"{shown}: {found['loss']} and {expected} by transformers\n{config}"
        if "made_up" in fields:
            told = " ".join(found.get("warnings", []))
            assert "made_up" in told, f"{shown}: {told!r} does not name made_up"
        return "equal", f"{shown}: {gap:.1e}", gap
    assert done.returncode == 3, f"{shown}: {done.returncode}\n{done.stderr}"
    # The field that is refused is one that was drawn, or the other name of one.
    named = [line for line in done.stderr.splitlines() if "config.json: " in line]
    assert named, f"{shown}: refused by no field\n{done.stderr}"
    drawn_now = set(fields) | {"num_local_experts", "num_experts", "n_routed_experts"}
    if "sliding_window" not in fields and "max_window_layers" in fields:
        drawn_now.add("sliding_window")
    for line in named:
        field = line.split("config.json: ")[1].split(":")[0].split(".")[0]
        assert field in drawn_now, f"{shown}: {line}"
    return "refused", f"{shown}: {named[0].strip()}", 0.0


def saved(moejob, family, folder):
    """What `transformers` itself writes into a config.json is known, all of it."""
    build(BASES[family], folder, by_name)
    text = AutoConfig.from_pretrained(folder).to_json_string(use_diff=False)
    (folder / "config.json").write_text(text)
    data = folder / "data.txt"
    data.write_bytes(TEXT)
    options = ["--data", data, "--sequence-length", SEQUENCE, "--tokenizer", "bytes", "--json"]
    command = list(map(str, [moejob, "eval", folder, *options]))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{family}: {done.stderr}\n{text}"
    found = json.loads(done.stdout)
    assert not found["warnings"], f"{family}: {found['warnings']}"
    gap = abs(found["loss"] - loss_of(folder, TEXT, SEQUENCE, torch.float32))
    assert gap <= BOUND, f"{family}: {gap}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("moejob", nargs="?", type=pathlib.Path)
    parser.add_argument("--fields", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.fields:
        found = every_field()
        if not options.check:
            DATA.write_text(json.dumps(found, indent=None, sort_keys=True) + "\n")
            return
        kept = json.loads(DATA.read_text())
        assert kept["bases"] == found["bases"], "other bases"
        for one, other in zip(kept["cases"], found["cases"], strict=True):
            gap = abs(one.pop("loss") - other.pop("loss"))
            assert one == other and gap <= BOUND / 2, f"{other}: {gap:.1e}"
        return
    if options.moejob is None:
        parser.error("the program is needed")
    moejob = options.moejob.resolve()
    for family in BASES:
        with tempfile.TemporaryDirectory() as folder:
            saved(moejob, family, pathlib.Path(folder))
    counts, wrong, number = {"equal": 0, "refused": 0}, [], 0
    skipped, farthest = 0, 0.0
    while sum(counts.values()) + len(wrong) < options.count:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = judge(moejob, number, options.seed, pathlib.Path(folder))
            except AssertionError as error:
                wrong.append(f"{number}: {error}")
                found = None, "", 0.0
        result, said, gap = found
        farthest = max(farthest, gap)
        number += 1
        if result:
            counts[result] += 1
        elif said:
            skipped += 1
        if options.verbose:
            print(f"{number - 1}: {result} {said}", file=sys.stderr)
    summary = f"{counts['equal']} equal, {counts['refused']} refused by name, {len(wrong)} wrong"
    summary += f", the losses at most {farthest:.1e} apart"
    print(f"configurations of seed {options.seed}: {summary}; {skipped} that transformers refuses")
    assert not wrong, "\n".join(wrong)
    assert counts["equal"] >= options.count // 3, "too much is refused to tell anything"


if __name__ == "__main__":
    main()
