//! One transfer over NIXL.

use std::any::Any;
use std::ffi::c_uint;
use std::ptr::null_mut;
use std::sync::Arc;

use super::handle::{AgentHandle, Detached, RawRequest};
use super::lists::{CallOptions, Failed, TransferList, c_string, check};
use super::sys;
use crate::agent::{AgentError, RemoteRequest, RemoteTransfer, TransferDirection, TransferState};

/// A transfer that NIXL executes.
pub(super) struct NixlTransfer {
    handle: Arc<AgentHandle>,
    direction: TransferDirection,
    bytes: u64,
    peer: String,
    /// The request and what it claims; `None` once it is over.
    running: Option<(RawRequest, Box<dyn Any + Send>)>,
    failed: Option<AgentError>,
}

impl NixlTransfer {
    /// Posts the request.
    ///
    /// # Safety
    /// As `RemoteAgent::start`.
    pub(super) unsafe fn start(
        handle: &Arc<AgentHandle>,
        request: RemoteRequest,
    ) -> Result<Self, AgentError> {
        let RemoteRequest { direction, peer, local, remote, notification, keep } = request;
        let subject = || format!(": {direction} of {} ranges with {peer}", local.entries.len());
        let failed = |failed: Failed| handle.error(failed, subject());
        let bytes = local.bytes();
        let backend = handle.backend(if peer == handle.name() { remote.kind } else { local.kind })?;
        let options = CallOptions::new().map_err(failed)?;
        options.backend(backend).map_err(failed)?;
        options.no_merge().map_err(failed)?;
        if let Some(message) = &notification {
            options.notification(message).map_err(failed)?;
        }
        let (local, remote) =
            (TransferList::new(&local).map_err(failed)?, TransferList::new(&remote).map_err(failed)?);
        let operation: c_uint = match direction {
            TransferDirection::Read => 0,
            TransferDirection::Write => 1,
        };
        let c_peer = c_string(&peer)?;
        let mut raw = null_mut();
        // SAFETY: all handles are live; the pointer is written by the call.
        let code = unsafe {
            sys::nixl_capi_create_xfer_req(
                handle.raw(),
                operation,
                local.0,
                remote.0,
                c_peer.as_ptr(),
                &raw mut raw,
                options.0,
            )
        };
        check("create_xfer_req", code).map_err(failed)?;
        let request = RawRequest(raw);
        // SAFETY: the agent and the request are live; the caller vouches for the memory.
        let code = unsafe { sys::nixl_capi_post_xfer_req(handle.raw(), request.0, options.0) };
        if let Err(error) = check("post_xfer_req", code) {
            // Parts of it may be on their way.
            handle.release(&request);
            let free_at = Some(AgentHandle::quarantine());
            handle.detach(Detached { request: RawRequest(null_mut()), keep, free_at });
            return Err(failed(error));
        }
        let mut transfer = Self {
            handle: Arc::clone(handle),
            direction,
            bytes,
            peer: peer.clone(),
            running: Some((request, keep)),
            failed: None,
        };
        if code == 0 {
            transfer.end();
        }
        Ok(transfer)
    }

    /// Frees a request that is done, and what it claims.
    fn end(&mut self) {
        if let Some((request, keep)) = self.running.take() {
            self.handle.release(&request);
            drop(keep);
        }
    }

    fn fail(&mut self, code: i32) -> AgentError {
        if let Some((request, keep)) = self.running.take() {
            self.handle.release(&request);
            let free_at = Some(AgentHandle::quarantine());
            self.handle.detach(Detached { request: RawRequest(null_mut()), keep, free_at });
        }
        let status = Failed { call: "get_xfer_status", code }.status();
        // Our own name stands for files and objects.
        let hint =
            if self.peer == self.handle.name() { "its log says more" } else { "the peer may have ended" };
        let error = AgentError::Failed {
            direction: self.direction,
            bytes: self.bytes,
            peer: self.peer.clone(),
            reason: format!("NIXL reports {status} ({code}); {hint}"),
        };
        self.failed = Some(error.clone());
        error
    }
}

impl RemoteTransfer for NixlTransfer {
    fn poll(&mut self) -> Result<TransferState, AgentError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let Some((request, _)) = &self.running else { return Ok(TransferState::Done) };
        // SAFETY: the agent and the request are live.
        let code = unsafe { sys::nixl_capi_get_xfer_status(self.handle.raw(), request.0) };
        match code {
            0 => {
                self.end();
                Ok(TransferState::Done)
            }
            1.. => Ok(TransferState::Running),
            _ => Err(self.fail(code)),
        }
    }

    fn late(&self) -> AgentError {
        AgentError::Deadline { direction: self.direction, bytes: self.bytes, peer: self.peer.clone() }
    }
}

impl Drop for NixlTransfer {
    fn drop(&mut self) {
        if let Some((request, keep)) = self.running.take() {
            self.handle.detach(Detached { request, keep, free_at: None });
        }
    }
}
