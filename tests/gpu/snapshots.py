"""What snapshots and checkpoints of a large state cost on one GPU.

    python3 snapshots.py MOEJOB [--only automatic] [--seconds 500] [--layers 4] [--steps 400]
        [--every 40] [--checkpoint N] [--accumulate 1]

OLMoE cut to 4 layers (22.6 GB of weights and moments) on the text files of ./data, in up to three
runs: `neither`, `every` so many steps a snapshot, and `automatic`, which takes snapshots at the
interval that a job chooses and checkpoints. Tells what each snapshot and checkpoint held up, and
the share of the time. All runs must have the same losses, bit for bit. A run ends after `--steps`
or `--seconds`, whichever is first of those that are given; without either after 400 steps or 120 s.

A job chooses the interval so (worker/src/attempt/pace.rs): the next snapshot comes when 200 times
the time has passed that the last one stalled steps; the first one is taken to pass 20 GB a second.
So with 4 layers the first snapshot comes after some 226 s, and the next one 200 stalls later: with
one of 1.6 s that is 320 s, beyond nine minutes. Two intervals go by within nine minutes with 2
layers (12.6 GB: 126 s, then some 180 s each):

    python3 snapshots.py MOEJOB --only automatic --layers 2 --seconds 520

A checkpoint is written from the first snapshot that comes 200 steps or more after the one before.
With `--checkpoint N` the manifest says every N steps: then each is cut anew, unless a snapshot of
its step is there, and stalls steps for as long.
"""
import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

LARGE = "{{ preset: olmoe-1b-7b, numHiddenLayers: {layers} }}"
SMALL = """
    hiddenSize: 256
    numHiddenLayers: {layers}
    numAttentionHeads: 4
    experts: {{ count: 8, perToken: 2, intermediateSize: 128 }}"""
MANIFEST = """
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: {{ name: snapshots }}
spec:
  nodes: {{ profile: {profile}, min: 1, max: 1, devicesPerNode: 1 }}
  model: {model}
  data:
    train: {{ text: {{ paths: ["**/*.txt"] }} }}
    validation: {{ fraction: 0.1, everySteps: 1000000 }}
    tokenizer: bytes
    sequenceLength: {sequence}
  training:
    steps: 1000000
    globalBatchSize: {batch}
    microBatchSize: 4
    precision: {precision}
    optimizer: {{ adamw: {{ learningRate: 4.0e-4 }} }}
  checkpoint: {{ {checkpoint}keep: 1 }}
  recovery: {{ {recovery} }}
"""
NEVER = 1000000
# `TIMES` and `USUAL` of worker/src/attempt/pace.rs.
INTERVAL_OVER_STALL = 200
USUAL_BYTES_A_SECOND = 2e10
# The first steps load what later ones have.
WARM_UP = 5


def arguments(about):
    """What all scripts that train this model take."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("moejob", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--profile", default="gpu", help="cpu: a small model, to try this script")
    return parser


def manifest(args, recovery, checkpoint=NEVER):
    """Of a job with a checkpoint every so many steps; None: as often as it has them by itself."""
    gpu = args.profile == "gpu"
    return MANIFEST.format(
        profile=args.profile,
        model=(LARGE if gpu else SMALL).format(layers=args.layers),
        sequence=4096 if gpu else 128,
        precision="bf16" if gpu else "fp32",
        batch=4 * args.accumulate,
        checkpoint=f"everySteps: {checkpoint}, " if checkpoint else "",
        recovery=recovery,
    )


def train(moejob, text, steps, seconds, name):
    """Reports and events of so many steps, or of so many seconds; then the job is killed, so that
    it writes nothing at its end."""
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = pathlib.Path(name_of_folder)
        (folder / "job.yaml").write_text(text)
        log = folder / "log"
        with open(log, "wb") as out:
            command = [moejob, "run", folder / "job.yaml", "--dir", folder]
            job = subprocess.Popen(command, stdout=out, stderr=out, cwd="data")
        metrics = folder / "snapshots" / "metrics.jsonl"
        lines, end = [], time.monotonic() + seconds
        try:
            while len(lines) < steps and job.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                lines = whole_lines(metrics)
            events = whole_lines(metrics.with_name("events.jsonl"))
        finally:
            job.kill()
            job.wait()
        if len(lines) < 2 * WARM_UP:
            print(log.read_text()[-3000:])
            raise SystemExit(f"{name}: only {len(lines)} steps; {events[-3:]}")
    return [json.loads(line) for line in lines][:steps], [json.loads(line) for line in events]


def whole_lines(path):
    """Of a file that is being written."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def seconds_of(report, tokens):
    """All of the time since the report before."""
    return tokens / report["wallTokensPerSecond"]


