pub mod authority;
pub mod control;
