"""The head and its loss in PyTorch, the peer of `cargo bench --bench cuda_head`.

    python3 head_torch.py [--shapes T,D,V[;...]] [--load SECONDS] [--time SECONDS]

bf16, the mean over all tokens, gradients of x and of the table (bf16), random data. `plain` is
F.linear and F.cross_entropy, `compiled` the same under torch.compile. Prints milliseconds, the
rate of the three products in it, the peak of memory, and the errors against float64 of a part.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F


def loss_of(x, table, targets):
    return F.cross_entropy(F.linear(x, table), targets)


def timed(run, load, seconds):
    started, times = time.monotonic(), []
    while (now := time.monotonic() - started) < load + seconds or len(times) < 3:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        run()
        marks[1].record()
        torch.cuda.synchronize()
        if now >= load:
            times.append(marks[0].elapsed_time(marks[1]))
    return statistics.median(times)


def errors(x, table, targets):
    """Of dx and the table's gradient, against float64, over few tokens and words."""
    x, table, targets = x[:512], table[:8192], targets[:512] % 8192
    found = []
    for kind in (torch.bfloat16, torch.float64):
        a, b = (t.detach().to(kind).requires_grad_() for t in (x, table))
        loss_of(a, b, targets).backward()
        found.append((a.grad.double(), b.grad.double()))
    return [((f - e).norm() / e.norm()).item() for f, e in zip(*found)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="16384,2048,50304")
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--time", type=float, default=1.5)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for shape in options.shapes.split(";"):
        tokens, dim, vocab = map(int, shape.split(","))
        torch.manual_seed(1)
        x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
        table = torch.randn(vocab, dim, device="cuda", dtype=torch.float32) / dim**0.5
        table = table.bfloat16().requires_grad_()
        targets = torch.randint(vocab, (tokens,), device="cuda")
        for name, loss in (("plain", loss_of), ("compiled", torch.compile(loss_of))):

            def run():
                x.grad = table.grad = None
                loss(x, table, targets).backward()

            run()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ms = timed(run, options.load, options.time)
            rate = 6 * tokens * dim * vocab / ms / 1e9
            peak = (torch.cuda.max_memory_allocated() - before) >> 20
            print(f"peer {name} {shape} | {ms:.3f} ms | {rate:.0f} TFLOP/s | {peak} MiB more")
        dx, dtable = errors(x, table, targets)
        print(f"peer errors {shape} | dx {dx:.2e} | dtable {dtable:.2e}")


if __name__ == "__main__":
    main()
