//! The order of a gang's nodes, in which ranks are given: expert groups inside a part first, then
//! least crossings of the ring, then least crossings of both trees.
//!
//! ```text
//! paths of nodes -> Part, a tree of parts -> an order of siblings everywhere -> order of nodes
//! ```
//!
//! An order that keeps every part together has the least ring crossings at every level, one a part.
//! In such an order what a part contributes depends on where it begins and on nothing else: the
//! tree links inside it, and the expert groups inside it. So the best order of few or like parts is
//! found exactly, by dynamic programming over what stands before; that of many unlike ones by
//! exchanging siblings until nothing gets better, from several beginnings. Ties keep the order
//! that was given.

use super::trees::Inside;
use std::collections::BTreeMap;

/// Sums that the exact search may look at; beyond it siblings are exchanged.
const EXACT_WORK_MAX: u64 = 150_000;
/// Parts that exchanges may look at, over all beginnings.
const EXCHANGE_WORK_MAX: u64 = 1_000_000;
/// Orders from which exchanges begin, beside the one that was given.
const BEGINNINGS: u64 = 12;

/// Expert groups first, then links of the trees inside leaves, then those inside other parts.
type Score = u64;
const GROUP: Score = 1 << 40;
const LINK: Score = 1 << 20;

/// What is arranged.
pub struct Wish {
    /// Nodes of an expert group; 1 where a group lies in a node.
    pub group: u32,
    /// Which element of a path names the leaf: crossings are counted between leaves.
    pub leaf: usize,
}

/// A part of the fabric: nodes, or parts.
struct Part {
    /// Elements of a path that all its nodes share.
    level: usize,
    size: u32,
    /// Parts that are made alike have one number.
    class: usize,
    inner: Vec<Part>,
    /// Of a part without parts: which nodes.
    nodes: Vec<usize>,
}

/// An order of `0..paths.len()`. A path names the parts that a node lies in, from wide to narrow;
/// all are of one length. What is given first comes first where it makes no difference.
pub fn arrange(paths: &[Vec<u32>], wish: &Wish) -> Vec<usize> {
    let nodes: Vec<usize> = (0..paths.len()).collect();
    if paths.len() < 3 || paths[0].is_empty() {
        return together(&nodes, paths);
    }
    let mut classes = BTreeMap::new();
    let root = part(nodes, paths, 0, &mut classes);
    let mut scorer = Scorer { inside: Inside::new(paths.len() as u32), wish, work: 0 };
    prepare(&root, &mut scorer.inside);
    let mut memo = BTreeMap::new();
    let order = match scorer.best(&root, 0, &mut memo) {
        Some(_) => {
            let mut order = Vec::with_capacity(paths.len());
            scorer.write(&root, 0, &memo, &mut order);
            order
        }
        None => scorer.exchange(root),
    };
    split_for_groups(order, paths, wish)
}

/// Nodes of one part beside each other, parts in the order in which they first appear.
fn together(nodes: &[usize], paths: &[Vec<u32>]) -> Vec<usize> {
    let mut order = nodes.to_vec();
    let first = |node: usize, level: usize| {
        let same = |other: &usize| paths[*other][..=level] == paths[node][..=level];
        nodes.iter().position(|other| same(other)).unwrap_or(0)
    };
    order.sort_by_cached_key(|node| {
        (0..paths[*node].len()).map(|level| first(*node, level)).collect::<Vec<_>>()
    });
    order
}

/// What makes two parts alike: level, size and the classes within.
type Kind = (usize, u32, Vec<usize>);

fn part(
    nodes: Vec<usize>,
    paths: &[Vec<u32>],
    level: usize,
    classes: &mut BTreeMap<Kind, usize>,
) -> Part {
    let (size, depth) = (nodes.len() as u32, paths[nodes[0]].len());
    let mut inner: Vec<Part> = Vec::new();
    let mut own = nodes.clone();
    // A level at which nothing is told apart is passed over.
    let told_apart = |at: usize| nodes.iter().any(|node| paths[*node][at] != paths[nodes[0]][at]);
    if let Some(at) = (level..depth).find(|at| told_apart(*at)) {
        let mut groups: Vec<(u32, Vec<usize>)> = Vec::new();
        for node in nodes {
            let name = paths[node][at];
            match groups.iter_mut().find(|(of, _)| *of == name) {
                Some((_, group)) => group.push(node),
                None => groups.push((name, vec![node])),
            }
        }
        inner = groups.into_iter().map(|(_, of)| part(of, paths, at + 1, classes)).collect();
        own = Vec::new();
    }
    let mut within: Vec<usize> = inner.iter().map(|part| part.class).collect();
    within.sort_unstable();
    let count = classes.len();
    let class = *classes.entry((level, size, within)).or_insert(count);
    Part { level, size, class, inner, nodes: own }
}

