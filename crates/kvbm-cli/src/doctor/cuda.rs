//! The CUDA driver, its devices, and what kvbm would do on each.

use std::fs::read_to_string;
use std::path::Path;
use std::time::Instant;

use kvbm::device::{CudaDevice, CudaDriver, CudaUnavailable, Device, DeviceId};
use kvbm::storage::{HugePages, NumaPlacement, PinFallback, PinnedStorage};
use kvbm_kernels::{Backend, Converter, CudaKernels, FATBIN, ImageKind, OneWay, image_for, images};

use super::{Finding, Status};
use crate::human::bytes;

/// Devices that are looked at one by one.
const MOST_DEVICES: u32 = 16;
/// Bytes that are page-locked to learn how fast that goes.
const PIN_BYTES: usize = 64 << 20;

const NAME: &str = "CUDA";
const GPU: &str = "GPU";
const KERNELS: &str = "GPU kernels";
const BATCHES: &str = "GPU batch copies";
const WAYS: &str = "GPU copies";
const PINNING: &str = "page-locking";
const GDS: &str = "GPUDirect Storage";

pub(super) fn examine() -> Vec<Finding> {
    let driver = match CudaDriver::open() {
        Ok(driver) => driver,
        Err(error) => return vec![missing(&error)],
    };
    let version = driver.version();
    let library =
        CudaDriver::library().map_or_else(|error| error.to_string(), |name| name.to_string_lossy().into());
    let (major, minor) = (version / 1000, version % 1000 / 10);
    let devices = driver.devices();
    let count = if devices == 1 { "one device".to_owned() } else { format!("{devices} devices") };
    let mut findings =
        vec![Finding::ok(NAME, format!("{library}: driver for CUDA {major}.{minor}, {count}"))];
    findings.push(if driver.has_batch_copies() {
        Finding::ok(BATCHES, "cuMemcpyBatchAsync")
    } else {
        Finding::short(
            BATCHES,
            Status::Limited,
            format!("the driver for CUDA {major}.{minor} has no cuMemcpyBatchAsync"),
            "fragments are gathered by a kernel or copied one by one",
            "update the driver to one for CUDA 12.8 or newer (R570)",
        )
    });
    for number in 0..devices.min(MOST_DEVICES) {
        match CudaDevice::open(&driver, DeviceId(number)) {
            Ok(device) => device_findings(&device, &mut findings),
            Err(error) => findings.push(broken(GPU, format!("{number}: {error}"))),
        }
    }
    findings.push(direct_storage(Path::new("/")));
    findings
}

fn missing(error: &CudaUnavailable) -> Finding {
    let fix = match error {
        CudaUnavailable::NoDriver { .. } => {
            "install the NVIDIA driver (sudo apt-get install nvidia-driver-580), or start the container with --gpus all"
        }
        CudaUnavailable::NoDevice | CudaUnavailable::NoSuchDevice { .. } => {
            "unset CUDA_VISIBLE_DEVICES, or start the container with --gpus all; nvidia-smi -L lists the devices"
        }
        _ => {
            "sudo apt-get install --reinstall nvidia-driver-580, then reboot: library and kernel module must fit"
        }
    };
    Finding::short(NAME, Status::Missing, error.to_string(), "G1 is the emulated device, in host memory", fix)
}

fn broken(name: &'static str, found: String) -> Finding {
    let effect = "this device cannot be used; the others can";
    Finding::short(
        name,
        Status::Missing,
        found,
        effect,
        "nvidia-smi -q, and dmesg for errors of the kernel module (Xid)",
    )
}

fn device_findings(device: &CudaDevice, findings: &mut Vec<Finding>) {
    let (info, number) = (device.info(), device.id());
    let capability = match device.compute_capability() {
        Ok(capability) => capability,
        Err(error) => return findings.push(broken(GPU, format!("{number}: {error}"))),
    };
    let (major, minor) = capability;
    let node = device.numa_node().map_or_else(String::new, |node| format!(", NUMA node {node}"));
    let memory = format!("{} of {} free", bytes(info.free_bytes), bytes(info.total_bytes));
    let text = format!("{number}: {}, compute capability {major}.{minor}, {memory}{node}", info.name);
    findings.push(Finding::ok(GPU, text));
    findings.push(image(number, capability));
    findings.push(pinning(device));
    findings.push(ways(device));
}

/// The image of the kernels that the device would load.
fn image(number: DeviceId, (major, minor): (u32, u32)) -> Finding {
    let images = images(FATBIN).unwrap_or_default();
    match image_for(&images, major, minor).map(|image| (image.kind, image.arch)) {
        Some((ImageKind::Cubin, arch)) => {
            Finding::ok(KERNELS, format!("{number}: machine code for sm_{arch}"))
        }
        Some((ImageKind::Ptx, arch)) => Finding::short(
            KERNELS,
            Status::Limited,
            format!("{number}: PTX for compute_{arch}: there is no machine code for {major}.{minor}"),
            "the driver compiles the kernels when they are loaded: a slower start",
            format!("build with CUDA_ARCHS={major}{minor} and a local nvcc"),
        ),
        None => Finding::short(
            KERNELS,
            Status::Missing,
            format!("{number}: no image for compute capability {major}.{minor}"),
            "fragments are copied by the copy engines; nothing is converted by a kernel",
            format!("build with CUDA_ARCHS={major}{minor} and a local nvcc"),
        ),
    }
}

