//! Ops, each in a room of its own: `op.rs` is the contract, `cpu.rs` the reference, and `cuda.rs`
//! with the `.cu` files beside it what a GPU does. `tests/floors.rs` holds that contracts know no
//! device, and that the machines know no op.

pub(crate) mod embed {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
}
pub(crate) mod norm {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
}
pub(crate) mod matmul {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
}
pub(crate) mod rope {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
}
pub(crate) mod attention {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
    pub(crate) mod shape;
}
pub(crate) mod router {
    pub mod balance;
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub mod op;
}
pub(crate) mod gate {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
}
pub(crate) mod mixture {
    pub(crate) mod call;
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod layer;
    pub(crate) mod op;
    pub(crate) mod route;
    pub(crate) mod desc;
}
pub(crate) mod slices {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
}
pub(crate) mod peer {
    pub(crate) mod count;
    pub(crate) mod cuda;
    pub(crate) mod group;
    pub(crate) mod in_place;
    pub(crate) mod op;
}
pub(crate) mod wire {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
}
pub(crate) mod elementwise {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
}
pub(crate) mod head {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
}
pub(crate) mod bucket {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
    pub mod step_numbers;
}
pub(crate) mod convert {
    pub(crate) mod cpu;
    pub(crate) mod cuda;
    pub(crate) mod op;
}
pub(crate) mod kernel_list;
pub(crate) mod table;
