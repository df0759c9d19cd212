//! Parts of the reader by themselves, each by what others may ask of it.

mod changes;
mod cost;
mod devices;
mod edges;
mod identity;
mod problem;
mod resources;
mod router;
mod several;
