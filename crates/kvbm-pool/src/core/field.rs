//! Fields of the arrays that all shards share. A field is written only by who holds the lock of the shard that its entry or
//! slot belongs to, so a relaxed load and store, plain moves for the machine, are all it takes. Whoever reads without that
//! lock reads a hint. (Of one field a hint is also written so: [`U16::change`].)

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

macro_rules! field {
    ($name:ident, $atomic:ident, $plain:ty) => {
        #[derive(Default)]
        #[repr(transparent)]
        pub(crate) struct $name($atomic);

        impl $name {
            #[inline]
            pub(crate) const fn new(value: $plain) -> Self {
                Self($atomic::new(value))
            }

            #[inline]
            pub(crate) fn get(&self) -> $plain {
                self.0.load(Relaxed)
            }

            #[inline]
            pub(crate) fn set(&self, value: $plain) {
                self.0.store(value, Relaxed);
            }
        }
    };
}

field!(U8, AtomicU8, u8);
field!(U16, AtomicU16, u16);
field!(U32, AtomicU32, u32);
field!(U64, AtomicU64, u64);

impl U16 {
    /// Changes it without the lock: what its owner writes meanwhile stays.
    pub(crate) fn change(&self, from: u16, to: u16) {
        // It may have been changed: then that counts.
        self.0.compare_exchange(from, to, Relaxed, Relaxed).ok();
    }
}
