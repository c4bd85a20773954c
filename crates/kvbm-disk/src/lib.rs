//! kvbm-disk.
