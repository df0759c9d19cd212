"""The PyTorch twin of examples/01-first-run.yaml on the CPU: the speed that users have today.

Eager PyTorch the way it is commonly written: a loop over experts with index_add, scaled dot-product
attention, fused AdamW, fp32. Prints tokens per second of whole optimizer steps, the median over the
timed ones, for each micro-batch size asked for.

    python3 tests/bench/first_run_twin.py --threads 2 --micro-batch 2 8 --steps 20
"""

import argparse
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, D, LAYERS, HEADS, EXPERTS, TOP_K, WIDTH = 256, 128, 4, 4, 8, 2, 128
SEQUENCE, GLOBAL_BATCH = 256, 8


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotary_table():
    half = D // HEADS // 2
    frequency = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(SEQUENCE)[:, None] * frequency[None, :]
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x, cos, sin):
        batch = x.shape[0]

        def heads(y):
            return y.view(batch, SEQUENCE, HEADS, D // HEADS).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, SEQUENCE, D))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, WIDTH, bias=False)
        self.up = nn.Linear(D, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, D, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        rows = x.reshape(-1, D)
        probability = self.router(rows).softmax(-1)
        weight, chosen = probability.topk(TOP_K, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            y = expert(rows[token]) * weight[token, slot, None]
            out.index_add_(0, token, y)
        share = F.one_hot(chosen, EXPERTS).sum(1).float().mean(0)
        balance = EXPERTS * (share.detach() * probability.mean(0)).sum()
        return out.view_as(x), balance


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = RmsNorm(), Attention()
        self.norm2, self.experts = RmsNorm(), Experts()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        y, balance = self.experts(self.norm2(x))
        return x + y, balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RmsNorm()
        cos, sin = rotary_table()
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens, targets):
        x, balance = self.embed(tokens), 0.0
        for layer in self.layers:
            x, term = layer(x, self.cos, self.sin)
            balance = balance + term
        logits = F.linear(self.norm(x), self.embed.weight)
        loss = F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))
        return loss + 0.01 * balance / LAYERS


def measure(micro_batch, steps):
    torch.manual_seed(1)
    model = Model()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    count = GLOBAL_BATCH // micro_batch
    times = []
    for step in range(steps + 3):
        batch = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQUENCE + 1))
        began = time.perf_counter()
        for rows in batch.split(micro_batch):
            (model(rows[:, :-1], rows[:, 1:]) / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= 3:
            times.append(time.perf_counter() - began)
    return GLOBAL_BATCH * SEQUENCE / statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for micro_batch in options.micro_batch:
        rate = measure(micro_batch, options.steps)
        label = f"torch {torch.__version__} micro-batch {micro_batch}"
        print(f"{label}: {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
