"""A cut of OLMoE trained on real text twice: by `moejob run` on a GPU, and by plain PyTorch.

    python3 twin.py prepare TOKENS.bin FOLDER...   ids of all text below (needs tokenizers)
    python3 twin.py compare MOEJOB TOKENS.bin      both, from the same weights, in the same order
    python3 twin.py noise MOEJOB TOKENS.bin        how far apart equally right runs are

Both begin with the weights of one Hugging Face directory, read the windows of TOKENS.bin in the
order of worker/src/data/order.rs, and use the same losses, rates and clipping. What is compared is
the mean loss of the last hundred steps, which must agree within `--bound`. Their sums are taken in
other orders and bf16 rounds them, so single steps part slowly. `noise` says how far two runs part
that only round elsewhere: PyTorch compiled and not, ours with attention in order and in any order
and with sums of gradients in fp32. All of them run at once, on all GPUs.
"""
import argparse
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / place) for place in ("peers", "../../kernels/bench-peers")]
SEED, RATE, LOWEST, DECAY = 1, 4e-4, 4e-5, 0.1
BETAS, EPSILON, AUX, Z = (0.9, 0.95), 1e-8, 0.01, 0.001
COUNTED = 100
NORMS = {
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
}


def prepare(args):
    """Byte-pair ids of the text below some folders, by a tokenizer that is made from them."""
    from tokenizers import ByteLevelBPETokenizer

    texts, size = [], 0
    for folder in args.folders:
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.suffix not in (".md", ".txt", ".rs", ".py") or not path.is_file():
                continue
            data = path.read_bytes()
            # What programs have written is long and says little.
            if len(data) > 100_000 or size + len(data) > args.megabytes * 10**6:
                continue
            texts.append(data.decode("utf-8", "ignore"))
            size += len(data)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=args.vocabulary, show_progress=False)
    ids = [numpy.array(tokenizer.encode(text).ids, dtype=numpy.uint16) for text in texts]
    numpy.concatenate(ids).tofile(args.tokens)
    print(f"{len(texts)} files, {size} bytes, {sum(map(len, ids))} tokens")


