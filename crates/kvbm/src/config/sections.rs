//! The schema: every setting there is, with its type, default, unit and meaning.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use kvbm_layout::DType;
use kvbm_pool::RegistryConfig;

use super::Config;
use super::choices::{
    Admission, Algorithm, BandwidthModel, ChainRootKind, CopyWay, DeviceKind, DeviceOrder, DiskEngine,
    DiskMode, EvictionPolicy, HostOrder, LayoutKind, NixlFiles, RemoteAgentKind, VerifyHost, VolumeCompress,
    VolumeLookup, VolumeLossy, VolumeOffload, WhenFull,
};
use super::groups::CacheGroups;
use super::offload::{OFFLOAD_G1_G2, OFFLOAD_G2_G3};
use super::schema::{List, Section, section};
use super::several::{CommandLine, Parameters, Paths, RankNodes, TenantShares, TensorBytes};
use super::units::{Blocks, Bytes, Capacity};
use super::value::Secret;

const MAX_PAGE_SIZE: u64 = 1 << 20;
pub(super) const MAX_LAYERS: u64 = 4096;
pub(super) const MAX_HEADS: u64 = 1 << 16;
pub(super) const MAX_HEAD_DIM: u64 = 1 << 16;
const MAX_RANKS: u64 = 1024;
/// Most blocks of G1 of all engines of a node daemon: each takes some bytes of bookkeeping.
const MAX_ENGINE_BLOCKS: u64 = 1 << 24;
const MAX_THREADS: u64 = 256;
const MAX_QUEUE_DEPTH: u64 = 1 << 20;
const MAX_RING: u64 = RegistryConfig::MAX_CAPACITY as u64;
/// Batches of events are bounded on the wire.
const MAX_BATCH_EVENTS: u64 = 4096;
const MAX_BATCH_BYTES: u64 = 2 << 20;

/// Every section, in the order of the reference.
pub(super) const SECTIONS: &[Section] = &[
    ModelConfig::SECTION,
    NamespaceConfig::SECTION,
    ParallelismConfig::SECTION,
    NodeConfig::SECTION,
    AdminConfig::SECTION,
    MetricsConfig::SECTION,
    DeviceConfig::SECTION,
    HostConfig::SECTION,
    DiskConfig::SECTION,
    EncryptionConfig::SECTION,
    VOLUME,
    VolumesConfig::SECTION,
    RemoteConfig::SECTION,
    OFFLOAD_G1_G2,
    OFFLOAD_G2_G3,
    TransferConfig::SECTION,
    EventsConfig::SECTION,
    PolicyConfig::SECTION,
    TenantsConfig::SECTION,
];

section! {
    /// Shape of the model's KV cache, all ranks together.
    ModelConfig, "model", |config| config.model, {
        /// Layers with a KV cache.
        num_layers: u32 = 0, ["layers"] required, 1 to MAX_LAYERS;
        /// KV heads of a layer, over all ranks (1 for MLA).
        num_kv_heads: u32 = 0, ["heads"] required, 1 to MAX_HEADS;
        /// Elements of one head.
        head_dim: u32 = 0, ["elements"] required, 1 to MAX_HEAD_DIM;
        /// Tokens of a block.
        page_size: u32 = 16, ["tokens"], 1 to MAX_PAGE_SIZE;
        /// Element type of the KV cache.
        dtype: DType = DType::BF16, [""];
        /// Tensors of a layer: 2 for keys and values, 1 for MLA.
        outer_dim: u32 = 2, [""], 1 to 2;
        /// Bytes that a block has in each tensor of a rank, in their order. It is for an engine
        /// whose tensors have no axes that kvbm could know (blocks of several kernel blocks,
        /// scales, recurrent state). It stands in place of `num_layers`, `num_kv_heads`, `head_dim`
        /// (not required then), `dtype` and `outer_dim`. Each tensor counts as a layer. No other
        /// number of ranks can read such blocks.
        opaque_tensors: TensorBytes = TensorBytes::default(), ["bytes per rank"];
        /// Ranks, one after another, that hold the same bytes, where tensors have no axes: all of
        /// them for MLA, as many as share a KV head else. G3 and G4 have one copy of these. Where
        /// the model has heads, kvbm knows this from their number.
        replicas: u32 = 1, ["ranks"], 1 to 1024;
        /// Layers that cache alike, where not all do: an array with a text for each group. It
        /// stands in place of `num_layers`, `num_kv_heads`, `head_dim` (not required then) and
        /// `outer_dim`. A group is `full` (every block of a prefix), `window=TOKENS` (the last
        /// tokens) or `state` (a state after a block), with `layers=N`. Where it keeps tokens, it
        /// has `heads=N head_dim=N`, and if need be `outer=1` (MLA), `dtype=TYPE` or
        /// `scales=PART:TYPE`. Scales are part of the block: one for the block on each rank
        /// (`block`), for each head (`head`) or each token of each head (`token`) in keys and in
        /// values. Where it keeps a state, `bytes=N` for each layer over all ranks. Of tensors of
        /// an engine without axes `layers=N` is their number and `rank_bytes=N` what a block has in
        /// each of them on each rank, of any kind. A slot holds a block of any group, so groups of
        /// about the same bytes waste least: `ModelConfig::from_hf` divides them so.
        groups: CacheGroups = CacheGroups::default(), [""];
    }
}

