//! The source build that `CUDA_ARCHS` asks for, with a stand-in for nvcc.

#[path = "../build/nvcc.rs"]
mod nvcc;

use std::path::Path;

#[test]
fn archs_are_machine_code_each_and_ptx_of_the_newest() {
    let expected = [
        "-gencode",
        "arch=compute_80,code=sm_80",
        "-gencode",
        "arch=compute_90,code=sm_90",
        "-gencode",
        "arch=compute_90,code=compute_90",
    ];
    assert_eq!(nvcc::targets("90, 80,90").unwrap(), expected);
    for (archs, named) in
        [("", "``"), ("sm_90", "`sm_90`"), ("80,", "``"), ("9.0", "`9.0`"), ("60", "60, older")]
    {
        let error = nvcc::targets(archs).unwrap_err();
        assert!(error.contains(named) && error.contains("prebuilt"), "{archs}: {error}");
    }
}

#[test]
fn a_compiler_that_is_not_there_is_an_error_with_a_way_out() {
    // The tests' environment names no compiler, and this source does not exist for the one that may
    // be installed.
    let nowhere = Path::new(env!("CARGO_TARGET_TMPDIR")).join("nowhere").join("none.cu");
    let error = nvcc::build(&nowhere, &nowhere.with_extension("fatbin"), &[]).unwrap_err();
    assert!(error.contains("unset CUDA_ARCHS to use the prebuilt kernels"), "{error}");
}
