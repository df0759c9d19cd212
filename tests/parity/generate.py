"""Reference values for worker/tests/parity.rs, from the models of `transformers`.

For each family one file, tests/parity/data/<family>.safetensors:

    tokens            u32 [10, B, S + 1], a batch a step
    initial/NAME      f32, our logical names (experts unfused)
    f32/... f64/...   logits [B, S, V], loss and aux [1] of the first step,
                      gradient/NAME of the first step, after/NAME after 10 AdamW steps
    __metadata__      config: the model's config.json; versions

Run it in a virtual environment with the versions of requirements.txt:

    python generate.py [--check] [--seed N] [--random COUNT] [FOLDER]

`--check` compares with the files in the folder instead of writing them, within the bounds that
the Rust tests use, because sums differ between processors in their last bits.
`--bf16` writes models of sizes that GPUs take, for worker/tests/cuda_parity.rs: weights that bf16
holds exactly, `f32/...` and `bf16/...` of one step, COUNT of each family,
which that test reads as MOEJOB_PARITY_BF16.
`--seed` is the first seed that is tried, 1 unless told. `--random` writes models of random shapes
in place of those below, COUNT of each family; the folder is then needed, and the Rust tests read
it as MOEJOB_PARITY_DATA.
"""

import argparse
import contextlib
import json
import pathlib
import random
import sys
import types

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Glm4MoeConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers import Glm4MoeForCausalLM, MixtralForCausalLM, OlmoeForCausalLM
from transformers import Qwen3MoeForCausalLM
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmoe import modeling_olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe

STEPS, BATCH, SEQUENCE = 10, 2, 8
MARGIN = 1e-4
BOUNDS = {"f32": 1e-3, "f64": 1e-9}

COMMON = dict(
    vocab_size=29,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
    rms_norm_eps=1e-5,
    router_aux_loss_coef=0.05,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    num_experts_per_tok=2,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    tie_word_embeddings=False,
)

GLM = dict(
    num_hidden_layers=3,
    num_experts_per_tok=3,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
)
CORRECTION = "e_score_correction_bias"

FAMILIES = {
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**COMMON, num_local_experts=4, intermediate_size=12, head_dim=4),
        modeling_mixtral,
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **{**COMMON, "tie_word_embeddings": True},
            num_experts=6,
            moe_intermediate_size=8,
            intermediate_size=20,
            head_dim=8,
            norm_topk_prob=True,
            mlp_only_layers=[0],
            decoder_sparse_step=1,
            attention_bias=True,
        ),
        modeling_qwen3_moe,
    ),
    "olmoe": (
        OlmoeForCausalLM,
        OlmoeConfig(
            **COMMON,
            num_experts=5,
            intermediate_size=8,
            norm_topk_prob=False,
            clip_qkv=1.5,
        ),
        modeling_olmoe,
    ),
    # The router of DeepSeek-V3 with ordinary attention.
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **{key: value for key, value in COMMON.items() if key not in GLM},
            **GLM,
            n_routed_experts=12,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
            moe_intermediate_size=8,
            intermediate_size=20,
            first_k_dense_replace=1,
            head_dim=4,
            use_qk_norm=True,
            num_mtp_layers=0,
        ),
        modeling_glm4_moe,
    ),
}