section! {
    /// What must be equal, beside the tokens, for two blocks to be the same. A block of one
    /// namespace is never found from another.
    NamespaceConfig, "namespace", |config| config.namespace, {
        /// Model id, as it is served.
        model: String = String::new(), [""] required;
        /// Version of the weights: change it with every update of the model, or old KV is served to
        /// new weights.
        weights: String = String::new(), [""];
        /// `RoPE` scaling in effect, in any fixed spelling.
        rope_scaling: Option<String> = None, [""];
        /// Quantisation of the KV cache, in any fixed spelling.
        kv_quantization: Option<String> = None, [""];
        /// Adapter (`LoRA`) with its version.
        adapter: Option<String> = None, [""];
        /// Keeps a tenant's blocks apart from those of all others.
        tenant_salt: Option<Secret> = None, [""];
        /// Mixed into every hash: without it nobody can compute the hash of a guessed prompt.
        /// Blocks on disk and volumes, and announcements, are signed with a key made from it:
        /// without it nobody who can write there can forge a block. Use 32 random bytes, such as
        /// `openssl rand -hex 32` prints.
        deployment_secret: Option<Secret> = None, [""];
        /// How blocks are hashed; `xxh3-128` only for a trusted single tenant, for it resists no
        /// forger.
        algorithm: Algorithm = Algorithm::Blake3, [""];
        /// Where chains of hashes begin: `external` and `per-process` are roots of an engine that
        /// computes the hashes.
        chain_root: ChainRootKind = ChainRootKind::Fixed, [""];
        /// Blocks have no parents, each is a key of its own: for hosts that store and ask for any
        /// part of a sequence by the keys of its blocks.
        flat: bool = false, [""];
        /// The root itself, unless `chain_root` is `fixed`.
        chain_root_seed: Option<String> = None, [""];
    }
}

section! {
    /// How the model is spread over GPUs.
    ParallelismConfig, "parallelism", |config| config.parallelism, {
        /// Ranks among which the KV heads are divided; more ranks than heads replicate them.
        tensor_parallel: u32 = 1, ["ranks"], 1 to MAX_RANKS;
        /// Sockets of the workers, one for each rank in order: each worker is a process of its own
        /// (`kvbm worker`). `tcp://HOST:PORT` is a worker on another machine, and needs the
        /// certificates below. Without them, the workers run in the leader's process.
        workers: Paths = Paths::default(), [""];
        /// PEM file with this end's certificate and those that lead to its authority, for lines
        /// over TCP. A worker's certificate is for its HOST. A file that changes is read again
        /// before the next connection, as are the next two.
        tls_cert: Option<PathBuf> = None, [""];
        /// PEM file with the certificate's private key, mode 0600.
        tls_key: Option<PathBuf> = None, [""];
        /// PEM file with the authorities of the other end. Whoever has a certificate of theirs is
        /// trusted: use authorities for leaders and workers alone.
        tls_ca: Option<PathBuf> = None, [""];
    }
}

section! {
    /// The node daemon (`kvbm serve`), which keeps the cache for engines in other processes. An
    /// embedded manager uses nothing of this section.
    NodeConfig, "node", |config| config.node, {
        /// Socket that engines attach to; its folder belongs to this user, and no other one writes
        /// there.
        socket: Option<PathBuf> = None, [""];
        /// Blocks of G1 that all engines together have on each rank.
        engine_blocks: u32 = 1 << 20, ["blocks"], 1 to MAX_ENGINE_BLOCKS;
        /// NUMA node of host memory: that of the device whose engine copies. One number, or one for
        /// each rank, such as `4x0,4x1`; none for wherever the system puts it. A node that is full,
        /// or not there, is no error: the log says so.
        numa_nodes: RankNodes = RankNodes::default(), [""];
    }
}

