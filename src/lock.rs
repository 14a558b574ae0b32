//! Open-file-description locks: tried and never waited for, asked about without taking anything, released by the kernel
//! when the holder dies. And a file whose holder says what it is doing.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use jiff::Timestamp;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde::{Deserialize, Serialize};

/// Whether a lock is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// For reading: others may have the same.
    Shared,
    /// For writing: nobody else has any.
    Exclusive,
}

/// Tries to lock a byte; `false` when another has it.
pub(crate) fn lock(file: &File, byte: i64, kind: Kind) -> io::Result<bool> {
    let kind = match kind {
        Kind::Shared => libc::F_RDLCK,
        Kind::Exclusive => libc::F_WRLCK,
    };
    match fcntl(file, FcntlArg::F_OFD_SETLK(&range(byte, kind))) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Gives the lock on a byte back.
pub(crate) fn unlock(file: &File, byte: i64) -> io::Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&range(byte, libc::F_UNLCK))).map(drop).map_err(Into::into)
}

/// The lock that another has on a byte. Takes nothing.
pub(crate) fn locked(file: &File, byte: i64) -> nix::Result<Option<Kind>> {
    let mut asked = range(byte, libc::F_WRLCK);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut asked))?;
    Ok(match libc::c_int::from(asked.l_type) {
        libc::F_UNLCK => None,
        libc::F_RDLCK => Some(Kind::Shared),
        _ => Some(Kind::Exclusive),
    })
}

fn range(byte: i64, kind: libc::c_int) -> libc::flock {
    #[allow(clippy::cast_possible_truncation, reason = "the constants are small; only their C types differ")]
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

/// A mutation under way, as whoever does it says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doing {
    /// "deploying web"
    pub what: String,
    /// Since when.
    pub since: Timestamp,
}

/// A file that is locked by the one who does something, and says what. The lock ends with this value.
#[derive(Debug)]
pub(crate) struct Described {
    _file: File,
}

impl Described {
    /// Takes it, or says what another is doing.
    pub(crate) fn try_take(path: &Path, doing: &Doing) -> io::Result<Result<Self, Option<Doing>>> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)?;
        if !lock(&file, 0, Kind::Exclusive)? {
            return Ok(Err(read(&mut file)));
        }
        file.set_len(0)?;
        // On a full disk it is held without a description: what is done may be what makes room.
        if let Err(e) = file.write_all(serde_json::to_string(doing).map_err(io::Error::other)?.as_bytes()) {
            tracing::warn!("saying in {path:?} what is done: {e}");
        }
        Ok(Ok(Self { _file: file }))
    }
}

/// What the holder of such a file is doing; none when nobody holds it, or when it can't be read.
pub(crate) fn doing(path: &Path) -> Option<Doing> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    locked(&file, 0).ok()??;
    read(&mut file)
}

fn read(file: &mut File) -> Option<Doing> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(4096).read_to_string(&mut text).ok()?;
    let mut doing: Doing = serde_json::from_str(&text).ok()?;
    doing.what = crate::text::printable(&doing.what);
    Some(doing)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn who_holds_it_says_what_it_does_and_only_as_long() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        assert_eq!(doing(&path), None);
        let first = Doing { what: "deploying web".into(), since: Timestamp::UNIX_EPOCH };
        let held = Described::try_take(&path, &first).unwrap().unwrap();
        assert_eq!(doing(&path), Some(first.clone()));
        let second = Doing { what: "removing db".into(), since: Timestamp::now() };
        assert_eq!(Described::try_take(&path, &second).unwrap().unwrap_err(), Some(first));
        drop(held);
        assert_eq!(doing(&path), None);
        assert!(Described::try_take(&path, &second).unwrap().is_ok());
    }
}
