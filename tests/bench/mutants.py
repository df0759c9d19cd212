#!/usr/bin/env python3
"""Mutation tests of the operator: which changes of the program do the fast tests notice?

    python3 -m venv target/venv && target/venv/bin/pip install tree-sitter tree-sitter-rust
    target/venv/bin/python tests/bench/mutants.py build              one build with all mutants
    target/venv/bin/python tests/bench/mutants.py run [GROUP ...]    [--sample 200 --seed 1]
    target/venv/bin/python tests/bench/mutants.py report

A mutant is the program with one thing changed. These are the mutants of `cargo mutants` 27.1: a
function's body gives way to a value of its type, an operator to another one, `!` and `-` are left
out, an arm of a match with `_` is left out, a guard is true or false, a field before `..` is left
out. cargo-mutants builds each of them by itself. Here all are built into one copy of the tree:

    a < b    becomes    (if mutant::none(&[7, 8]) { a < b } else if mutant::is(7) { a == b } ...)

and `MUTANT=7` chooses one at run time. What does not compile is told by the compiler's own places,
left out, and counted as unviable. Each test is run once by itself to see which mutants it comes
by. Then each mutant is run under the tests that come by it, quickest first, until one fails. A
mutant that no test comes by is missed. Five times the test's time, 20 s at least, is a timeout,
which counts as caught.

Everything lies in target/mutants: the copy (tree), which is built in its own target folder, and
results.json. A result stands until `--again`, so that after new tests only the missed are tried.
"""

import argparse, collections, concurrent.futures, json, os, random, re, resource, shutil, signal
import subprocess, sys, threading, time
from pathlib import Path

from mutant_values import SWITCH, find, path_of, text, values

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("MUTANTS_WORK", ROOT / "target/mutants"))
TREE = WORK / "tree"
PLAN, SHELL, IDENTITY = "operator/plan/src", "operator/src", "operator/identity/src"
# Files of each group. The first five are tried whole, of the others 200 are drawn.
GROUPS = {
    "lease": [f"{SHELL}/lease.rs"],
    "identity": [f"{IDENTITY}/{name}.rs" for name in ("keyring", "review", "authority")],
    "fence": [f"{PLAN}/lead/fence.rs"],
    "record": [f"{PLAN}/record.rs", f"{PLAN}/record/*.rs"],
    "loop": [f"{PLAN}/lead/*.rs"],
    "decide": [f"{PLAN}/decide.rs", f"{PLAN}/decide/*.rs"],
    "track": [f"{PLAN}/track.rs", f"{PLAN}/track/*.rs"],
    "allocate": [f"{PLAN}/allocate.rs", f"{PLAN}/allocate/*.rs"],
}
WHOLE = ["lease", "identity", "fence", "record"]
# `MUTANTS_PACKAGES=moejob-plan` builds and tries the plan alone, in a fraction of the time. What is
# shown of plans has tests of the plan as well.
PACKAGES = os.environ.get(
    "MUTANTS_PACKAGES", "moejob-plan moejob-offline moejob-identity moejob").split()
FOLDERS = {"moejob-plan": PLAN, "moejob-identity": IDENTITY}

OPERATORS = {
    "==": ["!="], "!=": ["=="], "&&": ["||"], "||": ["&&"],
    "<": ["==", ">", "<="], ">": ["==", "<", ">="], "<=": [">"], ">=": ["<"],
    "+": ["-", "*"], "+=": ["-=", "*="], "-": ["+", "/"], "*": ["+", "/"],
    "-=": ["+=", "/="], "*=": ["+=", "/="], "/": ["%", "*"], "/=": ["%=", "*="],
    "%": ["/", "+"], "%=": ["/=", "+="], "<<": [">>"], "<<=": [">>="], ">>": ["<<"],
    ">>=": ["<<="], "&": ["|", "^"], "&=": ["|="], "|": ["&", "^"], "|=": ["&="],
    "^": ["|", "&"], "^=": ["|=", "&="],
}

# Marks in the text while it is put together: where a mutant begins and ends.
OPEN, NAMED, CLOSE = "\ue000", "\ue001", "\ue002"


# ---- the mutants of a file, as visit.rs of cargo-mutants ----------------------------------------

