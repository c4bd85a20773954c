//! Slots over several directories: which file a slot lies in, and the mark by which directories
//! know that they belong together. The mark's bytes are drawn in `docs/formats.md`.

use crate::OpenError;
use crate::checksum::crc64;
use crate::journal::JOURNAL_FILE;
use crate::medium::{BlockFile, Medium, OpenFile, complete, open_read_only};
use kvbm_plan::{BlockId, Striping};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute};

/// The mark of a directory that is one of several.
pub(crate) const STRIPE_FILE: &str = "stripe.kvbm";

/// The slot file of each directory.
pub(crate) const SLOT_FILE: &str = "slots.kvbm";

/// The directory that has the journal.
pub(crate) const JOURNAL_MEMBER: usize = 0;

/// A mark that is being written.
const STRIPE_TEMP_FILE: &str = "stripe.kvbm.tmp";

const MAGIC: [u8; 8] = *b"KVBMSTRP";
const VERSION: u32 = 1;
const BYTES: usize = 32;
/// Bytes before the mark's checksum.
const SUMMED_BYTES: usize = 24;
/// The name of a file of directory `member` in a medium of several directories.
pub(crate) fn name_in(member: usize, name: &str) -> String {
    if member == 0 { name.to_owned() } else { format!("{member}/{name}") }
}

/// Where slots lie: in units of neighbours, in turn over the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stripes {
    striping: Striping,
    stride: u64,
}

impl Stripes {
    pub(crate) fn new(files: usize, stride: u64) -> Self {
        Self { striping: Striping::new(files, stride), stride }
    }

    /// The file of a slot, and the offset in it.
    pub(crate) fn place(&self, slot: BlockId) -> (usize, u64) {
        let unit = self.striping.unit();
        let row = u64::from(slot.0 / unit) / self.striping.directories() as u64;
        let local = row * u64::from(unit) + u64::from(slot.0 % unit);
        (self.striping.directory(slot), local * self.stride)
    }

    /// Whether files of these lengths have the first `bytes` bytes of a slot.
    pub(crate) fn have(&self, lengths: &[u64], slot: BlockId, bytes: u64) -> bool {
        let (file, offset) = self.place(slot);
        lengths.get(file).is_some_and(|length| offset.saturating_add(bytes) <= *length)
    }

    /// No slot from this one on has a byte in files of these lengths.
    pub(crate) fn end(&self, lengths: &[u64]) -> u64 {
        let longest = lengths.iter().max().map_or(0, |longest| longest.div_ceil(self.stride.max(1)));
        let rows = longest.div_ceil(self.striping.unit().into());
        rows.saturating_mul(self.row())
    }

    /// Slots of one unit in each file.
    fn row(&self) -> u64 {
        u64::from(self.striping.unit()) * self.striping.directories() as u64
    }

    /// Bytes of file `file` when there are `slots` slots in all.
    pub(crate) fn file_bytes(&self, file: usize, slots: u32) -> u64 {
        let (unit, row) = (u64::from(self.striping.unit()), self.row());
        let (rows, rest) = (u64::from(slots) / row, u64::from(slots) % row);
        let before = file as u64 * unit;
        let local = rows * unit + rest.saturating_sub(before).min(unit);
        local * self.stride
    }
}

/// What a mark says: which set, which of its directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    set: u64,
    member: u16,
    members: u16,
}

/// A mark as it lies in its file.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct MarkLayout {
    magic: [u8; 8],
    version: U32,
    member: U16,
    members: U16,
    set: U64,
    sum: U64,
}

const _: () = assert!(size_of::<MarkLayout>() == BYTES);

impl MarkLayout {
    fn expected_sum(&self) -> u64 {
        crc64(&self.as_bytes()[..SUMMED_BYTES])
    }
}

