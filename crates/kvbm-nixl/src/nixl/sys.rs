//! NIXL's C functions, as the stub archive of `nixl-sys` links them.
//!
//! The stubs look a function up in `libnixl_capi.so` at its first call and abort the process where
//! it is missing. So nothing here may be called before [`library::load`](super::library::load) has
//! succeeded: it loads the library and checks that it has [`FUNCTIONS`]. The safe API of `nixl-sys`
//! is not used: it registers one range a call, without metadata, and hides the status codes.

use std::ffi::{c_char, c_int, c_uint, c_void};

// Links the stub archive.
use nixl_sys as _;

/// A handle of NIXL's.
pub(super) type Raw = *mut c_void;

/// `nixl_capi_agent_config_t`.
#[repr(C)]
pub(super) struct AgentConfig {
    pub(super) enable_progress_thread: bool,
    pub(super) enable_listen_thread: bool,
    pub(super) listen_port: c_int,
    pub(super) thread_sync: c_uint,
    pub(super) num_workers: c_uint,
    pub(super) progress_delay_us: u64,
    pub(super) listen_delay_us: u64,
    pub(super) capture_telemetry: bool,
}

/// `NIXL_CAPI_THREAD_SYNC_RW`: calls may come from several threads.
pub(super) const THREAD_SYNC_RW: c_uint = 2;

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) -> c_int;)*) => {
        unsafe extern "C" {
            $(pub(super) fn $name($($argument: $kind),*) -> c_int;)*
        }
        /// What the library must have.
        pub(super) const FUNCTIONS: &[&str] = &[$(stringify!($name)),*];
    };
}

functions! {
    fn nixl_capi_create_configured_agent(name: *const c_char, config: *const AgentConfig, agent: *mut Raw) -> c_int;
    fn nixl_capi_destroy_agent(agent: Raw) -> c_int;
    fn nixl_capi_params_add(params: Raw, key: *const c_char, value: *const c_char) -> c_int;
    fn nixl_capi_destroy_params(params: Raw) -> c_int;
    fn nixl_capi_get_plugin_params(agent: Raw, plugin: *const c_char, kinds: *mut Raw, params: *mut Raw) -> c_int;
    fn nixl_capi_destroy_mem_list(kinds: Raw) -> c_int;
    fn nixl_capi_create_backend(agent: Raw, plugin: *const c_char, params: Raw, backend: *mut Raw) -> c_int;
    fn nixl_capi_destroy_backend(backend: Raw) -> c_int;
    fn nixl_capi_get_local_md(agent: Raw, data: *mut *mut c_void, len: *mut usize) -> c_int;
    fn nixl_capi_load_remote_md(agent: Raw, data: *const c_void, len: usize, name: *mut *mut c_char) -> c_int;
    fn nixl_capi_invalidate_remote_md(agent: Raw, name: *const c_char) -> c_int;
    fn nixl_capi_create_reg_dlist(kind: c_uint, list: *mut Raw) -> c_int;
    fn nixl_capi_destroy_reg_dlist(list: Raw) -> c_int;
    fn nixl_capi_reg_dlist_add_desc(
        list: Raw, address: usize, len: usize, device: u64, metadata: *const c_void, metadata_len: usize
    ) -> c_int;
    fn nixl_capi_register_mem(agent: Raw, list: Raw, options: Raw) -> c_int;
    fn nixl_capi_deregister_mem(agent: Raw, list: Raw, options: Raw) -> c_int;
    fn nixl_capi_create_opt_args(options: *mut Raw) -> c_int;
    fn nixl_capi_destroy_opt_args(options: Raw) -> c_int;
    fn nixl_capi_opt_args_add_backend(options: Raw, backend: Raw) -> c_int;
    fn nixl_capi_opt_args_set_notif_msg(options: Raw, data: *const c_void, len: usize) -> c_int;
    fn nixl_capi_opt_args_set_has_notif(options: Raw, has: bool) -> c_int;
    fn nixl_capi_opt_args_set_skip_desc_merge(options: Raw, skip: bool) -> c_int;
    fn nixl_capi_create_xfer_dlist(kind: c_uint, list: *mut Raw) -> c_int;
    fn nixl_capi_destroy_xfer_dlist(list: Raw) -> c_int;
    fn nixl_capi_xfer_dlist_add_desc(list: Raw, address: usize, len: usize, device: u64) -> c_int;
    fn nixl_capi_create_xfer_req(
        agent: Raw, operation: c_uint, local: Raw, remote: Raw, peer: *const c_char, request: *mut Raw, options: Raw
    ) -> c_int;
    fn nixl_capi_post_xfer_req(agent: Raw, request: Raw, options: Raw) -> c_int;
    fn nixl_capi_get_xfer_status(agent: Raw, request: Raw) -> c_int;
    fn nixl_capi_release_xfer_req(agent: Raw, request: Raw) -> c_int;
    fn nixl_capi_destroy_xfer_req(request: Raw) -> c_int;
    fn nixl_capi_gen_notif(agent: Raw, peer: *const c_char, data: *const c_void, len: usize, options: Raw) -> c_int;
    fn nixl_capi_create_notif_map(map: *mut Raw) -> c_int;
    fn nixl_capi_destroy_notif_map(map: Raw) -> c_int;
    fn nixl_capi_get_notifs(agent: Raw, map: Raw, options: Raw) -> c_int;
    fn nixl_capi_notif_map_size(map: Raw, size: *mut usize) -> c_int;
    fn nixl_capi_notif_map_get_agent_at(map: Raw, index: usize, name: *mut *const c_char) -> c_int;
    fn nixl_capi_notif_map_get_notifs_size(map: Raw, name: *const c_char, size: *mut usize) -> c_int;
    fn nixl_capi_notif_map_get_notif(
        map: Raw, name: *const c_char, index: usize, data: *mut *const c_void, len: *mut usize
    ) -> c_int;
}
