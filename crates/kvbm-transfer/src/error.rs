//! Refusals: at start, at submission, at shutdown. What happens to a block later is in its report.

use kvbm_device::DeviceError;
use kvbm_plan::wire::DecodeError;
use kvbm_plan::{Epoch, PlanError, PlanId};

/// Why a worker does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A field of the configuration breaks a rule.
    #[error("worker config: {field} = {value}: {rule}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// The rule it must obey.
        rule: String,
    },
    /// Two tiers hold blocks of different shape.
    #[error("blocks cannot move between {from} and {to}: {reason}; give both tiers the same model shape")]
    Layouts {
        /// One tier.
        from: kvbm_plan::Tier,
        /// The other.
        to: kvbm_plan::Tier,
        /// What differs.
        reason: String,
    },
    /// The device refused a stream.
    #[error("no stream for path {path}: {source}")]
    Stream {
        /// The path that needs it.
        path: kvbm_plan::Path,
        /// What the device said.
        #[source]
        source: DeviceError,
    },
    /// No memory for the staging ring between G3 and G1.
    #[error("staging ring of {blocks} blocks: {reason}; lower transfer.staging or free host memory")]
    Staging {
        /// Blocks asked for.
        blocks: u32,
        /// What the system said.
        reason: String,
    },
    /// The system refused a thread.
    #[error("cannot start thread {name}: {source}; raise the limit of threads")]
    Thread {
        /// Its name.
        name: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

/// Why a command was not accepted. Nothing of it was done and no report will come for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The bytes are not a command.
    #[error(transparent)]
    Malformed(#[from] DecodeError),
    /// The plan breaks a rule.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The plan belongs to another life of the leader.
    #[error(
        "plan {plan_id} is of epoch {found}, this worker serves epoch {current}: restart the worker for a new leader"
    )]
    StaleEpoch {
        /// The plan.
        plan_id: PlanId,
        /// Its epoch.
        found: Epoch,
        /// The worker's epoch.
        current: Epoch,
    },
    /// The plan was executed so long ago that its report is no longer kept. It is not executed
    /// again.
    #[error(
        "plan {plan_id} was already executed or skipped, and its report is no longer kept: use a new plan id"
    )]
    Forgotten {
        /// The plan.
        plan_id: PlanId,
    },
    /// Too many reports wait for the sink, or too many flushes are pending.
    #[error("{pending} {what} are pending: take reports from the sink faster, then submit again")]
    Backlogged {
        /// What is pending.
        what: &'static str,
        /// How many.
        pending: usize,
    },
    /// A command about a tier that this worker does not have.
    #[error("{command} of {tier}: this worker has no such persistent tier; configure it")]
    NoSuchTier {
        /// The command.
        command: &'static str,
        /// The tier.
        tier: kvbm_plan::Tier,
    },
    /// The worker is shutting down.
    #[error("the worker is shutting down: start a new one")]
    ShuttingDown,
}

/// Blocks that were not free at the deadline.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("plans still touch {} blocks of G1 ({}): allow more time, or end the worker", blocks.len(), Shown(blocks))]
pub struct BlocksBusy {
    /// The blocks, in order.
    pub blocks: Vec<kvbm_plan::BlockId>,
}

/// The first blocks of a list.
struct Shown<'a>(&'a [kvbm_plan::BlockId]);

impl std::fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const FIRST: usize = 8;
        let first: Vec<_> = self.0.iter().take(FIRST).map(|block| block.0.to_string()).collect();
        let more = if self.0.len() > FIRST { ", .." } else { "" };
        write!(f, "{}{more}", first.join(", "))
    }
}

/// Work that was not over at the deadline of a shutdown. It goes on in the background and owns its
/// memory until the hardware is done; its reports still reach the sink.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{running} transfers were still running at the deadline: they keep their memory until the hardware is done; not \
     answered: {}",
    waiting_for.join(", ")
)]
pub struct ShutdownError {
    /// Started transfers without a report.
    pub running: usize,
    /// The paths that they are on, and volumes whose calls have not returned.
    pub waiting_for: Vec<String>,
}
