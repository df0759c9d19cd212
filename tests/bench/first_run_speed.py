"""The first example beside its PyTorch twin: tokens per second of the same model on the same
processor with the same number of threads.

Rounds alternate between `moejob run` and first_run_twin.py, so that a neighbour's load hurts
neither more than the other. A round's figure is the median over its steps, after the first ones;
what is printed is the median over the rounds, and ours over the twin's better micro-batch size.

    cargo build --release
    python3 tests/bench/first_run_speed.py target/release/moejob --threads 2 --rounds 3

The Python that runs this must have PyTorch, or say which one has with --python. Exits with 1 below
--bar. Run it on a machine that does nothing else.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "01-first-run.yaml"
TWIN = pathlib.Path(__file__).with_name("first_run_twin.py")
WARM_UP_STEPS = 20


def shortened(steps, folder):
    """The example with fewer steps, no checkpoint on the way and no validation on the way."""
    text = EXAMPLE.read_text()
    for pattern, value in [
        (r"^    steps: \d+", f"    steps: {steps}"),
        (r"validation: \{.*\}", "validation: { fraction: 0.05, everySteps: 100000 }"),
        (r"checkpoint: \{.*\}", "checkpoint: { everySteps: 100000, keep: 1 }"),
    ]:
        text, count = re.subn(pattern, value, text, flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"{EXAMPLE}: {pattern} occurs {count} times")
    file = folder / "first-run.yaml"
    file.write_text(text)
    return file


def ours(moejob, threads, steps):
    """Median tokens/s of the steps after the first ones, and the last step's loss."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [moejob, "run", shortened(steps, folder), "--dir", folder / "runs"]
        command += ["--workers", "1", "--threads", str(threads)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = (folder / "runs" / "first-run" / "metrics.jsonl").read_text().splitlines()
    reports = [json.loads(line) for line in lines]
    reports = [report for report in reports if "tokensPerSecond" in report]
    rates = [report["tokensPerSecond"] for report in reports[WARM_UP_STEPS:]]
    return statistics.median(rates), reports[-1]["loss"]


def twin(python, threads, steps, micro_batches):
    """Tokens/s by micro-batch size."""
    command = [python, TWIN, "--threads", str(threads), "--steps", str(steps), "--micro-batch"]
    command += [str(size) for size in micro_batches]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = re.findall(r"micro-batch (\d+): (\d+) tokens/s", run.stdout)
    return {int(size): float(rate) for size, rate in found}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("moejob", type=pathlib.Path, help="the program, built with --release")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="of a round of ours")
    parser.add_argument("--twin-steps", type=int, default=20, help="of a round of the twin's")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[2, 8], help="the twin's")
    parser.add_argument("--python", default=sys.executable, help="one that has PyTorch")
    parser.add_argument("--bar", type=float, default=1.5, help="the least ratio")
    options = parser.parse_args()
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be above {WARM_UP_STEPS}")
    moejob = options.moejob.resolve()
    mine, theirs, losses = [], {size: [] for size in options.micro_batch}, set()
    for index in range(options.rounds):
        rate, loss = ours(moejob, options.threads, options.steps)
        mine.append(rate)
        losses.add(loss)
        rates = twin(options.python, options.threads, options.twin_steps, options.micro_batch)
        for size, rate in rates.items():
            theirs[size].append(rate)
        twins = ", ".join(f"{rate:.0f} (micro-batch {size})" for size, rate in rates.items())
        print(f"round {index + 1}: moejob {mine[-1]:.0f}, twin {twins} tokens/s", flush=True)
    if len(losses) != 1:
        raise SystemExit(f"the same run ended with different losses: {sorted(losses)}")
    medians = {size: statistics.median(rates) for size, rates in theirs.items()}
    best = max(medians, key=medians.get)
    ratio = statistics.median(mine) / medians[best]
    print(f"moejob {statistics.median(mine):.0f} tokens/s, loss {losses.pop()}")
    print(f"twin {medians[best]:.0f} tokens/s with micro-batch {best}")
    print(f"ratio {ratio:.2f}, bar {options.bar}")
    sys.exit(0 if ratio >= options.bar else 1)


if __name__ == "__main__":
    main()
