//! Parts of the plan by themselves, each by what others may ask of it.

mod changes;
mod cost;
mod demand;
mod devices;
mod identity;
mod judged;
mod locations;
mod orphans;
mod placement;
mod problem;
mod record;
mod repeat;
mod resources;
mod router;
mod several;
mod topology;