section! {
    /// Where a running manager is administered, also one inside an engine (`kvbm ctl`, `kvbm top`;
    /// docs/operate.md). Without `socket` and `http` nothing listens.
    AdminConfig, "admin", |config| config.admin, {
        /// Socket for calls: mode 0600, for processes of the same user alone. Its folder belongs to
        /// this user, and no other one writes there. Each manager needs its own.
        socket: Option<PathBuf> = None, [""];
        /// Address for the same calls over HTTP, like `127.0.0.1:9401`. Needs `token_file`. Where
        /// other machines reach it, also `tls_cert` and `tls_key`.
        http: Option<SocketAddr> = None, [""];
        /// File with the token that every call over HTTP carries: 16 to 4,096 bytes, mode 0600,
        /// read once at the start.
        token_file: Option<PathBuf> = None, [""];
        /// PEM file with the certificate of `http` and those that lead to its authority. The server
        /// then speaks TLS 1.3 alone. The file is read again when it changes, as are the next two.
        tls_cert: Option<PathBuf> = None, [""];
        /// PEM file with the certificate's private key, mode 0600.
        tls_key: Option<PathBuf> = None, [""];
        /// PEM file with the authorities of clients: a client without a certificate of theirs is
        /// not served.
        client_ca: Option<PathBuf> = None, [""];
        /// Allows `http` an address that other machines reach, without TLS: who can read what is
        /// sent learns the token, and can then empty the cache.
        insecure: bool = false, [""];
    }
}

section! {
    /// Where metrics are served to Prometheus, also those of a manager inside an engine. Without
    /// `http` nothing listens.
    MetricsConfig, "metrics", |config| config.metrics, {
        /// Address for `GET /metrics`, like `127.0.0.1:9400`. Where other machines reach it, it
        /// needs `tls_cert` and `tls_key`, and `token_file` or `client_ca`. Each manager needs its
        /// own.
        http: Option<SocketAddr> = None, [""];
        /// File with the token that every request carries: 16 to 4,096 bytes, mode 0600, read once
        /// at the start.
        token_file: Option<PathBuf> = None, [""];
        /// PEM file with the certificate of `http` and those that lead to its authority. The server
        /// then speaks TLS 1.3 alone. The file is read again when it changes, as are the next two.
        tls_cert: Option<PathBuf> = None, [""];
        /// PEM file with the certificate's private key, mode 0600.
        tls_key: Option<PathBuf> = None, [""];
        /// PEM file with the authorities of clients: a client without a certificate of theirs is
        /// not served.
        client_ca: Option<PathBuf> = None, [""];
        /// Allows `http` an address that other machines reach, without TLS or for whoever connects.
        insecure: bool = false, [""];
    }
}

section! {
    /// Tier G1: accelerator memory that kvbm allocates. Where the engine owns G1, kvbm ignores this
    /// section.
    DeviceConfig, "device", |config| config.device, {
        /// The device: `cuda` is an NVIDIA GPU, through the driver's library or the one that the
        /// variable `KVBM_CUDA_DRIVER` names. `emulated` keeps its memory in the host's, out of the
        /// program's reach.
        kind: DeviceKind = DeviceKind::Emulated, [""];
        /// Number of the GPU of rank 0, as CUDA counts; the other ranks of this process have the
        /// next ones.
        ordinal: u32 = 0, [""];
        /// What G1 holds.
        capacity: Capacity = Capacity::Blocks(Blocks(1024)), ["per rank"];
        /// How a block lies in G1: `layer-separate` as engines have it, or `fully-contiguous`.
        layout: LayoutKind = LayoutKind::LayerSeparate, [""];
        /// Order within a layer: `nhd` tokens before heads, `hnd` heads before tokens.
        order: DeviceOrder = DeviceOrder::Nhd, [""];
        /// How long copies of the emulated device take: `unlimited` as fast as the machine,
        /// `reference` 28 GB/s to host memory.
        bandwidth_model: BandwidthModel = BandwidthModel::Unlimited, [""];
    }
}