impl Mark {
    fn encode(self) -> [u8; BYTES] {
        let mut layout = MarkLayout {
            magic: MAGIC,
            version: U32::new(VERSION),
            member: U16::new(self.member),
            members: U16::new(self.members),
            set: U64::new(self.set),
            sum: U64::ZERO,
        };
        layout.sum.set(layout.expected_sum());
        transmute!(layout)
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        let Ok((layout, _)) = MarkLayout::ref_from_prefix(bytes) else {
            return Err(format!("{STRIPE_FILE} has less than {BYTES} bytes"));
        };
        if layout.magic != MAGIC {
            return Err(format!("{STRIPE_FILE} is not a file of kvbm"));
        }
        if layout.version != VERSION {
            return Err(format!("{STRIPE_FILE} has version {}, this build reads {VERSION}", layout.version));
        }
        if layout.sum != layout.expected_sum() {
            return Err(format!("{STRIPE_FILE} is damaged"));
        }
        Ok(Self { set: layout.set.get(), member: layout.member.get(), members: layout.members.get() })
    }

    /// Text for an opening that names the directory at another place.
    fn place(self) -> String {
        let Self { member, members, .. } = self;
        format!("it is number {} of {members}: name all of them, in their order", u32::from(member) + 1)
    }
}

/// Makes sure that the directories of `medium` are one set, in this order, before any of them is
/// changed; a new set gets its marks. `names` are the directories, for messages.
pub(crate) fn join(medium: &dyn Medium, names: &[String]) -> Result<(), OpenError> {
    let open = |member: usize, name: &str| medium.open(&name_in(member, name), OpenFile::default());
    let marks = read_marks(names, |member| open(member, STRIPE_FILE))?;
    let has_journal: Vec<bool> = (0..names.len()).map(|member| open(member, JOURNAL_FILE).is_ok()).collect();
    let Some(set) = examine(&marks, &has_journal, names)? else { return Ok(()) };
    for (member, _) in marks.iter().enumerate().filter(|(_, mark)| mark.is_none()) {
        let mark = Mark { set, member: member as u16, members: names.len() as u16 };
        write(medium, member, mark).map_err(|source| OpenError::Io {
            doing: format!("write {STRIPE_FILE} in {}", names[member]),
            source,
        })?;
    }
    medium.sync_dir().map_err(|source| OpenError::Io { doing: "sync the directories".to_owned(), source })
}

/// Makes sure that `dirs` are a whole set, in their order, and changes nothing.
pub(crate) fn check(dirs: &[PathBuf]) -> Result<(), OpenError> {
    let names: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    let marks = read_marks(&names, |member| open_read_only(&dirs[member].join(STRIPE_FILE), None))?;
    let has_journal: Vec<bool> = dirs.iter().map(|dir| dir.join(JOURNAL_FILE).is_file()).collect();
    examine(&marks, &has_journal, &names).map(drop)
}

/// The set that the directories are or, where none has blocks, become; `None` for a directory
/// alone.
fn examine(marks: &[Option<Mark>], has_journal: &[bool], names: &[String]) -> Result<Option<u64>, OpenError> {
    let wrong = |member: usize, reason: String| {
        Err(OpenError::Stripe {
            dir: names[member].clone(),
            member: member + 1,
            members: names.len(),
            reason,
        })
    };
    let (first, any) = (marks.first().copied().flatten(), marks.iter().flatten().next());
    let known = has_journal.first().copied().unwrap_or(false);
    if names.len() <= 1 {
        return match first {
            Some(mark) if mark.members > 1 => wrong(0, mark.place()),
            _ => Ok(None),
        };
    }
    let set = match (first, any) {
        (Some(mark), _) => mark.set,
        (None, _) if known => return wrong(0, "it holds blocks of its own: clear it first".to_owned()),
        (None, None) => RandomState::new().hash_one(std::process::id()),
        (None, Some(_)) => {
            let reason = "it has no blocks, others belong to a set: is its device mounted? To begin anew, clear the others";
            return wrong(0, reason.to_owned());
        }
    };
    for (member, mark) in marks.iter().enumerate() {
        let expected = Mark { set, member: member as u16, members: names.len() as u16 };
        let reason = match mark {
            Some(mark) if *mark == expected => continue,
            Some(mark) if mark.set == set => mark.place(),
            Some(_) => "it belongs to another set: clear it, or name its set".to_owned(),
            None if known => {
                "its blocks are gone: is its device mounted? To begin anew, clear the others".to_owned()
            }
            None if has_journal[member] => "it holds blocks of its own: clear it first".to_owned(),
            None => continue,
        };
        return wrong(member, reason);
    }
    Ok(Some(set))
}