def random_shape(name, seed):
    """A family with sizes that divide nothing, and every option that it has."""
    draw = random.Random(f"{name} {seed}")
    kv, each = draw.randint(1, 3), draw.randint(1, 3)
    head_dim = 2 * draw.randint(1, 5)
    experts = draw.randint(2, 13)
    layers = draw.randint(1, 3)
    common = dict(
        COMMON,
        vocab_size=draw.randint(11, 61),
        hidden_size=draw.randint(5, 33),
        num_hidden_layers=layers,
        num_attention_heads=kv * each,
        num_key_value_heads=kv,
        num_experts_per_tok=draw.choice([1, experts, draw.randint(1, experts)]),
        tie_word_embeddings=draw.random() < 0.5,
        router_aux_loss_coef=draw.choice([0.001, 0.05, 0.3]),
        hidden_act=draw.choice(["silu", "silu", "relu", "gelu_pytorch_tanh"]),
        rope_parameters={"rope_type": "default", "rope_theta": draw.choice([50.0, 1e4, 1e6])},
    )
    make, _, module = FAMILIES[name]
    width, norm = draw.randint(1, 19), draw.random() < 0.5
    if name == "mixtral":
        own = dict(num_local_experts=experts, intermediate_size=width, head_dim=head_dim)
    elif name == "qwen3_moe":
        dense = [layer for layer in range(layers) if draw.random() < 0.4]
        own = dict(
            num_experts=experts,
            moe_intermediate_size=width,
            intermediate_size=draw.randint(3, 21),
            head_dim=head_dim,
            norm_topk_prob=norm,
            mlp_only_layers=dense if len(dense) < layers else [],
            attention_bias=draw.random() < 0.5,
        )
    elif name == "olmoe":
        common["hidden_size"] = kv * each * head_dim
        clip = draw.choice([None, 0.7, 1.5])
        own = dict(
            num_experts=experts, intermediate_size=width, norm_topk_prob=norm, clip_qkv=clip
        )
    else:
        groups = draw.choice([1, 2, 3])
        experts = groups * draw.randint(2, 5)
        kept = draw.randint(1, groups)
        most = kept * experts // groups
        # Normalised, one expert has the weight 1: its router has no gradient to compare.
        common["num_experts_per_tok"] = draw.choice([most, draw.randint(2, most)])
        common["rope_parameters"]["partial_rotary_factor"] = 1.0
        own = dict(
            n_routed_experts=experts,
            n_shared_experts=draw.randint(1, 3),
            n_group=groups,
            topk_group=kept,
            routed_scaling_factor=draw.choice([1.0, 2.5]),
            norm_topk_prob=norm,
            moe_intermediate_size=width,
            intermediate_size=draw.randint(3, 21),
            first_k_dense_replace=draw.randint(0, layers - 1),
            head_dim=head_dim,
            use_qk_norm=draw.random() < 0.5,
            num_mtp_layers=0,
        )
    # Of many tokens one always chooses too closely.
    sizes = (STEPS, draw.randint(1, 2), draw.randint(3, 7))
    return (make, type(FAMILIES[name][1])(**{**common, **own}), module), sizes


@contextlib.contextmanager
def wide(module):
    """Every cast to float32 of the model's module becomes one to float64 (docs/parity.md)."""

    class Torch(types.ModuleType):
        float = torch.float64
        float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    narrow = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    module.torch = Torch("torch")
    try:
        yield
    finally:
        torch.Tensor.float = narrow
        module.torch = torch


def logical(state):
    """Our names: the experts' fused matrices taken apart."""
    tensors = {}
    for name, value in state.items():
        head, _, last = name.rpartition(".")
        if head.endswith("mlp.experts"):
            for expert, matrix in enumerate(value):
                at = f"{head}.{expert}"
                if last == "gate_up_proj":
                    gate, up = matrix.chunk(2, dim=0)
                    tensors[f"{at}.gate_proj.weight"] = gate
                    tensors[f"{at}.up_proj.weight"] = up
                else:
                    tensors[f"{at}.down_proj.weight"] = matrix
        else:
            tensors[name] = value
    return {name: value.detach().clone().contiguous() for name, value in tensors.items()}


def gap(scores, kept):
    """The smallest gap between a kept and a refused score of a row."""
    if kept == scores.shape[-1]:
        return 1.0
    best = scores.topk(kept + 1, dim=-1).values
    return (best[:, kept - 1] - best[:, kept]).min().item()


def margin(model, router_logits):
    """The smallest gap between what was chosen and what was refused, of experts and groups."""
    top_k, smallest = model.config.num_experts_per_tok, 1.0
    corrections = [value for name, value in model.named_buffers() if name.endswith(CORRECTION)]
    if not corrections:
        return min(gap(torch.softmax(logits, dim=-1), top_k) for logits in router_logits)
    groups, kept = model.config.n_group, model.config.topk_group
    for logits, correction in zip(router_logits, corrections, strict=True):
        choice = logits.sigmoid() + correction
        of_groups = choice.unflatten(-1, (groups, -1))
        scores = of_groups.topk(2, dim=-1).values.sum(-1)
        smallest = min(smallest, gap(scores, kept))
        best = scores.topk(kept, dim=-1).indices
        mask = torch.full_like(scores, -torch.inf).scatter(1, best, 0.0)
        smallest = min(smallest, gap((of_groups + mask.unsqueeze(-1)).flatten(1), top_k))
    return smallest


