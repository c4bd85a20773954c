//! Random numbers of the system, decided by the seed.
//!
//! The standard library draws the keys of hash maps from the system once for each thread. The order
//! of a map depends on them, and so does what a leader does first. Here each thread draws from a
//! number that it was given.

use std::cell::Cell;
use std::mem::MaybeUninit;

thread_local! {
    static SEED: Cell<u64> = const { Cell::new(0) };
}

/// What this thread draws from now on.
pub(crate) fn seed(seed: u64) {
    SEED.set(seed);
}

fn next() -> u64 {
    let state = SEED.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
    SEED.set(state);
    let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ z >> 29
}

/// Takes the place of the system's function in this program.
///
/// # Safety
/// `buffer` must be valid for writes of `length` bytes.
// SAFETY: no other item of this program has this name. It keeps the contract of the C library's
// function: it fills the buffer and returns its length.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, _flags: u32) -> isize {
    // SAFETY: the caller promises so many writable bytes; they need hold no value yet.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<MaybeUninit<u8>>(), length) };
    for byte in bytes {
        byte.write(next() as u8);
    }
    length.cast_signed()
}
