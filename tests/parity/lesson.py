"""Lesson 8 with weights that `transformers` has made, and what it says of the result.

    python lesson.py PROGRAM

A tiny Mixtral by `save_pretrained` stands in the place of the lesson's base. The lesson's own
manifest goes on from it, and the lesson's own `load.py` must print what `moejob generate` says of
what was exported.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM

LESSON = pathlib.Path(__file__).resolve().parents[2] / "examples" / "08-fine-tune"
PROMPT, TOKENS, STEPS = "pub fn ", 20, 40


def make_base(folder):
    torch.manual_seed(8)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    MixtralForCausalLM(config).save_pretrained(folder)


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)

        def call(*command):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
            return done.stdout

        (folder / "worker").mkdir()
        for index in range(10):
            lines = [f"pub fn part_{n}() -> u32 {{\n    {n * index}\n}}\n" for n in range(60)]
            (folder / "worker" / f"{index}.rs").write_text("\n".join(lines))
        make_base(folder / "runs" / "base-hf")
        call(program, "run", LESSON / "job.yaml", "--set", f"training.steps={STEPS}")
        metrics = (folder / "runs/fine-tuned/metrics.jsonl").read_text().splitlines()
        assert len(metrics) == STEPS, f"{len(metrics)} steps"
        first, last = (json.loads(metrics[at])["loss"] for at in (0, -1))
        assert last < first, f"the loss went from {first} to {last}"
        exported = folder / "runs" / "fine-tuned-hf"
        call(program, "checkpoint", "export", "runs/fine-tuned", exported)
        loaded = call(
            sys.executable, LESSON / "load.py", exported, PROMPT, "--max-tokens", str(TOKENS)
        )
        options = ["--temperature", "0", "--max-tokens", str(TOKENS), "--prompt", PROMPT, "--json"]
        said = json.loads(call(program, "generate", exported, *options))["text"]
        assert loaded.rstrip("\n") == PROMPT + said, f"{loaded!r} is not {PROMPT + said!r}"
    print(f"lesson 8: loss {first:.2f} to {last:.2f}, {TOKENS} tokens alike", file=sys.stderr)


if __name__ == "__main__":
    main()
