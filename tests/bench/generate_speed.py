"""`moejob generate` beside `generate` of transformers: tokens per second of one model, and what a
token costs late in a text.

Both take the likeliest token each time, in fp32, from one directory that `moejob checkpoint export`
has made. Rounds alternate; both must find the same tokens. What a token costs is processor time of
one thread, the least of a few runs, which a neighbour's load disturbs least.

    moejob checkpoint export runs/first-run exported
    python3 tests/bench/generate_speed.py target/release/moejob exported [--threads 2] [--rounds 5]

Needs the packages of tests/parity/requirements.txt. Exits with 1 below a bar: 1.0 times the speed
of transformers, and 1.5 times the cost of an early token.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import transformers

PROMPT = "The "
TOKENS = 200
# Each cost is over so many tokens, from these on.
SPAN, EARLY, LATE = 64, 8, 512


def ask(program, model, tokens, threads):
    command = [program, "generate", model, "--prompt", PROMPT, "--temperature", "0", "--json"]
    command += ["--max-tokens", str(tokens), "--threads", str(threads)]
    before = processor()
    out = subprocess.run(command, check=True, capture_output=True).stdout
    return json.loads(out), processor() - before


def processor():
    """Seconds of processors for all that was started and has ended. Only the sum of user and system
    mode is counted exactly; how it is shared is sampled some 250 times a second."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def costs(program, model, rounds):
    """Milliseconds of a processor for a token, early and late."""
    ends = [at + more for at in (EARLY, LATE) for more in (0, SPAN)]
    least = dict.fromkeys(ends, float("inf"))
    for _ in range(rounds):
        for tokens in ends:
            least[tokens] = min(least[tokens], ask(program, model, tokens, 1)[1])
    return (1e3 * (least[at + SPAN] - least[at]) / SPAN for at in (EARLY, LATE))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.eval()
    ids = torch.tensor([list(PROMPT.encode())])
    options = dict(do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, use_cache=True)
    rates = []
    for number in range(args.rounds + 1):
        answer, _ = ask(args.program, args.model, TOKENS, args.threads)
        began = time.perf_counter()
        with torch.no_grad():
            theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        seconds = time.perf_counter() - began
        same = theirs[0, ids.shape[1] :].tolist() == answer["tokens"]
        assert same, "the two go on with other tokens"
        # The first round makes both warm.
        if number > 0:
            rates.append((TOKENS / answer["seconds"], TOKENS / seconds))
            print("moejob %.0f tokens/s, transformers %.0f" % rates[-1], flush=True)
    ours, beside = (statistics.median(of) for of in zip(*rates))
    early, late = costs(args.program, args.model, 8 * args.rounds)
    print(f"medians: {ours:.0f} and {beside:.0f} tokens/s, {ours / beside:.2f} times (bar 1.0)")
    print(f"a token behind {EARLY}: {early:.3f} ms, behind {LATE}: {late:.3f} ms of a processor, "
          f"{late / early:.2f} times (bar 1.5)")
    sys.exit(ours < beside or late > 1.5 * early)


if __name__ == "__main__":
    main()
