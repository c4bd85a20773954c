//! kvbm-nixl.
