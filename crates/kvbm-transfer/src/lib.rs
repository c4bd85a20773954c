//! kvbm-transfer.
