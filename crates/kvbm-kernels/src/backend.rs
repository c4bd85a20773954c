//! Who moves the bytes: a kernel, or the copy engines, many copies at a time or one by one.

use std::fmt;

use crate::KernelError;

/// How a conversion is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Backend {
    /// What was measured to be the fastest on this device; the kernel where nothing was measured,
    /// then batches, then single copies, as far as the device has them.
    #[default]
    Auto,
    /// One launch of a kernel.
    Kernel,
    /// Copies submitted many at a time (`cuMemcpyBatchAsync`).
    Batch,
    /// One asynchronous copy after the other (`cuMemcpyAsync`).
    Async,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Kernel => "kernel",
            Self::Batch => "batch",
            Self::Async => "async",
        })
    }
}

/// What a device can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// The kernels were loaded.
    pub kernels: bool,
    /// Its driver takes batches of copies.
    pub batches: bool,
}

/// From which size of the pieces on the copy engines are faster than the kernel, as measured once
/// on the device.
///
/// Small pieces are the kernel's: the copy engines pay for every piece. Large ones keep the engines
/// busy without taking multiprocessors from the engine's compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crossover {
    /// Bytes of a piece from which on a batch is faster than the kernel.
    pub batch_from_bytes: u64,
    /// Bytes of a piece from which on single copies are as fast as a batch.
    pub async_from_bytes: u64,
}

/// Time that each way took for pieces of one size, in nanoseconds for the same number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measurement {
    /// Bytes of each piece.
    pub piece_bytes: u64,
    /// The kernel.
    pub kernel_ns: u64,
    /// A batch of copies; `None` where the driver has none.
    pub batch_ns: Option<u64>,
    /// Single copies.
    pub async_ns: u64,
}

impl Crossover {
    /// The sizes from which on one way stays ahead of the other, `u64::MAX` if it never does. A way
    /// has to win at every larger size that was measured too: one lucky measurement moves nothing.
    /// `None` without measurements.
    pub fn from_measurements(measurements: &[Measurement]) -> Option<Self> {
        let mut sorted = measurements.to_vec();
        sorted.sort_by_key(|measured| measured.piece_bytes);
        let from = |wins: &dyn Fn(&Measurement) -> bool| {
            let winners = sorted.iter().rev().take_while(|measured| wins(measured));
            winners.last().map_or(u64::MAX, |measured| measured.piece_bytes)
        };
        let batch_from_bytes = from(&|m| m.batch_ns.is_some_and(|batch| batch < m.kernel_ns));
        let async_from_bytes =
            from(&|m| m.async_ns < m.kernel_ns && m.batch_ns.is_none_or(|batch| m.async_ns <= batch));
        (!sorted.is_empty()).then_some(Self { batch_from_bytes, async_from_bytes })
    }
}

impl Backend {
    /// The back end to use for pieces of `piece_bytes`: never [`Backend::Auto`].
    ///
    /// # Errors
    /// [`KernelError::Backend`] if one was asked for by name that the device does not have.
    pub fn choose(
        self,
        capabilities: Capabilities,
        crossover: Option<&Crossover>,
        piece_bytes: u64,
    ) -> Result<Self, KernelError> {
        match self {
            Self::Kernel if !capabilities.kernels => {
                let why = "no image of the kernels could be loaded on this device";
                Err(KernelError::Backend { backend: self, why })
            }
            Self::Batch if !capabilities.batches => {
                let why =
                    "its driver takes no batches of copies (cuMemcpyBatchAsync, which came with CUDA 12.8)";
                Err(KernelError::Backend { backend: self, why })
            }
            Self::Kernel | Self::Batch | Self::Async => Ok(self),
            Self::Auto => Ok(Self::fastest(capabilities, crossover, piece_bytes)),
        }
    }

