//! Ways in which a transfer goes wrong.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::agent::{AgentError, RemoteRequest, RemoteTransfer, TransferDirection, TransferState};

/// How transfers with an agent fail. None of their bytes may be served.
#[derive(Clone, Debug)]
pub enum AgentFault {
    /// A transfer starts and does not end before `release` is set; then it fails. Its memory stays
    /// claimed until then.
    Hang {
        /// Ends the transfers that hang.
        release: Arc<AtomicBool>,
    },
    /// A transfer starts and fails.
    Fail,
    /// A transfer cannot start.
    Refuse,
}

/// When a claim ends, and what it holds.
type Claim = (Arc<AtomicBool>, Box<dyn Any + Send>);

/// Claims of transfers whose handle was dropped while they hung.
#[derive(Default)]
pub(super) struct Detached {
    claims: Mutex<Vec<Claim>>,
}

impl Detached {
    /// Gives back what no transfer uses any more.
    pub(super) fn purge(&self) {
        let over: Vec<_> = {
            let mut claims = self.claims.lock();
            claims.extract_if(.., |(release, _)| release.load(Ordering::Acquire)).collect()
        };
        drop(over);
    }
}

impl AgentFault {
    /// The transfer in which this fault shows.
    pub(super) fn begin(
        self,
        request: RemoteRequest,
        detached: &Arc<Detached>,
    ) -> Result<Box<dyn RemoteTransfer>, AgentError> {
        let what = What { direction: request.direction, bytes: request.local.bytes(), peer: request.peer };
        match self {
            Self::Hang { release } => {
                let (detached, keep) = (Arc::clone(detached), Some(request.keep));
                Ok(Box::new(Hung { what, release, detached, keep }))
            }
            Self::Fail => Ok(Box::new(Failing { what })),
            Self::Refuse => Err(what.failed("the peer refuses it")),
        }
    }
}

struct What {
    direction: TransferDirection,
    bytes: u64,
    peer: String,
}

impl What {
    fn failed(&self, reason: &str) -> AgentError {
        let Self { direction, bytes, peer } = self;
        AgentError::Failed {
            direction: *direction,
            bytes: *bytes,
            peer: peer.clone(),
            reason: reason.to_owned(),
        }
    }

    fn late(&self) -> AgentError {
        let Self { direction, bytes, peer } = self;
        AgentError::Deadline { direction: *direction, bytes: *bytes, peer: peer.clone() }
    }
}

struct Hung {
    what: What,
    release: Arc<AtomicBool>,
    detached: Arc<Detached>,
    keep: Option<Box<dyn Any + Send>>,
}

impl RemoteTransfer for Hung {
    fn poll(&mut self) -> Result<TransferState, AgentError> {
        if self.release.load(Ordering::Acquire) {
            return Err(self.what.failed("the connection broke"));
        }
        Ok(TransferState::Running)
    }

    fn late(&self) -> AgentError {
        self.what.late()
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        if let Some(keep) = self.keep.take()
            && !self.release.load(Ordering::Acquire)
        {
            self.detached.claims.lock().push((Arc::clone(&self.release), keep));
        }
    }
}

struct Failing {
    what: What,
}

impl RemoteTransfer for Failing {
    fn poll(&mut self) -> Result<TransferState, AgentError> {
        Err(self.what.failed("the connection broke"))
    }

    fn late(&self) -> AgentError {
        self.what.late()
    }
}

/// A transfer that ended before its start returned.
pub(super) struct Finished {
    what: What,
}

impl Finished {
    pub(super) fn new(direction: TransferDirection, bytes: u64, peer: String) -> Self {
        Self { what: What { direction, bytes, peer } }
    }
}

impl RemoteTransfer for Finished {
    fn poll(&mut self) -> Result<TransferState, AgentError> {
        Ok(TransferState::Done)
    }

    fn late(&self) -> AgentError {
        self.what.late()
    }
}
