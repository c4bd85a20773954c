//! A volume whose objects are compressed before the store gets them.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvbm_codec::{Codec, Compressor, Expander, FrameError, LossyForm, is_compressed, lossy_frame};
use kvbm_plan::{GroupId, NamespaceId, VolumeDescriptor};
use parking_lot::Mutex;

use crate::adaptive::{AdaptiveCompression, Way};
use crate::compression::{CompressionStats, LossyTerms, VolumeCompression};
use crate::seal::FoundFrame;
use crate::{
    BlobKey, BlobScope, DestroyedKey, GetRequest, MAX_PIECES, ObjectCorruption, PutRequest, StoreFacts,
    Volume, VolumeError,
};

/// Frames that one call of `put` holds at a time, and one object.
const MOST_FRAMED: u64 = 32 << 20;
/// Tables of codecs that are kept for later calls.
const MOST_TOOLS: usize = 8;

/// The objects of one deployment on another volume, compressed as it is set where they become
/// shorter. Objects that are compressed, and objects that are not, are read whatever is set. Where
/// it is lossy, objects of another lossy form are damaged ones, and so are lossy ones where it is
/// not.
///
/// A frame is opened into the caller's buffers, so an object takes no more memory than the block
/// that it should be, whatever it says.
pub struct CompressedVolume {
    inner: Arc<dyn Volume>,
    setting: VolumeCompression,
    /// By cache group; none where blocks are stored exactly.
    lossy: Vec<LossyForm>,
    compressors: Mutex<Vec<Compressor>>,
    expanders: Mutex<Vec<Expander>>,
    adaptive: Mutex<AdaptiveCompression>,
    counts: Counts,
}

/// Bytes of payloads, before compression and as they are stored.
#[derive(Debug, Default)]
struct Counts {
    written: AtomicU64,
    written_stored: AtomicU64,
    read: AtomicU64,
    read_stored: AtomicU64,
}

/// Objects as they are put, and how long it took to make them so.
struct Framed {
    frames: Vec<Option<Vec<u8>>>,
    took: Duration,
}

impl CompressedVolume {
    /// Compresses what is written to `inner` as it is set, and opens what is read.
    pub fn new(inner: Arc<dyn Volume>, setting: VolumeCompression) -> Self {
        Self {
            inner,
            setting,
            lossy: Vec::new(),
            compressors: Mutex::default(),
            expanders: Mutex::default(),
            adaptive: Mutex::default(),
            counts: Counts::default(),
        }
    }

    /// The same, lossy.
    #[must_use]
    pub fn with_lossy(mut self, lossy: &LossyTerms) -> Self {
        self.lossy = lossy.forms();
        self
    }

    fn form_of(&self, group: GroupId) -> Option<LossyForm> {
        self.lossy.get(usize::from(group.0)).copied()
    }

    /// Whether the next objects are compressed without loss, and with what.
    fn way(&self) -> Option<Codec> {
        match self.setting {
            VolumeCompression::Off => None,
            VolumeCompression::Lz4 => Some(Codec::Lz4),
            VolumeCompression::Zstd => Some(Codec::Zstd),
            VolumeCompression::Auto => {
                (self.adaptive.lock().next() == Way::Compressed).then_some(Codec::Zstd)
            }
        }
    }

    /// Frames of the objects that become shorter.
    fn frame(&self, codec: Option<Codec>, requests: &[PutRequest<'_>]) -> Framed {
        let began = Instant::now();
        let kept = || self.compressors.lock().pop();
        let mut compressor = codec.and_then(|codec| kept().or_else(|| Compressor::new(codec).ok()));
        if compressor.is_none() && self.lossy.is_empty() {
            return Framed { frames: vec![None; requests.len()], took: Duration::ZERO };
        }
        let frame = |request: &PutRequest<'_>| {
            frame_of(self.form_of(request.key.group), compressor.as_mut(), request)
        };
        let frames = requests.iter().map(frame).collect();
        if let Some(compressor) = compressor {
            keep(&self.compressors, compressor);
        }
        Framed { frames, took: began.elapsed() }
    }

