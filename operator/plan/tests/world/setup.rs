//! What a job of the world is.

use moejob_manifest::job::Venue;

/// What differs between the jobs of the tests.
#[derive(Clone, Debug)]
pub struct Setup {
    pub min: u32,
    pub max: u32,
    pub spares: u32,
    pub nodes: u32,
    /// Ranks of a worker.
    pub devices: u32,
    /// Experts of the model: no more ranks can share them.
    pub experts: u32,
    /// Its dimensions, in multiples of what is small.
    pub width: u32,
    pub steps: u64,
    pub memory_every: u64,
    pub checkpoint_every: u64,
    pub restarts_max: u32,
    /// Nodes are measured before they get a rank.
    pub preflight: bool,
    /// Such nodes measure with each other, too.
    pub pairs: bool,
    /// Which version of the control stream workers speak.
    pub speaks: u32,
    pub venue: Venue,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            min: 1,
            max: 4,
            spares: 0,
            nodes: 4,
            devices: 1,
            experts: 8,
            width: 1,
            steps: 100,
            memory_every: 10,
            checkpoint_every: 50,
            restarts_max: 20,
            preflight: false,
            pairs: false,
            speaks: moejob_protocol::message::CONTROL_VERSIONS[0],
            venue: Venue::Local,
        }
    }
}
