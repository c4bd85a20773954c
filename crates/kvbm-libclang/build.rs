//! Looks for libclang as bindgen does.

fn main() {
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    #[cfg(feature = "check")]
    if let Err(error) = clang_sys::load() {
        let reason = error.lines().next().unwrap_or_default();
        println!(
            "cargo::error=the feature `nixl` needs libclang to build: `apt-get install libclang-dev`, or \
             `pip install libclang` and set LIBCLANG_PATH to its folder `clang/native` and \
             BINDGEN_EXTRA_CLANG_ARGS=-I$(gcc -print-file-name=include) ({reason})"
        );
    }
}
