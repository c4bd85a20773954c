//! kvbm-volume.