section! {
    /// Tier G2: host memory.
    HostConfig, "host", |config| config.host, {
        /// What G2 holds; 0 for no such tier. In bytes, blocks count with their padding to 4 KiB.
        capacity: Capacity = Capacity::NONE, ["per rank"];
        /// Order within a block, in host memory and on disk: `nhd` is layer by layer, tokens before
        /// heads. `universal` has heads outermost, so that a rank's part of a block is one piece.
        /// From another order on a GPU, a kernel converts.
        order: HostOrder = HostOrder::Nhd, [""];
        /// Ask for huge pages: reserved ones, else transparent ones, else the memory has ordinary
        /// pages. Disks move blocks up to twice as fast from memory that lies in few large pieces.
        huge_pages: bool = true, [""];
        /// Lock the memory, so that it is never swapped; needs a sufficient memlock limit. Where
        /// the system refuses, the memory is used as it is and the log says so. Without a device,
        /// where the engine's G1 is host memory, nothing is locked.
        pinned: bool = true, [""];
        /// Touch all of the memory in the background after the start, so that no copy waits until
        /// the system provides a page. Where less than a sixteenth of the machine's memory is left,
        /// the rest is provided when it is used, and the log says so.
        populate: bool = true, [""];
        /// Copy blocks that an engine loads from disk or volumes to host memory too: the next
        /// request for them does not read the disk again. Not needed where the engine's own blocks
        /// are such a cache.
        keep_loaded: bool = true, [""];
        /// Let ranks that hold the same bytes (MLA, more ranks than KV heads) share one copy of a
        /// block. The first of them writes it; the others do not read their blocks, so nothing
        /// compares them. Workers in processes of their own and managers with `[remote]` have a
        /// copy for each rank in any case.
        one_copy: bool = false, [""];
    }
}

section! {
    /// Tier G3: a directory on SSD. Blocks reach it from host memory. Where there is none
    /// (`host.capacity` is 0), and kvbm owns G1, they come from the device, through the staging
    /// ring of `transfer.staging`.
    DiskConfig, "disk", |config| config.disk, {
        /// The directory; kvbm owns it alone and creates it where it is absent.
        dir: Option<PathBuf> = None, [""];
        /// Further directories, best on devices of their own: blocks are spread over all of them.
        /// Their number and order must not change while they hold blocks. One that is missing is an
        /// error at the start; blocks on one that fails later are misses.
        more_dirs: Paths = Paths::default(), [""];
        /// Mode of the files that hold blocks: access for their owner, or for the group too.
        /// Directories have 0700, 0750 or 0770. Each start sets the modes. A file of another user
        /// is refused; with `0660`, only one outside the directory's group.
        mode: DiskMode = DiskMode::Owner, [""];
        /// Encrypt blocks before they are written, with keys that `encryption.key_file` or
        /// `encryption.key_command` wraps. A directory that holds other blocks is refused.
        encrypt: bool = false, [""];
        /// What G3 holds; 0 for no such tier. In bytes, blocks count with their padding to 4 KiB.
        capacity: Capacity = Capacity::NONE, ["per rank"];
        /// Who moves the bytes: `io_uring` and `threads` around the page cache, `buffered` through
        /// it, or `auto`, the first of these that a probe finds to work. Or `nixl`: a back end of
        /// NIXL, with the cargo feature `nixl`, by the library of `remote.library`. One that is
        /// named and does not work is an error.
        engine: DiskEngine = DiskEngine::Auto, [""];
        /// NIXL's back end with `nixl`: `POSIX`, or `GDS_MT`, which needs a GPU.
        nixl_backend: NixlFiles = NixlFiles::Posix, [""];
        /// Operations at the device at a time with `io_uring`.
        depth: u32 = 32, ["operations per rank"], 1 to 4096;
        /// I/O threads of the other engines: their operations at the device at a time.
        threads: u32 = 8, ["threads per rank"], 1 to MAX_THREADS;
        /// Operations queued or running; more wait in the queue of their path.
        queue_depth: u32 = 2048, ["operations"], 1 to MAX_QUEUE_DEPTH;
        /// Longest time that a completed write waits until it is synced.
        commit_interval: Duration = Duration::from_millis(50), [""];
        /// Bytes that may be written in a day, as a multiple of the capacity; 0 for no limit.
        drive_writes_per_day: f64 = 1.0, ["capacities per day"];
        /// Bytes that may be written in a second; 0 for no limit. The lower of the two limits
        /// applies. Explicit copies may exceed them, and later copies wait until the average is
        /// below the limit again.
        write_budget: Bytes = Bytes(0), ["per second and rank"];
        /// Bytes a second of what lies there that are read and verified while nobody else uses the
        /// disk, so that damage is found before it is asked for. 0 for none. Every read is verified
        /// in any case.
        scrub: Bytes = Bytes(0), ["per second and rank"];
        /// How long all ranks together may take, at their first start, to take over what a
        /// deployment with another number of ranks left in `dir`. Blocks are read, verified, cut
        /// for the new ranks and written. Blocks that are not converted by then stay in the old
        /// folder; 0 converts none. These writes count against no budget.
        take_over: Duration = Duration::from_secs(60), [""];
        /// After this time a read counts as failed, and the caller gets the part of the prefix that
        /// arrived and is told to recompute the rest. A read of many blocks has more: beside this
        /// the time that its bytes take at half the speed that the disk had lately (64 MiB/s where
        /// that is not known). That is no more than computing them takes (where
        /// `policy.prefill_tokens_per_s` says so), and at most `transfer.deadline` altogether.
        read_deadline: Duration = Duration::from_secs(5), [""];
        /// After this time a worker gives up making what was written durable, and says so.
        flush_deadline: Duration = Duration::from_secs(60), [""];
    }
}

