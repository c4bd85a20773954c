//! One read or write, from its start to its end.

use std::any::Any;
use std::fmt;
use std::time::{Duration, Instant};

use kvbm_plan::clock;

use super::{AgentError, DescriptorList};

/// Which way bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferDirection {
    /// From the peer's memory into ours.
    Read,
    /// From our memory into the peer's.
    Write,
}

impl fmt::Display for TransferDirection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Read => "remote read",
            Self::Write => "remote write",
        })
    }
}

/// What to move.
pub struct RemoteRequest {
    /// Which way.
    pub direction: TransferDirection,
    /// Name of the peer's agent; our own name for files.
    pub peer: String,
    /// Ranges of our memory.
    pub local: DescriptorList,
    /// Ranges of the peer's memory, as many and as long.
    pub remote: DescriptorList,
    /// Sent to the peer when all bytes of a write have arrived there.
    pub notification: Option<Vec<u8>>,
    /// What keeps our memory allocated and unused: dropped when the hardware is done.
    pub keep: Box<dyn Any + Send>,
}

impl fmt::Debug for RemoteRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { direction, peer, local, .. } = self;
        write!(f, "{direction} of {} ranges, {} bytes, with {peer}", local.entries.len(), local.bytes())
    }
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferState {
    /// The hardware may still read or write.
    Running,
    /// All bytes have moved.
    Done,
}

/// A started transfer. Dropping it while it runs detaches it: the agent keeps its memory claimed
/// until the hardware is done.
pub trait RemoteTransfer: Send {
    /// Looks whether it is over. An error is final.
    ///
    /// # Errors
    /// [`AgentError::Failed`].
    fn poll(&mut self) -> Result<TransferState, AgentError>;

    /// The error of a transfer that is not over by its deadline.
    fn late(&self) -> AgentError;

    /// Waits until it is over or `deadline` has passed.
    ///
    /// # Errors
    /// As [`poll`](Self::poll), and [`AgentError::Deadline`].
    fn wait(&mut self, deadline: Instant) -> Result<(), AgentError> {
        // Small transfers end within microseconds; long ones leave the processor to others.
        let mut polls = 0_u32;
        loop {
            if self.poll()? == TransferState::Done {
                return Ok(());
            }
            if clock::now() >= deadline {
                return Err(self.late());
            }
            polls = polls.saturating_add(1);
            match polls {
                0..50 => std::hint::spin_loop(),
                50..200 => std::thread::yield_now(),
                _ => clock::sleep(Duration::from_micros(50)),
            }
        }
    }
}