class Mutant:
    def __init__(self, number, group, path, function, node, genre, change, about):
        self.number, self.group, self.path, self.function = number, group, path, function
        self.line, self.column = node.start_point[0] + 1, node.start_point[1] + 1
        self.genre, self.change, self.about = genre, change, about

    def name(self):
        inside = "" if self.genre == "FnValue" else f" in {self.function}"
        return f"{self.path}:{self.line}:{self.column}: {self.about}{inside}"


class Source:
    """One file: finds its mutants, and writes itself anew with all of them."""

    def __init__(self, path, group, parser, first, switch):
        self.path, self.group, self.switch = path, group, switch
        self.code = (ROOT / path).read_bytes()
        self.root = parser.parse(self.code).root_node
        assert not self.root.has_error, path
        self.mutants, self.sites = [], collections.defaultdict(list)
        self.first, self.functions, self.spaces = first, [], []
        self.consts, self.untried, self.unviable = set(), set(), set()
        self.visit_all(self.root.children)

    def add(self, site, node, genre, change, about):
        function = "::".join(self.spaces + self.functions) if self.functions else "a constant"
        number = self.first + len(self.mutants)
        one = Mutant(number, self.group, self.path, function, node, genre, change, about)
        self.mutants.append(one)
        self.sites[site.start_byte, site.end_byte, site.type].append(one)

    def at(self, node):
        return self.sites.get((node.start_byte, node.end_byte, node.type), [])

    def visit_all(self, nodes):
        attributes = []
        for node in nodes:
            if node.type == "attribute_item":
                attributes.append(text(node))
                continue
            if node.type in ("line_comment", "block_comment"):
                continue
            skipped = any(re.search(r"cfg\(test\)|^#\[(\w+::)*test\b", one) for one in attributes)
            attributes = []
            if not skipped:
                self.visit(node)

    def visit(self, node):
        handler = getattr(self, f"visit_{node.type}", None)
        if handler is None or handler(node) is None:
            self.visit_all(node.children)

    def visit_macro_invocation(self, node):
        return True

    def visit_macro_definition(self, node):
        return True

    def visit_call_expression(self, node):
        called = text(node.child_by_field_name("function"))
        return True if re.search(r"\bwith_capacity$", called) else None

    def space(self, name, node):
        self.spaces.append(name)
        outer, self.functions = self.functions, []
        self.visit_all(node.children)
        self.spaces.pop()
        self.functions = outer
        return True

    def visit_impl_item(self, node):
        trait = node.child_by_field_name("trait")
        if trait is not None and path_of(trait)[0] == "Default":
            return True
        name = text(node.child_by_field_name("type"))
        return self.space(name if trait is None else f"<impl {text(trait)} for {name}>", node)

    def visit_trait_item(self, node):
        return self.space(text(node.child_by_field_name("name")), node)

    def visit_mod_item(self, node):
        return self.space(text(node.child_by_field_name("name")), node)

    def visit_function_item(self, node):
        name, body = text(node.child_by_field_name("name")), node.child_by_field_name("body")
        modifiers = next((text(c) for c in node.children if c.type == "function_modifiers"), "")
        method = node.parent.type == "declaration_list" and node.parent.parent.type != "mod_item"
        inside = [c for c in body.named_children if not c.type.endswith("comment")]
        if "unsafe" in modifiers or not inside or (name == "new" and method):
            return True
        self.functions.append(name)
        kind = node.child_by_field_name("return_type")
        for value in values(kind) if kind is not None else ["()"]:
            said = f" -> {' '.join(text(kind).split())}" if kind is not None else ""
            full = "::".join(self.spaces + self.functions)
            if "".join(text(body).split()) != "{" + "".join(value.split()) + "}":
                self.add(body, inside[0], "FnValue", value, f"replace {full}{said} with {value}")
        self.visit_all(node.children)
        self.functions.pop()
        return True

    def visit_binary_expression(self, node):
        root = node
        while root.parent.type == "binary_expression":
            root = root.parent
        self.operator(root, node)

    def visit_compound_assignment_expr(self, node):
        self.operator(node, node)

    def operator(self, site, node):
        operator = node.child_by_field_name("operator")
        for other in OPERATORS.get(text(operator), []):
            start, end = operator.start_byte - site.start_byte, operator.end_byte - site.start_byte
            changed = site.text[:start].decode() + other + site.text[end:].decode()
            about = f"replace {text(operator)} with {other}"
            self.add(site, operator, "BinaryOperator", changed, about)

    def visit_unary_expression(self, node):
        sign = text(node.children[0])
        if sign in ("!", "-"):
            self.add(node, node, "UnaryOperator", text(node)[1:], f"delete {sign}")

    def visit_match_expression(self, node):
        arms = [a for a in node.child_by_field_name("body").named_children if a.type == "match_arm"]
        patterns = [arm.child_by_field_name("pattern") for arm in arms]
        guards = [pattern.child_by_field_name("condition") for pattern in patterns]
        bare = [text(p).split(" if ")[0].strip() if g else text(p)
                for p, g in zip(patterns, guards)]
        total = any(words == "_" and guard is None for words, guard in zip(bare, guards))
        if "_" in bare:
            for pattern, guard, words in zip(patterns, guards, bare):
                if words != "_" and guard is None:
                    about = f"delete match arm {' '.join(words.split())}"
                    self.add(pattern, pattern, "MatchArm", "", about)
                    if not total:
                        # The match is no longer exhaustive.
                        self.unviable.add(self.mutants[-1].number)
        for guard in filter(None, guards):
            for value in ("true", "false"):
                about = f"replace match guard {' '.join(text(guard).split())} with {value}"
                self.add(guard.parent, guard, "MatchArmGuard", value, about)

    def visit_struct_expression(self, node):
        body = node.child_by_field_name("body")
        base = next((c for c in body.children if c.type == "base_field_initializer"), None)
        for field in body.children if base else []:
            if field.type in ("field_initializer", "shorthand_field_initializer"):
                word = field.child_by_field_name("field") or field.named_children[0]
                name = text(node.child_by_field_name("name"))
                value, self_ = text(base)[2:].strip(), text(word)
                change = f"{{ let base: {name} = {value}; base.{self_} }}"
                if re.fullmatch(r"[\w.]+", value):
                    change = f"{value}.{self_}"
                about = f"delete field {self_} from struct {name} expression"
                self.add(field, field, "StructField", change, about)

    # ---- the text with all mutants in it

    def write(self, dropped):
        self.dropped = dropped
        whole = self.emit(self.root)
        names = list(self.consts)
        for name in names:
            uses = rf"(?<![\w{{])(?<!fn ){name}\b(?!\()"
            whole = "\n".join(l if re.match(r"\s*(pub )?use ", l) else re.sub(uses, f"{name}()", l)
                              for l in whole.split("\n"))
            # One that is written in a text by its name.
            whole = re.sub(rf'(\{{{name}\}}[^"\n]*")', rf"\1, {name} = {name}()", whole)
            # Constants that are made of it.
            for made in re.findall(rf"\bconst (\w+): \w+ = [^;]*\b{name}\(\)", whole):
                whole = re.sub(rf"\bconst {made}: (\w+) = ([^;]*);", rf"fn {made}() -> \1 {{ \2 }}",
                               whole)
                names.append(made)
        out, places, stack, size = [], [], [], 0
        for piece in re.split(f"({OPEN}[^{NAMED}]*{NAMED}|{CLOSE})", whole):
            if piece.startswith(OPEN):
                stack.append((piece[1:-1], size))
            elif piece == CLOSE:
                numbers, start = stack.pop()
                places += [(start, size, int(number)) for number in numbers.split(",")]
            else:
                out.append(piece)
                size += len(piece.encode())
        self.places = places
        return "".join(out)

    def emit(self, node):
        mutants = [m for m in self.at(node) if m.number not in self.dropped]
        handler = getattr(self, f"emit_{node.type}", None)
        if node.type == "const_item" and self.within(node):
            return self.emit_const(node)
        if not mutants:
            return self.plain(node)
        if handler:
            return handler(node, mutants)
        return self.choice(self.plain(node), mutants)

    def plain(self, node):
        out, at = [], node.start_byte
        for child in node.children:
            out += [self.code[at:child.start_byte].decode(), self.emit(child)]
            at = child.end_byte
        return "".join(out + [self.code[at:node.end_byte].decode()])

    def within(self, node):
        inside = (node.start_byte, node.end_byte)
        return any(m.number not in self.dropped for site, many in self.sites.items()
                   if inside[0] <= site[0] and site[1] <= inside[1] for m in many)

    def mark(self, mutants, words):
        return f"{OPEN}{','.join(str(m.number) for m in mutants)}{NAMED}{words}{CLOSE}"

    def none(self, mutants):
        return f"{self.switch}::none(&[{', '.join(str(m.number) for m in mutants)}])"

    def choice(self, original, mutants):
        """One of several expressions, the original first, so that it alone says the type."""
        out = f"(if {self.none(mutants)} {{ {original} }}"
        for index, one in enumerate(mutants):
            last = index + 1 == len(mutants)
            test = "" if last else f" if {self.switch}::is({one.number})"
            out += f" else{test} {{ {self.mark([one], one.change)} }}"
        return self.mark(mutants, out + ")")

    def emit_block(self, node, mutants):
        """A function's body."""
        inside = self.plain(node)
        if mutants[0].change.startswith("::std::iter::"):
            for mutant in reversed(mutants):
                either = f"{self.switch}::Either"
                inside = (f"{{ if {self.none([mutant])} {{ {either}::One({inside}) }} else {{ "
                          f"{either}::Other({self.mark([mutant], mutant.change)}) }} }}")
            # An error of another type of items lies in the whole of it.
            return self.mark(mutants[-1:], inside)
        returns = [self.mark([m], f"if {self.switch}::is({m.number}) {{ return {m.change}; }} ")
                   for m in mutants]
        return "{ " + "".join(returns) + inside[1:]

    def emit_match_pattern(self, node, mutants):
        if mutants[0].genre == "MatchArm":
            return self.plain(node) + self.mark(mutants, f" if {self.none(mutants)}")
        guard = node.child_by_field_name("condition")
        chosen = next((m for m in mutants if m.change == "true"), None)
        other = f"{self.switch}::is({chosen.number})" if chosen else "false"
        words = f"(if {self.none(mutants)} {{ {self.emit(guard)} }} else {{ {other} }})"
        head = self.code[node.start_byte:guard.start_byte].decode()
        return head + self.mark(mutants, words)

    def emit_field_initializer(self, node, mutants):
        name, value = node.child_by_field_name("field"), node.child_by_field_name("value")
        return f"{text(name)}: {self.choice(self.emit(value), mutants)}"

    def emit_shorthand_field_initializer(self, node, mutants):
        return f"{text(node)}: {self.choice(text(node), mutants)}"

    def emit_const(self, node):
        """A constant becomes a function, since a choice is made at run time. Others of the crate
        know those that are public: these are left as they are, and not tried."""
        if any(child.type == "visibility_modifier" for child in node.children):
            inside = [m for (start, end, _), many in self.sites.items() for m in many
                      if node.start_byte <= start and end <= node.end_byte]
            self.untried |= {m.number for m in inside}
            return text(node)
        name, kind = text(node.child_by_field_name("name")), node.child_by_field_name("type")
        self.consts.add(name)
        value = self.emit(node.child_by_field_name("value"))
        return f"fn {name}() -> {text(kind)} {{ {value} }}"


