"""How much of its speed a job on GPUs keeps while its engines are killed and stopped at random.

    python3 storm.py MOEJOB [--gpus 2] [--seconds 300] [--period 15] [--seed 2026]

OLMoE cut to 4 layers in bf16, experts over two GPUs each, a snapshot every 20 steps, on the text
files of ./data. It is left alone for 20 s, which gives its undisturbed speed. Then an engine gets
a signal each `--period` seconds in the mean: four of five SIGKILL, one SIGSTOP. Effective is the
speed over all of that time, with 8 s behind the last signal, over the undisturbed one.
"""
import argparse
import os
import pathlib
import random
import signal
import statistics
import subprocess
import tempfile
import time

from recovery import LARGE, MANIFEST, Tail, processes


def manifest(gpus):
    return MANIFEST.format(
        profile="gpu", workers=1, devices=gpus, parallelism="parallelism: { expert: 2 }",
        model=LARGE, sequence=4096, batch=4 * gpus, precision="bf16", every=20)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=os.path.abspath)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--period", type=float, default=15)
    parser.add_argument("--seed", type=int, default=2026)
    given = parser.parse_args()
    draws = random.Random(given.seed)
    root = pathlib.Path(tempfile.mkdtemp(prefix="storm"))
    (root / "job.yaml").write_text(manifest(given.gpus))
    command = [given.program, "run", root / "job.yaml", "--dir", root]
    log = open(root / "log", "w")
    job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    metrics, events = Tail(root / "lost/metrics.jsonl"), Tail(root / "lost/events.jsonl")

    def step():
        rows = metrics.read()
        return rows[-1]["step"] if rows else 0

    def at_end(why):
        raise SystemExit(f"the job ended: {why}\n{(root / 'log').read_text()[-2000:]}")

    while step() < 30:
        time.sleep(0.1)
        if job.poll() is not None:
            at_end("before its 30th step")
    began, first = time.time(), step()
    time.sleep(20)
    speed = (step() - first) / (time.time() - began)
    began, first, signals = time.time(), step(), []
    while time.time() - began < given.seconds:
        time.sleep(draws.expovariate(1 / given.period))
        engines = processes("engine", job.pid)
        if job.poll() is not None:
            at_end(f"after {len(signals)} signals")
        if engines:
            signals.append(signal.SIGKILL if draws.random() < 0.8 else signal.SIGSTOP)
            os.kill(draws.choice(engines), signals[-1])
    time.sleep(8)
    took, done = time.time() - began, step() - first
    recovered = [event for event in events.read() if event.get("event") == "Recovered"]
    sizes = sorted({row["worldSize"] for row in metrics.all})
    copies = [row["stalls"]["snapshot"] for row in metrics.all if row["stalls"].get("snapshot")]
    print(f"{given.gpus} GPUs, {took:.0f} s: {len(signals)} signals, of which "
          f"{signals.count(signal.SIGSTOP)} SIGSTOP; {len(recovered)} recoveries; {done} steps, "
          f"undisturbed {speed:.2f} a second: effective {100 * done / speed / took:.1f}%; "
          f"a snapshot holds them up for {statistics.median(copies or [0]):.2f} s; ranks {sizes}")
    job.send_signal(signal.SIGINT)
    try:
        job.wait(60)
    except subprocess.TimeoutExpired:
        job.kill()


if __name__ == "__main__":
    main()
