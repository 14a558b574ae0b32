//! Acquire and verify: from a release to bytes in private staging, and from there to an archive that is the published
//! one.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::archive::{
    Archive, ArchiveError, Incoming, MOST_ARCHIVE, MOST_CHECKSUMS, MOST_SIGNATURE, Sums, Unverified,
    find_checksum,
};
use super::events::{Event, SCHEMA, What};
use super::fetch::{self, FetchError};
use super::flow::{Failure, Flow};
use super::release::archive_name;
use super::staging::Staging;
use super::{Release, Source, Unresolved};
use crate::durable::{open_regular, read_bounded};
use crate::host::architecture;
use crate::interrupt::Interrupt;

/// Between two events about bytes that come: so many of them, or so long.
const TELL_BYTES: u64 = 256 * 1024;
const TELL_EACH: Duration = Duration::from_millis(250);

/// What is to be made current: an archive to verify, the same release that is in place, this very executable, or the
/// retained one.
pub(super) enum Acquired {
    Archive { bytes: Unverified, sums: Sums },
    InPlace { archive_sha256: String, sums: Sums },
    Executable(PathBuf),
}

/// What may be preflighted.
pub(super) enum Verified {
    Archive(Archive),
    InPlace {
        archive_sha256: String,
    },
    /// An executable that was installed before, or runs now.
    Executable(PathBuf),
}

impl Flow<'_> {
    /// Brings what is to be installed to private staging, hashed as it comes.
    pub(super) fn acquire(&mut self, release: &Release, staging: &Staging) -> Result<Acquired, Failure> {
        let Some(architecture) = architecture() else {
            return Err(Failure::new(
                "architecture",
                format!("there is no release for {}", std::env::consts::ARCH),
            ));
        };
        let name = archive_name(architecture);
        let path = staging.path(&name);
        match &release.source {
            Source::Itself => Ok(Acquired::Executable(self.host.program().to_owned())),
            Source::Retained => Ok(Acquired::Executable(self.host.previous())),
            Source::Local { archive, checksums } => {
                if archive.file_name().is_none_or(|given| given != name.as_str()) {
                    let error =
                        format!("the archive is called {archive:?}, and checksums.txt knows it as {name}");
                    return Err(Failure::new("archive_name", error));
                }
                let sums = local_sums(checksums, self.settings.signing_key.is_some())?;
                let bytes = copy_local(archive, &path, self.interrupt)?;
                self.fact(&format!("{name}, {}", megabytes(bytes.length)));
                Ok(Acquired::Archive { bytes, sums })
            }
            Source::Published { sums } => {
                let sums = match sums {
                    Some(sums) => sums.clone(),
                    None => super::published(self.host, self.settings, release.version, self.interrupt)
                        .map_err(not_published)?,
                };
                if let Some(archive_sha256) = self.in_place(release, &sums.checksums, &name) {
                    self.fact("the published archive is the one that is installed");
                    return Ok(Acquired::InPlace { archive_sha256, sums });
                }
                let url = self.settings.archive_url(release.version, architecture);
                let bytes = self.download(&url, &path)?;
                self.fact(&format!("{name}, {}", megabytes(bytes.length)));
                Ok(Acquired::Archive { bytes, sums })
            }
        }
    }

    /// The published archive's digest, when exactly that archive is what is installed.
    fn in_place(&self, release: &Release, checksums: &[u8], name: &str) -> Option<String> {
        let published = find_checksum(checksums, name).ok()?;
        let described = self.before.inventory.current.as_ref()?;
        let on_disk = self.before.keepable()?;
        let same = described.version == release.version
            && described.archive_sha256.as_ref() == Some(&published)
            && described.sha256 == on_disk;
        if same { Some(published) } else { None }
    }

    fn download(&mut self, url: &str, path: &Path) -> Result<Unverified, Failure> {
        let writing = |e: &io::Error| Failure::new("disk", format!("writing {path:?}: {e}"));
        let mut incoming = Incoming::create(path).map_err(|e| writing(&e))?;
        let bounds = fetch::Bounds { most: MOST_ARCHIVE, deadline: self.settings.deadlines.acquire };
        let (id, tell, deaf) = (&self.record.id, &mut self.tell, &mut self.deaf);
        let (mut told, mut told_at) = (0, Instant::now());
        let mut unwritten = None;
        let fetched =
            fetch::fetch(self.host, self.settings, url, bounds, self.interrupt, &mut |bytes, total| {
                incoming.take(bytes).inspect_err(|e| unwritten = Some(writing(e)))?;
                // A screen needs no more than this.
                let some = incoming.length() - told >= TELL_BYTES || told_at.elapsed() >= TELL_EACH;
                if some || Some(incoming.length()) == total {
                    (told, told_at) = (incoming.length(), Instant::now());
                    let what = What::Progress { attempt: id, bytes: told, total };
                    *deaf |= tell(&Event { schema: SCHEMA, what, at: Timestamp::now() }).is_err();
                    if *deaf {
                        return Err(io::Error::from(io::ErrorKind::BrokenPipe));
                    }
                }
                Ok(())
            });
        if let Some(failure) = unwritten {
            return Err(failure);
        }
        self.not_cancelled()?;
        fetched.map_err(|e| match &e {
            FetchError::NotFound { .. } => {
                Failure::new("not_found", e).help("ask for another version or channel")
            }
            FetchError::Refused { .. } => Failure::new("refused", e),
            FetchError::Unreachable { .. } => Failure::new("unreachable", e).help("try again later"),
            FetchError::Here { .. } => Failure::new("fetch", e),
            FetchError::Cancelled { .. } => Failure::new("cancelled", e),
        })?;
        Ok(incoming.finish())
    }

    /// Checks that what came is what was published: by its checksum and, where a key is configured, its signature.
    pub(super) fn verify(&mut self, acquired: Acquired) -> Result<Verified, Failure> {
        let failed = |e: ArchiveError| {
            let reason = match e {
                ArchiveError::Checksums { .. } => "checksums",
                ArchiveError::Signature { .. } => "signature",
                _ => "checksum_mismatch",
            };
            Failure::new(reason, e).help("the source is damaged or was changed: do not install from it")
        };
        let key = self.settings.signing_key.as_ref();
        let signed = |sums: &Sums| match key {
            Some(key) => sums.check_signature(key).map(|()| "checksums.txt, signed by the configured key"),
            None => Ok("checksums.txt; no signing key is configured"),
        };
        match acquired {
            Acquired::Executable(path) => Ok(Verified::Executable(path)),
            Acquired::InPlace { archive_sha256, sums } => {
                signed(&sums).map_err(failed)?;
                Ok(Verified::InPlace { archive_sha256 })
            }
            Acquired::Archive { bytes, sums } => {
                let by = signed(&sums).map_err(failed)?;
                let expected = find_checksum(&sums.checksums, &bytes.name()).map_err(failed)?;
                let archive = bytes.verify(&expected).map_err(failed)?;
                self.fact(&format!("sha256 {}  ({by})", shorten(&archive.sha256)));
                Ok(Verified::Archive(archive))
            }
        }
    }
}

