"""What snapshots and checkpoints of a large state cost on one GPU.

    python3 snapshots.py MOEJOB [--steps 400] [--every 40] [--checkpoint 100] [--accumulate 1]

OLMoE cut to 4 layers (22.6 GB of weights and moments) on the text files of ./data, three times:
with neither, with snapshots every so many steps, and at the automatic interval with checkpoints.
Tells what each snapshot and checkpoint held up, and the share of the time. All three must have the
same losses, bit for bit.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

MANIFEST = """
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: {{ name: snapshots }}
spec:
  nodes: {{ profile: gpu, min: 1, max: 1, devicesPerNode: 1 }}
  model: {{ preset: olmoe-1b-7b, numHiddenLayers: {layers} }}
  data:
    train: {{ text: {{ paths: ["**/*.txt"] }} }}
    validation: {{ fraction: 0.1, everySteps: 1000000 }}
    tokenizer: bytes
    sequenceLength: 4096
  training:
    steps: 1000000
    globalBatchSize: {batch}
    microBatchSize: 4
    precision: bf16
    optimizer: {{ adamw: {{ learningRate: 4.0e-4 }} }}
  checkpoint: {{ everySteps: {checkpoint}, keep: 1 }}
  recovery: {{ {memory} }}
"""
NEVER = 1000000


def run(args, name, memory, checkpoint):
    """Losses of so many steps; then the job is killed, so that it writes nothing at its end."""
    moejob = pathlib.Path(args.moejob).resolve()
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = pathlib.Path(name_of_folder)
        manifest, batch = folder / "job.yaml", 4 * args.accumulate
        manifest.write_text(
            MANIFEST.format(layers=args.layers, batch=batch, memory=memory, checkpoint=checkpoint)
        )
        log = folder / "log"
        with open(log, "wb") as out:
            command = [moejob, "run", manifest, "--dir", folder]
            job = subprocess.Popen(command, stdout=out, stderr=out, cwd="data")
        metrics = folder / "snapshots" / "metrics.jsonl"
        lines, end = [], time.monotonic() + args.seconds
        try:
            while len(lines) < args.steps and job.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                text = metrics.read_text() if metrics.exists() else ""
                lines = text[: text.rfind("\n") + 1].splitlines()
            events = metrics.with_name("events.jsonl")
            events = events.read_text().splitlines() if events.exists() else []
            if len(lines) < 10:
                print(log.read_text()[-3000:])
        finally:
            job.kill()
            job.wait()
    reports = [json.loads(line) for line in lines][: args.steps]
    if len(reports) < 10:
        raise SystemExit(f"{name}: only {len(reports)} steps; {events[-3:]}")
    tell(name, reports, events)
    return [report["loss"] for report in reports]


def tell(name, reports, events):
    tokens = reports[0]["tokens"]
    seconds = sum(tokens / report["wallTokensPerSecond"] for report in reports[5:])
    rate = statistics.median(report["tokensPerSecond"] for report in reports[5:])
    print(f"{name}: {len(reports)} steps, {rate:.0f} tokens/s, {seconds:.1f} s after the fifth")
    for part in ("snapshot", "checkpoint"):
        each = [(report["step"], report["stalls"][part]) for report in reports[5:]]
        each = [(step, stall) for step, stall in each if stall > 0]
        total = sum(stall for _, stall in each)
        shown = ", ".join(f"{step}: {stall:.3f}" for step, stall in each[:12])
        share = total / seconds
        print(f"  {part}: {len(each)}, {total:.2f} s, {100 * share:.2f}% of the time; {shown}")
    told = [json.loads(line) for line in events]
    kinds = ("CheckpointCommitted", "Warning", "EngineLost", "WorkerLost")
    for event in told:
        if event["event"] in kinds:
            print(f"  {event['time']} {event['event']} {event.get('reason')} "
                  f"{event.get('message', '')[:150]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("moejob")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=40, help="steps between snapshots")
    parser.add_argument("--checkpoint", type=int, default=150, help="steps between checkpoints")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120, help="a run's limit")
    args = parser.parse_args()
    never = f"memoryEverySteps: {NEVER}"
    every = f"memoryEverySteps: {args.every}"
    losses = [
        run(args, "neither", never, NEVER),
        run(args, f"snapshots every {args.every} steps", every, NEVER),
        run(args, "automatic, with checkpoints", "maxRestarts: 3", args.checkpoint),
    ]
    shortest = min(map(len, losses))
    same = all(one[:shortest] == losses[0][:shortest] for one in losses)
    print("losses:", "the same bits" if same else "DIFFERENT")


if __name__ == "__main__":
    main()