fn read_marks(
    names: &[String],
    open: impl Fn(usize) -> io::Result<Arc<dyn BlockFile>>,
) -> Result<Vec<Option<Mark>>, OpenError> {
    let read = |member: usize| {
        let dir = &names[member];
        let io = |source| OpenError::Io { doing: format!("read {STRIPE_FILE} in {dir}"), source };
        let file = match open(member) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => return Err(io(error)),
        };
        let mark = read_mark(&*file).map_err(io)?;
        mark.map(Some).map_err(|reason| OpenError::Stripe {
            dir: dir.clone(),
            member: member + 1,
            members: names.len(),
            reason: format!("{reason}: clear the directory"),
        })
    };
    (0..names.len()).map(read).collect()
}

fn read_mark(file: &dyn BlockFile) -> io::Result<Result<Mark, String>> {
    let mut bytes = [0; BYTES];
    let found = complete::read_up_to(file, 0, &mut bytes)?;
    Ok(Mark::decode(&bytes[..found]))
}

/// The mark is there as a whole or not at all: half of one would be taken for a damaged one.
fn write(medium: &dyn Medium, member: usize, mark: Mark) -> io::Result<()> {
    let (temporary, name) = (name_in(member, STRIPE_TEMP_FILE), name_in(member, STRIPE_FILE));
    let how = OpenFile { create: true, truncate: true, direct: false };
    let file = medium.open(&temporary, how)?;
    complete::write_all(&*file, 0, &mark.encode())?;
    file.sync_data()?;
    medium.rename(&temporary, &name)
}

/// The slot file of each directory.
pub(crate) fn slot_files(count: usize) -> Vec<String> {
    (0..count).map(|member| name_in(member, SLOT_FILE)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        /// Every slot has a place of its own inside its file, and the files have no more than that.
        #[test]
        fn slots_fill_their_files(files in 1_usize..5, pages in 1_u64..700, slots in 1_u32..3000, cut in 0_u64..1 << 32) {
            let stripes = Stripes::new(files, pages * 4096);
            let places: HashSet<_> = (0..slots).map(|slot| stripes.place(BlockId(slot))).collect();
            prop_assert_eq!(places.len(), slots as usize);
            let bytes: Vec<u64> = (0..files).map(|file| stripes.file_bytes(file, slots)).collect();
            prop_assert!(places.iter().all(|&(file, at)| at + pages * 4096 <= bytes[file]));
            prop_assert_eq!(bytes.iter().sum::<u64>(), u64::from(slots) * pages * 4096);
            // All of them are in files of these lengths, and in shorter ones those whose bytes are.
            prop_assert!(stripes.end(&bytes) >= u64::from(slots));
            let cut: Vec<u64> = bytes.iter().map(|bytes| bytes - bytes.min(&cut)).collect();
            for slot in (0..slots).map(BlockId) {
                let (file, at) = stripes.place(slot);
                let is_there = at + pages * 4096 <= cut[file];
                prop_assert_eq!(stripes.have(&cut, slot, pages * 4096), is_there);
                prop_assert!(!is_there || u64::from(slot.0) < stripes.end(&cut));
            }
        }
    }

    #[test]
    fn a_mark_is_read_as_it_was_written_and_nothing_else_is() {
        let mark = Mark { set: 0x0123_4567_89ab_cdef, member: 1, members: 3 };
        let bytes = mark.encode();
        assert_eq!(&bytes[..24], b"KVBMSTRP\x01\0\0\0\x01\0\x03\0\xef\xcd\xab\x89\x67\x45\x23\x01");
        assert_eq!(Mark::decode(&bytes), Ok(mark));
        for at in 0..BYTES {
            let mut bad = bytes;
            bad[at] ^= 0x20;
            assert!(Mark::decode(&bad).is_err(), "byte {at}");
            assert!(Mark::decode(&bytes[..at]).is_err());
        }
    }

    /// Mutation that makes it fail: the number added up as it is stored.
    #[test]
    fn a_directory_with_the_last_number_that_there_is_has_its_place_reported() {
        let mark = Mark { set: 1, member: u16::MAX, members: 2 };
        assert_eq!(Mark::decode(&mark.encode()), Ok(mark));
        let refused = examine(&[Some(mark), None], &[true, false], &["a".to_owned(), "b".to_owned()]);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("it is number 65536 of 2: name all of them"), "{message}");
    }
}