section! {
    /// The operator's key for encryption at rest (`disk.encrypt`, `volumes.encrypt`): 64
    /// hexadecimal digits, as `openssl rand -hex 32` prints them, or 32 bytes. It wraps the random
    /// keys that encrypt blocks, which lie beside them. Every worker reads it at its start.
    EncryptionConfig, "encryption", |config| config.encryption, {
        /// File with the key; it belongs to this user, or to root, and no other user reads it.
        key_file: Option<PathBuf> = None, [""];
        /// Command that prints the key, such as the client of a key management service. It runs
        /// without a shell and without input.
        key_command: CommandLine = CommandLine::default(), [""];
        /// The key before, while keys that it has wrapped are to be wrapped anew: new blocks get
        /// new keys then. Afterwards remove this setting, and destroy that key.
        previous_key_file: Option<PathBuf> = None, [""];
        /// Command that prints the key before.
        previous_key_command: CommandLine = CommandLine::default(), [""];
        /// After this time a command is killed, and the start fails.
        command_timeout: Duration = Duration::from_secs(10), [""];
    }
}

section! {
    /// Tier G4: a volume in a blob store, which may be shared with other managers. Blocks reach it
    /// from host memory. Where there is none (`host.capacity` = 0), they come from the device,
    /// through a staging ring (`transfer.staging`). One is `[volume]`, several are `[[volume]]`
    /// each; all blocks of a chain go to one volume, which the hash of the first block and the ids
    /// of the volumes select. `register_volume` and `unregister_volume` add and remove volumes
    /// later. `KVBM_VOLUME_*` variables set the first volume.
    VolumeConfig, "volume", |config| config.first_volume(); config.first_volume_mut(), {
        /// Where it is: `dir:///mnt/kv`, `memory:`, `s3://BUCKET/PREFIX?endpoint=http://HOST:PORT`
        /// (with the feature `s3`), or the scheme of another implementation. It must exist.
        /// Credentials of `s3:` come from the option `credentials=env:PREFIX` or
        /// `credentials=file:PATH`, else from `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, else
        /// from the machine's role in its cloud. kvbm reads no other credentials file. With the
        /// option `transport=nixl` NIXL moves large objects (`docs/operate.md`).
        uri: String = String::new(), [""] required;
        /// Its number, also in the location of events; each volume has its own, and keeps it, or
        /// what it holds is looked for elsewhere.
        id: u32 = 0, [""];
        /// What of it this namespace uses; 0 for no limit. What is used least goes first; what
        /// finds no room is dropped and counted.
        capacity: Capacity = Capacity::NONE, ["per rank"];
        /// Payloads begin at a multiple of this in their object: a power of two.
        alignment: u32 = 1, ["bytes"];
        /// After this time a call counts as failed: a copy is dropped, a read is a miss. A prefix
        /// has more where it is long, as that of `disk.read_deadline` has, and what of it arrived
        /// in time is used.
        deadline: Duration = Duration::from_secs(5), [""];
    }
}