fn prepare(part: &Part, inside: &mut Inside) {
    inside.prepare(part.size);
    part.inner.iter().for_each(|inner| prepare(inner, inside));
}

struct Scorer<'a> {
    inside: Inside,
    wish: &'a Wish,
    work: u64,
}

/// By class and first node: the best score, and the classes within in their order.
type Memo = BTreeMap<(usize, u32), (Score, Vec<usize>)>;

impl Scorer<'_> {
    /// Of the part itself.
    fn own(&self, part: &Part, first: u32) -> Score {
        let group = self.wish.group.max(1);
        let groups = match group {
            1 => 0,
            _ => ((first + part.size) / group).saturating_sub(first.div_ceil(group)),
        };
        // A wider part that has only one leaf stands for it.
        let narrower = |part: &Part| part.level > self.wish.leaf + 1;
        let is_leaf = !narrower(part) && part.inner.iter().all(narrower);
        let links = Score::from(self.inside.of(first, part.size));
        Score::from(groups) * GROUP + links * if is_leaf { LINK } else { 1 }
    }

    /// The best score of the part where it begins at `first`; none where that is too much work.
    fn best(&mut self, part: &Part, first: u32, memo: &mut Memo) -> Option<Score> {
        if let Some((score, _)) = memo.get(&(part.class, first)) {
            return Some(*score);
        }
        let own = self.own(part, first);
        let (inner, order) = self.best_order(part, first, memo)?;
        memo.insert((part.class, first), (own + inner, order));
        Some(own + inner)
    }

    fn best_order(
        &mut self,
        part: &Part,
        first: u32,
        memo: &mut Memo,
    ) -> Option<(Score, Vec<usize>)> {
        // One of each class stands for all, in the order of their first.
        let mut kinds: Vec<(&Part, usize)> = Vec::new();
        for inner in &part.inner {
            match kinds.iter_mut().find(|(of, _)| of.class == inner.class) {
                Some((_, count)) => *count += 1,
                None => kinds.push((inner, 1)),
            }
        }
        let mut states = 1u64;
        let mut weights = Vec::new();
        for (_, count) in &kinds {
            weights.push(states as usize);
            states = states.saturating_mul(*count as u64 + 1);
        }
        self.work = self.work.saturating_add(states.saturating_mul(kinds.len() as u64));
        if self.work > EXACT_WORK_MAX {
            return None;
        }
        // A state is how many of each kind have been placed; the best of what follows it.
        let states = states as usize;
        let placed = |state: usize, kind: usize| state / weights[kind] % (kinds[kind].1 + 1);
        let mut follows: Vec<(Score, usize)> = vec![(0, usize::MAX); states];
        for state in (0..states.saturating_sub(1)).rev() {
            let size = |kind: usize| placed(state, kind) as u32 * kinds[kind].0.size;
            let begins = first + (0..kinds.len()).map(size).sum::<u32>();
            let mut best: Option<(Score, usize)> = None;
            for (kind, (of, count)) in kinds.iter().enumerate() {
                if placed(state, kind) < *count {
                    let score = self.best(of, begins, memo)? + follows[state + weights[kind]].0;
                    if best.is_none_or(|(other, _)| score > other) {
                        best = Some((score, kind));
                    }
                }
            }
            follows[state] = best.unwrap_or((0, usize::MAX));
        }
        let (mut state, mut order) = (0, Vec::new());
        while state + 1 < states {
            let kind = follows[state].1;
            order.push(kinds[kind].0.class);
            state += weights[kind];
        }
        Some((follows[0].0, order))
    }

    /// The nodes of the part in the order that `best` found.
    fn write(&self, part: &Part, first: u32, memo: &Memo, order: &mut Vec<usize>) {
        order.extend(&part.nodes);
        let Some((_, classes)) = memo.get(&(part.class, first)) else { return };
        let mut begins = first;
        let mut left: Vec<&Part> = part.inner.iter().collect();
        for class in classes {
            let Some(at) = left.iter().position(|of| of.class == *class) else { continue };
            let inner = left.remove(at);
            self.write(inner, begins, memo, order);
            begins += inner.size;
        }
    }

    fn score(&mut self, part: &Part, first: u32) -> Score {
        self.work += 1;
        self.own(part, first) + self.run(&part.inner, first)
    }

    /// Exchanges siblings while that brings something, from several beginnings.
    fn exchange(&mut self, mut root: Part) -> Vec<usize> {
        self.work = 0;
        self.descend(&mut root, EXCHANGE_WORK_MAX / 2);
        let mut found = (self.score(&root, 0), flat(&root));
        for beginning in 0..BEGINNINGS {
            if self.work >= EXCHANGE_WORK_MAX {
                break;
            }
            shuffle(&mut root, beginning);
            self.descend(&mut root, EXCHANGE_WORK_MAX);
            let score = self.score(&root, 0);
            if score > found.0 {
                found = (score, flat(&root));
            }
        }
        found.1
    }

    fn descend(&mut self, root: &mut Part, work_max: u64) {
        while self.improve(root, 0, work_max) {}
    }

    /// Looks at every pair of siblings once. Whether an exchange brought something.
    fn improve(&mut self, part: &mut Part, first: u32, work_max: u64) -> bool {
        let mut improved = false;
        let mut begins = first;
        for a in 0..part.inner.len() {
            for b in a + 1..part.inner.len() {
                if self.work >= work_max {
                    return false;
                }
                // What stands before them and behind them stays where it is.
                if part.inner[a].class != part.inner[b].class {
                    let before = self.run(&part.inner[a..=b], begins);
                    part.inner.swap(a, b);
                    match self.run(&part.inner[a..=b], begins) > before {
                        true => improved = true,
                        false => part.inner.swap(a, b),
                    }
                }
            }
            begins += part.inner[a].size;
        }
        let mut begins = first;
        for inner in &mut part.inner {
            improved |= self.improve(inner, begins, work_max);
            begins += inner.size;
        }
        improved
    }

    /// Of siblings that stand beside each other.
    fn run(&mut self, parts: &[Part], first: u32) -> Score {
        let (mut score, mut begins) = (0, first);
        for part in parts {
            score += self.score(part, begins);
            begins += part.size;
        }
        score
    }
}

