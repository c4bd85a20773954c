//! NIXL's lists and options, freed when dropped.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use super::sys::{self, Raw};
use crate::agent::{AgentError, Descriptor, DescriptorList, Notification, SegmentKind};

/// NIXL's number of a kind of memory.
pub(super) fn kind_code(kind: SegmentKind) -> c_uint {
    match kind {
        SegmentKind::Dram => 0,
        SegmentKind::Vram => 1,
        SegmentKind::Object => 3,
        SegmentKind::File => 4,
    }
}

/// What an error says about itself.
pub(super) struct Failed {
    pub(super) call: &'static str,
    pub(super) code: c_int,
}

/// A status as a result; positive ones say "in progress".
pub(super) fn check(call: &'static str, code: c_int) -> Result<c_int, Failed> {
    if code >= 0 { Ok(code) } else { Err(Failed { call, code }) }
}

impl Failed {
    pub(super) fn status(&self) -> &'static str {
        match self.code {
            -1 => "INVALID_PARAM",
            -2 => "BACKEND",
            -3 => "INVALID_STATE",
            -4 => "EXCEPTION",
            -5 => "NO_TELEMETRY",
            -6 => "NOT_FOUND",
            _ => "an unknown status",
        }
    }

    pub(super) fn about(self, agent: &str, subject: String, hint: String) -> AgentError {
        AgentError::Nixl {
            agent: agent.to_owned(),
            call: self.call,
            status: self.status(),
            code: self.code,
            subject,
            hint,
        }
    }
}

/// A C string of a name that `NixlOptions::validate` or NIXL itself has given.
pub(super) fn c_string(text: &str) -> Result<CString, AgentError> {
    CString::new(text).map_err(|_| AgentError::Unsupported {
        what: format!("the name {text:?}"),
        way_out: "give a name without zero bytes",
    })
}

macro_rules! owned {
    ($(#[$doc:meta])* $name:ident, $destroy:ident) => {
        $(#[$doc])*
        pub(super) struct $name(pub(super) Raw);

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: the handle came from its create function and is freed once.
                unsafe { sys::$destroy(self.0) };
            }
        }
    };
}

owned!(
    /// Ranges to register.
    RegistrationList,
    nixl_capi_destroy_reg_dlist
);
owned!(
    /// Ranges of one side of a transfer.
    TransferList,
    nixl_capi_destroy_xfer_dlist
);
owned!(
    /// Optional arguments of a call.
    CallOptions,
    nixl_capi_destroy_opt_args
);
owned!(
    /// Parameters of a back end.
    Parameters,
    nixl_capi_destroy_params
);
owned!(
    /// Notifications that were taken.
    NotificationMap,
    nixl_capi_destroy_notif_map
);

impl RegistrationList {
    pub(super) fn new(kind: SegmentKind) -> Result<Self, Failed> {
        let mut raw = null_mut();
        // SAFETY: `raw` is written by the call.
        let code = unsafe { sys::nixl_capi_create_reg_dlist(kind_code(kind), &raw mut raw) };
        check("create_reg_dlist", code).map(|_| Self(raw))
    }

    /// Adds a range, with what its back end must know of it: of an object, its key.
    pub(super) fn add(&self, range: &Descriptor, metadata: &[u8]) -> Result<(), Failed> {
        let (address, bytes, device) = (range.address as usize, range.bytes as usize, range.device_id);
        let (data, length) = (metadata.as_ptr().cast::<c_void>(), metadata.len());
        // SAFETY: the list is ours; the metadata lives through the call, which copies it.
        let code = unsafe { sys::nixl_capi_reg_dlist_add_desc(self.0, address, bytes, device, data, length) };
        check("reg_dlist_add_desc", code).map(|_| ())
    }
}

impl TransferList {
    pub(super) fn new(list: &DescriptorList) -> Result<Self, Failed> {
        let mut raw = null_mut();
        // SAFETY: `raw` is written by the call.
        let code = unsafe { sys::nixl_capi_create_xfer_dlist(kind_code(list.kind), &raw mut raw) };
        let made = check("create_xfer_dlist", code).map(|_| Self(raw))?;
        for entry in &list.entries {
            let (address, bytes) = (entry.address as usize, entry.bytes as usize);
            // SAFETY: the list is ours; addresses are numbers here.
            let code = unsafe { sys::nixl_capi_xfer_dlist_add_desc(made.0, address, bytes, entry.device_id) };
            check("xfer_dlist_add_desc", code)?;
        }
        Ok(made)
    }
}

impl CallOptions {
    pub(super) fn new() -> Result<Self, Failed> {
        let mut raw = null_mut();
        // SAFETY: `raw` is written by the call.
        let code = unsafe { sys::nixl_capi_create_opt_args(&raw mut raw) };
        check("create_opt_args", code).map(|_| Self(raw))
    }