/// [`VolumeConfig::SECTION`], of which there may be several.
const VOLUME: Section = Section {
    list: Some(List {
        split: |config| {
            let alone = |volume: &VolumeConfig| Config { volume: vec![volume.clone()], ..Config::default() };
            config.volume.iter().map(alone).collect()
        },
        append: |config, other| config.volume.push(other.volume.into_iter().next().unwrap_or_default()),
    }),
    ..VolumeConfig::SECTION
};

static NO_VOLUME: LazyLock<VolumeConfig> = LazyLock::new(VolumeConfig::default);

impl Config {
    /// The volume that keys speak of; the defaults where there is none.
    fn first_volume(&self) -> &VolumeConfig {
        self.volume.first().unwrap_or(&NO_VOLUME)
    }

    /// The same to be written: a first one where there was none.
    fn first_volume_mut(&mut self) -> &mut VolumeConfig {
        if self.volume.is_empty() {
            self.volume.push(VolumeConfig::default());
        }
        &mut self.volume[0]
    }
}

section! {
    /// What goes for every volume of tier G4, also for those that are registered while the manager
    /// runs.
    VolumesConfig, "volumes", |config| config.volumes, {
        /// Encrypt blocks before they are written, with keys that `encryption.key_file` or
        /// `encryption.key_command` wraps and that lie on the volume. Nodes that share a volume
        /// have the same key. A volume that holds other blocks of this namespace is refused, and so
        /// is one that does not answer at the start.
        encrypt: bool = false, [""];
        /// Compress blocks before they are written, and encrypted: not at all, with `lz4` or
        /// `zstd`, or with `auto` while that makes a volume faster by what is measured. What is
        /// there is read whatever is set. Needs the feature `compress`.
        compress: VolumeCompress = VolumeCompress::Off, [""];
        /// Shorten blocks with loss before they are compressed and written: a code of 8 or 4 bits
        /// in place of each number, and a scale for 32 of them. What comes back is near what was
        /// computed and not equal to it, so tokens may differ. It is part of the namespace: blocks
        /// of another setting are not found, on any tier. For blocks of `bf16`, `f16` or `f32`
        /// alone. Needs the feature `compress`.
        lossy: VolumeLossy = VolumeLossy::Off, [""];
        /// What all tensors without axes (`model.opaque_tensors`, `rank_bytes`) consist of: `bf16`,
        /// `f16` or `f32`. With `lossy` it has to be said, for kvbm cannot see it: the connectors
        /// of all engines have such tensors. Of another type, blocks would come back as rubbish.
        lossy_dtype: Option<DType> = None, [""];
        /// Threads of each path that wait for a volume, up to 16 blocks each at a time: each volume
        /// has its own.
        threads: u32 = 4, ["threads per volume, path and rank"], 1 to MAX_THREADS;
        /// Which blocks are copied to volumes: all of host memory, those that are about to leave
        /// host memory (where there is no disk: `offload.g2_g3.ahead_share`), or those that a call
        /// names. Without host memory, the same of the device.
        offload: VolumeOffload = VolumeOffload::WriteThrough, [""];
        /// Share of host memory (without it, of the device) that waiting and running copies may
        /// hold; beyond it the oldest waiting ones are dropped and counted.
        queue_share: f64 = 0.25, ["share of the tier"];
        /// How chains are found that this manager does not know to be there: by asking, or not at
        /// all.
        lookup: VolumeLookup = VolumeLookup::Probe, [""];
        /// How long a volume is not asked again for what it did not have.
        recheck: Duration = Duration::from_secs(5), [""];
        /// Longest time for which a volume is left alone after failures.
        longest_pause: Duration = Duration::from_secs(30), [""];
    }
}

