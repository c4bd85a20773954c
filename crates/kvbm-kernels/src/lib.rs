//! kvbm-kernels.
