"""A whole training step of OLMoE-1B-7B in PyTorch, to stand beside `moejob bench`.

    python3 step_torch.py [--layers 16] [--micro-batch 4] [--sequence 4096] [--accumulation 1]
        [--steps 8] [--warm-up 4] [--devices 1]

Plain PyTorch, each block compiled: scaled_dot_product_attention, torch._grouped_mm over sorted
rows, a gather to sum a token's experts, the auxiliary and z losses of the router. Weights and
gradients are bf16, masters and moments fp32; AdamW is one compiled update a tensor, with the norm
of all gradients clipped at 1. Tokens are random. Prints the median step and tokens/s.

With `--devices 2` each GPU has the whole model and its own tokens, and a gradient is averaged over
both by NCCL as soon as backward has made it, beside what comes before it (as
DistributedDataParallel does, without its buckets, which would need copies of 14 GB).
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F

VOCAB, DIM, HEADS, HEAD_DIM, EXPERTS, TOP_K, HIDDEN = 50304, 2048, 16, 128, 64, 8, 1024


def norm(x, gain):
    return F.rms_norm(x, (x.shape[-1],), gain, 1e-5)


def turn(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def attention(x, p, cos, sin):
    batch, length, _ = x.shape
    split = lambda y: y.view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
    q = turn(split(norm(F.linear(x, p["q"]), p["q_norm"])), cos, sin)
    k = turn(split(norm(F.linear(x, p["k"]), p["k_norm"])), cos, sin)
    v = split(F.linear(x, p["v"]))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(y.transpose(1, 2).reshape(batch, length, DIM), p["o"])


def mixture(x, p):
    tokens = x.view(-1, DIM)
    logits = F.linear(tokens, p["router"]).float()
    scores = logits.softmax(-1)
    weights, ids = scores.topk(TOP_K, dim=-1)
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(
        tokens[order // TOP_K], p["up"].transpose(-2, -1), offs=ends
    ).chunk(2, dim=-1)
    y = torch._grouped_mm(F.silu(gate) * up, p["down"].transpose(-2, -1), offs=ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=x.device)
    y = y[back].view(tokens.shape[0], TOP_K, DIM)
    out = (y * weights.to(y.dtype).unsqueeze(-1)).sum(1).view_as(x)
    load = counts.float() / tokens.shape[0]
    aux = EXPERTS * (load * scores.mean(0)).sum() / TOP_K
    return out, 0.01 * aux + 0.001 * logits.logsumexp(-1).square().mean()


def block(x, p, cos, sin):
    x = x + attention(norm(x, p["norm1"]), p, cos, sin)
    out, loss = mixture(norm(x, p["norm2"]), p)
    return x + out, loss


def head(x, gain, table, targets):
    logits = F.linear(norm(x, gain), table).view(-1, VOCAB)
    return F.cross_entropy(logits.float(), targets.reshape(-1))


def update(weight, master, m, v, gradient, scale, rate, correction):
    g = gradient.float() * scale
    m.lerp_(g, 0.1)
    v.lerp_(g * g, 0.05)
    master.mul_(1 - 4e-5).sub_(rate * m / ((v * correction).sqrt() + 1e-8))
    weight.copy_(master)


def main():
    parser = argparse.ArgumentParser()
    for name, default in [("layers", 16), ("micro-batch", 4), ("sequence", 4096),
                          ("accumulation", 1), ("steps", 8), ("warm-up", 4), ("devices", 1)]:
        parser.add_argument("--" + name, type=int, default=default)
    args = parser.parse_args()
    if args.devices == 1:
        train(0, args)
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        torch.multiprocessing.spawn(train, (args,), args.devices)


def train(rank, args):
    torch.cuda.set_device(rank)
    if args.devices > 1:
        dist.init_process_group("nccl", rank=rank, world_size=args.devices)
    torch.manual_seed(1)
    weight = lambda *shape: (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    )
    ones = lambda n: torch.ones(n, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layers = [
        {
            "norm1": ones(DIM), "norm2": ones(DIM), "q_norm": ones(DIM), "k_norm": ones(DIM),
            **{name: weight(DIM, DIM) for name in "qkvo"},
            "router": weight(EXPERTS, DIM),
            "up": weight(EXPERTS, 2 * HIDDEN, DIM),
            "down": weight(EXPERTS, DIM, HIDDEN),
        }
        for _ in range(args.layers)
    ]
    embed, table, gain = weight(VOCAB, DIM), weight(VOCAB, DIM), ones(DIM)
    params = [embed, table, gain] + [tensor for layer in layers for tensor in layer.values()]
    state = [
        (p, p.detach().float(), *(torch.zeros_like(p, dtype=torch.float32) for _ in range(2)))
        for p in params
    ]
    sums, last_round = [], [True]

    def average(p):
        if last_round[0]:
            sums.append(dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True))

    if args.devices > 1:
        for p in params:
            p.register_post_accumulate_grad_hook(average)
        # Weights are alike, tokens are not.
        torch.manual_seed(2 + rank)
    turns = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(args.sequence).outer(turns)
    angles = torch.cat([angles, angles], -1).cuda()
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    each, last, change = torch.compile(block), torch.compile(head), torch.compile(update)
    one = lambda value: torch.tensor(value, device="cuda")

    def step(number):
        for micro_batch in range(args.accumulation):
            last_round[0] = micro_batch + 1 == args.accumulation
            shape = (args.micro_batch, args.sequence + 1)
            ids = torch.randint(VOCAB, shape, device="cuda")
            x, loss = F.embedding(ids[:, :-1], embed), 0.0
            for layer in layers:
                x, extra = each(x, layer, cos, sin)
                loss = loss + extra / len(layers)
            loss = loss + last(x, gain, table, ids[:, 1:])
            (loss / args.accumulation).backward()
        for waits in sums:
            waits.wait()
        sums.clear()
        with torch.no_grad():
            squares = torch.stack(torch._foreach_norm([p.grad for p in params]))
            scale = (1.0 / squares.float().norm()).clamp(max=1.0)
            rate = one(4e-4 / (1 - 0.9 ** (number + 1)))
            correction = one(1 / (1 - 0.95 ** (number + 1)))
            for p, master, m, v in state:
                change(p, master, m, v, p.grad, scale, rate, correction)
                p.grad = None
        return loss.item()

    times = []
    for number in range(args.warm_up + args.steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = step(number)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    measured = sorted(times[args.warm_up:])
    median = measured[len(measured) // 2]
    tokens = args.devices * args.accumulation * args.micro_batch * args.sequence
    peak = torch.cuda.max_memory_allocated() / 2**30
    if args.devices > 1:
        dist.barrier()
        dist.destroy_process_group()
    if rank > 0:
        return
    print(f"peer plain PyTorch, compiled, {args.devices} GPUs | {median * 1e3:.2f} ms "
          f"({measured[0] * 1e3:.2f} to {measured[-1] * 1e3:.2f}) | {tokens / median:.0f} tokens/s "
          f"| {peak:.1f} GiB | loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
