//! What every [`Device`](crate::Device) must do, as checks that any implementation can run.
