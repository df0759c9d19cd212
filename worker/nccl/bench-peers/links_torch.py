"""What torch.distributed makes of the same two GPUs: the peer of the bench links.

    python3 links_torch.py [--only all_to_all,counts]

Starts a process a GPU itself. Prints `peer verb | bytes | us | bus GB/s | in a graph us |
bus GB/s | host us a call`, with bytes and rates as in links.rs: medians of five readings, bf16.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

SIZES = [8, 512, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20,
         256 << 20]
VERBS = ["all_to_all", "reduce_scatter", "all_gather", "all_reduce"]
COUNTS = 128
IN_GRAPH = 20


def reading(times, run):
    first, last = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    dist.barrier()
    run()
    first.record()
    began = time.perf_counter()
    for _ in range(times):
        run()
    host = (time.perf_counter() - began) / times * 1e6
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / times * 1e3, host


def median(times, run):
    readings = sorted(reading(times, run) for _ in range(6))[1:]
    return readings[len(readings) // 2]


def graph_of(run):
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            run()
    return graph


def verb_of(name, source, target, elements):
    whole_in, whole_out = source[:elements], target[:elements]
    half_in, half_out = source[: elements // 2], target[: elements // 2]
    return {
        "all_to_all": lambda: dist.all_to_all_single(whole_out, whole_in),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(half_out, whole_in),
        "all_gather": lambda: dist.all_gather_into_tensor(whole_out, half_in),
        "all_reduce": lambda: dist.all_reduce(whole_in),
    }[name]


def counts(rank):
    source = torch.ones(COUNTS, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    host = torch.empty(COUNTS, dtype=torch.int32, pin_memory=True)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        dist.all_to_all_single(target, source)
        host.copy_(target, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        times.append((time.perf_counter() - began) * 1e6)
    if rank == 0:
        print(f"peer counts | {4 * COUNTS} | {statistics.median(times):.1f} us until the host "
              "has them", flush=True)


def part(rank, only):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    source, target = [torch.zeros(128 << 20, dtype=torch.bfloat16, device="cuda")
                      for _ in range(2)]
    if rank == 0:
        print(f"peer torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}", flush=True)
    for name in VERBS:
        if only and name not in only:
            continue
        for size in SIZES:
            run = verb_of(name, source, target, size // 2)
            times = 50 if size < 16 << 20 else 10
            us, host = median(times, run)
            graph_us = median(times // 10, graph_of(run).replay)[0] / IN_GRAPH
            bus = size * (1 if name == "all_reduce" else 0.5)
            if rank == 0:
                print(f"peer {name} | {size} | {us:.1f} | {bus / us / 1e3:.1f} | {graph_us:.1f} | "
                      f"{bus / graph_us / 1e3:.1f} | {host:.1f}", flush=True)
    if not only or "counts" in only:
        counts(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    only = parser.parse_args().only
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    multiprocessing.spawn(part, args=(only.split(",") if only else None,), nprocs=2)