/// How fast host memory is page-locked, and where it lies.
fn pinning(device: &CudaDevice) -> Finding {
    let (number, len) = (device.id(), PIN_BYTES as u64);
    let start = Instant::now();
    match PinnedStorage::new(device, len, 4096, HugePages::No, PinFallback::Error) {
        Ok(pinned) => {
            let rate = len as f64 / start.elapsed().as_secs_f64().max(1e-9) / 1e9;
            let text = format!("{number}: {rate:.1} GB/s ({} as a sample)", bytes(len));
            match pinned.placement() {
                NumaPlacement::Anywhere => Finding::ok(PINNING, text),
                NumaPlacement::Preferred(node) => {
                    Finding::ok(PINNING, format!("{text}, on NUMA node {node}"))
                }
                NumaPlacement::Refused { node, reason } => Finding::short(
                    PINNING,
                    Status::Limited,
                    format!("{text}, not bound to NUMA node {node}: {reason}"),
                    "host memory may lie on another node than the device: slower copies",
                    format!(
                        "numactl --preferred={node}, or a container that is allowed mbind (CAP_SYS_NICE)"
                    ),
                ),
            }
        }
        Err(error) => Finding::short(
            PINNING,
            Status::Limited,
            format!("{number}: {error}"),
            "copies from and to host memory are slower and go through the driver's own buffers",
            "ulimit -l unlimited (or LimitMEMLOCK=infinity in the service, --ulimit memlock=-1 for a container)",
        ),
    }
}

/// How fragments of blocks would get to host memory, and from there.
fn ways(device: &CudaDevice) -> Finding {
    let number = device.id();
    let measured = CudaKernels::new(device.clone()).and_then(|kernels| {
        let converter = Converter::new(kernels);
        Ok((converter.host_copies()?, converter.capabilities()))
    });
    match measured {
        Ok((measured, capabilities)) => {
            let text = |one: &OneWay| {
                let way = |size: u64| {
                    let chosen = Backend::Auto.choose(capabilities, one.crossover.as_ref(), size);
                    chosen.map_or_else(|error| error.to_string(), |way| way.to_string())
                };
                let sizes = one.measurements.iter().map(|one| one.piece_bytes);
                sizes.map(|size| format!("{} {}", bytes(size), way(size))).collect::<Vec<_>>().join(", ")
            };
            let (to, from) = (text(&measured.to_host), text(&measured.from_host));
            let text =
                format!("{number}: measured, by fragment size: to host memory {to}; from there {from}");
            Finding::ok(WAYS, text)
        }
        Err(error) => Finding::short(
            WAYS,
            Status::Limited,
            format!("{number}: not measured: {error}"),
            "fragments are gathered by a kernel where there is one, whatever their size",
            "nvidia-smi shows who uses the device; kvbm measures anew when it is started",
        ),
    }
}

/// Whether storage could reach the device without host memory; `root` is that of the file system.
fn direct_storage(root: &Path) -> Finding {
    let modules = read_to_string(root.join("proc/modules")).unwrap_or_default();
    if modules.lines().any(|line| line.starts_with("nvidia_fs ")) {
        return Finding::ok(GDS, "the kernel module nvidia_fs is loaded");
    }
    let config = read_to_string(root.join("etc/cufile.json")).unwrap_or_default();
    let squeezed: String = config.chars().filter(|char| !char.is_whitespace()).collect();
    let compat = if squeezed.contains("\"allow_compat_mode\":false") {
        "its compatibility mode is switched off in /etc/cufile.json"
    } else {
        "it would run in compatibility mode"
    };
    Finding::short(
        GDS,
        Status::Limited,
        format!("the kernel module nvidia_fs is not loaded: {compat}"),
        "disk blocks reach the device through a staging ring in host memory, as they do in kvbm anyway",
        "sudo modprobe nvidia_fs (package nvidia-fs)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_has_a_line_on_what_it_would_load() {
        for (capability, status, part) in [
            ((9, 0), Status::Ok, "sm_90"),
            ((13, 0), Status::Limited, "PTX for compute_80"),
            ((7, 5), Status::Missing, "no image for compute capability 7.5"),
        ] {
            let finding = image(DeviceId(3), capability);
            assert_eq!(finding.status, status, "{finding:?}");
            assert!(finding.found.contains(part) && finding.found.starts_with("3: "), "{finding:?}");
        }
    }

    #[test]
    fn direct_storage_is_read_off_the_system() {
        let root = tempfile::tempdir().unwrap();
        assert!(direct_storage(root.path()).found.contains("would run in compatibility mode"));
        std::fs::create_dir_all(root.path().join("etc")).unwrap();
        std::fs::write(
            root.path().join("etc/cufile.json"),
            "{\"properties\": {\"allow_compat_mode\" : false}}",
        )
        .unwrap();
        assert!(direct_storage(root.path()).found.contains("switched off"));
        std::fs::create_dir_all(root.path().join("proc")).unwrap();
        std::fs::write(root.path().join("proc/modules"), "nvidia_fs 200 1 - Live 0x0\n").unwrap();
        assert_eq!(direct_storage(root.path()).status, Status::Ok);
    }

    #[test]
    fn every_reason_has_a_way_out_of_its_own() {
        let no_driver = missing(&CudaUnavailable::NoDriver { reason: "gone".into() });
        assert!(no_driver.found.contains("gone") && no_driver.fix.unwrap().contains("--gpus all"));
        assert!(missing(&CudaUnavailable::NoDevice).fix.unwrap().contains("CUDA_VISIBLE_DEVICES"));
        let old = missing(&CudaUnavailable::OldDriver { version: 11_080 });
        assert!(old.found.contains("11.8") && old.fix.unwrap().contains("reinstall"));
    }
}
