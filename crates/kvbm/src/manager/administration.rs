//! What operators ask for beside an engine.

use super::KvBlockManager;
use crate::admin::Admin;
use crate::leader::{ForgetReceipt, PinForError};
use kvbm_plan::{NamespaceId, deadline_after};
use kvbm_pool::TierMask;
use kvbm_tokens::{BlockChain, Namespace};
use std::time::Duration;

impl<G> KvBlockManager<G> {
    /// Where this manager is administered: what `admin.socket` and `admin.http` configure.
    pub fn admin(&self) -> &Admin {
        &self.admin
    }

    /// Whether [`shutdown`](Self::shutdown) has begun, or somebody drained the manager: no transfer
    /// of a caller starts any more.
    pub fn is_draining(&self) -> bool {
        self.leader.transfers.refuses_callers()
    }

    /// Like [`pin`](Self::pin), for a time in place of iterations. When it is over, the blocks are
    /// unpinned but for those that another such pin holds: pins until an iteration of the same
    /// blocks end with it.
    ///
    /// # Errors
    /// [`PinForError`]; nothing changed.
    pub fn pin_for<'a>(
        &self,
        chain: impl Into<BlockChain<'a>>,
        tiers: TierMask,
        time: Duration,
    ) -> Result<usize, PinForError> {
        self.leader.pin_until(chain.into(), tiers, deadline_after(kvbm_plan::clock::now(), time))
    }

    /// As [`forget`](Self::forget), with a receipt: what was removed where, and what has not
    /// confirmed it. Waits for volumes too, for `timeout` at most.
    pub fn forget_with_receipt(&self, namespace: &Namespace, timeout: Duration) -> ForgetReceipt {
        let deadline = deadline_after(kvbm_plan::clock::now(), timeout);
        self.leader.forget_with_receipt(NamespaceId::from(namespace.tag()), deadline)
    }
}