def sources():
    import tree_sitter, tree_sitter_rust
    shell, folders = "moejob" in PACKAGES, tuple(FOLDERS[of] for of in PACKAGES if of in FOLDERS)
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_rust.language()))
    found, taken, first = [], set(), 1
    for group, patterns in GROUPS.items():
        for pattern in [of for of in patterns if shell or of.startswith(folders)]:
            for path in sorted(ROOT.glob(pattern)):
                name = str(path.relative_to(ROOT))
                if name not in taken and path.name != "tests.rs":
                    taken.add(name)
                    switch = "crate::mutant" if name.startswith(PLAN) else "::moejob_plan::mutant"
                    found.append(Source(name, group, parser, first, switch))
                    first += len(found[-1].mutants)
    return found


# ---- the copy, and what compiles ---------------------------------------------------------------

def copy():
    """The tree as git knows it, with files touched only where they differ."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT,
                            check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            put(TREE / name, (ROOT / name).read_bytes(), (ROOT / name).stat().st_mode)


def put(path, content, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)
        if mode:
            path.chmod(mode)


def write(found, dropped):
    for source in found:
        put(TREE / source.path, source.write(dropped).encode())
    put(TREE / PLAN / "mutant.rs", SWITCH.encode())
    root = (ROOT / PLAN / "lib.rs").read_text()
    put(TREE / PLAN / "lib.rs", (root + "\npub mod mutant;\n").encode())


def cargo(*words):
    options = [f"--config=profile.dev.package.{package}.{key}" for package in PACKAGES
               for key in ("opt-level=1", "debug=false")]
    command = ["cargo", words[0], "--offline", "--locked", "--message-format=json", *options,
               *words[1:]]
    run = subprocess.run(command, cwd=TREE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith(b"{")]
    return run.returncode, lines, run.stderr.decode()


def blamed(found, messages):
    """Mutants that the compiler's errors lie in: in the smallest one, or the nearest around."""
    by_path = {source.path: source for source in found}
    bad, strange = set(), []
    for message in messages:
        if message.get("reason") != "compiler-message" or message["message"]["level"] != "error":
            continue
        said = message["message"]
        spans = sorted(said["spans"], key=lambda span: not span["is_primary"])
        hit = set()
        for span in spans:
            source = by_path.get(span["file_name"])
            inside = [(end - start, number) for start, end, number in source.places
                      if start <= span["byte_start"] and span["byte_end"] <= end] if source else []
            least = min(inside)[0] if inside else 0
            hit = {number for size, number in inside if size == least}
            if hit:
                break
        bad |= hit
        if not hit and spans:
            strange.append(said["rendered"])
    return bad, strange


