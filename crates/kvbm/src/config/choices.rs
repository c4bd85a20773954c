//! The settings that are one of a few words.

use super::value::choice;

choice! {
    /// How blocks are hashed.
    Algorithm {
        /// Keyed BLAKE3.
        Blake3 = "blake3",
        /// XXH3-128.
        Xxh3_128 = "xxh3-128",
    }
}

choice! {
    /// Where chains of hashes begin.
    ChainRootKind {
        /// The same in every process.
        Fixed = "fixed",
        /// An engine's own, the same in every process.
        External = "external",
        /// An engine's own, different in every process: nothing can be stored or shared.
        PerProcess = "per-process",
    }
}

choice! {
    /// What stands behind tier G1.
    DeviceKind {
        /// Emulated in host memory.
        Emulated = "emulated",
        /// An NVIDIA GPU.
        Cuda = "cuda",
    }
}

choice! {
    /// How a block lies in G1.
    LayoutKind {
        /// One region per layer, keys before values.
        LayerSeparate = "layer-separate",
        /// All layers of a block side by side.
        FullyContiguous = "fully-contiguous",
    }
}

choice! {
    /// Order within a layer of a block in G1.
    DeviceOrder {
        /// Tokens before heads.
        Nhd = "nhd",
        /// Heads before tokens.
        Hnd = "hnd",
    }
}

choice! {
    /// Order within a block in host memory and on disk.
    HostOrder {
        /// Layer by layer, tokens before heads.
        Nhd = "nhd",
        /// Heads outermost.
        Universal = "universal",
    }
}

choice! {
    /// How fragments of blocks get from and to a GPU.
    CopyWay {
        /// As is measured to be the fastest.
        Auto = "auto",
        /// By a kernel through a staging area.
        Kernel = "kernel",
        /// Many copies in one call.
        Batch = "batch",
        /// One copy after the other.
        Async = "async",
    }
}

choice! {
    /// How long copies of the emulated device take.
    BandwidthModel {
        /// As fast as the machine.
        Unlimited = "unlimited",
        /// The figures of the tiering article: 28 GB/s between device and host memory.
        Reference = "reference",
    }
}

choice! {
    /// Who moves bytes between host memory and disk.
    DiskEngine {
        /// The first of `io_uring`, `threads` and `buffered` that works.
        Auto = "auto",
        /// A ring of the kernel, around the page cache.
        IoUring = "io_uring",
        /// Threads, around the page cache.
        Threads = "threads",
        /// Threads, through the page cache.
        Buffered = "buffered",
        /// Threads with agents of NIXL, around the page cache where that is possible.
        Nixl = "nixl",
    }
}

choice! {
    /// NIXL's back ends for files.
    NixlFiles {
        /// Asynchronous I/O of the kernel.
        Posix = "POSIX",
        /// Storage that a GPU reaches directly, with threads.
        GdsMt = "GDS_MT",
    }
}

choice! {
    /// Who may use the files of G3.
    DiskMode {
        /// Their owner alone.
        Owner = "0600",
        /// The group may read.
        GroupRead = "0640",
        /// The group may read and write.
        GroupWrite = "0660",
    }
}

choice! {
    /// Which blocks from host memory have their checksums compared.
    VerifyHost {
        /// None.
        Never = "never",
        /// Some.
        Sampled = "sampled",
        /// All.
        Always = "always",
    }
}

choice! {
    /// Which blocks are copied to a volume.
    VolumeOffload {
        /// Each block of host memory, as soon as it is registered there; without host memory, of
        /// the device.
        WriteThrough = "write-through",
        /// Those that are about to be evicted from there.
        Victims = "victims",
        /// Those that a call names.
        Explicit = "explicit",
    }
}

choice! {
    /// Whether blocks on volumes are compressed.
    VolumeCompress {
        /// They are not.
        Off = "off",
        /// With LZ4: fast, and little shorter.
        Lz4 = "lz4",
        /// With Zstandard.
        Zstd = "zstd",
        /// With Zstandard, while that makes a volume faster by what is measured.
        Auto = "auto",
    }
}

choice! {
    /// Whether blocks on volumes have short codes in place of their numbers.
    VolumeLossy {
        /// They are as they were computed.
        Off = "off",
        /// 8-bit floating point with 3 bits of mantissa.
        Fp8E4m3 = "fp8_e4m3",
        /// Whole numbers of 8 bits.
        Int8 = "int8",
        /// Whole numbers of 4 bits.
        Int4 = "int4",
    }
}

choice! {
    /// How chains on a volume are found.
    VolumeLookup {
        /// By asking it for a few of their blocks.
        Probe = "probe",
        /// Only where this manager wrote or read them.
        Known = "known",
    }
}

choice! {
    /// What moves bytes between nodes.
    RemoteAgentKind {
        /// NIXL, whose library is found at run time.
        Nixl = "nixl",
        /// Copies, between managers of one process.
        InProcess = "in-process",
    }
}

choice! {
    /// What happens when nobody takes the events.
    WhenFull {
        /// The oldest are lost and counted.
        DropOldest = "drop-oldest",
        /// Whoever registers blocks waits.
        Block = "block",
    }
}

choice! {
    /// Which blocks get a copy on a lower tier.
    Admission {
        /// Those whose copy saves more than it costs.
        Cost = "cost",
        /// All that the triggers offer.
        All = "all",
    }
}

choice! {
    /// What is evicted first.
    EvictionPolicy {
        /// The least recently used block that has no child.
        LruLeaf = "lru-leaf",
        /// The block that is least likely to be used again soon, by what was seen so far.
        Hazard = "hazard",
    }
}
