//! Builds release trees as a release source serves them: good ones in one call, hostile ones by saying what
//! is hostile.
//!
//! ```no_run
//! # fn main() -> std::io::Result<()> {
//! use kit::release::{Archive, Checksums, Release};
//! let site = std::path::Path::new("site");
//! Release::new("1.4.0")
//!     .archive(Archive::new().file("ployzd", "#!/bin/sh\n").symlink("also", "/etc/passwd"))
//!     .checksums(Checksums::UpperCase)
//!     .publish(site)?;
//! # Ok(())
//! # }
//! ```

mod archive;
mod checksums;
mod gzip;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub use archive::{Archive, Member};
pub use checksums::{Checksums, sha256};
pub use gzip::Gzip;

/// A release that is about to be published.
#[derive(Clone, Debug)]
pub struct Release {
    version: String,
    arch: String,
    files: Vec<(String, Vec<u8>)>,
    checksums: Checksums,
    pointer: bool,
}

/// A release that was published.
#[derive(Clone, Debug)]
pub struct Published {
    /// `DIR/releases/download/v1.4.0`.
    pub directory: PathBuf,
    /// The first file's path: the archive.
    pub archive: PathBuf,
    /// Its digest, whatever `checksums.txt` says.
    pub sha256: String,
    /// Its length.
    pub length: u64,
}

/// Publishes a good release for this machine's architecture, its archive holding the given members, each
/// executable.
///
/// # Errors
/// When the directory can't be written.
pub fn tree(site: &Path, version: &str, members: &[(&str, &[u8])]) -> io::Result<Published> {
    let archive = members.iter().fold(Archive::new(), |archive, (name, bytes)| archive.file(name, bytes));
    Release::new(version).archive(archive).publish(site)
}

/// The name of this machine's architecture in an archive's name.
#[must_use]
pub fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The name of the archive for this machine's architecture.
#[must_use]
pub fn archive_name() -> String {
    format!("ployzd_linux_{}.tar.gz", arch())
}

impl Release {
    /// An empty release for this machine's architecture.
    pub fn new(version: impl Into<String>) -> Self {
        let (arch, checksums) = (arch().to_owned(), Checksums::Good);
        Self { version: version.into(), arch, files: Vec::new(), checksums, pointer: true }
    }

    /// For another architecture: of the archives that are added after this.
    #[must_use]
    pub fn arch(self, arch: impl Into<String>) -> Self {
        Self { arch: arch.into(), ..self }
    }

    /// The daemon's archive.
    #[must_use]
    pub fn archive(self, archive: impl Into<Vec<u8>>) -> Self {
        let name = format!("ployzd_linux_{}.tar.gz", self.arch);
        self.file(name, archive)
    }

    /// Any file.
    #[must_use]
    pub fn file(mut self, name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        self.files.push((name.into(), bytes.into()));
        self
    }

    /// What `checksums.txt` is like.
    #[must_use]
    pub fn checksums(self, checksums: Checksums) -> Self {
        Self { checksums, ..self }
    }

    /// Leaves the channel's pointer where it is.
    #[must_use]
    pub fn without_pointer(self) -> Self {
        Self { pointer: false, ..self }
    }

    /// Writes the release below a site, and lets the channel point to it: `stable`, or `beta` for a
    /// prerelease. What was published under this version before is gone.
    ///
    /// # Errors
    /// When the directory can't be written, or the release has no file.
    pub fn publish(&self, site: &Path) -> io::Result<Published> {
        let directory = site.join("releases/download").join(format!("v{}", self.version));
        if directory.exists() {
            fs::remove_dir_all(&directory)?;
        }
        fs::create_dir_all(&directory)?;
        for (name, bytes) in &self.files {
            fs::write(directory.join(name), bytes)?;
        }
        let digests: Vec<_> = self.files.iter().map(|(name, bytes)| (name.as_str(), sha256(bytes))).collect();
        if let Some(text) = self.checksums.text(&digests) {
            fs::write(directory.join("checksums.txt"), text)?;
        }
        if self.pointer {
            point(site, self.channel(), &self.version)?;
        }
        let (name, bytes) = self.files.first().ok_or_else(|| io::Error::other("a release without a file"))?;
        let archive = directory.join(name);
        Ok(Published { directory, archive, sha256: sha256(bytes), length: bytes.len() as u64 })
    }

    fn channel(&self) -> &'static str {
        if self.version.contains('-') { "beta" } else { "stable" }
    }
}

/// Lets a channel point to a version, whether or not that was published.
///
/// # Errors
/// When the pointer can't be written.
pub fn point(site: &Path, channel: &str, version: &str) -> io::Result<()> {
    let major = version.split('.').next().unwrap_or_default();
    let channels = site.join(format!("v{major}"));
    fs::create_dir_all(&channels)?;
    fs::write(channels.join(channel), format!("v{version}\n"))
}
