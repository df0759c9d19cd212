//! What each rank owns of a whole table, and what it is sent for that: counted by kinds of
//! parameters, not one by one.
//!
//! Parameters of one size with the same holders differ by their place in the table alone, by which
//! their runs rotate over the holders ([`Layout::owned`](crate::Layout::owned)). So of each such
//! kind it is counted how many stand at each remainder of the place, and every rank's sum follows
//! from these counts. That takes a step a parameter and a step a rank, where asking each rank for
//! each parameter takes their product: hours for thousands of ranks and of experts.

use crate::layout::{BLOCK, elements, owned_blocks};
use crate::mesh::Mesh;
use crate::model::{MATRICES, ModelConfig, Role, Visitor, numel};
use crate::owners::Holders;
use crate::reduction::{ALIGNMENT_ELEMENTS, Flats, subtrees_of};
use std::collections::BTreeMap;
use std::fmt::Arguments;

/// What each rank owns where tensors are divided, by rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shares {
    pub blocks: Vec<u64>,
    pub elements: Vec<u64>,
    /// Rows of the table.
    pub params: u64,
}

impl Shares {
    pub fn new(model: &ModelConfig, holders: &Holders) -> Shares {
        let mut census = Census { holders, kinds: Vec::new(), known: BTreeMap::new(), params: 0 };
        model.walk(&mut census);
        let Census { kinds, params, .. } = census;
        let world = holders.sets()[0].len();
        let mut shares = Shares { blocks: vec![0; world], elements: vec![0; world], params };
        for Kind { set, numel, changes } in kinds {
            let count = |sum: &mut u64, change: i64| {
                *sum = sum.wrapping_add_signed(change);
                Some(*sum)
            };
            let places: Vec<u64> = changes.into_iter().scan(0, count).collect();
            shares.add(&holders.sets()[set], numel, &places);
        }
        shares
    }

    /// The holder at `position` has the turn `position - place` (modulo holders) of a parameter.
    /// All turns get `each` blocks and the first `more` of them one more; the last turn that gets
    /// any has the tensor's end, whose block may be cut short.
    /// Of so many parameters of `numel` elements, by remainder of the place, `ranks` are holders.
    fn add(&mut self, ranks: &[u32], numel: u64, places: &[u64]) {
        let count = ranks.len();
        let blocks = numel.div_ceil(BLOCK);
        if count == 0 || blocks == 0 {
            return;
        }
        let (each, more) = (blocks / count as u64, (blocks % count as u64) as usize);
        let last = if each > 0 { count - 1 } else { more - 1 };
        let missing = blocks * BLOCK - numel;
        let back = |position: usize, by: usize| places[(position + count - by) % count];
        let all: u64 = places.iter().sum();
        // Of parameters of which the holder has one of the first `more` turns.
        let mut longer: u64 = (0..more).map(|turn| back(0, turn)).sum();
        for (position, rank) in ranks.iter().enumerate() {
            if position > 0 && more > 0 {
                longer = longer + places[position] - back(position, more);
            }
            let owned = all * each + longer;
            self.blocks[*rank as usize] += owned;
            self.elements[*rank as usize] += owned * BLOCK - back(position, last) * missing;
        }
    }
}

/// Parameters of one size with the same holders.
struct Kind {
    set: usize,
    numel: u64,
    /// How many stand at each remainder of their place by the number of holders, less how many
    /// stand at the one before: so a run of them is two steps, however long it is.
    changes: Vec<i64>,
}

struct Census<'a> {
    holders: &'a Holders,
    kinds: Vec<Kind>,
    known: BTreeMap<(usize, u64), usize>,
    params: u64,
}

impl Census<'_> {
    /// The next `count` parameters of the table.
    fn run(&mut self, set: usize, numel: u64, count: u64) {
        let holders = self.holders.sets()[set].len() as u64;
        let first = self.params;
        self.params += count;
        if holders == 0 {
            return;
        }
        let kinds = &mut self.kinds;
        let at = *self.known.entry((set, numel)).or_insert_with(|| {
            kinds.push(Kind { set, numel, changes: vec![0; holders as usize] });
            kinds.len() - 1
        });
        let changes = &mut kinds[at].changes;
        changes[0] += (count / holders) as i64;
        let (from, rest) = (first % holders, count % holders);
        let until = from + rest;
        changes[from as usize] += 1;
        match changes.get_mut(until as usize) {
            Some(change) => *change -= 1,
            // Up to the end, and on from the beginning.
            None if until > holders => {
                changes[0] += 1;
                changes[(until - holders) as usize] -= 1;
            }
            None => {}
        }
    }
}

