//! Gradients from leaves to owners, and weights from owners to holders.
//!
//! ```text
//! backward -> leaf on a stack -> merges (one tree over all micro-batches, protocol/tree.rs)
//!          -> nodes to the owner of each run -> the tree's root -> squares, AdamW
//!          -> new weights to the other holders
//! ```
//! Who sends what is a function of the layout, so it is worked out once an attempt, as lists of
//! buffers.

use crate::engine::backward::Leaf;
use crate::engine::buckets::move_corrections;
use crate::engine::handles::{Dense, Experts, is_frozen, slice};
use crate::engine::links::{Links, Parcel};
use crate::engine::model::Model;
use crate::engine::numbers::class_of;
use crate::engine::round::Round;
use moejob_kernels::{AdamWUpdate, Add, BlockSquareSums, Buffer, Fill};
use moejob_protocol::config::AdamW as AdamWConfig;
use moejob_protocol::layout::{BLOCK, elements};
use moejob_protocol::memory::EXCHANGE_BYTES_MAX;
use moejob_protocol::model::{Param, Role};
use moejob_protocol::reduction::{contribution, leaf_blocks};
use moejob_protocol::tree::{Counter, Node, reduce, root, subtrees};
use std::ops::Range;

/// The stacks of this rank and everything that happens to them in a step.
#[derive(Debug)]
pub struct TreeSums {
    dense: Stack<Dense>,
    /// In ep order.
    experts: Vec<Stack<Vec<Experts>>>,
    /// Partial gradients of neighbouring sources, before anything is sent.
    local: Vec<(Buffer, Buffer)>,
    /// Nodes to owners.
    nodes: Vec<Stage>,
    /// What owners add up.
    finish: Vec<(Buffer, Buffer)>,
    /// New weights to holders.
    weights: Vec<Stage>,
    pub runs: Vec<Run>,
}

/// A binary-counter stack: entry i is `slots[i]`.
#[derive(Debug)]
struct Stack<Handles> {
    counter: Counter,
    slots: Vec<Buffer>,
    handles: Vec<Handles>,
}

/// One exchange.
#[derive(Debug, Default)]
struct Stage {
    sends: Vec<Parcel>,
    receives: Vec<Parcel>,
}

/// The run of a parameter that this rank owns.
#[derive(Clone, Debug)]
pub struct Run {
    /// In the table.
    pub index: usize,
    /// Of the flattened parameter.
    pub elements: Range<u64>,
    pub weight: Buffer,
    pub moment1: Buffer,
    pub moment2: Buffer,
    /// Complete once reduced.
    gradient: Buffer,
    /// f64, one a block.
    square_sums: Buffer,
    /// Of StepParams.
    class: usize,
    frozen: bool,
}

impl<Handles> Stack<Handles> {
    fn new(slots: &[Buffer], handles: impl Fn(Buffer) -> Handles) -> Stack<Handles> {
        let handles = slots.iter().map(|slot| handles(*slot)).collect();
        Stack { counter: Counter::default(), slots: slots.to_vec(), handles }
    }

    /// Where the next leaf goes.
    fn top(&self) -> &Handles {
        &self.handles[self.counter.nodes().len()]
    }

    /// Pushes the leaf that was just computed.
    fn push(&mut self, leaf: u32, model: &mut Model) {
        let mut top = self.counter.nodes().len();
        for _ in 0..self.counter.push(leaf) {
            model.device.add(&Add { a: self.slots[top - 1], b: self.slots[top] });
            top -= 1;
        }
    }
}

impl TreeSums {
    pub fn new(model: &Model) -> TreeSums {
        let (config, layout, rank) = (&model.config, &model.layout, model.rank);
        let (params, flats) = (&model.params, &model.shape.flats);
        let stacks = &model.buffers.gradients;
        let dense = Stack::new(&stacks.dense, |slot| {
            Dense::new(config, params, &|index| slice(slot, &flats.dense, index))
        });
        let of_source = |slots: &Vec<Buffer>| {
            Stack::new(slots, |slot| {
                let find = |index| slice(slot, &flats.experts, index);
                Experts::new(config, layout, rank, params, &find)
            })
        };
        let mut gradients = TreeSums {
            dense,
            experts: stacks.experts.iter().map(of_source).collect(),
            local: Vec::new(),
            nodes: Vec::new(),
            finish: Vec::new(),
            weights: Vec::new(),
            runs: Vec::new(),
        };
        gradients.plan(model);
        gradients
    }