    pub(super) fn backend(&self, backend: Raw) -> Result<(), Failed> {
        // SAFETY: both handles are live: a back end lives as long as its agent.
        check("opt_args_add_backend", unsafe { sys::nixl_capi_opt_args_add_backend(self.0, backend) })
            .map(|_| ())
    }

    /// The lists are coalesced already, so that NIXL need not look for neighbours.
    pub(super) fn no_merge(&self) -> Result<(), Failed> {
        // SAFETY: the handle is live.
        let code = unsafe { sys::nixl_capi_opt_args_set_skip_desc_merge(self.0, true) };
        check("opt_args_set_skip_desc_merge", code).map(|_| ())
    }

    pub(super) fn notification(&self, message: &[u8]) -> Result<(), Failed> {
        let (data, length) = (message.as_ptr().cast::<c_void>(), message.len());
        // SAFETY: the call copies the message.
        let code = unsafe { sys::nixl_capi_opt_args_set_notif_msg(self.0, data, length) };
        check("opt_args_set_notif_msg", code)?;
        // SAFETY: the handle is live.
        check("opt_args_set_has_notif", unsafe { sys::nixl_capi_opt_args_set_has_notif(self.0, true) })
            .map(|_| ())
    }
}

impl Parameters {
    /// The defaults of a back end.
    pub(super) fn of_plugin(agent: Raw, plugin: &CStr) -> Result<Self, Failed> {
        let (mut kinds, mut raw) = (null_mut(), null_mut());
        // SAFETY: the agent is live; both pointers are written by the call.
        let code =
            unsafe { sys::nixl_capi_get_plugin_params(agent, plugin.as_ptr(), &raw mut kinds, &raw mut raw) };
        check("get_plugin_params", code)?;
        // SAFETY: the list came from the call above and is used no more.
        unsafe { sys::nixl_capi_destroy_mem_list(kinds) };
        Ok(Self(raw))
    }

    pub(super) fn set(&self, key: &CStr, value: &CStr) -> Result<(), Failed> {
        // SAFETY: the handle is live; the call copies both strings.
        let code = unsafe { sys::nixl_capi_params_add(self.0, key.as_ptr(), value.as_ptr()) };
        check("params_add", code).map(|_| ())
    }
}

impl NotificationMap {
    /// Takes what has arrived.
    pub(super) fn take(agent: Raw) -> Result<Self, Failed> {
        let mut raw = null_mut();
        // SAFETY: `raw` is written by the call.
        let code = unsafe { sys::nixl_capi_create_notif_map(&raw mut raw) };
        let map = check("create_notif_map", code).map(|_| Self(raw))?;
        // SAFETY: both handles are live.
        check("get_notifs", unsafe { sys::nixl_capi_get_notifs(agent, map.0, null_mut()) })?;
        Ok(map)
    }

    /// All messages, as bytes: NIXL's own reading of them as text fails on other bytes.
    pub(super) fn messages(&self) -> Result<Vec<Notification>, Failed> {
        let mut agents = 0;
        // SAFETY: the map is live; the number is written by the call.
        check("notif_map_size", unsafe { sys::nixl_capi_notif_map_size(self.0, &raw mut agents) })?;
        let mut messages = Vec::new();
        for index in 0..agents {
            let mut name: *const c_char = std::ptr::null();
            // SAFETY: the index is below the size; the pointer is written by the call.
            let code = unsafe { sys::nixl_capi_notif_map_get_agent_at(self.0, index, &raw mut name) };
            check("notif_map_get_agent_at", code)?;
            self.of_agent(name, &mut messages)?;
        }
        Ok(messages)
    }

    fn of_agent(&self, name: *const c_char, messages: &mut Vec<Notification>) -> Result<(), Failed> {
        let mut count = 0;
        // SAFETY: the map and the name in it are live; the number is written by the call.
        let code = unsafe { sys::nixl_capi_notif_map_get_notifs_size(self.0, name, &raw mut count) };
        check("notif_map_get_notifs_size", code)?;
        // SAFETY: the map holds the name as a C string, and is not changed.
        let from = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        for index in 0..count {
            let (mut data, mut length): (*const c_void, usize) = (std::ptr::null(), 0);
            // SAFETY: the index is below the count; both are written by the call.
            let code = unsafe {
                sys::nixl_capi_notif_map_get_notif(self.0, name, index, &raw mut data, &raw mut length)
            };
            check("notif_map_get_notif", code)?;
            let message = if data.is_null() || length == 0 {
                Vec::new()
            } else {
                // SAFETY: the map holds `length` bytes there, and is not changed.
                unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) }.to_vec()
            };
            messages.push(Notification { from: from.clone(), message });
        }
        Ok(())
    }
}
