"""What moejob knows of a machine with GPUs: preflight, NCCL's topology, binding to NUMA nodes.

    python3 machine.py MOEJOB [--only preflight|slowed|limited|topology|binding] [--profile cpu]

Run beside `data` and `ndm-a100-v4.xml`, as tests/gpu/build lays them. What needs two GPUs is left
out with one. A machine with one NUMA node stands for one with two by files (MOEJOB_SYS): each half
of its GPUs and of its processors is said to be a node. Exits with 1 where something is not as it
should be.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

import topology

HERE = pathlib.Path(__file__).resolve().parent
PREFLIGHT_S_MAX = 3.0
# Below what NVLink of any generation gives, and above PCI Express.
LIMITS = """
version: 1
about: two GPUs that NVLink joins
backend: cuda
devices: {count}
memory: 40Gi
expect:
  allReduceGBps: {{ fail: 100 }}
  peerReadGBps: {{ fail: 100 }}
"""
MANIFEST = """
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: {{ name: {name} }}
spec:
  nodes: {{ profile: {profile}, min: 1, max: 1, devicesPerNode: {devices} }}
  model:
    hiddenSize: {width}
    numHiddenLayers: 4
    numAttentionHeads: {heads}
    experts: {{ count: 16, perToken: 4, intermediateSize: {width} }}
    router: {{ auxLossCoef: 0.01 }}
  data:
    train: {{ text: {{ paths: ["**/*.txt"] }} }}
    tokenizer: bytes
    sequenceLength: {sequence}
  training:
    steps: 1000000
    globalBatchSize: {batch}
    microBatchSize: {batch_of_one}
    precision: {precision}
    optimizer: {{ adamw: {{ learningRate: 4.0e-4 }} }}
"""
failed = []


def check(holds, what):
    print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)
    if not holds:
        failed.append(what)


def gpus():
    """Addresses as the kernel writes them: 0000:18:00.0."""
    query = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    if not shutil.which(query[0]):
        return []
    found = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return [bus[-12:].lower() for bus in found]


def preflight(moejob, count, limits=None, **environment):
    """Its outcomes, seconds, and all that it wrote."""
    command = [moejob, "preflight", "-o", "json"]
    if gpus():
        command += ["--gpus", str(count)]
        command += ["--profile", "mine", "--profiles", limits] if limits else ["--profile", "gpu"]
    began = time.monotonic()
    ran = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, **environment}
    )
    seconds = time.monotonic() - began
    try:
        outcomes = json.loads(ran.stdout)["outcomes"]
    except (ValueError, KeyError):
        outcomes = []
        check(False, f"preflight says: {ran.stdout[-500:]} {ran.stderr[-1500:]}")
    return outcomes, seconds, ran.stdout + ran.stderr


def bad(outcomes, grades=("fail",)):
    return [one for one in outcomes if one["grade"] in grades]


def in_words(outcomes):
    told = [f"{one['check']} {one.get('of', '')}: {one['text']}" for one in outcomes]
    return "; ".join(told) or "nothing"


class Job:
    """One that trains until the block ends."""

    def __init__(self, moejob, folder, name, devices, width, **environment):
        on_gpus = bool(gpus())
        text = MANIFEST.format(
            name=name, devices=devices, width=width, heads=width // 64, batch=8 * devices,
            batch_of_one=8,
            profile="gpu" if on_gpus else "cpu", precision="bf16" if on_gpus else "fp32",
            sequence=1024 if on_gpus else 16,
        )
        (folder / f"{name}.yaml").write_text(text)
        self.runs, self.log = folder / name, folder / f"{name}.log"
        command = [moejob, "run", folder / f"{name}.yaml", "--dir", folder]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, cwd=HERE / "data",
                env={**os.environ, **environment}, start_new_session=True,
            )

    def trains(self):
        metrics, end = self.runs / "metrics.jsonl", time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") > 3:
                return True
            time.sleep(0.05)
        print(self.log.read_text()[-2000:])
        return False

    def engines(self):
        """Pid by rank."""
        lines = (self.runs / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        started = [event for event in events if event["event"] == "EngineStarted"]
        return {event["rank"]: event["pid"] for event in started}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # Its GPUs are free again a moment after it.
        time.sleep(3)


def slowed(moejob, count, folder):
    """The last GPU is busy with another job."""
    others = {"CUDA_VISIBLE_DEVICES": str(count - 1)}
    with Job(moejob, folder, "beside", 1, 2048, **others) as job:
        check(job.trains(), "a job beside trains")
        outcomes, _, _ = preflight(moejob, count)
        odd = bad(outcomes, ("fail", "warn"))
        named = [one for one in odd if str(count - 1) in one.get("of", "") + one["text"]]
        check(named, f"a GPU with a job beside is named: {in_words(odd)}")


def limited(moejob, count, folder):
    limits = folder / "mine.yaml"
    limits.write_text(LIMITS.format(count=count))
    outcomes, _, _ = preflight(moejob, count, limits)
    check(outcomes and not bad(outcomes), f"nothing is wrong: {in_words(bad(outcomes))}")
    slow = {"NCCL_P2P_DISABLE": "1", "NCCL_MAX_NCHANNELS": "1"}
    outcomes, _, _ = preflight(moejob, count, limits, **slow)
    named = [one for one in bad(outcomes) if one["check"] == "allReduceGBps"]
    check(named, f"a pair that NCCL's settings limit is named: {in_words(bad(outcomes))}")


def topologies(moejob, count, folder, addresses):
    """Ours of this machine, and that of an NDm machine with two of its GPUs' addresses."""
    own = subprocess.run(
        [moejob, "doctor", "--profile", "gpu", "--topology"], capture_output=True, text=True
    ).stdout
    made = (HERE / "ndm-a100-v4.xml").read_text()
    there = re.findall(r'busid="([^"]+)" class="0x0302', made)
    for address, busid in zip(addresses, there):
        made = made.replace(busid, address)
    (folder / "alone").unlink(missing_ok=True)
    preflight(moejob, count, NCCL_TOPO_DUMP_FILE=str(folder / "alone"))
    for name, text in [("own", own), ("made", made)]:
        file, dump = folder / f"{name}.xml", folder / f"{name}.dump"
        file.write_text(text)
        _, _, wrote = preflight(
            moejob, count, NCCL_TOPO_FILE=str(file), NCCL_TOPO_DUMP_FILE=str(dump),
            NCCL_DEBUG="WARN",
        )
        warns = [line for line in wrote.splitlines() if "WARN" in line]
        check(not warns, f"NCCL takes the {name} file without a warning {warns[:3]}")
        same = dump.exists() and topology.main(file, dump, folder / "alone") == 0
        check(same, f"parents of GPUs are those of the {name} file")


