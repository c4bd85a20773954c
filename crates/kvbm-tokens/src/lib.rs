//! kvbm-tokens.