section! {
    /// Memory of other nodes (docs/remote.md): this one offers its G2 to its peers, and reads from
    /// theirs what no tier here has. Needs `host.capacity`, one cache group, and workers in this
    /// process.
    RemoteConfig, "remote", |config| config.remote, {
        /// Take part.
        enabled: bool = false, [""];
        /// What moves the bytes: `nixl` (with the feature `nixl`), or `in-process` between managers
        /// of one process.
        agent: RemoteAgentKind = RemoteAgentKind::Nixl, [""];
        /// NIXL's library `libnixl_capi.so`, by its absolute path; not set: it is looked for in the
        /// usual places.
        library: Option<PathBuf> = None, [""];
        /// Parameters of NIXL's back end UCX, such as `device_list=mlx5_0,mlx5_1;num_workers=4`.
        /// It reads `device_list`, `num_workers`, `num_threads`, `split_batch_size`,
        /// `ucx_num_device_channels`, `ucx_error_handling_mode` and `engine_config`. What is not
        /// given keeps NIXL's default.
        ucx: Parameters = Parameters::default(), [""];
        /// Pause of NIXL's progress thread, from 1 us to 10 ms. A shorter one costs processor time
        /// while nothing moves.
        progress_delay: Duration = Duration::from_micros(100), [""];
        /// This node's number: from 1 on, unique among its peers, and the same after a restart.
        node: u32 = 0, [""];
        /// Folder in which nodes find each other: each keeps a file there. It belongs to this user,
        /// and no other one may write there. kvbm makes it with mode 0700.
        directory: Option<PathBuf> = None, [""];
        /// NATS server in place of `directory`: `nats://HOST:PORT?bucket=NAME&tls=true&creds=FILE`,
        /// with the parameters of docs/events.md that say who we are. Nodes find each other in a
        /// key-value bucket of `JetStream`, `kvbm-nodes` by default. Needs the feature `nats`.
        url: Option<Secret> = None, [""];
        /// How often announcements are read: so long a node that comes or goes is not noticed.
        refresh: Duration = Duration::from_secs(1), [""];
        /// How long a look-up waits for what peers say they have, at most.
        lookup_deadline: Duration = Duration::from_millis(20), [""];
        /// How long a request waits for blocks of peers, at most; what has not arrived by then is
        /// computed.
        read_deadline: Duration = Duration::from_secs(5), [""];
        /// How long blocks of this node stay in place for a peer that does not renew its lease.
        lease: Duration = Duration::from_secs(5), [""];
        /// Prefixes that are read from peers at a time.
        threads: u32 = 4, ["prefixes"], 1 to MAX_THREADS;
        /// Of those, prefixes that are read from one peer: a slow one leaves the others to the
        /// rest.
        per_peer: u32 = 2, ["prefixes"], 1 to MAX_THREADS;
        /// Longest time for which a peer is left alone after failures.
        longest_pause: Duration = Duration::from_secs(30), [""];
    }
}

section! {
    /// How bytes are moved.
    TransferConfig, "transfer", |config| config.transfer, {
        /// Plans of 128 blocks that each path queues, or as many blocks in smaller ones; more are
        /// refused.
        queue_depth: u32 = 256, ["plans per path"], 1 to MAX_QUEUE_DEPTH;
        /// Threads that copy between memories.
        threads: u32 = 2, ["threads per path and rank"], 1 to MAX_THREADS;
        /// Steps into which a copy between device and host memory is cut that goes layer by layer,
        /// at most; 1 copies whole blocks. Fewer are taken where a step would take less time than
        /// its plan.
        layer_steps: u32 = 16, ["steps"], 1 to 1024;
        /// After this time a transfer that has not started fails, and a wait for one that has gives
        /// up.
        deadline: Duration = Duration::from_secs(30), [""];
        /// A rank is given up when its line stays closed for this time. Its transfers fail, its
        /// slots become free, and all cached blocks are dropped, since each has a part there. The
        /// rank comes back when its worker starts again. A worker that is silent on an open line
        /// may still write; only `rank_lost` gives it up. For workers in other processes, whose
        /// memory ends with them; 0 never gives one up by itself.
        rank_lost_after: Duration = Duration::ZERO, [""];
        /// How fragments of blocks get from and to a GPU: by a `kernel` through a staging area, in
        /// a `batch` of copies, or one by one (`async`). `auto` takes what is measured on the
        /// device when it is opened.
        copies: CopyWay = CopyWay::Auto, [""];
        /// Size of each of the staging rings of a rank, through which blocks go from disk, and from
        /// volumes, straight to the device; without host memory, also from the device to disk and
        /// to volumes. They lie outside G2. A ring has a block at least, and no more than its path
        /// has on the way.
        staging: Bytes = Bytes::mib(64), ["bytes per rank"];
        /// Compare checksums of blocks that come from host memory. What comes from disk is always
        /// compared.
        verify_host: VerifyHost = VerifyHost::Sampled, [""];
        /// Of so many blocks that come from host memory one is compared, where `verify_host` is
        /// `sampled`. Comparing takes memory bandwidth from copying: `kvbm bench transfer --only
        /// g2_g1 --verify-every 1` measures how much.
        verify_every: u32 = 16, ["blocks"], 1 to u32::MAX as u64;
    }
}

