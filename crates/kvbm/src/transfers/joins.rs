//! Blocks on their way to G1 and the transfer that brings each, so that a second request for a
//! block joins the first.

use super::transfer::{Transfer, expired};
use super::{Handle, Purpose, Request, Transfers};
use kvbm_plan::{BlockIdentity, Failure, GroupId, SequenceHash};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;

type Key = (GroupId, SequenceHash);

fn key(identity: &BlockIdentity) -> Key {
    (identity.group, identity.hash)
}

#[derive(Default)]
pub(super) struct Joins(Mutex<HashMap<Key, Arc<Transfer>>>);

impl Joins {
    /// The transfer is over: nobody joins it any more.
    pub(super) fn remove(&self, transfer: &Arc<Transfer>) {
        if transfer.purpose != Purpose::Onboard {
            return;
        }
        let mut arriving = self.0.lock();
        for block in &transfer.moves {
            let key = key(&block.identity);
            // The block may be on its way again already, with another transfer.
            if arriving.get(&key).is_some_and(|known| Arc::ptr_eq(known, transfer)) {
                arriving.remove(&key);
            }
        }
    }
}

/// Held from the reservation of blocks of G1 until their transfer is entered here: no other caller
/// finds a block on its way without the transfer that brings it.
pub(crate) struct Arriving<'a> {
    transfers: &'a Arc<Transfers>,
    by_block: MutexGuard<'a, HashMap<Key, Arc<Transfer>>>,
}

impl Transfers {
    pub(crate) fn arriving(self: &Arc<Self>) -> Arriving<'_> {
        Arriving { transfers: self, by_block: self.joins.0.lock() }
    }
}

impl Arriving<'_> {
    /// Adds a share in the transfer that brings the block, unless `handles` has one.
    ///
    /// # Errors
    /// That transfer is late.
    pub(crate) fn join(&self, identity: &BlockIdentity, handles: &mut Vec<Handle>) -> Result<(), Failure> {
        let Some(theirs) = self.by_block.get(&key(identity)) else { return Ok(()) };
        if handles.iter().any(|known| known.is_of(theirs)) {
            return Ok(());
        }
        let interest = theirs.join(kvbm_plan::clock::now());
        let interest = interest.ok_or_else(|| expired("an earlier transfer of the block", theirs.limit))?;
        handles.push(Handle::new(self.transfers, interest));
        Ok(())
    }

    /// Starts a transfer that others may join.
    pub(crate) fn start(mut self, request: Request) -> Handle {
        let (transfer, parts) = self.transfers.prepare(request);
        let keys = transfer.moves.iter().map(|block| key(&block.identity));
        self.by_block.extend(keys.map(|key| (key, Arc::clone(&transfer))));
        let Self { transfers, by_block } = self;
        let handle = Handle::new(transfers, transfer.interest());
        // A link may answer from inside `send`, and the end of the transfer takes the lock.
        drop(by_block);
        transfers.send(&transfer, parts);
        handle
    }
}
