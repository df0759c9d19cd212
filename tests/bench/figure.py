"""Draws the picture of README: a run that lost a worker, and one that nobody disturbed.

    moejob run examples/02-elastic.yaml SETS &
    kill -9 PID                                  one of the workers, PID as lesson 2 finds it
    moejob run examples/02-elastic.yaml SETS --name calm --workers 1
    python3 tests/bench/figure.py runs/elastic runs/calm docs/worker-lost.svg

SETS are those of the picture's caption. It needs nothing but Python. The last line of a step
counts: after a loss some steps are done again.
"""

import json
import sys
from pathlib import Path

WIDTH, LEFT, RIGHT = 760, 64, 24
LOSS, RANKS, BOTTOM = (44, 190), (226, 286), 320
STYLE = """
text { font: 13px sans-serif; fill: #1f2937 }
.faint { fill: #4b5563 }
.axis { stroke: #9ca3af; stroke-width: 1; fill: none }
.calm { stroke: #f59e0b; stroke-width: 6; fill: none; opacity: .6 }
.lost { stroke: #1f5fa8; stroke-width: 1.5; fill: none }
.ranks { stroke: #15803d; stroke-width: 2; fill: none }
.kill { stroke: #b91c1c; stroke-width: 1.5; stroke-dasharray: 4 3 }
.page { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .faint { fill: #d1d5db } .page { fill: #0d1117 }
  .lost { stroke: #60a5fa } .ranks { stroke: #4ade80 } .kill { stroke: #f87171 }
}
"""


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def main():
    elastic, calm, out = map(Path, sys.argv[1:])
    all_steps = lines(elastic / "metrics.jsonl")
    lost = {line["step"]: line for line in all_steps}
    whole = {line["step"]: line for line in lines(calm / "metrics.jsonl")}
    recoveries = [of for of in lines(elastic / "events.jsonl") if of["event"] == "Recovered"]
    if lost.keys() != whole.keys() or not recoveries:
        sys.exit("the two runs have other steps, or nothing was lost")
    differ = [step for step in lost if lost[step]["loss"] != whole[step]["loss"]]
    if differ:
        sys.exit(f"losses differ from step {differ[0]} on")
    last = max(lost)
    high = max(line["loss"] for line in whole.values())
    low = min(line["loss"] for line in whole.values())
    most = max(line["worldSize"] for line in all_steps)
    attempt = recoveries[0]["attempt"]
    killed = min(line["step"] for line in all_steps if line["attempt"] >= attempt)

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(loss):
        top, bottom = LOSS
        return bottom - (bottom - top) * (loss - low) / (high - low)

    def rank_y(ranks):
        top, bottom = RANKS
        return bottom - (bottom - top) * ranks / most

    def path(css, points):
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        return f'<polyline class="{css}" points="{joined}"/>'

    def text(at, down, words, css="", anchor="start"):
        place = f'x="{at:.0f}" y="{down:.0f}" text-anchor="{anchor}"'
        return f'<text class="{css}" {place}>{words}</text>'

    steps = sorted(lost)
    ranks = []
    for step in steps:
        height = rank_y(lost[step]["worldSize"])
        if ranks and ranks[-1][1] != height:
            ranks.append((x(step), ranks[-1][1]))
        ranks.append((x(step), height))
    recovery = recoveries[0]
    seconds = recovery["firstStepMs"] / 1000
    again = recovery["stepsLost"]
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BOTTOM}" role="img">',
        "<title>The loss of a run that lost a worker and of one that did not</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{BOTTOM}"/>',
        text(LEFT, 24, "loss: a run that lost a worker (thin) over one that did not (wide)"),
        path("axis", [(LEFT, LOSS[0]), (LEFT, LOSS[1]), (WIDTH - RIGHT, LOSS[1])]),
        path("calm", [(x(step), y(whole[step]["loss"])) for step in steps]),
        path("lost", [(x(step), y(lost[step]["loss"])) for step in steps]),
        text(LEFT - 8, LOSS[0] + 10, f"{high:.1f}", "faint", "end"),
        text(LEFT - 8, LOSS[1], f"{low:.1f}", "faint", "end"),
        text(WIDTH - RIGHT, LOSS[1] - 22, f"step {last}: {lost[last]['loss']!r}", "", "end"),
        text(WIDTH - RIGHT, LOSS[1] - 6, "in both, to the last digit", "faint", "end"),
        f'<line class="kill" x1="{x(killed):.1f}" x2="{x(killed):.1f}" y1="{LOSS[0]}" '
        f'y2="{RANKS[1]}"/>',
        text(x(killed) + 8, LOSS[0] + 14, "kill -9 of a worker"),
        text(
            x(killed) + 8,
            LOSS[0] + 31,
            f"the others train on after {seconds:.1f} s, {again} steps are done again",
            "faint",
        ),
        text(LEFT, RANKS[0] - 10, "ranks that train"),
        path("axis", [(LEFT, RANKS[0]), (LEFT, RANKS[1]), (WIDTH - RIGHT, RANKS[1])]),
        path("ranks", ranks),
        text(LEFT - 8, RANKS[0] + 10, f"{most}", "faint", "end"),
        text(LEFT - 8, RANKS[1], "0", "faint", "end"),
        text(WIDTH - RIGHT, RANKS[1] + 20, f"{last} steps", "faint", "end"),
        "</svg>",
    ]
    out.write_text("\n".join(drawn) + "\n")


main()
