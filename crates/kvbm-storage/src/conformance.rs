//! What every [`Storage`](crate::Storage) must do, as checks that any implementation can run.