def moment(text):
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def tell(name, reports, events):
    tokens = reports[0]["tokens"]
    warm = reports[WARM_UP:]
    seconds = sum(seconds_of(report, tokens) for report in warm)
    rate = statistics.median(report["tokensPerSecond"] for report in warm)
    print(f"{name}: {len(reports)} steps, {rate:.0f} tokens/s, {seconds:.1f} s after the fifth")
    for part in ("snapshot", "checkpoint"):
        each = stalls(part, warm)
        total = sum(stall for _, stall in each)
        shown = ", ".join(f"{report['step']}: {stall:.3f}" for report, stall in each[:12])
        share = total / seconds
        print(f"  {part}: {len(each)}, {total:.2f} s, {100 * share:.2f}% of the time; {shown}")
    kinds = ("CheckpointCommitted", "CheckpointDegraded", "Warning", "EngineLost", "WorkerLost")
    for event in events:
        if event["event"] in kinds:
            print(f"  {event['time']} {event['event']} {event.get('reason')} "
                  f"{event.get('message', '')[:150]}")


def stalls(part, reports):
    """Reports of steps before which a snapshot, or a checkpoint, has stalled steps, and for how
    long."""
    each = [(report, report["stalls"][part]) for report in reports]
    return [(report, stall) for report, stall in each if stall > 0]


def tell_intervals(reports, events):
    """What the job has decided by what it measured, beside what came of it."""
    taken = stalls("snapshot", reports)
    began = [event for event in events if event["event"] == "AttemptStarted"]
    if not taken:
        print("  no snapshot: the first interval is longer than the run")
        return
    if began:
        first = moment(taken[0][0]["time"]) - moment(began[-1]["time"])
        state = first / INTERVAL_OVER_STALL * USUAL_BYTES_A_SECOND
        print(f"  the first snapshot came {first:.0f} s after the start, as for {state / 1e9:.1f} "
              f"GB at {USUAL_BYTES_A_SECOND / 1e9:.0f} GB/s")
    for at, (report, stall) in enumerate(taken):
        decided = INTERVAL_OVER_STALL * stall
        came = ""
        if at + 1 < len(taken):
            next_report, next_stall = taken[at + 1]
            passed = moment(next_report["time"]) - moment(report["time"])
            came = (f"; the next one came after {passed:.0f} s and stalled {next_stall:.3f} s: "
                    f"{100 * next_stall / passed:.2f}% of that time")
        print(f"  step {report['step']}: a stall of {stall:.3f} s, so an interval of "
              f"{decided:.0f} s: {100 * stall / decided:.2f}%{came}")


def main():
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", choices=("neither", "every", "automatic"),
                        help="one of the runs; may be given twice")
    parser.add_argument("--steps", type=int, help="of a run (400 without --seconds)")
    parser.add_argument("--every", type=int, default=40, help="steps between snapshots")
    parser.add_argument("--checkpoint", type=int, help="steps between checkpoints")
    parser.add_argument("--seconds", type=float, help="of a run (120 without)")
    args = parser.parse_args()
    never, every = (f"memoryEverySteps: {steps}" for steps in (NEVER, args.every))
    runs = {
        "neither": (never, NEVER),
        "every": (every, NEVER),
        "automatic": ("maxRestarts: 3", args.checkpoint),
    }
    # Whoever says how long does not mean the other limit's default.
    steps = args.steps or (NEVER if args.seconds else 400)
    seconds = args.seconds or (NEVER if args.steps else 120)
    losses = []
    for name in args.only or runs:
        text = manifest(args, *runs[name])
        reports, events = train(args.moejob, text, steps, seconds, name)
        tell(name, reports, events)
        if name == "automatic":
            tell_intervals(reports, events)
        losses.append([report["loss"] for report in reports])
    shortest = min(map(len, losses))
    same = all(one[:shortest] == losses[0][:shortest] for one in losses)
    if len(losses) > 1:
        print(f"losses of {shortest} steps:", "the same bits" if same else "DIFFERENT")
    return not same


if __name__ == "__main__":
    raise SystemExit(main())