/// What the source says of a release's files did not come.
fn not_published(unresolved: Unresolved) -> Failure {
    let (reason, problem) = match unresolved {
        Unresolved::NoSuchRelease(problem) => ("not_found", problem),
        Unresolved::Unreachable(problem) => ("unreachable", problem),
        Unresolved::Refused(problem) => ("refused", problem),
    };
    Failure::new(reason, problem.what).help(problem.help)
}

/// Reads `checksums.txt` and, where signatures count, `checksums.txt.minisig` beside it.
pub(super) fn local_sums(path: &Path, signed: bool) -> Result<Sums, Failure> {
    let read = |path: &Path, most: u64| read_bounded(path, usize::try_from(most).unwrap_or(usize::MAX));
    let reading = |path: &Path, e: io::Error| Failure::new("missing", format!("reading {path:?}: {e}"));
    let checksums = read(path, MOST_CHECKSUMS).map_err(|e| reading(path, e))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let beside = path.with_file_name(format!("{name}.minisig"));
    let signature = match signed.then(|| read(&beside, MOST_SIGNATURE)) {
        None => None,
        Some(Ok(signature)) => Some(signature),
        Some(Err(e)) if e.kind() == io::ErrorKind::NotFound => None,
        Some(Err(e)) => return Err(reading(&beside, e)),
    };
    Ok(Sums { checksums, signature })
}

/// Copies an archive that is here, hashed as it is copied: what is verified is what is extracted.
fn copy_local(from: &Path, to: &Path, interrupt: &Interrupt) -> Result<Unverified, Failure> {
    let reading = |e: io::Error| Failure::new("missing", format!("reading {from:?}: {e}"));
    let writing = |e: io::Error| Failure::new("disk", format!("writing {to:?}: {e}"));
    let mut file = open_regular(from).map_err(reading)?;
    let mut incoming = Incoming::create(to).map_err(writing)?;
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        if let Some(signal) = interrupt.requested() {
            return Err(Failure::cancelled(signal));
        }
        match file.read(&mut buffer) {
            Ok(0) => return Ok(incoming.finish()),
            Ok(n) => incoming.take(&buffer[..n]).map_err(writing)?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(reading(e)),
        }
    }
}

/// "3f9c…a2"
fn shorten(sha256: &str) -> String {
    format!("{}…{}", sha256.get(..4).unwrap_or_default(), sha256.get(62..).unwrap_or_default())
}

/// "2.2 MB"
fn megabytes(bytes: u64) -> String {
    let tenths = bytes / 100_000;
    format!("{}.{} MB", tenths / 10, tenths % 10)
}
