"""The same layer in PyTorch: torch._grouped_mm, compiled. Times itself as benches/cuda_moe.rs does.

python3 torch_moe.py [case ...] [zipf] [eager] [seconds=1.5]
"""

import sys
import time

import torch
import torch.nn.functional as F

CASES = {  # T, D, F, E, K, gated
    "tutel_fig1": (32768, 2048, 2048, 8, 2, False),
    "olmoe": (32768, 2048, 1024, 64, 8, True),
    "qwen3_30b": (32768, 2048, 768, 128, 8, True),
    "mixtral": (16384, 4096, 14336, 8, 2, True),
    "sonic_7b": (32768, 4096, 1024, 128, 8, True),
    "dsv3_ep8": (8192, 7168, 2048, 32, 8, True),
}


def layer(x, w_router, w_up, w_down, k: int, gated: bool):
    tokens, dim = x.shape
    experts = w_router.shape[0]
    logits = F.linear(x, w_router).float()
    weights, ids = torch.topk(torch.softmax(logits, dim=-1), k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.histc(flat.float(), bins=experts, min=0, max=experts - 1)
    offsets = torch.cumsum(counts, 0).to(torch.int32)
    rows = x[order // k]
    h = torch._grouped_mm(rows, w_up.transpose(1, 2), offs=offsets)
    if gated:
        gate, up = h.chunk(2, dim=-1)
        a = F.silu(gate) * up
    else:
        a = F.relu(h)
    y = torch._grouped_mm(a, w_down.transpose(1, 2), offs=offsets)
    y = y * weights.reshape(-1)[order].to(y.dtype).unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return y[back].view(tokens, k, dim).sum(dim=1)


def inputs(case, zipf):
    tokens, dim, hidden, experts, k, gated = case
    g = torch.Generator(device="cuda").manual_seed(1)

    def normal(*shape, scale):
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        return x.normal_(generator=g).mul_(scale)

    x = normal(tokens, dim, scale=1.0)
    x[:, 0] = 1.0
    w_router = normal(experts, dim, scale=dim**-0.5)
    ranks = torch.arange(1, experts + 1, device="cuda").log()
    w_router[:, 0] = (-ranks if zipf else torch.zeros_like(ranks)).bfloat16()
    w_up = normal(experts, hidden * (2 if gated else 1), dim, scale=dim**-0.5)
    w_down = normal(experts, dim, hidden, scale=hidden**-0.5)
    dout = normal(tokens, dim, scale=0.01)
    leaves = [t.requires_grad_() for t in (x, w_router, w_up, w_down)]
    return leaves, dout


def measure(name, case, zipf, eager, seconds):
    tokens, dim, hidden, experts, k, gated = case
    leaves, dout = inputs(case, zipf)
    run = layer if eager else torch.compile(layer, dynamic=False)
    begin = time.perf_counter()

    def once(middle=None):
        for leaf in leaves:
            leaf.grad = None
        out = run(*leaves, k, gated)
        if middle is not None:
            middle.record()
        out.backward(dout)

    once()
    torch.cuda.synchronize()
    built = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.6:
        once()
        torch.cuda.synchronize()
    whole, forward = [], []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start.record()
        once(middle)
        end.record()
        end.synchronize()
        whole.append(start.elapsed_time(end))
        forward.append(start.elapsed_time(middle))
    whole, forward = sorted(whole)[len(whole) // 2], sorted(forward)[len(forward) // 2]
    flops = 2 * tokens * k * dim * hidden * (3 if gated else 2)
    peak = torch.cuda.max_memory_allocated() >> 20
    print(
        f"torch {torch.__version__} {'eager' if eager else 'compiled'} | {name} {case[:5]} "
        f"{'zipf' if zipf else 'random'} | {whole:.3f} ms, {3 * flops / whole / 1e9:.0f} TFLOP/s | "
        f"forward {forward:.3f} ms | peak {peak} MiB | ready in {built:.1f} s",
        flush=True,
    )


def main():
    words = sys.argv[1:]
    seconds = next((float(w[8:]) for w in words if w.startswith("seconds=")), 1.5)
    picked = [w for w in words if w in CASES] or list(CASES)
    for name in picked:
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        measure(name, CASES[name], "zipf" in words, "eager" in words, seconds)


main()