    fn fastest(capabilities: Capabilities, crossover: Option<&Crossover>, piece_bytes: u64) -> Self {
        let measured = crossover.filter(|_| capabilities.kernels);
        match measured {
            Some(measured) if piece_bytes >= measured.async_from_bytes => Self::Async,
            Some(measured) if capabilities.batches && piece_bytes >= measured.batch_from_bytes => Self::Batch,
            _ if capabilities.kernels => Self::Kernel,
            _ if capabilities.batches => Self::Batch,
            _ => Self::Async,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Capabilities = Capabilities { kernels: true, batches: true };
    const KERNELS: Capabilities = Capabilities { kernels: true, batches: false };
    const BATCHES: Capabilities = Capabilities { kernels: false, batches: true };
    const NOTHING: Capabilities = Capabilities { kernels: false, batches: false };

    #[test]
    fn auto_follows_what_was_measured_and_falls_back_where_nothing_was() {
        let measured = Some(Crossover { batch_from_bytes: 1 << 16, async_from_bytes: 1 << 22 });
        for (capabilities, crossover, piece_bytes, expected) in [
            (ALL, None, 1 << 30, Backend::Kernel),
            (BATCHES, None, 1, Backend::Batch),
            (NOTHING, None, 1, Backend::Async),
            (ALL, measured, (1 << 16) - 1, Backend::Kernel),
            (ALL, measured, 1 << 16, Backend::Batch),
            (ALL, measured, (1 << 22) - 1, Backend::Batch),
            (ALL, measured, 1 << 22, Backend::Async),
            (KERNELS, measured, 1 << 16, Backend::Kernel),
            (KERNELS, measured, 1 << 22, Backend::Async),
            (BATCHES, measured, 1, Backend::Batch),
            (NOTHING, measured, 1, Backend::Async),
        ] {
            let chosen = Backend::Auto.choose(capabilities, crossover.as_ref(), piece_bytes);
            assert_eq!(chosen, Ok(expected), "{capabilities:?} {crossover:?} {piece_bytes}");
        }
    }

    #[test]
    fn what_is_asked_for_by_name_is_used_or_refused() {
        for backend in [Backend::Kernel, Backend::Batch, Backend::Async] {
            assert_eq!(backend.choose(ALL, None, 1), Ok(backend));
        }
        assert_eq!(Backend::Async.choose(NOTHING, None, 1), Ok(Backend::Async));
        let error = Backend::Kernel.choose(BATCHES, None, 1).unwrap_err().to_string();
        assert!(error.contains("back end kernel") && error.contains("image"), "{error}");
        let error = Backend::Batch.choose(KERNELS, None, 1).unwrap_err().to_string();
        assert!(error.contains("back end batch") && error.contains("cuMemcpyBatchAsync"), "{error}");
    }

    #[test]
    fn a_crossover_needs_every_larger_size() {
        let measure = |piece_bytes, kernel_ns, batch_ns, async_ns| Measurement {
            piece_bytes,
            kernel_ns,
            batch_ns: Some(batch_ns),
            async_ns,
        };
        assert_eq!(Crossover::from_measurements(&[]), None);
        // At 1 KiB the batch was lucky; single copies catch up at 16 MiB. Unsorted on purpose.
        let measured = [
            measure(1 << 24, 10, 8, 8),
            measure(1 << 10, 10, 9, 90),
            measure(1 << 14, 10, 30, 90),
            measure(1 << 20, 10, 9, 20),
        ];
        let expected = Crossover { batch_from_bytes: 1 << 20, async_from_bytes: 1 << 24 };
        assert_eq!(Crossover::from_measurements(&measured), Some(expected));
        let never = [measure(1 << 24, 5, 8, 8)];
        let expected = Crossover { batch_from_bytes: u64::MAX, async_from_bytes: u64::MAX };
        assert_eq!(Crossover::from_measurements(&never), Some(expected));
        let without = [Measurement { batch_ns: None, ..measure(1 << 20, 10, 0, 9) }];
        let expected = Crossover { batch_from_bytes: u64::MAX, async_from_bytes: 1 << 20 };
        assert_eq!(Crossover::from_measurements(&without), Some(expected));
    }
}