def halves(folder, addresses):
    """A folder like /sys, in which each half of processors and of GPUs is a NUMA node."""
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    parts = [cpus[:half], cpus[half:]]

    def put(name, text):
        path = folder / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    put("devices/system/cpu/online", ",".join(map(str, cpus)))
    for node, part in enumerate(parts):
        put(f"devices/system/node/node{node}/cpulist", ",".join(map(str, part)))
    for at, address in enumerate(addresses):
        node = at * 2 // len(addresses)
        real = pathlib.Path("/sys/bus/pci/devices") / address
        for name in ("vendor", "device", "class"):
            if (real / name).exists():
                put(f"bus/pci/devices/{address}/{name}", (real / name).read_text())
        put(f"bus/pci/devices/{address}/numa_node", str(node))
        put(f"bus/pci/devices/{address}/local_cpulist", ",".join(map(str, parts[node])))
    return folder / "sys", parts


def binding(moejob, count, folder, addresses):
    sys, parts = halves(folder, addresses)
    with Job(moejob, folder, "bound", count, 256, MOEJOB_SYS=str(sys)) as job:
        check(job.trains(), "a job on two NUMA nodes trains")
        for rank, pid in sorted(job.engines().items()):
            part = set(parts[rank * 2 // count])
            threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
            away = []
            for thread in threads:
                try:
                    found = os.sched_getaffinity(thread)
                except OSError:
                    continue
                if not found <= part:
                    name = pathlib.Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip()
                    away.append(name)
            check(not away, f"{len(threads)} threads of rank {rank} are on its node {away}")
        check("planned" not in job.log.read_text(), "nothing else was read back")
        os.sched_setaffinity(job.engines()[0], os.sched_getaffinity(0))
        end = time.monotonic() + 90
        while "planned" not in job.log.read_text() and time.monotonic() < end:
            time.sleep(0.5)
        told = [line for line in job.log.read_text().splitlines() if "planned" in line]
        check(told, f"a thread that was let go elsewhere is told: {told[:1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("moejob", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--only")
    parser.add_argument("--profile", default="gpu", help="cpu: to try this script without GPUs")
    args = parser.parse_args()
    addresses = gpus()
    count = len(addresses) if args.profile == "gpu" else 2
    folder = pathlib.Path(tempfile.mkdtemp())
    wants = lambda part: args.only in (None, part)
    try:
        if wants("preflight"):
            for _ in range(3):
                outcomes, seconds, _ = preflight(args.moejob, count)
                good = outcomes and not bad(outcomes)
                check(good and seconds <= PREFLIGHT_S_MAX, f"preflight of {count} GPUs takes "
                      f"{seconds:.2f} s (3): {in_words(bad(outcomes))}")
        if len(addresses) > 1 and wants("slowed"):
            slowed(args.moejob, count, folder)
        if len(addresses) > 1 and wants("limited"):
            limited(args.moejob, count, folder)
        if len(addresses) > 1 and wants("topology"):
            topologies(args.moejob, count, folder, addresses)
        if count > 1 and wants("binding"):
            binding(args.moejob, count, folder, addresses)
        if count < 2:
            print("left out: two GPUs are needed for all but preflight")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