    /// Works out every transfer, parameter by parameter.
    fn plan(&mut self, model: &Model) {
        let world = model.layout.mesh.world();
        let mut cursor = Cursor::default();
        let mut bytes = u64::MAX;
        for (index, param) in model.params.iter().enumerate() {
            let size = param.numel() * model.shape.float_bytes;
            // A function of the table alone: all ranks cut at the same parameters.
            if bytes.saturating_add(size) > EXCHANGE_BYTES_MAX {
                self.nodes.push(Stage::new(world));
                self.weights.push(Stage::new(world));
                bytes = 0;
            }
            bytes += size;
            self.plan_param(model, index, param, &mut cursor);
        }
    }

    fn plan_param(&mut self, model: &Model, index: usize, param: &Param, cursor: &mut Cursor) {
        let (config, layout, me) = (&model.config, &model.layout, model.rank);
        let micro_batches = model.shape.micro_batches;
        let owners = layout.owners(config, index, param);
        let own_run = layout.owned(config, index, param, me);
        let own_run = elements(&own_run, param.numel());
        let Some(weight) = model.weight(index) else { return };
        let own_nodes = self.own_nodes(model, index, param);
        let (nodes, weights) = last_stages(&mut self.nodes, &mut self.weights);
        let cut = |buffer: Buffer, run: &Range<u64>| {
            buffer.slice(run.start as usize, (run.end - run.start) as usize)
        };
        for (owner, blocks) in owners.iter().filter(|(owner, _)| *owner != me) {
            let run = elements(blocks, param.numel());
            let outgoing = own_nodes.iter().map(|(_, buffer)| cut(*buffer, &run));
            nodes.sends[*owner as usize].1.extend(outgoing);
            weights.receives[*owner as usize].1.push(cut(weight, &run));
            weights.sends[*owner as usize].1.push(cut(weight, &own_run));
        }
        if own_run.is_empty() {
            return;
        }
        let mut all: Vec<(Node, Buffer)> =
            own_nodes.iter().map(|(node, buffer)| (*node, cut(*buffer, &own_run))).collect();
        for (holder, _) in owners.iter().filter(|(holder, _)| *holder != me) {
            for node in contribution(config, layout, param, *holder, micro_batches) {
                let len = (own_run.end - own_run.start) as usize;
                let buffer = model.buffers.gradients.inbox.slice(cursor.inbox, len);
                cursor.inbox += len.next_multiple_of(64);
                nodes.receives[*holder as usize].1.push(buffer);
                all.push((node, buffer));
            }
        }
        all.sort_by_key(|(node, _)| node.leaves().start);
        let gradient = add_up(&all, root(micro_batches), &mut self.finish);
        let weight = cut(weight, &own_run);
        self.plan_run(model, index, param, own_run, weight, gradient, cursor);
    }

    #[allow(clippy::too_many_arguments)]
    fn plan_run(
        &mut self,
        model: &Model,
        index: usize,
        param: &Param,
        elements: Range<u64>,
        weight: Buffer,
        gradient: Buffer,
        cursor: &mut Cursor,
    ) {
        let (state, owned) = (&model.buffers.state, &model.shape.flats.owned);
        let blocks = (elements.end - elements.start).div_ceil(BLOCK) as usize;
        let moment = |base| slice(base, owned, index).expect("moments of an owned run");
        self.runs.push(Run {
            index,
            elements,
            weight,
            moment1: moment(state.moment1),
            moment2: moment(state.moment2),
            gradient,
            square_sums: model.square_sums().slice(cursor.blocks, blocks),
            class: class_of(param),
            frozen: is_frozen(&model.config, param),
        });
        cursor.blocks += blocks;
    }

    /// The nodes of a parameter that this rank contributes, and where they are once `local` is
    /// done.
    fn own_nodes(&mut self, model: &Model, index: usize, param: &Param) -> Vec<(Node, Buffer)> {
        let (mesh, flats) = (&model.layout.mesh, &model.shape.flats);
        let micro_batches = model.shape.micro_batches;
        let entries = |slots: &[Buffer], block: Range<u32>, flat| {
            let nodes = subtrees(block).into_iter().zip(slots.to_vec());
            nodes.map(move |(node, slot)| {
                (node, slice(slot, flat, index).expect("a held parameter"))
            })
        };
        let Role::Expert { layer, expert } = param.role else {
            let block = mesh.micro_batches(model.rank, micro_batches);
            return entries(&self.dense.slots, block, &flats.dense).collect();
        };
        let mut pieces: Vec<(Node, Buffer)> = Vec::new();
        for (position, source) in mesh.expert_group(model.rank).into_iter().enumerate() {
            let computed = model.layout.expert_ranks(&model.config, layer, source);
            if computed[expert as usize] == model.rank {
                let block = mesh.micro_batches(source, micro_batches);
                pieces.extend(entries(&self.experts[position].slots, block, &flats.experts));
            }
        }
        let blocks = leaf_blocks(&model.config, &model.layout, param, model.rank, micro_batches);
        let targets = blocks.into_iter().flat_map(subtrees);
        targets.map(|target| (target, add_up(&pieces, target, &mut self.local))).collect()
    }

