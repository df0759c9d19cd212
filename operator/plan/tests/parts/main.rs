//! Parts of the plan by themselves, each by what others may ask of it.

mod demand;
mod judged;
mod locations;
mod memory;
mod orphans;
mod placement;
mod record;
mod repeat;
