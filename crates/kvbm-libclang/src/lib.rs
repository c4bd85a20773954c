//! A build check: it says in one line what to install where libclang is missing.
//!
//! **Knows:** how bindgen looks for libclang.
//! **Must never know:** what is built with it.
//!
//! The bindings of `nixl-sys` are generated when it is built, and its own build fails without a
//! remedy. This crate is built beside it and fails first, because it waits for nothing.
#![forbid(unsafe_code)]
