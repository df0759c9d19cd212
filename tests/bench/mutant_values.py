"""What mutants.py puts into the copy of the sources: the switch, and values of a type."""

import re

# What `mutant::is` and its kin are, in the copy.
SWITCH = r'''
//! Chooses a mutant, or writes down which were come by.
use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

enum Mode { Plain, One(u32), Trace(String) }

fn mode() -> &'static Mode {
    static MODE: OnceLock<Mode> = OnceLock::new();
    MODE.get_or_init(|| match (std::env::var("MUTANT"), std::env::var("MUTANT_TRACE")) {
        (Ok(number), _) => Mode::One(number.parse().expect("a number")),
        (_, Ok(path)) => Mode::Trace(path),
        _ => Mode::Plain,
    })
}

#[cold]
fn trace(path: &str, number: u32) {
    static SEEN: [AtomicBool; 20_000] = [const { AtomicBool::new(false) }; 20_000];
    if !SEEN[number as usize].swap(true, Relaxed) {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        file.expect("the trace").write_all(format!("{number}\n").as_bytes()).expect("written");
    }
}

#[inline]
pub fn is(number: u32) -> bool {
    !none(&[number])
}

/// Whether the program is as it was, as to these.
#[inline]
pub fn none(numbers: &[u32]) -> bool {
    match mode() {
        Mode::Plain => true,
        Mode::One(one) => !numbers.contains(one),
        Mode::Trace(path) => {
            numbers.iter().for_each(|number| trace(path, *number));
            true
        }
    }
}

/// Iterators of two types behind one `impl Iterator`.
#[derive(Clone)]
pub enum Either<A, B> { One(A), Other(B) }
impl<T, A: Iterator<Item = T>, B: Iterator<Item = T>> Iterator for Either<A, B> {
    type Item = T;
    fn next(&mut self) -> Option<T> {
        match self { Either::One(one) => one.next(), Either::Other(other) => other.next() }
    }
}
'''

def text(node):
    return node.text.decode()


def path_of(node):
    """Last segment, its type arguments, and whether it is one bare word."""
    bare = node.type in ("type_identifier", "primitive_type")
    if node.type == "generic_type":
        name = text(node.child_by_field_name("type")).split("::")[-1]
        arguments = node.child_by_field_name("type_arguments").named_children
        types = [a for a in arguments if a.type not in ("lifetime", "type_binding", "line_comment")]
        return name, types, False
    return text(node).split("::")[-1], [], bare


UNSIGNED = {"u8", "u16", "u32", "u64", "u128", "usize"}
SIGNED = {"i8", "i16", "i32", "i64", "i128", "isize"}


def values(node):
    kind = node.type
    if kind in ("type_identifier", "primitive_type", "scoped_type_identifier", "generic_type"):
        return path_values(node)
    if kind == "unit_type":
        return ["()"]
    if kind == "array_type":
        element, length = node.child_by_field_name("element"), node.child_by_field_name("length")
        if length is None:
            return slice_values(element)
        return [f"[{value}; {text(length)}]" for value in values(element)]
    if kind == "reference_type":
        inner = node.child_by_field_name("type")
        mutable = any(child.type == "mutable_specifier" for child in node.children)
        if text(inner) == "str" and not mutable:
            return ['""', '"xyzzy"']
        if inner.type == "array_type" and inner.child_by_field_name("length") is None:
            return slice_values(inner.child_by_field_name("element"))
        return [f"Box::leak(Box::new({value}))" for value in values(inner)]
    if kind == "tuple_type":
        products = [[]]
        for element in node.named_children:
            products = [one + [value] for one in products for value in values(element)]
        return [f"({', '.join(one)}{',' if len(one) == 1 else ''})" for one in products]
    if text(node).startswith("impl "):
        found = re.search(r"\bIterator<", text(node))
        item = found and find(node, lambda n: n.type == "type_binding")
        if not item:
            return []
        inner = values(item.child_by_field_name("type"))
        return ["::std::iter::empty()"] + [f"::std::iter::once({value})" for value in inner]
    return [] if kind == "never_type" else ["Default::default()"]


def slice_values(element):
    return ["Vec::leak(Vec::new())"] + [f"Vec::leak(vec![{value}])" for value in values(element)]


def path_values(node):
    name, types, bare = path_of(node)
    first = values(types[0]) if types else None
    if bare and name == "bool":
        return ["true", "false"]
    if bare and name == "String":
        return ["String::new()", '"xyzzy".into()']
    if bare and name == "str":
        return ['""', '"xyzzy"']
    if bare and name in UNSIGNED:
        return ["0", "1"]
    if bare and name in SIGNED:
        return ["0", "1", "-1"]
    if bare and name in ("f32", "f64"):
        return ["0.0", "1.0", "-1.0"]
    if re.fullmatch(r"NonZero(U\w+)", name):
        return ["1.try_into().unwrap()"]
    if name == "Result":
        if first is None:
            return ["Ok(Default::default())"]
        return [f"Ok({value})" for value in first]
    if name == "Option" and types:
        return ["None"] + [f"Some({value})" for value in first]
    if name == "Vec" and types:
        return ["vec![]"] + [f"vec![{value}]" for value in first]
    if name == "Cow" and types:
        both = lambda v: (f"Cow::Borrowed({v})", f"Cow::Owned({v}.to_owned())")
        return [made for v in first for made in both(v)]
    if name in ("Box", "Cell", "RefCell", "Arc", "Rc", "Mutex") and len(types) == 1:
        return [f"{name}::new({value})" for value in first]
    if name in ("BinaryHeap", "BTreeSet", "HashSet", "LinkedList", "VecDeque") and len(types) == 1:
        return [f"{name}::new()"] + [f"{name}::from_iter([{value}])" for value in first]
    if name in ("BTreeMap", "HashMap") and len(types) == 2:
        pairs = [(k, v) for k in first for v in values(types[1])]
        return [f"{name}::new()"] + [f"{name}::from_iter([({k}, {v})])" for k, v in pairs]
    if len(types) == 1:
        calls = lambda v: (f"from_iter([{v}])", f"new({v})", f"from({v})")
        made = [f"{name}::{call}" for v in first for call in calls(v)]
        return [f"{name}::new()"] + made
    return ["Default::default()"]


def find(node, wanted):
    if wanted(node):
        return node
    return next((found for child in node.children if (found := find(child, wanted))), None)
