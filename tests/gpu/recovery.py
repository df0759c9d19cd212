"""How long a lost engine or worker holds up a job on GPUs, and what its snapshots cost.

    python3 recovery.py MOEJOB [--rounds 10] [--model large|small|whole] [--workers 1|2]
        [--gpus 2] [--fault KILL|STOP|illegal|hang|link|full] [--whom engine|worker]

The large model is OLMoE cut to 4 layers (24 GB of weights and moments), the whole one all of it (83
GB), experts over a worker's GPUs; it trains on the text files of ./data. From the signal to the
first step of the next attempt; beside it what the events say of where the time went, and memory
then.
Memory of the whole gang is looked at once more before the next fault, when it has settled: from the
third recovery on it is to stay the same.
"""
import argparse
import collections
import datetime
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

LARGE = "{ preset: olmoe-1b-7b, numHiddenLayers: 4 }"
WHOLE = "{ preset: olmoe-1b-7b }"
SMALL = """
    hiddenSize: 256
    numHiddenLayers: 4
    numAttentionHeads: 4
    experts: { count: 16, perToken: 4, intermediateSize: 128 }
    router: { auxLossCoef: 0.01 }"""
MANIFEST = """
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: {{ name: lost }}
spec:
  nodes: {{ profile: {profile}, min: 1, max: {workers}, devicesPerNode: {devices} }}
  {parallelism}
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
  checkpoint: {{ everySteps: 1000000, keep: 2 }}
  recovery: {{ memoryEverySteps: {every}, maxRestarts: 1000 }}
"""


class Tail:
    """Lines of a growing file of JSON, each read once."""

    def __init__(self, path):
        self.path, self.at, self.all = path, 0, []

    def read(self):
        try:
            with open(self.path, "rb") as file:
                file.seek(self.at)
                text = file.read()
        except FileNotFoundError:
            return self.all
        whole = text[: text.rfind(b"\n") + 1]
        self.at += len(whole)
        self.all += [json.loads(line) for line in whole.splitlines()]
        return self.all


