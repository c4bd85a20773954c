//! Scrubs G3 on a thread of its own: reads and verifies so many bytes a second.

use crate::hub::{Hub, Producer};
use kvbm_disk::{DiskEngine, Scrubbed, Scrubber};
use kvbm_plan::{Epoch, Failure, Message, Rank, Tier};
use parking_lot::{Condvar, Mutex};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

/// How long it waits while the disk works for somebody else.
const BUSY: Duration = Duration::from_millis(20);

/// How long it waits while there is nothing to read.
const EMPTY: Duration = Duration::from_secs(1);

/// The scrubbing thread's work, and its end.
pub(crate) struct Scrub {
    engine: Arc<DiskEngine>,
    rank: Rank,
    epoch: Epoch,
    bytes_per_s: NonZeroU64,
    closing: Mutex<bool>,
    changed: Condvar,
}

impl Scrub {
    pub(crate) fn new(engine: Arc<DiskEngine>, rank: Rank, epoch: Epoch, bytes_per_s: NonZeroU64) -> Self {
        Self { engine, rank, epoch, bytes_per_s, closing: Mutex::new(false), changed: Condvar::new() }
    }

    /// Lets the thread end after the block that it reads.
    pub(crate) fn close(&self) {
        *self.closing.lock() = true;
        self.changed.notify_one();
    }

    /// The thread: a block, then a pause as long as its bytes take at the set rate.
    pub(crate) fn run(&self, hub: &Hub, _alive: &Producer) {
        let mut scrubber = Scrubber::default();
        loop {
            let pause = match self.engine.scrub(&mut scrubber) {
                Scrubbed::Empty => EMPTY,
                Scrubbed::Good { bytes } | Scrubbed::Changed { bytes } => self.pause(bytes),
                Scrubbed::Bad { slot, identity, bytes, error } => {
                    tracing::warn!(rank = %self.rank, %slot, hash = %identity.hash, %error, "scrubbing found a bad block");
                    let detail = format!("scrubbing of G3: {error}");
                    let failure = Failure::new(error.kind(), detail);
                    let (rank, epoch, tier) = (self.rank, self.epoch, Tier::G3);
                    hub.send(Message::Damaged { rank, epoch, tier, block: slot, identity, failure });
                    self.pause(bytes)
                }
                // What else there may be in a later version is waited out.
                _ => BUSY,
            };
            let mut closing = self.closing.lock();
            self.changed.wait_while_for(&mut closing, |closing| !*closing, pause);
            if *closing {
                return;
            }
        }
    }

    fn pause(&self, bytes: u64) -> Duration {
        let micros = u128::from(bytes) * 1_000_000 / u128::from(self.bytes_per_s.get());
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }
}
