//! The archive of a release: bytes on disk whose hash was checked against `checksums.txt`, and the one file in them
//! that is wanted.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use flate2::bufread::GzDecoder;
use ring::digest::{Context, SHA256};
use tar::EntryType;

use crate::durable::{create_new, hex};

/// The largest archive, in bytes.
pub(crate) const MOST_ARCHIVE: u64 = 64 * 1024 * 1024;
/// The most that an archive may unpack to, in bytes.
pub(crate) const MOST_UNPACKED: u64 = 128 * 1024 * 1024;
/// The longest `checksums.txt`, in bytes.
pub(crate) const MOST_CHECKSUMS: u64 = 256 * 1024;
/// The longest signature, in bytes.
pub(crate) const MOST_SIGNATURE: u64 = 4 * 1024;
/// The member that is wanted.
const MEMBER: &[u8] = b"ployzd";

/// An archive on disk whose hash was checked.
#[derive(Debug)]
pub(crate) struct Archive {
    path: PathBuf,
    /// The digest of the archive, as `checksums.txt` has it.
    pub(crate) sha256: String,
}

/// An archive on disk whose hash is known and was compared with nothing yet.
#[derive(Debug)]
pub(crate) struct Unverified {
    path: PathBuf,
    sha256: String,
    /// Its length in bytes.
    pub(crate) length: u64,
}

/// A file that is being written and hashed at once.
pub(crate) struct Incoming {
    path: PathBuf,
    file: File,
    context: Context,
    length: u64,
}

/// Why an archive is not what it should be. The bytes are deleted with it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArchiveError {
    /// `checksums.txt` does not have exactly one line for the archive's name.
    #[error("checksums.txt {problem}")]
    Checksums { problem: String },
    /// A signing key is configured, and `checksums.txt` is not signed by it.
    #[error("checksums.txt {problem}")]
    Signature { problem: String },
    /// The archive is another than the published one.
    #[error("{name} has sha256 {found}, and checksums.txt says {expected}")]
    Mismatch { name: String, found: String, expected: String },
    /// The archive holds something that it must not, or not what it must.
    #[error("refusing the archive: {0}")]
    Content(String),
    /// It can't be read or written here.
    #[error("{doing} {path:?}: {source}")]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
}

impl Incoming {
    /// A new file at `path`.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), file: create_new(path)?, context: Context::new(&SHA256), length: 0 })
    }

    /// Takes bytes; more than an archive may have are refused.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.length += bytes.len() as u64;
        if self.length > MOST_ARCHIVE {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("more than {MOST_ARCHIVE} bytes"),
            ));
        }
        self.context.update(bytes);
        self.file.write_all(bytes)
    }

    /// How many bytes were taken.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// All bytes are there.
    pub(crate) fn finish(self) -> Unverified {
        Unverified { path: self.path, sha256: hex(self.context.finish().as_ref()), length: self.length }
    }
}

impl Unverified {
    /// The name that `checksums.txt` knows it by.
    pub(crate) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Compares the hash; a mismatch deletes the bytes.
    pub(crate) fn verify(self, expected: &str) -> Result<Archive, ArchiveError> {
        if self.sha256 == expected {
            return Ok(Archive { path: self.path, sha256: self.sha256 });
        }
        let _ = std::fs::remove_file(&self.path);
        Err(ArchiveError::Mismatch { name: self.name(), found: self.sha256, expected: expected.to_owned() })
    }
}

/// What a release publishes about its files.
#[derive(Debug, Clone)]
pub(crate) struct Sums {
    /// `checksums.txt`.
    pub(crate) checksums: Vec<u8>,
    /// `checksums.txt.minisig`, if there is one and it was asked for.
    pub(crate) signature: Option<Vec<u8>>,
}

