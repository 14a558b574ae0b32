//! Files that survive a power loss whole: written under a temporary name, synced, renamed, directory synced.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::libc;
use ring::digest::{Context, SHA256};
use ring::rand::{SecureRandom, SystemRandom};

use crate::host::{Account, Host};

/// Random bytes in a temporary name.
const RANDOM: usize = 6;

/// `bytes` random bytes as lower-case hex.
///
/// # Errors
/// When the kernel gives no random bytes.
pub(crate) fn random_hex(bytes: usize) -> io::Result<String> {
    let mut raw = vec![0u8; bytes];
    SystemRandom::new().fill(&mut raw).map_err(|_| io::Error::other("the kernel gave no random bytes"))?;
    Ok(hex(&raw))
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        use std::fmt::Write as _;
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Writes a file whole: after this returns, a crash or power loss leaves either the old content or this one.
/// Mode and owner are exact, whatever the umask.
///
/// # Errors
/// The system's; the temporary file is gone then.
pub(crate) fn write_whole(
    host: &Host,
    path: &Path,
    content: &[u8],
    mode: u32,
    owner: Account,
) -> io::Result<()> {
    put_whole(host, path, content, mode, owner, true)?;
    sync_parent(path)
}

fn put_whole(
    host: &Host,
    path: &Path,
    content: &[u8],
    mode: u32,
    owner: Account,
    durable: bool,
) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| io::Error::other("a path without a file name"))?;
    let temporary = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), random_hex(RANDOM)?));
    let written = (|| {
        let mut file = create_new(&temporary)?;
        file.write_all(content)?;
        give(host, &file, mode, owner)?;
        if durable {
            file.sync_all()?;
        }
        std::fs::rename(&temporary, path)
    })();
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

/// Writes a file whole for readers of this boot: a power loss may leave it empty or take it back.
///
/// # Errors
/// The system's; the temporary file is gone then.
pub(crate) fn write_fleeting(
    host: &Host,
    path: &Path,
    content: &[u8],
    mode: u32,
    owner: Account,
) -> io::Result<()> {
    put_whole(host, path, content, mode, owner, false)
}

/// Removes what a crash in [`write_whole`] left in a directory: temporary files for names that `ours` accepts. Only for
/// whoever may write those files now.
pub(crate) fn sweep(dir: &Path, ours: impl Fn(&str) -> bool) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let parts = name.to_str().and_then(|n| n.strip_prefix('.')).and_then(|n| n.rsplit_once('.'));
        let left = parts.is_some_and(|(target, random)| {
            random.len() == 2 * RANDOM && random.bytes().all(|b| b.is_ascii_hexdigit()) && ours(target)
        });
        if left {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Opens a file that must not exist yet, for reading and writing, private until it is given away.
///
/// # Errors
/// The system's; `AlreadyExists` for a name that is taken, a symbolic link included.
pub(crate) fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

/// Copies a file to a name that must not exist yet, and reads both again: returns the digest that they share.
///
/// # Errors
/// The system's, and when the copy is not the original.
pub(crate) fn copy_exactly(from: &Path, to: &Path) -> io::Result<String> {
    let mut copy = create_new(to)?;
    io::copy(&mut File::open(from)?, &mut copy)?;
    drop(copy);
    let digest = sha256_file(to)?;
    if digest != sha256_file(from)? {
        return Err(io::Error::other(format!("the copy differs from {from:?}")));
    }
    Ok(digest)
}

/// Gives a file its owner and mode.
fn give(host: &Host, file: &File, mode: u32, owner: Account) -> io::Result<()> {
    host.own(file, owner.uid, owner.gid)?;
    file.set_permissions(std::fs::Permissions::from_mode(mode))
}

/// Makes the names in the directory that holds `path` durable.
///
/// # Errors
/// The system's.
pub(crate) fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

/// Makes a directory, and those above it, with `mode` where it did not exist; refuses a symbolic link in its place.
///
/// # Errors
/// The system's.
pub(crate) fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(io::Error::other("exists and is not a directory")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            if let Some(parent) = path.parent() {
                make_dir(parent, 0o755)?;
            }
            match std::fs::create_dir(path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                made => made,
            }?;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
            sync_parent(path)
        }
        Err(e) => Err(e),
    }
}

/// Who besides root could change what a path leads to, in words; nothing that is not there can be changed.
pub(crate) fn writable_by_others(path: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata(path).ok()?;
    let shown = path.display();
    match (meta.uid(), meta.mode() & 0o002) {
        (0, 0) => None,
        (0, _) => Some(format!("{shown} may be written by everyone (mode {:o})", meta.mode() & 0o7777)),
        (uid, _) => Some(format!("{shown} belongs to uid {uid}, not to root")),
    }
}

/// Opens a regular file for reading; anything else is refused, and none of it is waited for.
///
/// # Errors
/// The system's.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("not a regular file")) }
}

/// Reads a file of at most `most` bytes.
///
/// # Errors
/// The system's, and `FileTooLarge` for a longer one.
pub(crate) fn read_bounded(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open_regular(path)?.take(most as u64 + 1).read_to_end(&mut content)?;
    if content.len() > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("longer than {most} bytes")));
    }
    Ok(content)
}

/// The sha256 of what is read, in lower-case hex, and its length in bytes.
///
/// # Errors
/// The reader's.
pub(crate) fn sha256(mut reader: impl Read) -> io::Result<(String, u64)> {
    let mut context = Context::new(&SHA256);
    let mut buffer = vec![0u8; 64 * 1024];
    let mut total = 0;
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok((hex(context.finish().as_ref()), total)),
            Ok(n) => {
                context.update(&buffer[..n]);
                total += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// The sha256 of a file, in lower-case hex.
///
/// # Errors
/// The system's.
pub(crate) fn sha256_file(path: &Path) -> io::Result<String> {
    Ok(sha256(open_regular(path)?)?.0)
}

/// Moves a file that can't be read out of the way, so that nothing trips over it twice; says where to.
///
/// # Errors
/// The system's.
pub(crate) fn move_aside(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let aside = path.with_file_name(format!("{name}.damaged-{}", random_hex(4)?));
    std::fs::rename(path, &aside)?;
    sync_parent(path)?;
    Ok(aside)
}
