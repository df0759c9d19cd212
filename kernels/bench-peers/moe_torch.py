"""The layer of `benches/cuda_layer.rs` in PyTorch, timed in the same way.

    python3 moe_torch.py [--cases qwen3] [--sums gather,index_add] [--load-ms 600] [--time-ms 1500]
        [--zipf] [--ceilings] [--modes compile,eager|none] [--peers [scattermoe,sonicmoe,tutel]]

torch._grouped_mm over sorted rows, forward + backward with the router, compiled and eager. A
token's rows are summed by a gather into slot order and a sum (gather), or by adding each row to
its token with atomics (index_add). Everything is
bf16, weight gradients too, but the scores (softmax in fp32). Prints `case | mode | ms | MiB` a
line; ms is the median under sustained load, MiB the peak above weights, inputs and gradients.
--ceilings: what cuBLAS and a copy reach in the same way. --peers: also ScatterMoE, SonicMoE and
Tutel, or those named, where installed; what is not, or does not take the case, is skipped with the
reason. Run a case a process: after a few shapes torch.compile makes them dynamic, which is slower.
"""
import argparse
import itertools
import time

import torch
import torch.nn.functional as F

CASES = {
    "tutel": (32768, 2048, 2048, 8, 2, False),
    "olmoe": (32768, 2048, 1024, 64, 8, True),
    "qwen3": (32768, 2048, 768, 128, 8, True),
    "mixtral": (16384, 4096, 14336, 8, 2, True),
    "sonic": (32768, 4096, 1024, 128, 8, True),
    "dsv3": (8192, 7168, 2048, 32, 8, True),
}