impl Sums {
    /// Whether `checksums.txt` is signed by `key`. Only hashed signatures count: the legacy form is refused.
    pub(crate) fn check_signature(&self, key: &minisign_verify::PublicKey) -> Result<(), ArchiveError> {
        let refuse = |problem: String| ArchiveError::Signature { problem };
        let signature = self.signature.as_ref().ok_or_else(|| refuse("is not signed".into()))?;
        let text =
            std::str::from_utf8(signature).map_err(|_| refuse("has a signature that is not text".into()))?;
        let signature = minisign_verify::Signature::decode(text)
            .map_err(|e| refuse(format!("has a signature that can't be read: {e}")))?;
        key.verify(&self.checksums, &signature, false)
            .map_err(|e| refuse(format!("is not signed by the configured key: {e}")))
    }
}

/// The digest that `checksums.txt` (the form of `sha256sum`) has for `name`: exactly one line for the exact name, 64
/// lower-case hex digits, two spaces, nothing else. Lines for other names are not looked at.
pub(crate) fn find_checksum(checksums: &[u8], name: &str) -> Result<String, ArchiveError> {
    let refuse = |problem: String| ArchiveError::Checksums { problem };
    let text = std::str::from_utf8(checksums).map_err(|_| refuse("is not text".into()))?;
    // Any line that means this name in any spelling counts, so that a second one in another spelling is seen: that of
    // a binary file has a star before the name, that of BSD parentheses around it.
    let edge = |c: char| c.is_whitespace() || matches!(c, '*' | '(' | ')');
    let mut lines = text.split('\n').filter(|line| line.split(edge).any(|word| word == name));
    let line = lines.next().ok_or_else(|| refuse(format!("has no line for {name}")))?;
    if lines.next().is_some() {
        return Err(refuse(format!("has more than one line for {name}")));
    }
    let (digest, rest) = line.split_at_checked(64).unwrap_or((line, ""));
    let lower_hex = digest.len() == 64 && digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !lower_hex || rest.strip_prefix("  ") != Some(name) {
        let seen: String = line.chars().take(100).collect();
        return Err(refuse(format!(
            "has {seen:?} for {name}, not 64 lower-case hex digits, two spaces and the name"
        )));
    }
    Ok(digest.to_owned())
}

/// Is given each member's name and content.
type Visit<'a> = &'a mut dyn FnMut(&[u8], &mut dyn Read) -> Result<(), ArchiveError>;

impl Archive {
    /// Extracts `ployzd` to `target`, which must not exist; returns its digest. The whole archive is looked at before
    /// a byte lands: exactly one `ployzd`, a regular file; other clean-named regular files are skipped; anything else
    /// is refused.
    pub(crate) fn extract(&self, target: &Path) -> Result<String, ArchiveError> {
        self.extract_within(MOST_UNPACKED, target)
    }

    /// The same within another bound.
    pub(super) fn extract_within(&self, most: u64, target: &Path) -> Result<String, ArchiveError> {
        let mut found = 0;
        self.each(most, &mut |name, _| {
            found += usize::from(name == MEMBER);
            Ok(())
        })?;
        if found != 1 {
            return Err(ArchiveError::Content(format!("it holds {found} files named ployzd, not one")));
        }
        let mut digest = String::new();
        let extracted = self.each(most, &mut |name, content| {
            if name == MEMBER {
                digest = write(content, target)?;
            }
            Ok(())
        });
        if extracted.is_err() {
            let _ = std::fs::remove_file(target);
        }
        extracted.map(|()| digest)
    }

    fn each(&self, most: u64, visit: Visit<'_>) -> Result<(), ArchiveError> {
        let reading = |source| ArchiveError::Io { doing: "reading", path: self.path.clone(), source };
        let file = File::open(&self.path).map_err(reading)?;
        let unpacked =
            Bounded { from: GzDecoder::new(BufReader::with_capacity(64 * 1024, file)), most, left: most };
        let mut members = tar::Archive::new(unpacked);
        let broken = |e: io::Error| ArchiveError::Content(format!("it can't be unpacked: {e}"));
        // Raw, so that the headers that carry long names and attributes are seen, and refused, as what they are.
        for member in members.entries().map_err(broken)?.raw(true) {
            let mut member = member.map_err(broken)?;
            let name = member.path_bytes().into_owned();
            check(&name, member.header()).map_err(ArchiveError::Content)?;
            visit(&name, &mut member)?;
        }
        let mut unpacked = members.into_inner();
        io::copy(&mut unpacked, &mut io::sink()).map_err(broken)?;
        let mut rest = unpacked.from.into_inner();
        match rest.read(&mut [0]).map_err(reading)? {
            0 => Ok(()),
            _ => Err(ArchiveError::Content("bytes follow its end".into())),
        }
    }
}