    fn put_all(
        &self,
        requests: &[PutRequest<'_>],
        frames: &[Option<Vec<u8>>],
        deadline: Instant,
    ) -> Vec<Result<(), VolumeError>> {
        let inner: Vec<PutRequest<'_>> = requests
            .iter()
            .zip(frames)
            .map(|(request, frame)| {
                let PutRequest { key, form, ref seal, ref pieces } = *request;
                match frame {
                    Some(frame) => PutRequest { key, form, seal: seal.framed(), pieces: vec![frame] },
                    None => PutRequest { key, form, seal: seal.clone(), pieces: pieces.clone() },
                }
            })
            .collect();
        self.inner.put(&inner, deadline)
    }

    /// Opens what was read where it is a frame. Whether that took decompression.
    fn open(&self, request: &mut GetRequest<'_>, length: u64) -> Result<bool, FrameError> {
        let form = self.form_of(request.key.group);
        let parts = request.pieces.iter_mut().map(|piece| &mut **piece).filter(|piece| !piece.is_empty());
        let mut parts: Vec<&mut [u8]> = parts.collect();
        let mut frame = Vec::with_capacity(usize::try_from(length).unwrap_or(0).min(total(&parts)));
        for part in &parts {
            let rest = usize::try_from(length).unwrap_or(usize::MAX) - frame.len();
            frame.extend_from_slice(&part[..part.len().min(rest)]);
        }
        let mut expander = self.expanders.lock().pop().unwrap_or_default();
        let mut open = |content: &mut [u8]| match form {
            Some(form) => expander.open_lossy(form, &frame, content),
            None => expander.open(&frame, content),
        };
        let opened = match &mut parts[..] {
            [whole] => open(whole),
            parts => {
                let mut whole = vec![0; total(parts)];
                let opened = open(&mut whole);
                let mut rest = &whole[..];
                for part in parts {
                    let (bytes, later) = rest.split_at(part.len());
                    part.copy_from_slice(bytes);
                    rest = later;
                }
                opened
            }
        };
        keep(&self.expanders, expander);
        opened.map(|()| is_compressed(&frame))
    }
}

fn total(parts: &[&mut [u8]]) -> usize {
    parts.iter().map(|part| part.len()).sum()
}

fn keep<T>(tools: &Mutex<Vec<T>>, tool: T) {
    let mut tools = tools.lock();
    if tools.len() < MOST_TOOLS {
        tools.push(tool);
    }
}

/// The frame of an object, of a length that its pieces divide; `None` where it is not shorter.
fn frame_of(
    form: Option<LossyForm>,
    mut compressor: Option<&mut Compressor>,
    request: &PutRequest<'_>,
) -> Option<Vec<u8>> {
    let (length, pieces) = (length_of(&request.pieces), u64::from(request.form.pieces));
    if !(1..=u64::from(MAX_PIECES)).contains(&pieces) || !length.is_multiple_of(pieces) {
        // The volume says what is wrong with it.
        return None;
    }
    let content = match &request.pieces[..] {
        [whole] => Cow::Borrowed(*whole),
        pieces => Cow::Owned(pieces.concat()),
    };
    let lossy = form.and_then(|form| lossy_frame(form, &content, compressor.as_deref_mut()));
    // What has no lossy form is compressed without loss.
    let mut frame = lossy.or_else(|| compressor?.frame(&content, None))?;
    frame.resize(frame.len().next_multiple_of(request.form.pieces as usize), 0);
    ((frame.len() as u64) < length).then_some(frame)
}

fn length_of(pieces: &[&[u8]]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

impl Volume for CompressedVolume {
    fn descriptor(&self) -> &VolumeDescriptor {
        self.inner.descriptor()
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let volume = self.descriptor().id;
        let found: Vec<FoundFrame> = requests.iter().map(|_| FoundFrame::default()).collect();
        let about = requests.iter().zip(&found);
        let about: Vec<_> = about
            .map(|(request, found)| (request.key, request.form, request.seal.measuring(found)))
            .collect();
        let mut inner: Vec<GetRequest<'_>> = requests
            .iter_mut()
            .zip(about)
            .map(|(request, (key, form, seal))| {
                let pieces = request.pieces.iter_mut().map(|piece| &mut **piece).collect();
                GetRequest { key, form, seal, pieces }
            })
            .collect();
        let began = Instant::now();
        let results = self.inner.get(&mut inner, deadline);
        drop(inner);
        // Bytes of blocks that took decompression, and that did not.
        let (mut framed, mut plain) = (0, 0);
        let open =
            |((request, found), result): ((&mut GetRequest<'_>, FoundFrame), Result<(), VolumeError>)| {
                result?;
                let content = request.pieces.iter().map(|piece| piece.len() as u64).sum();
                let length = found.get().copied();
                if let Some(length) = length {
                    let key = request.key;
                    let corrupt =
                        |error| VolumeError::Corrupt { volume, key, reason: ObjectCorruption::Frame(error) };
                    let is_compressed = self.open(request, length).map_err(corrupt)?;
                    *(if is_compressed { &mut framed } else { &mut plain }) += content;
                } else {
                    plain += content;
                }
                self.counts.read.fetch_add(content, Ordering::Relaxed);
                self.counts.read_stored.fetch_add(length.unwrap_or(content), Ordering::Relaxed);
                Ok(())
            };
        let results: Vec<_> = requests.iter_mut().zip(found).zip(results).map(open).collect();
        self.adaptive.lock().has_read([plain, framed], began.elapsed());
        results
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let way = self.way();
        let mut results = Vec::with_capacity(requests.len());
        let mut rest = requests;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |request: &&PutRequest<'_>| {
                bytes += length_of(&request.pieces);
                bytes <= MOST_FRAMED
            };
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            rest = later;
            let nothing = || Framed { frames: vec![None; now.len()], took: Duration::ZERO };
            let is_as_it_is = way.is_none() && self.lossy.is_empty();
            let framed = if is_as_it_is { nothing() } else { self.frame(way, now) };
            let began = Instant::now();
            let put = self.put_all(now, &framed.frames, deadline);
            let took = began.elapsed();
            let mut written = 0;
            for ((request, frame), result) in now.iter().zip(&framed.frames).zip(&put) {
                if result.is_ok() {
                    let (content, stored) =
                        (length_of(&request.pieces), frame.as_ref().map(|frame| frame.len() as u64));
                    written += content;
                    self.counts.written.fetch_add(content, Ordering::Relaxed);
                    self.counts.written_stored.fetch_add(stored.unwrap_or(content), Ordering::Relaxed);
                }
            }
            if written > 0 {
                let way = if way.is_some() { Way::Compressed } else { Way::Plain };
                self.adaptive.lock().has_written(way, written, framed.took + took);
            }
            results.extend(put);
        }
        results
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.inner.exists(keys, deadline)
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.inner.delete(keys, deadline)
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        self.inner.list(scope, after, max, deadline)
    }

    fn used_bytes(&self) -> Option<u64> {
        self.inner.used_bytes()
    }

    fn facts(&self, deadline: Instant) -> StoreFacts {
        self.inner.facts(deadline)
    }

    fn destroy_keys(&self, label: NamespaceId, deadline: Instant) -> Result<Vec<DestroyedKey>, VolumeError> {
        self.inner.destroy_keys(label, deadline)
    }

    fn compression(&self) -> Option<CompressionStats> {
        let compresses = match self.setting {
            VolumeCompression::Off => false,
            VolumeCompression::Lz4 | VolumeCompression::Zstd => true,
            VolumeCompression::Auto => self.adaptive.lock().choice() == Way::Compressed,
        };
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Some(CompressionStats {
            compresses: compresses || !self.lossy.is_empty(),
            written: count(&self.counts.written),
            written_stored: count(&self.counts.written_stored),
            read: count(&self.counts.read),
            read_stored: count(&self.counts.read_stored),
        })
    }
}