def train(model, tokens):
    """Logits, losses and gradients of the first step, the weights after the last, the margin."""
    params = dict(model.named_parameters())
    groups = [
        {"params": [p for p in params.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    result, smallest = {}, 1.0
    for step in range(STEPS):
        ids, targets = tokens[step, :, :-1], tokens[step, :, 1:]
        out = model(
            input_ids=ids, labels=ids, shift_labels=targets.contiguous(),
            output_router_logits=True, use_cache=False,
        )
        optimizer.zero_grad()
        out.loss.backward()
        smallest = min(smallest, margin(model, out.router_logits))
        if smallest <= MARGIN:
            break
        if step == 0:
            result["logits"] = out.logits.detach().clone().contiguous()
            result["loss"] = out.loss.detach().reshape(1).clone()
            if getattr(out, "aux_loss", None) is not None:
                result["aux"] = out.aux_loss.detach().reshape(1).clone()
            gradients = logical({name: p.grad for name, p in params.items()})
            result |= {f"gradient/{name}": value for name, value in gradients.items()}
        optimizer.step()
    after = logical(params)
    return result | {f"after/{name}": value for name, value in after.items()}, smallest


def begin(make, config, sizes, seed):
    """Tokens [steps, B, S + 1], a model of random weights in f32, and its corrections by name."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    steps, batch, sequence = sizes
    tokens = torch.randint(0, config.vocab_size, (steps, batch, sequence + 1))
    first = make(config)
    with torch.no_grad():
        for param in first.parameters():
            # Gains and biases too, so that each of them matters.
            centre = 1.0 if param.ndim == 1 and param.mean() == 1.0 else 0.0
            param.copy_(centre + 0.3 * torch.randn_like(param))
        corrections = {n: b for n, b in first.named_buffers() if n.endswith(CORRECTION)}
        for correction in corrections.values():
            correction.copy_(0.2 * torch.randn_like(correction))
    return tokens, first, corrections


def family(name, shape, sizes, seed):
    """All tensors of a model, or None where a choice of experts is too close."""
    make, config, module = shape
    tokens, first, corrections = begin(make, config, sizes, seed)
    state = {key: value.clone() for key, value in first.state_dict().items()}
    tensors = {"tokens": tokens.to(torch.uint32)}
    initial = logical(dict(first.named_parameters()) | corrections)
    tensors |= {f"initial/{key}": value for key, value in initial.items()}
    for kind in ("f32", "f64"):
        patches = wide(module) if kind == "f64" else contextlib.nullcontext()
        with patches:
            torch.set_default_dtype(torch.float64 if kind == "f64" else torch.float32)
            model = make(config)
            model = model.double() if kind == "f64" else model
            model.load_state_dict(state)
            result, smallest = train(model, tokens)
            torch.set_default_dtype(torch.float32)
        if smallest <= MARGIN:
            return None
        for key, value in result.items():
            expected = torch.float64 if kind == "f64" else torch.float32
            assert value.dtype == expected, f"{name}: {key} is {value.dtype}: a cast was missed"
            tensors[f"{kind}/{key}"] = value
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    metadata = {"config": json.dumps(config.to_dict(), sort_keys=True), "seed": str(seed)}
    return tensors, metadata | versions


def sixteen_bits(name, seed):
    """One step in float32 and in bfloat16, of a model whose sizes the kernels of GPUs take."""
    make, config, _ = FAMILIES[name]
    own = dict(
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2 if name == "olmoe" else 1, initializer_range=0.06,
        router_aux_loss_coef=0.0, max_position_embeddings=256, num_experts_per_tok=2,
        num_experts=8, num_local_experts=8, moe_intermediate_size=64, intermediate_size=64,
        head_dim=64, clip_qkv=None, mlp_only_layers=[], attention_bias=False,
        tie_word_embeddings=False,
    )
    config = type(config)(**{**config.to_dict(), **own})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    tokens = torch.randint(0, 256, (1, 4, 129))
    first = make(config)
    with torch.no_grad():
        for param in first.parameters():
            centre = 1.0 if param.ndim == 1 else 0.0
            param.copy_(centre + 0.06 * torch.randn_like(param))
        # A token's id says which experts it takes, so clearly that no rounding changes it: one
        # token more or less would move an expert's gradient further than all rounding does.
        experts = torch.linalg.qr(torch.randn(128, 8)).Q.T
        ids = torch.arange(256)
        second = (ids + ids // 8 % 7 + 1) % 8
        first.model.embed_tokens.weight += 12 * experts[ids % 8] + 8 * experts[second]
        for layer in first.model.layers:
            layer.mlp.gate.weight.copy_(0.5 * experts + 0.02 * torch.randn(8, 128))
        for param in first.parameters():
            param.copy_(param.bfloat16().float())
    state = {key: value.clone() for key, value in first.state_dict().items()}
    initial = logical(dict(first.named_parameters()))
    tensors = {"tokens": tokens.to(torch.uint32)}
    tensors |= {f"initial/{key}": value for key, value in initial.items()}
    choices = []
    for kind, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        model = make(config)
        model.load_state_dict(state)
        # Rotary frequencies stay in float32, as `from_pretrained` leaves them.
        for param in model.parameters():
            param.data = param.data.to(dtype)
        ids, targets = tokens[0, :, :-1], tokens[0, :, 1:].contiguous()
        out = model(
            input_ids=ids, labels=ids, shift_labels=targets, output_router_logits=True,
            use_cache=False,
        )
        out.loss.backward()
        scores = [torch.softmax(logits.float(), dim=-1) for logits in out.router_logits]
        choices.append([score.topk(2, dim=-1).indices.sort(dim=-1).values for score in scores])
        closest = min(gap(logits.float(), 2) for logits in out.router_logits)
        assert closest > 0.3, f"{name}: two experts are {closest} apart"
        tensors[f"{kind}/loss"] = out.loss.detach().float().reshape(1).clone()
        gradients = logical({name: p.grad for name, p in model.named_parameters()})
        tensors |= {f"{kind}/gradient/{key}": value.float() for key, value in gradients.items()}
    same = all(torch.equal(one, other) for one, other in zip(*choices, strict=True))
    assert same, f"{name}: bfloat16 chose other experts"
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return tensors, {"config": json.dumps(config.to_dict(), sort_keys=True)} | versions


def compare(name, tensors, path):
    with safe_open(path, "pt") as kept:
        assert set(kept.keys()) == set(tensors), f"{name}: other tensors"
        for key, value in tensors.items():
            expected = kept.get_tensor(key)
            if key[:3] not in BOUNDS:
                assert torch.equal(value, expected), f"{name}: {key} differs"
                continue
            error = (value - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
            assert error <= BOUNDS[key[:3]], f"{name}: {key} differs by {error:.2e}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--bf16", type=int, default=0)
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    options = parser.parse_args()
    if (options.random or options.bf16) and options.folder is None:
        parser.error("--random and --bf16 need a folder: those in the tree are of fixed shapes")
    folder = options.folder or pathlib.Path(__file__).parent / "data"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if options.bf16:
        for name in ("olmoe", "qwen3_moe", "mixtral"):
            for seed in range(options.seed, options.seed + options.bf16):
                tensors, metadata = sixteen_bits(name, seed)
                save_file(tensors, folder / f"{name}-{seed}.safetensors", metadata)
        return
    cases = [(name, name, FAMILIES[name], (STEPS, BATCH, SEQUENCE)) for name in FAMILIES]
    if options.random:
        numbers = range(options.seed, options.seed + options.random)
        every = [(name, n) for name in FAMILIES for n in numbers]
        cases = [(f"{name}-{n}", name, *random_shape(name, n)) for name, n in every]
    for file, name, shape, sizes in cases:
        seeds = range(options.seed, options.seed + 2000)
        tensors, metadata = next(filter(None, (family(name, shape, sizes, n) for n in seeds)))
        path = folder / f"{file}.safetensors"
        if options.check:
            compare(file, tensors, path)
        else:
            save_file(tensors, path, metadata)
        print(f"{file}: {len(tensors)} tensors, seed {metadata['seed']}", file=sys.stderr)


if __name__ == "__main__":
    main()
