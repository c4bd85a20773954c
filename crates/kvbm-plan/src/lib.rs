//! kvbm-plan.
