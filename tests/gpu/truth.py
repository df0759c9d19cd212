#!/usr/bin/env python3
"""Jobs in fp32 have the numbers of one GPU on several: truth.py MOEJOB [--models N] [--seed N]
[--steps N] [--gpus N]

Models are drawn by the seed: sizes, experts, sequences a step, routers. Each trains on one GPU, and
on several that hold all experts, that share them, and so with the dense part divided; four also
as two workers, between which tokens travel along rails. What every step tells (its losses and its
gradient's norm) are sums in fp64 over ranks, so they may be 1e-12 apart. A token that chose another
expert would show as 1e-6. Where there are fewer GPUs, one stands for all. With MOEJOB_ROUTED=grows
steps find too little memory for routed rows at first.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

LETTERS = "etaoinshrdlucmfwypvbgkq"
APART = 1e-12


def text(folder, seed):
    draw = random.Random(seed)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 9))) for _ in range(3000)]
    for file in range(20):
        some = (words[min(int(draw.paretovariate(0.6)), 2999)] for _ in range(12000))
        (folder / f"{file}.txt").write_text(" ".join(some))


def model(draw, gpus):
    """The parts of a manifest that are drawn: its model and its training."""
    hidden, heads = draw.choice([(128, 2), (256, 4), (512, 8)])
    experts, chosen = draw.choice([(8, 2), (16, 4), (32, 4), (8 * gpus, 8)])
    micro = draw.choice([1, 2, 4])
    router = f"auxLossCoef: {draw.choice([0.001, 0.01])}"
    if draw.random() < 0.3:
        router += ", scoring: sigmoid, biasUpdateRate: 0.001"
    lines = [
        "  model:",
        f"    hiddenSize: {hidden}",
        f"    numHiddenLayers: {draw.randint(2, 5)}",
        f"    numAttentionHeads: {heads}",
        "    initializerRange: 0.06",
        f"    qkNorm: {draw.choice(['full', 'perHead', 'none'])}",
        f"    tieWordEmbeddings: {draw.choice(['true', 'false'])}",
        f"    experts: {{ count: {experts}, perToken: {chosen}, routedHeadroom: 1, "
        f"intermediateSize: {draw.choice([64, 128, 192])} }}",
        f"    router: {{ {router} }}",
    ]
    training = [
        # No rank is without a micro-batch.
        f"    globalBatchSize: {micro * max(gpus, draw.choice([2, 3, 4, 7, 16]))}",
        f"    microBatchSize: {micro}",
        f"    seed: {draw.randint(1, 1000)}",
    ]
    return lines, training


def manifest(name, drawn, nodes, parallelism, steps):
    lines, training = drawn
    return "\n".join([
        "apiVersion: moejob.dev/v1alpha1",
        "kind: MoeJob",
        f"metadata: {{ name: {name} }}",
        "spec:",
        f"  nodes: {{ profile: gpu, {nodes} }}",
        f"  parallelism: {{ {parallelism} }}",
        *lines,
        "  data:",
        "    train: { text: { paths: [\"data/*.txt\"] } }",
        "    validation: { fraction: 0.1, everySteps: 50 }",
        "    tokenizer: bytes",
        "    sequenceLength: 128",
        "  training:",
        f"    steps: {steps}",
        *training,
        "    precision: fp32",
        "    optimizer: { adamw: { learningRate: 1.0e-3 } }",
        "  checkpoint: { everySteps: 1000 }",
        "",
    ])


def train(moejob, folder, name, workers, text_of_job):
    path = folder / f"{name}.yaml"
    path.write_text(text_of_job)
    began = time.time()
    done = subprocess.run(
        [moejob, "run", path, "--dir", folder, "--workers", str(workers)],
        capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        print(done.stdout[-1500:], done.stderr[-3000:], text_of_job, sep="\n")
        return None, 0.0
    rows = [json.loads(line) for line in open(folder / name / "metrics.jsonl")]
    return {row["step"]: row for row in rows if "loss" in row}, time.time() - began


def apart(found, expected):
    """The largest relative difference, and the step where it is."""
    worst = (0.0, 0)
    for step, row in expected.items():
        for what in ("loss", "auxLoss", "gradNorm", "validationLoss"):
            if row.get(what) is None:
                continue
            a, b = found[step][what], row[what]
            worst = max(worst, (abs(a - b) / max(abs(b), 1e-30), step))
    return worst


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("moejob", type=pathlib.Path)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--gpus", type=int, default=2)
    options = parser.parse_args()
    gpus = options.gpus
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    if len(found.splitlines()) < gpus:
        os.environ["MOEJOB_GPU_SHARES"] = str(gpus)
    of_one_node = f"devicesPerNode: {gpus}"
    jobs = [
        ("one", 1, "devicesPerNode: 1", "expert: 1"),
        ("all-experts", 1, of_one_node, "expert: 1"),
        ("shared", 1, of_one_node, f"expert: {gpus}"),
        ("divided", 1, of_one_node, f"expert: {gpus}, zero: 3"),
    ]
    if gpus > 2:
        of_two = f"min: 2, max: 2, devicesPerNode: {gpus // 2}"
        jobs += [
            ("halves", 1, of_one_node, "expert: 2"),
            ("rails", 2, of_two, f"expert: {gpus}, exchange: hierarchical"),
        ]
    failed = False
    for seed in range(options.seed, options.seed + options.models):
        draw = random.Random(seed)
        drawn = model(draw, gpus)
        print(f"-- {seed}: {'; '.join(line.strip() for part in drawn for line in part[1:])}")
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "data").mkdir()
            text(folder / "data", seed)
            expected = None
            for name, workers, nodes, parallelism in jobs:
                moejob = options.moejob.resolve()
                job = manifest(name, drawn, nodes, parallelism, options.steps)
                found, seconds = train(moejob, folder, name, workers, job)
                if found is None or len(found) != options.steps:
                    failed = True
                    print(f"FAILED: {name}")
                elif expected is None:
                    expected = found
                    last = found[options.steps]
                    print(f"   {name}: {seconds:.1f} s, loss {found[1]['loss']:.4f} to "
                          f"{last['loss']:.4f}")
                else:
                    worst, step = apart(found, expected)
                    print(f"   {name}: {seconds:.1f} s, {worst:.1e} apart at most (step {step})")
                    if worst > APART:
                        failed = True
                        print(f"FAILED: {name} differs from one GPU")
    sys.exit(failed)


if __name__ == "__main__":
    main()
