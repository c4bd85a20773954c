//! kvbm-device.
