//! kvbm-storage.
