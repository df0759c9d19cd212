"""What PyTorch makes of the memory-bound ops of a step: the peer of the bench cuda_step_ops.

    python3 step_ops_torch.py [--only norm,optimizer] [--parameters MILLIONS]

Prints `peer op | shape | us | GB/s`. Norms by torch.compile; AdamW fused, over tensors of 1.6M
elements, with the norm of all gradients and clipping before it (foreach). torch has no bf16 weights
with fp32 masters in one optimizer, so its AdamW is timed on fp32 weights and gradients (28 bytes a
parameter) and on bf16 alone (14 bytes, whose small updates bf16 weights lose).
"""

import argparse
import statistics
import time

import torch
import torch._functorch.config
import torch.nn.functional as functional

# The backward pass is timed alone, again and again on one forward pass.
torch._functorch.config.donated_buffer = False


def median_ms(run, load=0.2, timed=0.4):
    """Of single runs, after and under the same load."""
    times = []
    started = time.time()
    while time.time() - started < load + timed:
        marks = []
        for _ in range(16):
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            run()
            pair[1].record()
            marks.append(pair)
        torch.cuda.synchronize()
        if time.time() - started >= load:
            times += [first.elapsed_time(last) for first, last in marks]
    return statistics.median(times)


def row(name, bytes_moved, run):
    ms = median_ms(run)
    print(f"peer {name} | {ms * 1e3:.1f} us | {bytes_moved / ms * 1e-6:.0f} GB/s", flush=True)
    return ms


def norm(x, w):
    return functional.rms_norm(x, (x.shape[-1],), w, 1e-5)


def sum_and_norm(x, branch, w):
    mid = x + branch
    return mid, norm(mid, w)


def norms():
    forward, both = torch.compile(norm), torch.compile(sum_and_norm)
    for rows, dim in [(16384, 2048), (32768, 2048), (16384, 4096)]:
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        x, branch, dy = make(rows, dim), make(rows, dim), make(rows, dim)
        w = make(dim)
        size = rows * dim * 2
        with torch.no_grad():
            row(f"norm {rows} x {dim}", 2 * size, lambda: forward(x, w))
            row(f"sum and norm {rows} x {dim}", 4 * size, lambda: both(x, branch, w))
        own, gain = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = forward(own, gain)

        def backward():
            torch.autograd.grad(y, (own, gain), dy, retain_graph=True)

        row(f"norm backward {rows} x {dim}", 3 * size, backward)


def optimizer(millions):
    tensor = 768 * 2048
    count = millions * 1_000_000 // tensor
    for dtype, each in [(torch.float32, 28), (torch.bfloat16, 14)]:
        weights = []
        for _ in range(count):
            weight = torch.randn(tensor, device="cuda", dtype=dtype) * 0.02
            weight.requires_grad_()
            weight.grad = torch.randn(tensor, device="cuda", dtype=dtype) * 1e-3
            weights.append(weight)
        adamw = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        parameters = count * tensor

        def step():
            torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
            adamw.step()

        for name, run in [("AdamW", adamw.step), ("norm, clip and AdamW", step)]:
            ms = row(f"{name} {parameters * 1e-9:.2f}e9 {dtype}", each * parameters, run)
            print(f"  that is {ms * 6.9e9 / parameters:.1f} ms for 6.9e9 parameters")
        del weights, adamw
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="norm,optimizer")
    parser.add_argument("--parameters", type=int, default=1500)
    arguments = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name())
    if "norm" in arguments.only:
        norms()
    if "optimizer" in arguments.only:
        optimizer(arguments.parameters)


if __name__ == "__main__":
    main()
