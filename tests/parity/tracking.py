"""What a real MLflow server was given by `moejob run --mlflow`, against the run's metrics.jsonl.

    python -m venv mlflow && mlflow/bin/pip install mlflow==3.17.2
    mlflow/bin/mlflow server --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port 5000 &
    mlflow/bin/python tests/parity/tracking.py runs/NAME

Reads by MLflow's own client. Exits with 1 if a number is missing or another one. A step that was
done again is at the server once for each time; the last one counts, as in metrics.jsonl.
"""

import json
import pathlib
import sys

from mlflow.tracking import MlflowClient

NAMES = {
    "loss/train": "loss",
    "loss/aux": "auxLoss",
    "loss/z": "zLoss",
    "loss/validation": "validationLoss",
    "router/entropy": "routerEntropy",
}


def main():
    folder = pathlib.Path(sys.argv[1])
    known = json.loads((folder / "mlflow.json").read_text())
    client = MlflowClient(known["uri"])
    run = client.get_run(known["runId"])
    steps = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        report = json.loads(line)
        if "loss" in report:
            steps[report["step"]] = report
    compared, wrong = 0, []
    for key in run.data.metrics:
        field = NAMES.get(key, key.split("/")[-1])
        expected = {n: of[field] for n, of in steps.items() if of.get(field) is not None}
        found = {}
        # In the order in which they were logged.
        for metric in client.get_metric_history(known["runId"], key):
            found.setdefault(metric.step, []).append(metric.value)
        wrong += [(key, step) for step in expected.keys() ^ found.keys()]
        for step in expected.keys() & found.keys():
            compared += 1
            if expected[step] != found[step][-1]:
                wrong.append((key, step, expected[step], found[step]))
    print(f"{run.info.status}: {len(run.data.params)} parameters, {compared} numbers of "
          f"{len(run.data.metrics)} metrics compared, {len(wrong)} differ", *wrong[:9], sep="\n")
    sys.exit(bool(wrong) or compared == 0)


if __name__ == "__main__":
    main()
