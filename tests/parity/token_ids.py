#!/usr/bin/env python3
"""Token ids of `moejob data tokenize` beside those of Python's tokenizers.

    token_ids.py MOEJOB [--seed N] [--documents N] [--only NAME,..] [--long BYTES] [--text BYTES]

Thirty-two tokenizers in the forms of published ones are trained on documents drawn by the seed.
Other documents of the same seed (scripts, runs of white space, digits, punctuation, emoji, marks,
controls, what looks like special tokens, and runs without a space, of any length) are tokenised by
both, as lines of JSON and as text files. Ids have to be equal, or refused by name.
"""

import argparse
import json
import os
import random
import struct
import subprocess
import sys
import tempfile

import numpy
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
CL100K_OLD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K_OLD.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + ENDING,
        r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*" + ENDING,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARK = "\u2581"

LETTERS = [
    (0x61, 0x7A),
    (0x41, 0x5A),
    (0xC0, 0x24F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x531, 0x587),
    (0x5D0, 0x5EA),
    (0x621, 0x64A),
    (0x905, 0x939),
    (0xE01, 0xE3A),
    (0x1E00, 0x1EFF),
    (0x3041, 0x3096),
    (0x30A1, 0x30FA),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x10400, 0x1044F),
    (0x1E900, 0x1E943),
    (0x20000, 0x200FF),
    (0x1C80, 0x1C8A),
    (0x10D40, 0x10D8F),
    (0xFF21, 0xFF5A),
]
DIGITS = [(0x30, 0x39)] * 4 + [
    (0x660, 0x669),
    (0x966, 0x96F),
    (0xFF10, 0xFF19),
    (0x2160, 0x2188),
    (0xB2, 0xB3),
    (0xBC, 0xBE),
    (0x1D7CE, 0x1D7FF),
    (0x11DE0, 0x11DE9),
]
SPACES = (
    [" "] * 12
    + ["\n"] * 5
    + [
        "\t",
        "\r\n",
        "\r",
        "\u00a0",
        "\u2003",
        "\u3000",
        "\u2028",
        "\u2029",
        "\u0085",
        "\x0b",
        "\x0c",
        "\u200b",
        "\u1680",
        "\u180e",
        "\u202f",
    ]
)
PUNCTUATION = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
PUNCTUATION += list("«»‘’“”…—–·、。「」！？¿¡§¶†€£¥°©™±×÷≠∞→▁")
MARKS = ["\u0301", "\u0308", "\u0327", "\u20dd", "\u093f", "\u094d", "\u0e31", "\u3099", "\u0345"]
OTHERS = [
    "\u200d",
    "\u200c",
    "\ufeff",
    "\ufffd",
    "\u0000",
    "\u0007",
    "\u001b",
    "\u007f",
    "\u00ad",
    "\u202e",
    "\ue000",
    "\u0378",
    "\U000e0001",
    "\u0600",
]
EMOJI = ["😀", "👩\u200d👩\u200d👧", "🇩🇪", "👍🏽", "❤️", "1️⃣", "🏴\U000e0067\U000e007f"]
SPECIALS = [
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<mask>",
    "[MASK]",
    "[SEP]",
    "<|im_start|>",
    "<unk>",
    "<0x0A>",
    "<tool>",
    "word",
    "New York",
    "\n\n\n",
]
WORDS = (
    "the of and to in is that it's don't we'll I'VE you're he'd THEY'LL was for on are "
    "with as at be this have from or one had by but not what all were when your can said "
    "there use an each which she do how their if will up other about out many then them "
    "these so some her would make like him into time has look two more write go see "
    "number no way could people my than first water been call who oil its now find long "
    "down day did get come made may part def return self.x=0 int main(void){} #include "
    "x_1 foo_bar snake_case CamelCase HTTPServer http://a.b/c?d=e&f=1 straße Ǆ ŉ ﬁn ﬀ "
    "İstanbul ǰ ſs "
).split()


def character(random, ranges):
    low, high = random.choice(ranges)
    return chr(random.randint(low, high))


def piece(random):
    kind = random.randrange(20)
    if kind < 7:
        return random.choice(WORDS)
    if kind < 10:
        low, high = random.choice(LETTERS)
        return "".join(chr(random.randint(low, high)) for _ in range(random.randint(1, 9)))
    if kind < 12:
        return "".join(character(random, DIGITS) for _ in range(random.choice([1, 2, 3, 4, 7, 15])))
    if kind < 14:
        return "".join(random.choice(PUNCTUATION) for _ in range(random.choice([1, 1, 2, 3, 6])))
    if kind == 14:
        return random.choice(EMOJI)
    if kind == 15:
        return random.choice(MARKS) * random.randint(1, 3)
    if kind == 16:
        return random.choice(OTHERS)
    if kind == 17:
        return random.choice(SPECIALS)
    if kind == 18:
        return "".join(random.choice(SPACES) for _ in range(random.randint(1, 12)))
    return random.choice(SPACES) * random.randint(1, 9)


