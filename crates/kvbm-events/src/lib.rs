//! kvbm-events.
