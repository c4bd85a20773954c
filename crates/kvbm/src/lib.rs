//! kvbm.