/// Reads no more than an archive may unpack to, and says so.
struct Bounded<R> {
    from: R,
    most: u64,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.from.read(buffer)?;
        self.left = self.left.checked_sub(n as u64).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("it unpacks to more than {} bytes", self.most),
            )
        })?;
        Ok(n)
    }
}

/// Refuses every member that is not a plain file under a clean name.
fn check(name: &[u8], header: &tar::Header) -> Result<(), String> {
    let shown: String = String::from_utf8_lossy(name).chars().take(100).collect();
    if !matches!(header.entry_type(), EntryType::Regular) {
        return Err(format!("{shown:?} is not a regular file ({:?})", header.entry_type()));
    }
    let clean = name.split(|b| *b == b'/').all(|part| !part.is_empty() && part != b"." && part != b"..");
    if !clean || !name.iter().all(u8::is_ascii_graphic) {
        return Err(format!("{shown:?} is not a clean relative name"));
    }
    match header.mode() {
        Ok(mode) if mode & 0o7000 == 0 => Ok(()),
        Ok(mode) => Err(format!("{shown:?} has mode {mode:o}")),
        Err(e) => Err(format!("{shown:?} has no mode: {e}")),
    }
}

fn write(content: &mut dyn Read, target: &Path) -> Result<String, ArchiveError> {
    let writing = |source| ArchiveError::Io { doing: "writing", path: target.to_owned(), source };
    let mut file = create_new(target).map_err(writing)?;
    let mut context = Context::new(&SHA256);
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        let n = match content.read(&mut buffer) {
            Ok(0) => return Ok(hex(context.finish().as_ref())),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(ArchiveError::Content(format!("it can't be unpacked: {e}"))),
        };
        context.update(&buffer[..n]);
        file.write_all(&buffer[..n]).map_err(writing)?;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn checksums_are_read_strictly() {
        let name = "ployzd_linux_amd64.tar.gz";
        let good = "0a".repeat(32);
        let other = "ff".repeat(32);
        let found = |text: &str| find_checksum(text.as_bytes(), name).map_err(|e| e.to_string());
        assert_eq!(found(&format!("{good}  {name}\n")), Ok(good.clone()));
        assert_eq!(found(&format!("{other}  ployz_linux_amd64.tar.gz\n{good}  {name}")), Ok(good.clone()));
        assert_eq!(
            found(&format!("{other}  old-{name}\n{good}  {name}\n{other}  {name}.asc\n")),
            Ok(good.clone())
        );
        for (text, problem) in [
            (String::new(), "no line"),
            (format!("{good}  {name}.asc\n"), "no line"),
            (format!("{good}  x{name}\n"), "no line"),
            (format!("{good}  {name}\n{good}  {name}\n"), "more than one"),
            (format!("{good}  {name}\n{good} *{name}\n"), "more than one"),
            (format!("{good}  {name}\nSHA256 ({name}) = {other}\n"), "more than one"),
            (format!("{good}  {name}\n{other}  other\r{name}\n"), "more than one"),
            (format!("{good} *{name}\n"), "not 64 lower-case"),
            (format!("SHA256 ({name}) = {good}\n"), "not 64 lower-case"),
            (format!("{good}  {name}\r\n"), "not 64 lower-case"),
            (format!("{}  {name}\n", good.to_uppercase()), "not 64 lower-case"),
            (format!("{good} {name}\n"), "not 64 lower-case"),
            (format!("{}  {name}\n", &good[1..]), "not 64 lower-case"),
            (format!("{good}  dir/../{name}\n"), "no line"),
            (format!("\u{feff}{good}  {name}\n"), "not 64 lower-case"),
        ] {
            let error = found(&text).unwrap_err();
            assert!(error.contains(problem), "{text:?}: {error}");
        }
        assert!(find_checksum(b"\xff\xfe", name).is_err());
    }
}