fn flat(part: &Part) -> Vec<usize> {
    let inner = part.inner.iter().flat_map(flat);
    part.nodes.iter().copied().chain(inner).collect()
}

/// Another beginning: by size in both directions, then by numbers that are always the same.
fn shuffle(part: &mut Part, beginning: u64) {
    let mut state = beginning.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    part.inner.sort_by_cached_key(|inner| match beginning {
        0 => u64::from(inner.size),
        1 => u64::from(u32::MAX - inner.size),
        _ => {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
            state >> 33
        }
    });
    part.inner.iter_mut().for_each(|inner| shuffle(inner, beginning.wrapping_add(2)));
}

/// Where whole leaves in a row break more expert groups than need be, what remains of each leaf
/// beyond whole groups is put together elsewhere: a broken group costs more than a link of a ring.
fn split_for_groups(order: Vec<usize>, paths: &[Vec<u32>], wish: &Wish) -> Vec<usize> {
    let group = wish.group.max(1) as usize;
    let leaf = |node: usize| &paths[node][..=wish.leaf.min(paths[node].len() - 1)];
    let mut leaves: Vec<Vec<usize>> = Vec::new();
    for node in &order {
        match leaves.last_mut() {
            Some(run) if leaf(run[0]) == leaf(*node) => run.push(*node),
            _ => leaves.push(vec![*node]),
        }
    }
    let possible: usize = leaves.iter().map(|run| run.len() / group).sum();
    let whole = |order: &[usize]| {
        order.chunks_exact(group).filter(|of| of.iter().all(|n| leaf(*n) == leaf(of[0]))).count()
    };
    if group == 1 || whole(&order) == possible {
        return order;
    }
    // Remains in the order of their leaves make the mixed groups, so these keep to neighbours. A
    // mixed group follows the leaf of its first node.
    let mains = leaves.iter().map(|run| run.len() / group * group);
    let mains: Vec<usize> = mains.collect();
    let remains: Vec<usize> =
        leaves.iter().zip(&mains).flat_map(|(run, main)| run[*main..].to_vec()).collect();
    let mut mixed = remains.chunks(group).peekable();
    let mut split = Vec::with_capacity(order.len());
    for (run, main) in leaves.iter().zip(&mains) {
        split.extend(&run[..*main]);
        let follows = |of: &&[usize]| of.len() == group && leaf(of[0]) == leaf(run[0]);
        while let Some(next) = mixed.next_if(follows) {
            split.extend(next);
        }
    }
    mixed.for_each(|rest| split.extend(rest));
    split
}