    /// Where the gradients of a round go.
    pub fn leaf(&self, round: &Round) -> Leaf<'_> {
        Leaf {
            dense: (round.tokens > 0).then(|| self.dense.top()),
            experts: (round.sources.iter())
                .map(|source| self.experts[source.position].top().as_slice())
                .collect(),
            stacks: &[],
            accumulate: false,
            accumulate_matrices: false,
            accumulate_experts: false,
            tied: None,
            last: None,
        }
    }

    /// Forgets everything: a new step begins.
    pub fn clear(&mut self) {
        self.dense.counter.clear();
        self.experts.iter_mut().for_each(|stack| stack.counter.clear());
    }

    /// Takes in the leaves of the round that was just computed; `leaves` are their micro-batches,
    /// by source.
    pub fn push(&mut self, round: &Round, own: Option<u32>, leaves: &[u32], model: &mut Model) {
        if let Some(leaf) = own {
            self.dense.push(leaf, model);
        }
        for (source, leaf) in round.sources.iter().zip(leaves) {
            self.experts[source.position].push(*leaf, model);
        }
    }

    /// Makes an owned gradient no finite number.
    pub(crate) fn spoil(&self, model: &mut Model) {
        let Some(run) = self.runs.first() else { return };
        let value = f64::NAN;
        model.device.fill(&Fill { value, x: run.gradient.slice(0, 1) });
    }

    /// Completes the gradients of the owned runs.
    pub fn reduce(&mut self, model: &mut Model, links: &mut Links) {
        add_all(&self.local, model);
        exchange(&self.nodes, model, links);
        add_all(&self.finish, model);
    }

    /// Sums of squares of the gradients of the owned runs.
    pub fn measure(&self, model: &mut Model) {
        for run in &self.runs {
            let op = BlockSquareSums { g: run.gradient, out: run.square_sums };
            model.device.block_square_sums(&op);
        }
    }

    /// Updates the owned runs, and the corrections of routers, as the step's reduced numbers say.
    pub fn update(&self, model: &mut Model, config: &AdamWConfig) {
        let numbers = model.buffers.numbers.clone();
        for run in self.runs.iter().filter(|run| !run.frozen) {
            model.device.adamw_update(&AdamWUpdate {
                beta1: config.beta1,
                beta2: config.beta2,
                eps: config.epsilon,
                class: run.class,
                params: numbers.params,
                numbers: numbers.reduced,
                w: run.weight,
                m: run.moment1,
                v: run.moment2,
                g: run.gradient,
            });
        }
        move_corrections(model);
    }

    /// Sends updated runs to the other holders and takes theirs. After a failure the weights are
    /// torn and must be loaded anew.
    pub fn spread(&self, model: &mut Model, links: &mut Links) {
        exchange(&self.weights, model, links);
    }
}

impl Stage {
    fn new(world: u32) -> Stage {
        let empty: Vec<Parcel> = (0..world).map(|rank| (rank, Vec::new())).collect();
        Stage { sends: empty.clone(), receives: empty }
    }
}

/// How far flat memory is handed out.
#[derive(Debug, Default)]
struct Cursor {
    inbox: usize,
    blocks: usize,
}

fn last_stages<'a>(
    nodes: &'a mut [Stage],
    weights: &'a mut [Stage],
) -> (&'a mut Stage, &'a mut Stage) {
    let last = |stages: &'a mut [Stage]| stages.last_mut().expect("a stage was begun");
    (last(nodes), last(weights))
}

fn exchange(stages: &[Stage], model: &mut Model, links: &mut Links) {
    for stage in stages {
        links.exchange(&mut model.device, &stage.sends, &stage.receives);
    }
}

fn add_all(additions: &[(Buffer, Buffer)], model: &mut Model) {
    for (a, b) in additions {
        model.device.add(&Add { a: *a, b: *b });
    }
}

/// The additions that reduce `pieces` to `target`, and where that is then.
fn add_up(
    pieces: &[(Node, Buffer)],
    target: Node,
    additions: &mut Vec<(Buffer, Buffer)>,
) -> Buffer {
    let nodes: Vec<Node> = pieces.iter().map(|piece| piece.0).collect();
    let (pairs, at) = reduce(&nodes, target).expect("every node has leaves");
    additions.extend(pairs.into_iter().map(|(into, from)| (pieces[into].1, pieces[from].1)));
    pieces[at].1
}
