//! Who may read and write the files that hold users' KV.

use std::path::Path;

/// Access to the files and directories that hold KV. Other users never have any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FileAccess {
    /// The owner alone: files 0600, directories 0700.
    #[default]
    Owner,
    /// The group may read: files 0640, directories 0750.
    GroupRead,
    /// The group may read and write, and may own files: files 0660, directories 0770.
    GroupWrite,
}

impl FileAccess {
    /// Permission bits of a file.
    pub const fn file_mode(self) -> u32 {
        match self {
            Self::Owner => 0o600,
            Self::GroupRead => 0o640,
            Self::GroupWrite => 0o660,
        }
    }

    /// Permission bits of a directory.
    pub const fn dir_mode(self) -> u32 {
        match self {
            Self::Owner => 0o700,
            Self::GroupRead => 0o750,
            Self::GroupWrite => 0o770,
        }
    }

    /// The access that a file with these permission bits has. Bits that no access has mean
    /// [`FileAccess::Owner`].
    pub const fn of_file_mode(mode: u32) -> Self {
        match mode & 0o777 {
            0o640 => Self::GroupRead,
            0o660 => Self::GroupWrite,
            _ => Self::Owner,
        }
    }

    /// The reason to refuse the file at `path`, if another user owns it. `ours` is the user of this
    /// process and the group that shares the directory.
    pub fn refusal(self, path: &Path, found: FileOwner, ours: FileOwner) -> Option<String> {
        let is_shared = self == Self::GroupWrite && found.gid == ours.gid;
        if found.uid == ours.uid || is_shared {
            return None;
        }
        let FileOwner { uid, gid, mode } = found;
        let path = path.display();
        let us = ours.uid;
        Some(format!(
            "{path} belongs to user {uid}, group {gid}, with mode {mode:04o}, and this process runs as user {us}: \
             run it as user {uid}, `chown` the file if you trust its content, or choose another directory"
        ))
    }
}

/// Owner and permission bits of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOwner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Permission bits, with the set-id and sticky bits.
    pub mode: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_other_users_are_refused_with_owner_mode_and_remedy() {
        let path = Path::new("/kv/slots.kvbm");
        let ours = FileOwner { uid: 1000, gid: 50, mode: 0o600 };
        let of = |uid, gid| FileOwner { uid, gid, mode: 0o644 };
        for access in [FileAccess::Owner, FileAccess::GroupRead, FileAccess::GroupWrite] {
            assert_eq!(access.refusal(path, of(1000, 7), ours), None);
            let refusal = access.refusal(path, of(0, 7), ours).unwrap();
            for part in ["/kv/slots.kvbm", "user 0", "mode 0644", "user 1000", "chown"] {
                assert!(refusal.contains(part), "{refusal} names {part}");
            }
            // Only a group that may write is trusted with what it wrote.
            let is_trusted = access.refusal(path, of(1001, 50), ours).is_none();
            assert_eq!(is_trusted, access == FileAccess::GroupWrite);
            assert_eq!(FileAccess::of_file_mode(0o100_000 | access.file_mode()), access);
            assert_eq!(access.dir_mode() & 0o007, 0);
        }
        assert_eq!(FileAccess::of_file_mode(0o644), FileAccess::Owner);
    }
}