def processes(word, of):
    """Pids below `of` whose command line has the word, by age."""
    parents, named = {}, {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            command = open(f"/proc/{entry}/cmdline").read().split("\0")
            stat = open(f"/proc/{entry}/stat").read().rsplit(")", 1)[1].split()
            parent, started = int(stat[1]), int(stat[19])
        except (OSError, ValueError, IndexError):
            continue
        parents[int(entry)] = parent
        if word in command[:4]:
            # Numbers of processes start anew now and then.
            named[int(entry)] = started
    below, grew = {of}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below |= more
        grew = bool(more)
    return sorted(named.keys() & below, key=lambda pid: (named[pid], pid))


def resident(pid):
    try:
        for line in open(f"/proc/{pid}/status"):
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 2**20
    except OSError:
        pass
    return 0.0


def proportional(pids):
    """GiB of all of them, what they share counted once."""
    total = 0
    for pid in pids:
        try:
            for line in open(f"/proc/{pid}/smaps_rollup"):
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
        except OSError:
            pass
    return total / 2**20


def kinds_of_memory(pid):
    """MiB in memory by what it is of; beside it how many threads and open files there are."""
    kinds = {}
    try:
        for line in open(f"/proc/{pid}/smaps"):
            words = line.split()
            if not words[0].endswith(":"):
                name = " ".join(words[5:])
                kind = ("heap" if name == "[heap]" else "of no file" if not name
                        else name if name.startswith("/dev/nvidia")
                        else "library" if ".so" in name else "memfd" if "memfd" in name
                        else "shared" if name.startswith("/dev/") else "other")
            elif words[0] == "Rss:":
                kinds[kind] = kinds.get(kind, 0) + int(words[1]) / 1024
        threads = len(os.listdir(f"/proc/{pid}/task"))
        files = collections.Counter()
        for file in os.scandir(f"/proc/{pid}/fd"):
            target = os.readlink(file.path).removesuffix(" (deleted)")
            files[re.sub(r"[0-9:\[\]]+$", "", target.rsplit("/", 1)[-1]) or target] += 1
    except OSError:
        return {}
    return {kind: round(size, 1) for kind, size in sorted(kinds.items())} | {
        "threads": threads, "files": dict(sorted(files.items()))}


def spread(values):
    """How far the largest is above the smallest."""
    return max(values) / min(values) - 1 if min(values) else 0.0


def is_gone(pid):
    """Whether it has given its memory back: what is left of a process then is a zombie without
    further threads."""
    try:
        state = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
        return state in "ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1
    except OSError:
        return True


class Dying(threading.Thread):
    """How long a process that was killed takes to end."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.pid, self.mapped, self.took = pid, resident(pid), None
        self.began = time.monotonic()

    def run(self):
        while not is_gone(self.pid) and time.monotonic() < self.began + 60:
            time.sleep(0.005)
        self.took = time.monotonic() - self.began

    def __str__(self):
        took = "not" if self.took is None else f"after {self.took:.2f} s"
        return f"{self.mapped:.2f} GiB mapped, gone {took}"


# Takes all memory of GPU 0 as soon as it is free, for so many seconds.
HOG = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
end, taken, size = time.time() + float(sys.argv[1]), 0, 1 << 36
while time.time() < end:
    place = ctypes.c_uint64()
    if cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(size)) == 0:
        taken += size
    elif size > 1 << 22:
        size //= 2
    else:
        if taken:
            sys.stdout.write("full\\n")
            sys.stdout.flush()
            sys.stdout = open("/dev/null", "w")
        time.sleep(0.0005)
"""


def hog(seconds):
    """A process that has filled the GPU's memory."""
    process = subprocess.Popen([sys.executable, "-c", HOG, str(seconds)], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def memory_of_gpus():
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:
        return []


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("moejob")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", choices=["large", "small", "whole"], default="large")
    parser.add_argument("--gpus", type=int, default=2, help="of all workers")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--fault", default="KILL")
    parser.add_argument("--whom", choices=["engine", "worker"], default="engine")
    parser.add_argument("--spares", action="store_true",
                        help="the oldest is never hit: does its memory grow?")
    parser.add_argument("--profile", default="gpu", help="cpu: to try this script")
    parser.add_argument("--log", help="where the job's log goes; MOEJOB_LOG says how much")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--every", type=int, help="steps between snapshots")
    parser.add_argument("--waits", action="store_true",
                        help="experts over all workers: those that are left cannot go on alone")
    parser.add_argument("--hold", type=float, default=5, help="how long memory is full")
    parser.add_argument("--ends", metavar="TEXT", help="the job is to end, and to say so")
    args = parser.parse_args()
    began = time.monotonic()
    kept = pathlib.Path(args.log).resolve() if args.log else None
    moejob = str(pathlib.Path(args.moejob).resolve())
    os.chdir(pathlib.Path(__file__).parent / "data")
    runs = pathlib.Path(tempfile.mkdtemp())
    large = args.model != "small"
    every = args.every or (20 if large else 50)
    model = {"large": LARGE, "small": SMALL, "whole": WHOLE}[args.model]
    # A gang of one rank shares its experts with nobody: with this, a worker's loss would be waited
    # out until there is another.
    expert = args.gpus if args.waits else args.gpus // args.workers
    text = MANIFEST.format(
        profile=args.profile, precision="bf16" if args.profile == "gpu" else "fp32",
        workers=args.workers, devices=args.gpus // args.workers, model=model,
        parallelism=f"parallelism: {{ expert: {expert} }}" if expert > 1 else "",
        batch=4 * args.gpus,
        sequence=4096 if large else 256 if args.profile == "gpu" else 16, every=every)
    (runs / "lost.yaml").write_text(text)
    log = open(runs / "log", "wb")
    command = [moejob, "run", str(runs / "lost.yaml"), "--dir", str(runs)]
    where = dict(os.environ)
    if args.fault in ("illegal", "hang"):
        where["MOEJOB_FAULT"] = f"{args.fault}@60/1"
    cut = runs / "cut"
    if args.fault == "link":
        source = pathlib.Path(__file__).resolve().parent / "link.c"
        library = ["gcc", "-shared", "-fPIC", "-O2", "-o", runs / "link.so", source, "-ldl"]
        subprocess.run(library, check=True)
        where |= {"LD_PRELOAD": str(runs / "link.so"), "MOEJOB_TEST_LINK": str(cut)}
    run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=where)
    steps, events = Tail(runs / "lost/metrics.jsonl"), Tail(runs / "lost/events.jsonl")

    def wait(what, until, seconds=90):
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() > end or run.poll() is not None:
                print(f"FAILED: {what} did not come; the log ends so:")
                print((runs / "log").read_text()[-3000:])
                for event in events.read()[-12:]:
                    print("  ", json.dumps(event)[:300])
                return False
            time.sleep(0.002)
        return True

    def newest():
        rows = steps.read()
        return rows[-1] if rows else {"attempt": 0, "step": 0}

    def of_newest():
        rows = steps.read()
        return sum(1 for row in rows[-60:] if row["attempt"] == rows[-1]["attempt"])

    times, grown, settled, full = [], [], [], None
    broken = args.fault in ("illegal", "hang")
    try:
        if wait("the first step", lambda: newest()["step"] >= 1):
            print(f"first step after {time.monotonic() - began:.2f} s")
        if broken:
            if not wait("the next attempt", lambda: newest()["attempt"] > 1, 60):
                return 1
            rows = steps.read()
            before = [row for row in rows if row["attempt"] == 1][-1]
            after = next(row for row in rows if row["attempt"] > 1)
            clock = lambda row: datetime.datetime.fromisoformat(row["time"]).timestamp()
            print(f"{args.fault}: step {before['step']} -> {after['step']}, "
                  f"{clock(after) - clock(before):.2f} s between the two")
            for event in events.read():
                said = event.get("message", "")[:250]
                print("    ", event["time"][14:23], event["event"], event.get("reason", ""), said)
            wait("a whole gang", lambda: newest()["step"] > 120)
            args.rounds = 0
        for round in range(args.rounds):
            world = lambda: newest().get("worldSize") == args.gpus and of_newest() >= every + 5
            if not wait("a whole gang", world):
                return 1
            engines = processes("engine", run.pid)
            workers = processes("worker", run.pid)
            targets = engines if args.whom == "engine" else workers
            targets = targets[1:] if args.spares else targets
            everybody = [run.pid, *workers, *engines]
            settled.append((sum(map(int, memory_of_gpus())), proportional(everybody)))
            if args.spares and (round == 3 or round % 10 == 0):
                print(f"the oldest engine, MiB: {kinds_of_memory(engines[0])}", flush=True)
            attempt, seen = newest()["attempt"], len(events.read())
            last = newest()["step"]
            full = hog(args.hold) if args.fault == "full" else None
            start, clock, dying = time.monotonic(), time.time(), None
            if args.fault == "link":
                cut.touch()
                ended = lambda: any(e["event"] == "AttemptStarted" for e in events.read()[seen:])
                if not wait("the end of the attempt", ended):
                    return 1
                cut.unlink()
            else:
                name = "KILL" if full else args.fault
                dying = Dying(targets[round % len(targets)])
                os.kill(targets[round % len(targets)], getattr(signal, f"SIG{name}"))
                if name == "KILL":
                    dying.start()
            if args.ends:
                run.wait(90)
                said = (runs / "log").read_text()
                if run.returncode == 0 or args.ends not in said:
                    print(f"FAILED: exit code {run.returncode}, without '{args.ends}':")
                    print(said[-3000:])
                    return 1
                took = time.monotonic() - start
                print(f"{args.fault}: the job ended after {took:.2f} s: {said.splitlines()[-1]}")
                return 0
            if not wait("the next step", lambda: newest()["attempt"] > attempt):
                return 1
            took = time.monotonic() - start
            if full:
                full.kill()
                full.wait()
            times.append(took)
            first = next(row for row in steps.read() if row["attempt"] > attempt)
            resumed = [e for e in events.read()[seen:] if e["event"] == "Resumed"]
            parts = {k: v for k, v in (resumed[-1] if resumed else {}).items() if k.endswith("Ms")}
            used = memory_of_gpus()
            hosts = [f"{resident(pid):.2f}" for pid in [run.pid, *processes("worker", run.pid),
                                                         *processes("engine", run.pid)]]
            stalls = first.get("stalls") or {}
            news = events.read()[seen:]
            told = [f"{e['time'][14:23]} {e['event']}" for e in news]
            print(f"{args.fault} {args.whom} {round}: {took:.2f} s, step {last} -> "
                  f"{first['step']}, of ranks {first['worldSize']}, {parts}, first step's stalls "
                  f"{ {k: round_(v) for k, v in stalls.items() if v} }, GPUs {used} MiB, hosts "
                  f"{hosts} GiB, who was killed: {dying}", flush=True)
            if args.whom == "worker" and not args.waits:
                if not wait("a whole gang", lambda: newest().get("worldSize") == args.gpus):
                    return 1
                grown.append(time.monotonic() - start)
                print(f"     all again after {grown[-1]:.2f} s")
            at = time.strftime("%M:%S", time.gmtime(clock))
            print(f"     at {at}.{int(clock % 1 * 1000):03d}: {told}", flush=True)
            # More than the engine that was killed was lost.
            for event in news if len(news) > 5 else []:
                if event.get("message"):
                    print(f"     {event['time'][14:23]} {event['message'][:600]}", flush=True)
            if time.monotonic() - began > args.seconds:
                break
        if times:
            print(f"{args.model}, {args.workers} worker(s), {args.whom}, {args.fault}: median "
                  f"{statistics.median(times):.2f} s of {len(times)}, worst {max(times):.2f}")
        if grown:
            print(f"all again: median {statistics.median(grown):.2f} s, worst {max(grown):.2f}")
        # The first is of the job as it began.
        if len(settled) > 4:
            gpus, hosts = zip(*settled[3:])
            print(f"settled, from the third recovery on: GPUs {min(gpus)} to {max(gpus)} MiB "
                  f"({spread(gpus):.2%} apart), processes {min(hosts):.3f} to {max(hosts):.3f} GiB "
                  f"({spread(hosts):.2%}): {', '.join(f'{host:.3f}' for host in hosts)}")
        rows = steps.read()
        whole = [row for row in rows if row.get("stalls", {}).get("snapshot")]
        print("snapshots:", [round_(row["stalls"]["snapshot"]) for row in whole[:12]], "s")
        tokens = [row["tokensPerSecond"] for row in rows if "tokensPerSecond" in row]
        print(f"tokens/s, median {statistics.median(tokens):.0f}" if tokens else "")
    finally:
        if full:
            full.kill()
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        run.wait()
        if kept:
            logs = [runs / "log", *sorted((runs / "lost/logs").glob("*"))]
            kept.write_bytes(b"".join(log.read_bytes() for log in logs))
        subprocess.run(["rm", "-rf", str(runs)])
    return 0


def round_(seconds):
    return round(seconds, 3)


if __name__ == "__main__":
    raise SystemExit(main())
