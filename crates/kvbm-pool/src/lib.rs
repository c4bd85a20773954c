//! kvbm-pool.
