//! kvbm-layout.