def document(random, pieces):
    parts = []
    for _ in range(pieces):
        parts.append(piece(random))
        if random.random() < 0.6:
            parts.append(random.choice(SPACES))
    return "".join(parts)


def plain(random, bytes_wanted):
    """Prose, of which a long file may be cut."""
    parts, size = [], 0
    while size < bytes_wanted:
        line = " ".join(random.choice(WORDS[:90]) for _ in range(random.randint(1, 20)))
        if random.random() < 0.2:
            # A file with zeros at its head is taken for no text.
            line = document(random, 12).replace("\0", "")
        parts.append(line + random.choice(["\n", "\n\n", "\r\n", ".\n", " \n", "\n  "]))
        size += len(parts[-1].encode())
    return "".join(parts)


def long_documents(random, size):
    letters = "".join(chr(random.randint(0x61, 0x7A)) for _ in range(997))
    chinese = "".join(chr(random.randint(0x4E00, 0x9FFF)) for _ in range(499))
    return [
        letters * (size // 997 + 1),
        chinese * (size // 1497 + 1),
        "start" + " " * size + "end",
        "x" + "\n" * size + " y",
        "".join(random.choice("0123456789") for _ in range(size)),
        "-" * size + "!",
        document(random, size // 8),
    ]


def bpe(texts, pre_tokenizer, normalizer=None, size=700, alphabet=True, **options):
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    special = ["<unk>", "<s>", "</s>"] + (
        [f"<0x{byte:02X}>" for byte in range(256)] if options.get("byte_fallback") else []
    )
    if not alphabet:
        special += [MARK]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=alphabet,
        limit_alphabet=400,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level(texts, *splits, **options):
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    stages = [*splits, bytes_alone]
    return bpe(texts, pre_tokenizers.Sequence(stages) if splits else bytes_alone, **options)


def retold(tokenizer, change):
    """The tokenizer with its file changed."""
    value = json.loads(tokenizer.to_str())
    change(value)
    return Tokenizer.from_str(json.dumps(value))


def llama(texts, **options):
    """SentencePiece's byte pairs as Llama 2 and Mistral have them."""
    tokenizer = bpe(
        texts,
        pre_tokenizers.Metaspace(),
        alphabet=False,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
        **options,
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
    )
    tokenizer.pre_tokenizer = None
    return tokenizer


def unigram(texts, normalizer, pre_tokenizer, byte_fallback=False):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    special = ["<pad>", "</s>", "<unk>"] + (
        [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    )
    # Every character that it sees becomes a token.
    texts = ["".join(c for c in text if ord(c) < 0x600) for text in texts]
    trainer = trainers.UnigramTrainer(
        vocab_size=2500, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if byte_fallback:
        tokenizer = retold(tokenizer, lambda value: value["model"].update(byte_fallback=True))
    return tokenizer


def wordpiece(texts, normalizer, pre_tokenizer):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def with_added(tokenizer, *tokens):
    tokenizer.add_tokens([AddedToken(content, **options) for content, options in tokens])
    return tokenizer


def makers():
    """Name -> texts -> tokenizer."""
    space_runs = normalizers.Replace(Regex(" {2,}"), " ")
    t5 = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), space_runs])
    return {
        "gpt2": lambda texts: byte_level(texts),
        "gpt2-prefix": lambda texts: bpe(texts, pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "cl100k-tiktoken": lambda texts: byte_level(texts, split(CL100K)),
        "cl100k-llama3": lambda texts: byte_level(texts, split(CL100K_OLD), ignore_merges=True),
        "o200k": lambda texts: byte_level(texts, split(O200K)),
        "qwen": lambda texts: byte_level(texts, split(QWEN), normalizer=normalizers.NFC()),
        "deepseek-v3": lambda texts: byte_level(
            texts, split(r"\p{N}{1,3}"), split(r"[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3)
        ),
        "deepseek-coder": lambda texts: byte_level(
            texts,
            split(r"[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split(r"[一-龥ࠀ-一가-퟿]+"),
            pre_tokenizers.Digits(individual_digits=True),
        ),
        "deepseek-llm": lambda texts: byte_level(
            texts,
            split(r"[\r\n]"),
            split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ҁҊ-ԯԱ-Ֆ]+"),
            split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            split(r"\s+$"),
            split(r"[一-龥ࠀ-一가-퟿]+"),
            pre_tokenizers.Digits(individual_digits=True),
        ),
        "olmo": lambda texts: with_added(
            byte_level(texts, normalizer=normalizers.NFC()),
            *((" " * count, {"normalized": True}) for count in range(24, 1, -1)),
            ("<|endoftext|>", {"special": True, "normalized": False}),
        ),
        "starcoder": lambda texts: bpe(
            texts,
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
        ),
        "llama2": lambda texts: llama(texts),
        "mistral-added": lambda texts: with_added(
            llama(texts),
            ("<tool>", {"rstrip": True}),
            ("<mask>", {"lstrip": True}),
            ("word", {"single_word": True, "normalized": True}),
            ("New York", {"normalized": True}),
        ),
        "mixtral-metaspace": lambda texts: bpe(
            texts,
            pre_tokenizers.Metaspace(prepend_scheme="first"),
            alphabet=False,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        ),
        "metaspace-never": lambda texts: bpe(
            texts,
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            alphabet=False,
            unk_token="<unk>",
        ),
        "metaspace-whole": lambda texts: retold(
            bpe(
                texts,
                pre_tokenizers.Metaspace(),
                alphabet=False,
                unk_token="<unk>",
                byte_fallback=True,
            ),
            lambda value: value["pre_tokenizer"].update(split=False, prepend_scheme="first"),
        ),
        "gemma": lambda texts: retold(
            bpe(
                texts,
                pre_tokenizers.Metaspace(prepend_scheme="never"),
                alphabet=False,
                unk_token="<unk>",
                byte_fallback=True,
                fuse_unk=True,
            ),
            lambda value: value.update(
                normalizer={"type": "Replace", "pattern": {"String": " "}, "content": MARK},
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"String": " "},
                    "behavior": "MergedWithPrevious",
                    "invert": False,
                },
            ),
        ),
        "t5": lambda texts: unigram(
            texts,
            t5,
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        ),
        "xlm-roberta": lambda texts: unigram(texts, t5, pre_tokenizers.Metaspace()),
        "unigram-bytes": lambda texts: unigram(
            texts, None, pre_tokenizers.Metaspace(), byte_fallback=True
        ),
        "albert": lambda texts: unigram(
            texts,
            normalizers.Sequence(
                [
                    normalizers.Replace("``", '"'),
                    normalizers.Replace("''", '"'),
                    normalizers.NFKD(),
                    normalizers.StripAccents(),
                    normalizers.Lowercase(),
                    space_runs,
                ]
            ),
            pre_tokenizers.Metaspace(),
        ),
        "bert-uncased": lambda texts: wordpiece(
            texts, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        ),
        "bert-cased": lambda texts: wordpiece(
            texts, normalizers.BertNormalizer(lowercase=False), pre_tokenizers.BertPreTokenizer()
        ),
        "wordpiece-strip": lambda texts: wordpiece(
            texts,
            normalizers.Sequence([normalizers.Strip(), normalizers.NFD()]),
            pre_tokenizers.Whitespace(),
        ),
        "clip": lambda texts: bpe(
            texts,
            pre_tokenizers.Sequence(
                [
                    split(
                        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
                        "removed",
                        True,
                    ),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
            normalizer=normalizers.Sequence(
                [
                    normalizers.NFC(),
                    normalizers.Replace(Regex(r"\s+"), " "),
                    normalizers.Lowercase(),
                ]
            ),
            end_of_word_suffix="</w>",
        ),
        "posix-classes": lambda texts: byte_level(
            texts, split(r"[[:punct:]]"), split(r"[[:space:]]+|[[:alpha:]]+|[[:digit:]]{2}|\h+")
        ),
        "line-ends": lambda texts: byte_level(
            texts, split(r"\s+$|^#.*$|\w+(?<!_)\b|(?m:x.y)|[^\n]\Z")
        ),
        "folded": lambda texts: byte_level(
            texts, split(r"(?i:straSSe|ﬁ|st|ǆ|[k-s]+)|\X|(?>\s+)|\R")
        ),
        "merged-next": lambda texts: byte_level(texts, split(r"\s", "merged_with_next")),
        "contiguous": lambda texts: bpe(
            texts,
            pre_tokenizers.Sequence(
                [
                    split(r"\p{Lu}|\p{Nd}", "contiguous"),
                    pre_tokenizers.Punctuation("merged_with_previous"),
                    pre_tokenizers.UnicodeScripts(),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            ),
        ),
        "words": lambda texts: word_level(texts),
        "truncated": lambda texts: truncated(byte_level(texts, split(CL100K_OLD))),
    }


def word_level(texts):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
    trainer = trainers.WordLevelTrainer(
        vocab_size=900, special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def truncated(tokenizer):
    """What a file says of lengths is for other uses; docs/data.md."""
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=32)
    return tokenizer


def reference(tokenizer, text):
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return None


def read_megatron(output):
    index = open(output + ".idx", "rb").read()
    code, sequences, _ = struct.unpack_from("<BQQ", index, 17)
    kind = {8: numpy.uint16, 4: numpy.int32}[code]
    lengths = numpy.frombuffer(index, numpy.int32, sequences, 34)
    return numpy.split(numpy.fromfile(output + ".bin", kind), numpy.cumsum(lengths)[:-1])


def product(program, folder, path, tokenizer):
    output = os.path.join(folder, "out")
    for ending in (".bin", ".idx", ".state.json", ".bin.part", ".lengths.part"):
        if os.path.exists(output + ending):
            os.remove(output + ending)
    done = subprocess.run(
        [program, "data", "tokenize", path, "--output", output, "--tokenizer", tokenizer],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        return None, (
            done.stderr.strip().splitlines()[-1]
            if done.stderr.strip()
            else f"exit {done.returncode}"
        )
    return read_megatron(output), None


def difference(name, expected, found, texts):
    kept = [(text, ids) for text, ids in zip(texts, expected) if ids]
    if len(kept) != len(found):
        return f"{name}: {len(found)} documents instead of {len(kept)}"
    for number, ((text, ids), own) in enumerate(zip(kept, found)):
        if len(ids) != len(own) or (numpy.asarray(ids) != own).any():
            at = next(
                (i for i, (a, b) in enumerate(zip(ids, own)) if a != b), min(len(ids), len(own))
            )
            return (
                f"{name}: document {number} ({len(text)} characters) differs at id {at}: "
                f"{ids[at:at + 6]} expected, {list(own[at:at + 6])} found; text {text[:60]!r}"
            )
    return None


def compare(program, folder, name, tokenizer, documents, files):
    """Lines that tell what is wrong, and one that tells what was done."""
    path = os.path.join(folder, name + ".json")
    tokenizer.save(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    wrong, counts = [], {"equal": 0, "refused": 0}
    expected = [reference(tokenizer, text) for text in documents]
    impossible = [number for number, ids in enumerate(expected) if ids is None]
    good = [text for text, ids in zip(documents, expected) if ids is not None]
    lines = os.path.join(folder, "d.jsonl")
    for texts, ids in [(good, [ids for ids in expected if ids is not None])] + [
        ([documents[number]], None) for number in impossible[:3]
    ]:
        with open(lines, "w") as out:
            out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        found, error = product(program, folder, lines, path)
        if ids is None and found is not None:
            wrong.append(f"{name}: tokenised what Python refuses: {texts[0][:60]!r}")
        elif ids is not None and error:
            counts["refused"] += len(texts)
            print(f"  {name} refused: {error}")
        elif ids is not None:
            problem = difference(name, ids, found, texts)
            counts["equal"] += 0 if problem else len(texts)
            wrong += [problem] if problem else []
    whole = 0
    for text in files:
        ids = reference(tokenizer, text)
        with open(os.path.join(folder, "t.txt"), "w", newline="") as out:
            out.write(text)
        found, error = product(program, folder, os.path.join(folder, "t.txt"), path)
        if error:
            counts["refused"] += 1
            print(f"  {name} refused a text of {len(text.encode())} bytes: {error}")
        elif ids is not None:
            problem = difference(name + " (text)", [ids], found, [text])
            whole += 0 if problem else 1
            wrong += [problem] if problem else []
    print(
        f"{name}: {counts['equal']} documents and {whole} texts equal, "
        f"{counts['refused']} refused, {len(impossible)} that Python refuses too",
        flush=True,
    )
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--long", type=int, default=5_000, help="bytes of runs without a break")
    parser.add_argument("--text", type=int, default=1_300_000, help="bytes of the text files")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    training = [document(draw, 60) for _ in range(400)] + [plain(draw, 40_000)]
    documents = [
        document(draw, draw.choice([0, 1, 3, 10, 40, 120])) for _ in range(options.documents)
    ]
    documents += ["", " ", "\n"] + long_documents(draw, options.long)
    files = [plain(draw, options.text)]
    wrong, made = [], {
        name: make
        for name, make in makers().items()
        if not options.only or name in options.only.split(",")
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, make in made.items():
            wrong += compare(options.program, folder, name, make(training), documents, files)
    print(f"seed {options.seed}: {len(made)} tokenizers, {len(documents)} documents each")
    for line in wrong:
        print("WRONG", line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
