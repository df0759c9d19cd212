//! How gradients come together and weights follow them: by a tree of leaves, whose bits depend on
//! nothing but the data, or in buckets, which are faster.

use crate::engine::backward::Leaf;
use crate::engine::buckets::BucketSums;
use crate::engine::tree::TreeSums;
use crate::engine::links::Links;
use crate::engine::model::Model;
use crate::engine::round::Round;
use moejob_protocol::config::AdamW as AdamWConfig;

#[derive(Debug)]
pub enum Sums {
    Tree(TreeSums),
    Buckets(BucketSums),
}

impl Sums {
    pub fn new(model: &Model) -> Sums {
        match &model.places {
            Some(places) => Sums::Buckets(BucketSums::new(model, places)),
            None => Sums::Tree(TreeSums::new(model)),
        }
    }

    /// Forgets everything: a new step begins.
    pub fn clear(&mut self) {
        match self {
            Sums::Tree(tree) => tree.clear(),
            Sums::Buckets(buckets) => buckets.clear(),
        }
    }

    /// Where the gradients of a round go.
    pub fn leaf(&self, round: &Round) -> Leaf<'_> {
        match self {
            Sums::Tree(tree) => tree.leaf(round),
            Sums::Buckets(buckets) => buckets.leaf(round),
        }
    }

    /// The same in a step's last round: where links work beside, sums in buckets begin to travel
    /// in it, and [`Sums::reduce`] is not called.
    pub(crate) fn last_leaf(&self, round: &Round) -> Leaf<'_> {
        match self {
            Sums::Tree(tree) => tree.leaf(round),
            Sums::Buckets(buckets) => buckets.last_leaf(round),
        }
    }

    /// Takes in the leaves of the round that was just computed; `leaves` are their micro-batches,
    /// by source.
    pub fn push(&mut self, round: &Round, own: Option<u32>, leaves: &[u32], model: &mut Model) {
        match self {
            Sums::Tree(tree) => tree.push(round, own, leaves, model),
            Sums::Buckets(buckets) => buckets.push(round, model),
        }
    }

    /// The same of a round that had [`Sums::last_leaf`]: what is in buckets has left.
    pub(crate) fn push_last(
        &mut self,
        round: &Round,
        own: Option<u32>,
        leaves: &[u32],
        model: &mut Model,
    ) {
        if let Sums::Tree(tree) = self {
            tree.push(round, own, leaves, model);
        }
    }

    /// Completes the gradients of what is owned.
    pub fn reduce(&mut self, model: &mut Model, links: &mut Links) {
        match self {
            Sums::Tree(tree) => tree.reduce(model, links),
            Sums::Buckets(buckets) => buckets.reduce(model, links),
        }
    }

    /// Makes an owned gradient no finite number.
    pub(crate) fn spoil(&self, model: &mut Model) {
        match self {
            Sums::Tree(tree) => tree.spoil(model),
            Sums::Buckets(buckets) => buckets.spoil(model),
        }
    }

    /// What the step's numbers say of the gradients.
    pub fn measure(&self, model: &mut Model) {
        match self {
            Sums::Tree(tree) => tree.measure(model),
            Sums::Buckets(buckets) => buckets.measure(model),
        }
    }

    /// Updates what is owned, and the corrections of routers, as the step's numbers say.
    pub fn update(&self, model: &mut Model, links: &mut Links, config: &AdamWConfig) {
        match self {
            Sums::Tree(tree) => tree.update(model, config),
            Sums::Buckets(buckets) => buckets.update(model, links, config),
        }
    }

    /// Sends what was updated to the other holders and takes theirs. After a failure the weights
    /// are torn and must be loaded anew.
    pub fn spread(&self, model: &mut Model, links: &mut Links) {
        match self {
            Sums::Tree(tree) => tree.spread(model, links),
            Sums::Buckets(buckets) => buckets.spread(model, links),
        }
    }
}