def philox(key, counter):
    """kernels/src/philox.rs, over arrays of counters."""
    c = [numpy.asarray(word, dtype=numpy.uint64) for word in counter]
    key = [key & 0xFFFFFFFF, key >> 32]
    low_word = numpy.uint64(0xFFFFFFFF)
    for _ in range(10):
        low, high = c[0] * numpy.uint64(0xD2511F53), c[2] * numpy.uint64(0xCD9E8D57)
        c = [
            high >> numpy.uint64(32) ^ c[1] ^ numpy.uint64(key[0]),
            high & low_word,
            low >> numpy.uint64(32) ^ c[3] ^ numpy.uint64(key[1]),
            low & low_word,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def order(count, epoch):
    """Where the samples of an epoch lie: worker/src/data/order.rs, `permute`."""
    half = -(-(count - 1).bit_length() // 2)
    mask, shift = numpy.uint64((1 << half) - 1), numpy.uint64(half)
    at, left_over = numpy.arange(count, dtype=numpy.uint64), numpy.ones(count, dtype=bool)
    while left_over.any():
        left, right = at[left_over] >> shift, at[left_over] & mask
        for turn in range(6):
            word = numpy.full_like(right, turn << 24 ^ 0x64617461)
            halves = (epoch & 0xFFFFFFFF, epoch >> 32)
            epochs = [numpy.full_like(right, half) for half in halves]
            left, right = right, (left ^ philox(SEED, [right, word, *epochs])[0]) & mask
        at[left_over] = left << shift | right
        left_over = at >= count
    return at


class Batches:
    def __init__(self, path, rows, sequence):
        self.ids = numpy.memmap(path, dtype=numpy.uint16, mode="r")
        self.rows, self.sequence = rows, sequence
        self.windows = (len(self.ids) - 1) // sequence
        self.epoch, self.places = None, None

    def __getitem__(self, step):
        windows = []
        for sample in range(step * self.rows, (step + 1) * self.rows):
            epoch, index = divmod(sample, self.windows)
            if epoch != self.epoch:
                self.epoch, self.places = epoch, order(self.windows, epoch)
            start = int(self.places[index]) * self.sequence
            windows.append(self.ids[start : start + self.sequence + 1].astype(numpy.int64))
        return numpy.stack(windows)


def warm_up(steps):
    return min(100, steps // 4)


def rate_of(step, steps):
    warm = warm_up(steps)
    if step < warm:
        return RATE * (step + 1) / (warm + 1)
    share = min((step - warm) / max(steps - warm - 1, 1), 1.0)
    return LOWEST + (RATE - LOWEST) * 0.5 * (1 + math.cos(math.pi * share))


def sizes(args):
    """Hidden, heads, experts, chosen, hidden of an expert, vocabulary."""
    if args.tiny:
        return dict(hidden=64, heads=1, experts=8, chosen=2, width=64, vocabulary=50304)
    return dict(hidden=2048, heads=16, experts=64, chosen=8, width=1024, vocabulary=50304)


def make_model(args, folder):
    """Random weights in a Hugging Face directory, each layer's tensors under published names."""
    import torch
    from safetensors.torch import save_file

    size = sizes(args)
    hidden, width = size["hidden"], size["width"]
    torch.manual_seed(args.seed)
    draw = lambda *shape: torch.randn(*shape, device=args.device).mul_(0.02).bfloat16().cpu()
    ones = lambda: torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": draw(size["vocabulary"], hidden),
        "lm_head.weight": draw(size["vocabulary"], hidden),
        "model.norm.weight": ones(),
    }
    for layer in range(args.layers):
        at = f"model.layers.{layer}."
        for name in NORMS.values():
            tensors[f"{at}{name}.weight"] = ones()
        for name in "qkvo":
            tensors[f"{at}self_attn.{name}_proj.weight"] = draw(hidden, hidden)
        tensors[f"{at}mlp.gate.weight"] = draw(size["experts"], hidden)
        for expert in range(size["experts"]):
            shapes = {name: (width, hidden) for name in ("gate", "up")} | {"down": (hidden, width)}
            for name, shape in shapes.items():
                tensors[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = draw(*shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "torch_dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": args.layers,
        "num_attention_heads": size["heads"], "num_key_value_heads": size["heads"],
        "num_experts": size["experts"], "num_experts_per_tok": size["chosen"],
        "norm_topk_prob": False, "vocab_size": size["vocabulary"], "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 4096, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "clip_qkv": None,
        "initializer_range": 0.02, "router_aux_loss_coef": AUX,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def ours(args, folder, model):
    manifest = folder / "twin.yaml"
    manifest.write_text(f"""apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: {{ name: twin }}
spec:
  nodes: {{ profile: {args.profile}, min: 1, max: 1 }}
  model:
    from: {{ path: {model} }}
    router: {{ auxLossCoef: {AUX}, zLossCoef: {Z}, auxLossScope: microBatch }}
  data:
    train: {{ tokens: {{ paths: ["{args.tokens.resolve()}"], dtype: uint16 }} }}
    validation: {{ fraction: 0 }}
    sequenceLength: {args.sequence}
  training:
    attention: {args.attention}
    steps: {args.steps}
    globalBatchSize: {args.rows}
    microBatchSize: {args.rows}
    precision: {args.precision}
    gradientDtype: {args.gradients}
    optimizer:
      adamw:
        learningRate: {RATE}
        weightDecay: {DECAY}
        beta1: {BETAS[0]}
        beta2: {BETAS[1]}
        epsilon: {EPSILON}
    schedule: {{ cosine: {{ warmupSteps: {warm_up(args.steps)}, minLearningRate: {LOWEST} }} }}
    maxGradNorm: 1.0
    seed: {SEED}
  checkpoint: {{ everySteps: {args.steps}, keep: 1 }}
""")
    began = time.perf_counter()
    done = subprocess.run([args.moejob.resolve(), "run", manifest, "--dir", folder], cwd=folder,
                          capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"moejob run: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    seconds = time.perf_counter() - began
    with open(folder / "twin" / "metrics.jsonl") as lines:
        rows = [json.loads(line) for line in lines]
    return [row["loss"] for row in rows if "loss" in row], seconds


def theirs(args, tensors):
    import torch
    import step_torch as peer

    size = sizes(args)
    peer.VOCAB, peer.DIM, peer.HEADS = size["vocabulary"], size["hidden"], size["heads"]
    peer.HEAD_DIM = size["hidden"] // size["heads"]
    peer.EXPERTS, peer.TOP_K, peer.HIDDEN = size["experts"], size["chosen"], size["width"]
    kind = torch.bfloat16 if args.precision == "bf16" else torch.float32
    take = lambda name: tensors[name].to(args.device, kind).requires_grad_()

    def experts(at, names):
        of = lambda expert, name: tensors[f"{at}mlp.experts.{expert}.{name}_proj.weight"]
        whole = [torch.cat([of(e, name) for name in names]) for e in range(size["experts"])]
        return torch.stack(whole).to(args.device, kind).requires_grad_()

    layers = []
    for layer in range(args.layers):
        at = f"model.layers.{layer}."
        named = NORMS | {"router": "mlp.gate"}
        named |= {name: f"self_attn.{name}_proj" for name in "qkvo"}
        layers.append({ours: take(f"{at}{name}.weight") for ours, name in named.items()}
                      | {"up": experts(at, ["gate", "up"]), "down": experts(at, ["down"])})
    embed, table = take("model.embed_tokens.weight"), take("lm_head.weight")
    gain = take("model.norm.weight")
    params = [embed, table, gain] + [tensor for layer in layers for tensor in layer.values()]
    zeros = lambda p: torch.zeros_like(p, dtype=torch.float32)
    state = [(p, p.detach().float().clone(), zeros(p), zeros(p)) for p in params]
    head_dim = peer.HEAD_DIM
    turns = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(args.sequence).outer(turns)
    angles = torch.cat([angles, angles], -1).to(args.device)
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)

    def update(weight, master, m, v, gradient, scale, rate, first, second, decay):
        g = gradient.float() * scale
        m.lerp_(g, 1 - BETAS[0])
        v.lerp_(g * g, 1 - BETAS[1])
        master.mul_(1 - rate * decay).sub_(rate * (m * first) / ((v * second).sqrt() + EPSILON))
        weight.copy_(master)

    compiled = torch.compile if args.compiled else lambda function: function
    each, last, change = compiled(peer.block), compiled(peer.head), compiled(update)
    one = lambda value: torch.tensor(value, device=args.device)
    batches, losses = Batches(args.tokens, args.rows, args.sequence), []
    began = time.perf_counter()
    for number in range(args.steps):
        ids = torch.from_numpy(batches[number]).to(args.device)
        x, extra = torch.nn.functional.embedding(ids[:, :-1], embed), 0.0
        for layer in layers:
            x, more = each(x, layer, cos, sin)
            extra = extra + more / len(layers)
        loss = last(x, gain, table, ids[:, 1:])
        (loss + extra).backward()
        losses.append(loss.detach())
        with torch.no_grad():
            norms = torch._foreach_norm([p.grad for p in params])
            squares = torch.stack([norm.float() for norm in norms])
            scale = (1.0 / squares.norm()).clamp(max=1.0)
            rate = one(rate_of(number, args.steps))
            first, second = (one(1 / (1 - beta ** (number + 1))) for beta in BETAS)
            for p, master, m, v in state:
                decay = one(DECAY if p.ndim >= 2 else 0.0)
                change(p, master, m, v, p.grad, scale, rate, first, second, decay)
                p.grad = None
    losses = [loss.item() for loss in losses]
    return losses, time.perf_counter() - began


def compare(args):
    import torch

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model = folder / "model"
        model.mkdir()
        tensors = make_model(args, model)
        found, our_time = ours(args, folder, model)
        expected, their_time = theirs(args, tensors)
    assert len(found) == len(expected) == args.steps, (len(found), len(expected))
    for step in sorted({0, 1, 9, 99, *range(249, args.steps, 250), args.steps - 1}):
        if step < args.steps:
            print(f"step {step + 1}: {found[step]:.5f} beside {expected[step]:.5f}")
    last = min(COUNTED, args.steps)
    means = [sum(losses[-last:]) / last for losses in (found, expected)]
    apart = abs(means[0] / means[1] - 1)
    print(f"the last {last} steps: {means[0]:.5f} and {means[1]:.5f}, {apart:.2%} apart "
          f"(at most {args.bound:.2%}); {our_time:.0f} s and {their_time:.0f} s with their starts")
    if not apart <= args.bound or not means[1] < expected[0] - 0.5:
        sys.exit("FAILED")


def one(args):
    """One run of a kind; writes its losses."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    folder = pathlib.Path(args.folder)
    if args.kind == "ours":
        (folder / args.name).mkdir()
        losses, seconds = ours(args, folder / args.name, folder / "model")
    else:
        from safetensors.torch import load_file

        losses, seconds = theirs(args, load_file(folder / "model" / "model.safetensors"))
    told = {"losses": losses, "seconds": seconds}
    (folder / f"{args.name}.json").write_text(json.dumps(told))


KINDS = {
    "PyTorch, compiled": ["peer", "--compiled"],
    "PyTorch, not compiled": ["peer"],
    "ours, attention in order": ["ours"],
    "ours, attention fastest": ["ours", "--attention", "fastest"],
    "ours, gradients fp32": ["ours", "--gradients", "fp32"],
}


def noise(args):
    import torch

    gpus = max(torch.cuda.device_count(), 1)
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "model"
        model.mkdir()
        make_model(args, model)
        under_way = []
        wanted = [kind for kind in KINDS.items() if any(
            part in kind[0] for part in args.only.split(";"))]
        for at, (name, options) in enumerate(wanted):
            kind, *options = options
            common = [f"--{key}={getattr(args, key)}"
                      for key in ("steps", "layers", "rows", "sequence", "seed", "device",
                                  "profile")]
            if args.tiny:
                common.append("--tiny")
            if args.device == "cpu" and "--compiled" in options:
                options.remove("--compiled")
            command = [sys.executable, __file__, "one", str(args.moejob), str(args.tokens), *common,
                       "--kind", kind, "--folder", folder, "--name", name, *options]
            where = os.environ | {"CUDA_VISIBLE_DEVICES": str(at % gpus)}
            process = subprocess.Popen(command, env=where, start_new_session=True)
            under_way.append((name, process))
        runs, end = {}, time.monotonic() + args.seconds
        for name, process in under_way:
            try:
                failed = process.wait(max(end - time.monotonic(), 0)) != 0
            except subprocess.TimeoutExpired:
                # With its job, which is not this script's child.
                os.killpg(process.pid, signal.SIGKILL)
                failed = True
            if failed:
                print(f"FAILED or too slow: {name}")
            else:
                runs[name] = json.loads((pathlib.Path(folder) / f"{name}.json").read_text())
        if not runs:
            sys.exit(1)
    last = min(COUNTED, args.steps)
    means = {name: sum(run["losses"][-last:]) / last for name, run in runs.items()}
    first = next(iter(means.values()))
    for name, run in runs.items():
        losses = run["losses"]
        steps = [f"{losses[step]:.5f}" for step in (0, 9, 99, 499, 999) if step < len(losses)]
        print(f"{name:26} steps 1, 10, 100, 500, 1000: {' '.join(steps)}; the last {last}: "
              f"{means[name]:.5f} ({means[name] / first - 1:+.2%}), {run['seconds']:.0f} s")
    if len(runs) < len(wanted):
        sys.exit(1)


def main():
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("prepare")
    verb.set_defaults(run=prepare)
    verb.add_argument("tokens", type=pathlib.Path)
    verb.add_argument("folders", nargs="+")
    verb.add_argument("--megabytes", type=int, default=36)
    verb.add_argument("--vocabulary", type=int, default=50304)
    for name, run in ("compare", compare), ("noise", noise), ("one", one):
        verb = verbs.add_parser(name)
        verb.set_defaults(run=run)
        verb.add_argument("moejob", type=pathlib.Path)
        verb.add_argument("tokens", type=pathlib.Path)
        defaults = {"steps": 2000, "layers": 4, "rows": 4, "sequence": 1024, "seed": 1}
        for option, default in defaults.items():
            verb.add_argument("--" + option, type=int, default=default)
        verb.add_argument("--profile", default="gpu")
        verb.add_argument("--precision", default="bf16")
        verb.add_argument("--attention", default="deterministic")
        verb.add_argument("--gradients", default="auto")
        verb.add_argument("--device", default="cuda")
        verb.add_argument("--tiny", action="store_true")
        verb.add_argument("--compiled", action="store_true")
        verb.add_argument("--bound", type=float, default=0.005)
        verb.add_argument("--seconds", type=float, default=1000, help="for all runs of `noise`")
        verb.add_argument("--only", default="", help="kinds of `noise`, by a part of their names")
        verb.add_argument("--kind")
        verb.add_argument("--folder")
        verb.add_argument("--name")
    args = parser.parse_args()
    if args.run is compare:
        args.compiled = args.device == "cuda"
    args.run(args)


if __name__ == "__main__":
    main()