def build(_):
    copy()
    found = sources()
    dropped = set().union(*(source.unviable for source in found))
    for attempt in range(40):
        write(found, dropped)
        code, messages, errors = cargo("build", "--lib", *[f"-p{p}" for p in PACKAGES])
        if code == 0:
            break
        bad, strange = blamed(found, messages)
        print(f"round {attempt}: {len(bad)} do not compile, {len(strange)} errors are elsewhere",
              flush=True)
        if not bad - dropped:
            print("".join(strange) or errors)
            sys.exit("stuck: errors that lie in no mutant")
        dropped |= bad
    code, messages, errors = cargo("test", "--no-run", *[f"-p{p}" for p in PACKAGES])
    if code:
        rendered = [m["message"]["rendered"] for m in messages
                    if m.get("reason") == "compiler-message" and m["message"]["level"] == "error"]
        sys.exit("".join(rendered) + errors)
    binaries = [m for m in messages if m.get("executable") and m["profile"]["test"]]
    untried = set().union(*(source.untried for source in found))
    everything = [dict(vars(m), name=m.name(), viable=m.number not in dropped | untried)
                  for source in found for m in source.mutants]
    seen = collections.Counter()
    for one in everything:
        same = f"{one['path']}: {one['about']} in {one['function']}"
        one["key"] = f"{same} #{seen[same]}"
        seen[same] += 1
    save("mutants.json", everything)
    save("binaries.json", [{"path": m["executable"], "folder": str(Path(m["manifest_path"]).parent),
                            "name": m["target"]["name"]} for m in binaries])
    print(f"{len(everything)} mutants, {len(dropped)} of them unviable, "
          f"{len(untried)} in public constants and not tried")
    trace()


