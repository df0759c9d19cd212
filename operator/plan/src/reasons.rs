//! Why a job failed or is not planned: stable words that stand in conditions, events and the
//! record.

use crate::observed::Reason;

pub const INVALID_SPEC: Reason = "InvalidSpec";
pub const REFUSED: Reason = "DataOrCheckpointRefused";
pub const RESTART_BUDGET_USED_UP: Reason = "RestartBudgetUsedUp";
pub const WORKERS_DO_NOT_START: Reason = "WorkersDoNotStart";
pub const ENDS_ALIKE: Reason = "EndsAlike";
pub const PREFLIGHT_FAILED: Reason = "PreflightFailed";
pub const DEVICE_FAILS: Reason = "DeviceFails";

/// Of all jobs that failed. One that this operator does not know was another version's.
pub const ALL: [Reason; 7] = [
    INVALID_SPEC,
    REFUSED,
    RESTART_BUDGET_USED_UP,
    WORKERS_DO_NOT_START,
    ENDS_ALIKE,
    PREFLIGHT_FAILED,
    DEVICE_FAILS,
];