impl Visitor for Census<'_> {
    fn param(&mut self, _: Arguments<'_>, shape: &[u32], role: Role) {
        self.run(self.holders.set(role), numel(shape), 1);
    }

    fn experts(&mut self, model: &ModelConfig, layer: u32) {
        let numel = numel(&[model.slices().width, model.hidden_size]);
        for run in self.holders.row(layer).chunk_by(|one, other| one == other) {
            self.run(run[0], numel, run.len() as u64 * u64::from(MATRICES));
        }
    }
}

/// Where one rank stands in each set of holders, and how many partial gradients the others of the
/// set send it for each run that it owns.
pub struct Standing<'a> {
    holders: &'a Holders,
    mesh: Mesh,
    rank: u32,
    micro_batches: u32,
    /// By set.
    positions: Vec<Option<usize>>,
    /// By set, of parameters that all compute, and of experts: worked out when it is asked for.
    nodes: [Vec<Option<u64>>; 2],
}

impl<'a> Standing<'a> {
    pub fn new(holders: &'a Holders, mesh: Mesh, rank: u32, micro_batches: u32) -> Standing<'a> {
        let sets = holders.sets();
        let positions = sets.iter().map(|set| set.binary_search(&rank).ok()).collect();
        let nodes = [vec![None; sets.len()], vec![None; sets.len()]];
        Standing { holders, mesh, rank, micro_batches, positions, nodes }
    }

    /// `(position, holders)` of the rank among those of a parameter; none: it holds none of it.
    pub fn position(&self, role: Role) -> Option<(usize, usize)> {
        let set = self.holders.set(role);
        Some((self.positions[set]?, self.holders.sets()[set].len()))
    }

    /// Nodes of the tree that the other holders send for a run.
    pub fn sent(&mut self, role: Role) -> u64 {
        let set = self.holders.set(role);
        let of_expert = matches!(role, Role::Expert { .. });
        if let Some(nodes) = self.nodes[usize::from(of_expert)][set] {
            return nodes;
        }
        let ranks = &self.holders.sets()[set];
        let others = ranks.iter().filter(|other| **other != self.rank);
        let nodes = others
            .map(|other| subtrees_of(&self.mesh, ranks, of_expert, *other, self.micro_batches))
            .sum();
        self.nodes[usize::from(of_expert)][set] = Some(nodes);
        nodes
    }
}

/// What one rank holds and owns of the table, and what it is sent for that.
pub struct Own<'a> {
    standing: Standing<'a>,
    /// Place in the table of the next parameter.
    next: usize,
    pub flats: Flats,
    /// Elements that peers send of the owned gradients.
    pub inbox: u64,
    /// Blocks of the largest owned run.
    pub blocks_max: u64,
}

impl<'a> Own<'a> {
    pub fn new(model: &ModelConfig, standing: Standing<'a>) -> Own<'a> {
        let flats = Flats::default();
        let mut own = Own { standing, next: 0, flats, inbox: 0, blocks_max: 0 };
        model.walk(&mut own);
        own
    }
}

impl Visitor for Own<'_> {
    fn param(&mut self, _: Arguments<'_>, shape: &[u32], role: Role) {
        let (at, numel) = (self.next, numel(shape));
        self.next += 1;
        let Some((position, count)) = self.standing.position(role) else { return };
        match role {
            Role::Expert { .. } => self.flats.experts.push(at, numel),
            _ => self.flats.dense.push(at, numel),
        }
        let owned = owned_blocks(numel, at, count, position);
        let run = elements(&owned, numel);
        self.flats.owned.push(at, run.end - run.start);
        if !run.is_empty() {
            self.blocks_max = self.blocks_max.max(owned.end - owned.start);
            let sent = self.standing.sent(role);
            self.inbox += sent * (run.end - run.start).next_multiple_of(ALIGNMENT_ELEMENTS);
        }
    }

    /// Of thousands of experts a rank holds a few.
    fn experts(&mut self, model: &ModelConfig, layer: u32) {
        let holders = self.standing.holders;
        for (expert, set) in (0..).zip(holders.row(layer)) {
            match self.standing.positions[*set] {
                Some(_) => model.expert_params(layer, expert, self),
                None => self.next += MATRICES as usize,
            }
        }
    }
}