section! {
    /// Events that say which blocks are cached.
    EventsConfig, "events", |config| config.events, {
        /// Where events are published beside this process, like `nats://127.0.0.1:4222`
        /// (docs/events.md); not set: nowhere.
        url: Option<Secret> = None, [""];
        /// Who publishes: unique among all workers of a transport, and the same after a restart, so
        /// that followers notice one; 0 for another number at every start.
        worker_id: u64 = 0, [""];
        /// The machine in the location of every event.
        node: u32 = 0, [""];
        /// Events kept for a reader that is behind; older ones are lost and counted.
        ring_capacity: u32 = 65_536, ["events"], 1 to MAX_RING;
        /// What happens when nobody takes the events: `drop-oldest` loses and counts them, `block`
        /// has whoever registers blocks wait until the half of them were taken, at most for
        /// `full_wait`.
        when_full: WhenFull = WhenFull::DropOldest, [""];
        /// Longest wait for room, where `when_full` is `block`.
        full_wait: Duration = Duration::from_millis(100), [""];
        /// Events of a batch.
        batch_events: u32 = 1000, ["events"], 1 to MAX_BATCH_EVENTS;
        /// Encoded bytes of a batch, at most.
        batch_bytes: u32 = 256 << 10, ["bytes"], 1024 to MAX_BATCH_BYTES;
        /// Longest time that an event waits for others to fill its batch: under load, the time
        /// between two batches that are not full. After a quiet time of this length an event goes
        /// at once.
        batch_age: Duration = Duration::from_millis(10), [""];
        /// Time between two signs of life without events.
        heartbeat: Duration = Duration::from_secs(1), [""];
        /// How long one batch may wait for the transport before it is tried again.
        publish_timeout: Duration = Duration::from_secs(1), [""];
    }
}

section! {
    /// What is evicted first, and what is copied to lower tiers.
    PolicyConfig, "policy", |config| config.policy, {
        /// The policy, which chooses among the blocks without a child: `hazard` learns which are
        /// used again, `lru-leaf` goes by recency.
        eviction: EvictionPolicy = EvictionPolicy::Hazard, [""];
        /// Seed of the samples that `hazard` draws.
        seed: u64 = 0, [""];
        /// Which of the blocks that the triggers offer get a copy on a lower tier. `cost` weighs
        /// what a copy saves against what it costs, `all` takes them as they come.
        admission: Admission = Admission::Cost, [""];
        /// How fast the engine computes prompts, on all ranks together. With it, no copies are made
        /// on a tier from which blocks come back more slowly than they are computed, and a request
        /// computes what would arrive later than that. With 0 it is measured, where the engine
        /// tells of its steps (the connectors for vLLM and TensorRT-LLM do), and not known before.
        prefill_tokens_per_s: f64 = 0.0, ["tokens per second"];
        /// Where a prefix can end in cache groups with a sliding window or state, beside the ends
        /// of requests: what such groups need there is kept too (`KvBlockManager::kept_blocks`). 0
        /// for ends of requests alone.
        checkpoint_every: u32 = 0, ["blocks"];
        /// How long a request waits for blocks from below G1: so many times what it takes to
        /// compute them, where that is known, and 250 ms at least. What has arrived by then counts.
        /// 0 leaves it to the deadlines of the tiers alone.
        onboard_patience: f64 = 1.0, ["times"];
        /// What prefetches may have on its way to host memory at a time, as a share of it; 0 for
        /// none.
        prefetch_share: f64 = 0.1, ["share of host memory"];
    }
}

section! {
    /// Who may count on a share of the tiers. A tenant's blocks are those of its sequences'
    /// namespace (`KvBlockManager::tenant`); a tenant may use space that others do not use; kvbm
    /// takes it back when they need it.
    TenantsConfig, "tenants", |config| config.tenants, {
        /// Tenants and the share of each tier (G1 where it is ours, G2, G3) that each of them may
        /// count on, together at most 1. When a tier is full, blocks of the tenant that is furthest
        /// over its share are evicted. A tenant over its share never takes from one within it.
        /// Blocks of running requests are never evicted. Blocks without a tenant have what the
        /// shares leave, nothing where the sum of the shares is 1. In a file also as a table:
        /// `[tenants.shares]`, a line each. With tenants any block may be evicted next, so all of a
        /// tier is copied down (as with `ahead_share` = 1): mind the write budget of the disk.
        shares: TenantShares = TenantShares::default(), ["shares of each tier"];
    }
}
