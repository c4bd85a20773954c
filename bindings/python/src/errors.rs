//! From errors of kvbm to exceptions of `kvbm_rs.errors`.
//!
//! The classes are declared in Python, where they have documentation and several bases. The message
//! is the Rust text.

use kvbm::config::ConfigError;
use kvbm::tokens::{ExtraKeyError, NamespaceError, NotPersistable};
use kvbm::{
    BuildError, EngineError, OffloadError, ParkError, PinError, PinForError, SequenceError, TicketError,
};
use pyo3::PyErr;

/// The classes.
mod classes {
    pyo3::import_exception!(kvbm_rs.errors, KvbmError);
    pyo3::import_exception!(kvbm_rs.errors, BuildFailed);
    pyo3::import_exception!(kvbm_rs.errors, BusyError);
    pyo3::import_exception!(kvbm_rs.errors, ClosedError);
    pyo3::import_exception!(kvbm_rs.errors, ConfigInvalid);
    pyo3::import_exception!(kvbm_rs.errors, ForkedError);
    pyo3::import_exception!(kvbm_rs.errors, InternalError);
    pyo3::import_exception!(kvbm_rs.errors, InvalidArgument);
    pyo3::import_exception!(kvbm_rs.errors, LostError);
    pyo3::import_exception!(kvbm_rs.errors, NoRoomError);
}

/// Why a call failed, by what its caller can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No other kind fits.
    Other,
    /// The manager does not start.
    Build,
    /// Blocks that a copy still touches.
    Busy,
    /// The object was closed, or the manager is shutting down.
    Closed,
    /// A setting.
    Config,
    /// Another process made the object.
    Forked,
    /// A panic.
    Internal,
    /// An argument.
    Argument,
    /// Contents that a worker lost.
    Lost,
    /// A tier without room.
    NoRoom,
}

/// An error on its way to Python; made without the GIL.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Error {
    kind: Kind,
    text: String,
}

pub(crate) type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(kind: Kind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(Kind::Argument, text)
    }

    pub(crate) fn of(kind: Kind, error: &impl std::error::Error) -> Self {
        Self::new(kind, error.to_string())
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        let text = error.text;
        match error.kind {
            Kind::Other => classes::KvbmError::new_err(text),
            Kind::Build => classes::BuildFailed::new_err(text),
            Kind::Busy => classes::BusyError::new_err(text),
            Kind::Closed => classes::ClosedError::new_err(text),
            Kind::Config => classes::ConfigInvalid::new_err(text),
            Kind::Forked => classes::ForkedError::new_err(text),
            Kind::Internal => classes::InternalError::new_err(text),
            Kind::Argument => classes::InvalidArgument::new_err(text),
            Kind::Lost => classes::LostError::new_err(text),
            Kind::NoRoom => classes::NoRoomError::new_err(text),
        }
    }
}

impl From<EngineError> for Error {
    fn from(error: EngineError) -> Self {
        let kind = match error {
            EngineError::Busy(_) => Kind::Busy,
            EngineError::Lost(_) | EngineError::LostPrefix(_) => Kind::Lost,
            EngineError::Alloc(_) => Kind::NoRoom,
            EngineError::ShuttingDown => Kind::Closed,
            EngineError::Private(ref error) => match error {
                ParkError::Alloc(_) | ParkError::NoHostMemory => Kind::NoRoom,
                ParkError::Lost(_) => Kind::Lost,
                ParkError::ShuttingDown => Kind::Closed,
                ParkError::Failed(_) => Kind::Other,
                ParkError::Sequence(_) | ParkError::Foreign | ParkError::Namespaces => Kind::Argument,
            },
            _ => Kind::Argument,
        };
        Self::of(kind, &error)
    }
}

impl From<TicketError> for Error {
    fn from(error: TicketError) -> Self {
        match error {
            TicketError::Engine(error) => Self::from(error),
            TicketError::Loading { .. } => Self::of(Kind::Busy, &error),
            _ => Self::of(Kind::Argument, &error),
        }
    }
}

impl From<PinError> for Error {
    fn from(error: PinError) -> Self {
        let kind = if matches!(error, PinError::Limit { .. }) { Kind::NoRoom } else { Kind::Argument };
        Self::of(kind, &error)
    }
}

impl From<PinForError> for Error {
    fn from(error: PinForError) -> Self {
        match error {
            PinForError::Pin(error) => Self::from(error),
            PinForError::TooMany { .. } => Self::of(Kind::NoRoom, &error),
        }
    }
}

impl From<OffloadError> for Error {
    fn from(error: OffloadError) -> Self {
        let kind = match error {
            OffloadError::Lost(_) => Kind::Lost,
            OffloadError::ShuttingDown => Kind::Closed,
            _ => Kind::Argument,
        };
        Self::of(kind, &error)
    }
}

impl From<BuildError> for Error {
    fn from(error: BuildError) -> Self {
        let kind = match error {
            BuildError::Config(_) => Kind::Config,
            BuildError::Namespace(_) | BuildError::NotPersistable(_) | BuildError::Ranks { .. } => {
                Kind::Argument
            }
            _ => Kind::Build,
        };
        Self::of(kind, &error)
    }
}

impl From<kvbm_node::NodeError> for Error {
    fn from(error: kvbm_node::NodeError) -> Self {
        let kind = match error {
            kvbm_node::NodeError::NoScheduler => Kind::Argument,
            kvbm_node::NodeError::System(_) => Kind::Build,
            _ => Kind::Other,
        };
        Self::of(kind, &error)
    }
}

macro_rules! of_kind {
    ($($type:ty => $kind:ident),* $(,)?) => {
        $(impl From<$type> for Error {
            fn from(error: $type) -> Self {
                Self::of(Kind::$kind, &error)
            }
        })*
    };
}

of_kind! {
    ConfigError => Config,
    ExtraKeyError => Argument,
    NamespaceError => Argument,
    NotPersistable => Argument,
    SequenceError => Argument,
    kvbm::NoSuchBlock => Argument,
    kvbm::TtlError => Argument,
    kvbm::ClearError => Argument,
    kvbm::FenceError => Argument,
    kvbm::FlushError => Other,
    kvbm::WorkerError => Build,
    kvbm_node::DaemonError => Build,
    kvbm::tokens::SequenceError => Argument,
    kvbm::layout::LayoutError => Argument,
    kvbm::layout::ConfigError => Argument,
    kvbm::kernels::KernelError => Argument,
    kvbm::storage::StorageError => Argument,
    kvbm::events_plane::TransportError => Other,
}