def layer(x, w_router, w_up, w_down, k, gated, sums):
    """x [T, D], w_router [E, D], w_up [E, W, D], w_down [E, D, F] -> [T, D], all bf16."""
    experts = w_router.shape[0]
    scores = F.linear(x, w_router).float().softmax(-1)
    weights, ids = scores.topk(k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0).to(torch.int32)
    h = torch._grouped_mm(x[order // k], w_up.transpose(-2, -1), offs=ends)
    if gated:
        gate, up = h.chunk(2, dim=-1)
        a = F.silu(gate) * up
    else:
        a = F.relu(h)
    y = torch._grouped_mm(a, w_down.transpose(-2, -1), offs=ends)
    if sums == "index_add":
        y = y * weights.flatten()[order].to(y.dtype).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // k, y)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=x.device)
    y = y[back].view(x.shape[0], k, x.shape[1])
    return (y * weights.to(y.dtype).unsqueeze(-1)).sum(1)


def median_ms(run, load_ms, time_ms):
    """Load for `load_ms`, then the median of single runs over `time_ms`."""
    start = time.time()
    while (time.time() - start) * 1e3 < load_ms:
        for _ in range(4):
            run()
        torch.cuda.synchronize()
    events, start = [], time.time()
    while (time.time() - start) * 1e3 < time_ms:
        for _ in range(4):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            events.append((first, last))
        torch.cuda.synchronize()
    times = sorted(first.elapsed_time(last) for first, last in events)
    return times[len(times) // 2]


def measure(name, args):
    tokens, dim, hidden, experts, k, gated = CASES[name]
    torch.manual_seed(1)
    normal = lambda *shape, scale=1.0: torch.randn(
        *shape, device="cuda", dtype=torch.bfloat16
    ).mul_(scale)
    width = hidden * (2 if gated else 1)
    x, dout = normal(tokens, dim), normal(tokens, dim)
    params = [
        normal(experts, dim, scale=dim**-0.5),
        normal(experts, width, dim, scale=dim**-0.5),
        normal(experts, dim, hidden, scale=hidden**-0.5),
    ]
    if args.zipf:
        x[:, 0] = 1
        params[0][:, 0] = -torch.arange(1, experts + 1, device="cuda").float().log().bfloat16()
    for tensor in [x, *params]:
        tensor.requires_grad_()
    for mode, sums in itertools.product(args.modes.split(","), args.sums.split(",")):
        torch._dynamo.reset()  # else a second compilation makes shapes dynamic
        step = torch.compile(layer) if mode == "compile" else layer

        def run():
            for tensor in [x, *params]:
                tensor.grad = None
            step(x, *params, k, gated, sums).backward(dout)

        for _ in range(3):
            run()
        kept = sum(t.numel() * t.element_size() for t in [x, dout, *params])
        gradients = sum(t.numel() * t.element_size() for t in [x, *params])
        torch.cuda.reset_peak_memory_stats()
        ms = median_ms(run, args.load_ms, args.time_ms)
        extra = (torch.cuda.max_memory_allocated() - kept - gradients) / 2**20
        print(f"peer {name} | {mode}, {sums} | {ms:.3f} ms | {extra:.0f} MiB", flush=True)


def scattermoe(tokens, dim, hidden, experts, k, gated):
    from scattermoe.mlp import GLUMLP, MLP

    kind = GLUMLP if gated else MLP
    act = torch.nn.SiLU() if gated else torch.nn.ReLU()
    mlp = kind(input_size=dim, hidden_size=hidden, num_experts=experts, top_k=k, activation=act)
    mlp = mlp.cuda().bfloat16()
    router = torch.nn.Linear(dim, experts, bias=False).cuda().bfloat16()

    def step(x):
        weights, ids = router(x).float().softmax(-1).topk(k, dim=-1)
        return mlp(x, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), ids)

    return step, [*mlp.parameters(), *router.parameters()]


def sonicmoe(tokens, dim, hidden, experts, k, gated):
    from sonicmoe import KernelBackendMoE, MoE
    from sonicmoe.enums import ActivationType

    assert gated, "gated layers only"
    moe = MoE(
        num_experts=experts, num_experts_per_tok=k, hidden_size=dim, intermediate_size=hidden,
        activation_function=ActivationType.SWIGLU, add_bias=False, std=0.02,
    ).cuda().bfloat16()
    backend = KernelBackendMoE.sonicmoe
    return lambda x: moe(x, kernel_backend_moe=backend)[0], list(moe.parameters())


def tutel(tokens, dim, hidden, experts, k, gated):
    from tutel import moe

    assert not gated, "two-matrix experts only"
    layer = moe.moe_layer(
        gate_type={"type": "top", "k": k, "capacity_factor": 1.0, "fp32_gate": True},
        experts={"type": "ffn", "num_experts_per_device": experts,
                 "hidden_size_per_expert": hidden, "activation_fn": F.relu},
        model_dim=dim,
    ).cuda().bfloat16()
    return layer, list(layer.parameters())


def hook(peer, name, args):
    """Another project's layer in the same way, where it is installed and takes the case."""
    tokens, dim = CASES[name][:2]
    x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    try:
        step, params = peer(*CASES[name])
        params = [p for p in params if p.requires_grad]

        def run():
            for tensor in [x, *params]:
                tensor.grad = None
            step(x).backward(dout)

        for _ in range(3):
            run()
        ms = median_ms(run, args.load_ms, args.time_ms)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"peer {name} | {peer.__name__} | skipped: {reason}", flush=True)
        return
    print(f"peer {name} | {peer.__name__} | {ms:.3f} ms", flush=True)


def ceilings(args):
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ms = median_ms(lambda: a @ b, args.load_ms, args.time_ms)
    print(f"ceiling cuBLAS {n}^3 | {2 * n**3 / ms / 1e9:.0f} TFLOP/s", flush=True)
    x = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    ms = median_ms(lambda: y.copy_(x), args.load_ms, args.time_ms)
    print(f"ceiling copy | {4 * x.numel() / ms / 1e6:.0f} GB/s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-ms", type=float, default=600)
    parser.add_argument("--time-ms", type=float, default=1500)
    parser.add_argument("--zipf", action="store_true")
    parser.add_argument("--ceilings", action="store_true")
    parser.add_argument("--modes", default="compile")
    parser.add_argument("--sums", default="gather")
    parser.add_argument("--peers", nargs="?", const="scattermoe,sonicmoe,tutel", default="")
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    if args.ceilings:
        ceilings(args)
    for name in filter(None, args.cases.split(",")):
        if args.modes != "none":
            measure(name, args)
        for peer in [scattermoe, sonicmoe, tutel]:
            if peer.__name__ in args.peers.split(","):
                hook(peer, name, args)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