def save(name, value):
    (WORK / name).write_text(json.dumps(value, indent=1))


def load(name, default=None):
    path = WORK / name
    return json.loads(path.read_text()) if path.exists() else default


# ---- which tests come by which mutants ---------------------------------------------------------

def launch(binary, words, limit, **environment):
    """Exit code of a test binary, or None after its time; and its seconds."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [binary["path"], *words], cwd=binary["folder"], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "CARGO_MANIFEST_DIR": binary["folder"], **environment},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)))
    try:
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        code = None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    return code, time.monotonic() - begun


def trace():
    """Runs every test by itself: its seconds, and the mutants that it comes by."""
    tests = []
    folder = WORK / "traces"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for binary in load("binaries.json"):
        listed = subprocess.run([binary["path"], "--list", "--format", "terse"],
                                cwd=binary["folder"], capture_output=True, text=True).stdout
        ignored = subprocess.run([binary["path"], "--list", "--format", "terse", "--ignored"],
                                 cwd=binary["folder"], capture_output=True, text=True).stdout
        names = [line[:-6] for line in listed.splitlines() if line.endswith(": test")]
        tests += [(binary, name) for name in names if f"{name}: test\n" not in ignored + "\n"]

    def one(index):
        binary, name = tests[index]
        path = folder / str(index)
        code, seconds = launch(binary, ["--exact", name], 600, MUTANT_TRACE=str(path))
        by = sorted({int(line) for line in path.read_text().split()}) if path.exists() else []
        if code != 0:
            print(f"{binary['name']} {name} fails without any mutant: {code}")
        return {"binary": binary, "test": name, "seconds": seconds, "by": by if code == 0 else []}

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        traced = list(pool.map(one, range(len(tests))))
    save("tests.json", [t for t in traced if t["by"]])
    seconds = sum(t["seconds"] for t in traced if t["by"])
    print(f"{len(traced)} tests, {sum(bool(t['by']) for t in traced)} of them come by mutants, "
          f"{seconds:.0f} s")


# ---- running them ------------------------------------------------------------------------------

def chosen(everything, groups, sample, seed):
    some = [m for m in everything if m["viable"] and (not groups or m["group"] in groups)]
    if sample:
        whole = [m for m in some if m["group"] in WHOLE]
        rest = [m for m in some if m["group"] not in WHOLE]
        some = whole + random.Random(seed).sample(rest, min(sample, len(rest)))
    return some


def run(options):
    everything, tests = load("mutants.json"), load("tests.json")
    results, lock = load("results.json", {}), threading.Lock()
    mutants = chosen(everything, options.groups, options.sample, options.seed)
    todo = [m for m in mutants if options.again or m["key"] not in results
            or (options.missed and results[m["key"]]["end"] == "missed")]
    print(f"{len(mutants)} mutants chosen, {len(todo)} to be tried", flush=True)
    by = collections.defaultdict(list)
    for test in tests:
        for number in test["by"]:
            by[number].append(test)
    kills = collections.Counter()

    def one(mutant):
        def cost(test):
            # Tests that have caught others of this file are likely to catch this one.
            return test["seconds"] / (1 + kills[mutant["path"], test["test"]])
        end, caught_by, begun = "missed", None, time.monotonic()
        for test in sorted(by[mutant["number"]], key=cost):
            limit = max(20, 5 * test["seconds"])
            code, _ = launch(test["binary"], ["--exact", test["test"]], limit,
                             MUTANT=str(mutant["number"]))
            if code != 0:
                end, caught_by = ("timeout" if code is None else "caught"), test
                kills[mutant["path"], test["test"]] += 1
                break
        with lock:
            results[mutant["key"]] = {
                "end": end, "group": mutant["group"], "reached": len(by[mutant["number"]]),
                "by": caught_by and f"{caught_by['binary']['name']} {caught_by['test']}",
                "seconds": round(time.monotonic() - begun, 1)}
            save("results.json", results)
            if end != "caught":
                print(f"{end} ({len(by[mutant['number']])} tests): {mutant['name']}", flush=True)

    random.Random(0).shuffle(todo)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, todo))
    report(options)


def report(options):
    """Results of the mutants of the last build that were tried."""
    results = load("results.json", {})
    everything = load("mutants.json")
    print("| group | mutants | unviable | tried | caught | by a timeout | missed "
          "| caught of viable |")
    print("|---|---|---|---|---|---|---|---|")
    for group in [*GROUPS, None]:
        some = [m for m in everything if group in (None, m["group"])]
        ends = collections.Counter(results[m["key"]]["end"] for m in some
                                   if m["viable"] and m["key"] in results)
        tried, caught = sum(ends.values()), ends["caught"] + ends["timeout"]
        share = f"{100 * caught / tried:.1f}%" if tried else "-"
        unviable = sum(not m["viable"] for m in some)
        print(f"| {group or 'all'} | {len(some)} | {unviable} | {tried} | "
              f"{caught} | {ends['timeout']} | {ends['missed']} | {share} |")
    if options.names:
        for m in everything:
            if m["viable"] and results.get(m["key"], {}).get("end") == "missed":
                print(f"missed ({results[m['key']]['reached']}): {m['name']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(required=True)
    verbs.add_parser("list").set_defaults(
        do=lambda _: print("\n".join(m.name() for s in sources() for m in s.mutants)))
    verbs.add_parser("build").set_defaults(do=build)
    runs = verbs.add_parser("run")
    runs.add_argument("groups", nargs="*", choices=[*GROUPS, []])
    runs.add_argument("--sample", type=int, default=0, help="so many of all but the first four")
    runs.add_argument("--seed", type=int, default=1)
    runs.add_argument("--jobs", type=int, default=2)
    runs.add_argument("--again", action="store_true", help="also those that have a result")
    runs.add_argument("--missed", action="store_true", help="also those that were missed")
    runs.add_argument("--names", action="store_true")
    runs.set_defaults(do=run)
    reports = verbs.add_parser("report")
    reports.add_argument("--names", action="store_true", help="name the missed")
    reports.set_defaults(do=report)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
