"""The attentions of `benches/cuda_attention.rs` by cuDNN through PyTorch, timed in the same way.

    python3 attention_torch.py [--cases olmoe,gqa] [--backend cudnn|flash] [--load-ms 500]
        [--time-ms 1000] [--check FOLDER]

Prints `peer CASE | forward ms TFLOP/s | backward ms TFLOP/s` (4 D a pair forward, 2.5 times that
backward, which need not be deterministic). Documents have no peer here. --check: holds what
`cuda_attention --dump FOLDER` left, and cuDNN on the same inputs, against float64.
"""
import argparse
import math
import pathlib
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

CASES = {
    "olmoe": (4, 4096, 16, 16, 128),
    "gqa": (4, 4096, 32, 4, 128),
    "long": (1, 16384, 16, 16, 128),
    "long_gqa": (1, 16384, 32, 4, 128),
    "d64": (4, 4096, 32, 32, 64),
    "d96": (4, 4096, 16, 16, 96),
}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def median_ms(run, load_ms, time_ms):
    """Load for `load_ms`, then the median of single runs over `time_ms`."""
    start = time.time()
    while time.time() - start < load_ms / 1e3:
        for _ in range(8):
            run()
        torch.cuda.synchronize()
    times, start = [], time.time()
    while time.time() - start < time_ms / 1e3:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(17)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]
    return sorted(times)[len(times) // 2]


def attention(q, k, v, backend):
    """q [B, S, N, D], k and v [B, S, KV, D] -> [B, S, N, D]"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def measure(name, sizes, backend, args):
    b, s, n, kv, d = sizes
    def random(heads):
        return torch.randn(b, s, heads, d, device="cuda", dtype=torch.float32).bfloat16()
    q, k, v, d_o = random(n), random(kv), random(kv), random(n)
    flops = 2.0 * b * n * s * s * d
    with torch.no_grad():
        forward = median_ms(lambda: attention(q, k, v, backend), args.load_ms, args.time_ms)
    leaves = [x.requires_grad_(True) for x in (q, k, v)]
    out = attention(*leaves, backend)
    def run():
        torch.autograd.grad(out, leaves, d_o, retain_graph=True)
    backward = median_ms(run, args.load_ms, args.time_ms)
    print(f"peer {name} {list(sizes)} | forward {forward:.3f} ms {flops / forward / 1e9:.0f}"
          f" | backward {backward:.3f} ms {2.5 * flops / backward / 1e9:.0f} TFLOP/s", flush=True)


def exact(q, k, v, d_o):
    """o, dq, dk, dv in float64."""
    leaves = [x.double().requires_grad_(True) for x in (q, k, v)]
    groups = q.shape[2] // k.shape[2]
    x, y, z = (t.transpose(1, 2) for t in leaves)
    y, z = (t.repeat_interleave(groups, 1) for t in (y, z))
    scores = x @ y.transpose(-1, -2) / math.sqrt(q.shape[3])
    above = torch.ones(q.shape[1], q.shape[1], device="cuda", dtype=torch.bool).triu(1)
    out = (scores.masked_fill(above, float("-inf")).softmax(-1) @ z).transpose(1, 2)
    return out, *torch.autograd.grad(out, leaves, d_o.double())


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def check(folder):
    for case in sorted(pathlib.Path(folder).iterdir()):
        b, s, n, kv, d = map(int, (case / "sizes").read_text().split())
        def read(name, heads):
            data = torch.frombuffer(bytearray((case / name).read_bytes()), dtype=torch.bfloat16)
            return data.view(b, s, heads, d).cuda()
        q, k, v, d_o = read("q", n), read("k", kv), read("v", kv), read("d_o", n)
        ours = [read("o", n), read("dq", n), read("dk", kv), read("dv", kv)]
        expected = exact(q, k, v, d_o)
        leaves = [x.requires_grad_(True) for x in (q, k, v)]
        out = attention(*leaves, SDPBackend.CUDNN_ATTENTION)
        peers = [out, *torch.autograd.grad(out, leaves, d_o)]
        for name, x, y, z in zip(("o", "dq", "dk", "dv"), ours, peers, expected):
            mine, peer = error(x, z), error(y, z)
            verdict = "PASS" if mine <= 1.1 * peer else "FAIL"
            print(f"{verdict} {case.name} {name}: error ours {mine:.2e}, cuDNN {peer:.2e}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--backend", choices=BACKENDS, default="cudnn")
    parser.add_argument("--load-ms", type=float, default=500)
    parser.add_argument("--time-ms", type=float, default=1000)
    parser.add_argument("--check")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.check:
        check(args.check)
        return
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", flush=True)
    for name in args.cases.split(","):
        try:
            measure(name, CASES[name], BACKENDS[args.backend], args)
        except RuntimeError as problem:
            print(f"peer {name}: skipped: {str(problem).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
